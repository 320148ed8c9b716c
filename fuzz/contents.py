"""Data that both the fuzzers' servers and their clients know: what digests hit."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from blake3 import blake3

from longwire.server.cache import WeightCache
from longwire.wire.fnv import fnv1a_64

__all__ = ["CONTENTS", "DIGESTS", "KEYS", "own_cache", "stocked"]

CONTENTS = (
    bytes(range(32)),
    (np.arange(16384, dtype="<u4") % 4).tobytes(),
    b"\1\0\0\0",
    b"\0\0\x80\x3f" * 16,
)
"""The second is large enough to be mapped in place of a tensor, and legal as ids."""

DIGESTS = tuple(blake3(content).digest() for content in CONTENTS)

KEYS = tuple(fnv1a_64(memoryview(content)) for content in CONTENTS)

_LIMIT = 1 << 20
"""Bytes of a cache: what clients bring goes again, what is asked for stays."""


def stocked(folder: Path) -> WeightCache:
    """A cache in that folder that has them all, under both kinds of names."""
    kept = WeightCache(folder, _LIMIT)
    for content in CONTENTS:
        kept.store(memoryview(content))
    return kept


@cache
def own_cache() -> WeightCache:
    """This process's, which goes when it ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return stocked(Path(folder.name))
