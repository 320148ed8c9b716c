"""Byte streams between machines."""
