"""The serving side: a supervisor that only hands sockets on, a process per client."""
