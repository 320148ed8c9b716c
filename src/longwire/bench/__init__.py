"""Measurements, each a ratio taken in one run on one machine."""
