"""The hash that clients ask for weights by."""

from __future__ import annotations

# The package's own fnv1a_64() takes `bytes` alone, which would copy each tensor.
from fnv_c.ext._fnv import ffi as fnv_ffi
from fnv_c.ext._fnv import lib as fnv_lib

__all__ = ["fnv1a_64"]


def fnv1a_64(data: memoryview) -> int:
    """FNV-1a 64 of contiguous bytes (PROTOCOL.md, "File cache")."""
    return int(fnv_lib.fnv1a_64(fnv_ffi.from_buffer(data), data.nbytes))
