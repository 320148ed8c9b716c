"""Bytes to messages and back: no sockets, no ggml, no threads, no clock."""
