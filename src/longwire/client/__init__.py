"""Devices of another machine, as ggml sees them."""
