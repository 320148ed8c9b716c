"""Longwire: a ggml device at the far end of a network cable."""
