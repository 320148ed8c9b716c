"""A proxy that shows what passes between a client and a server, of whichever make."""
