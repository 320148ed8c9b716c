"""What was found out, kept by what it depends on."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["LIMIT", "remember"]

LIMIT = 8192
"""Entries; a few large models have as many weights, or nodes that differ."""

K = TypeVar("K")
V = TypeVar("V")


def remember(known: dict[K, V], key: K, value: V) -> None:
    """Keep a value that could be found anew; with too many of them, it alone."""
    if len(known) >= LIMIT:
        known.clear()
    known[key] = value
