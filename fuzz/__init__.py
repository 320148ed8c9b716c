"""Fuzzers: a target per file, and the inputs that once were findings (corpus/)."""
