"""Native memory by address, for code that may not know ctypes.

An address here always comes from the engine library, never from the wire.
"""

from __future__ import annotations

import ctypes as C
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NOWHERE", "address_of", "array_at", "copy", "fill", "read", "read_i32"]
__all__ += ["use_huge_pages", "view"]

NOWHERE = 1 << 60
"""Aligned, and no address that anything has."""

read = C.string_at
"""`read(address, size)`: a copy of `size` bytes."""

copy = C.memmove
"""`copy(to_address, from_address_or_bytes, size)`."""

fill = C.memset
"""`fill(address, value, size)`."""


_HUGE_PAGE = 2 << 20
"""On x86-64 and most others; where it is more, a part stays as it is."""

_MADV_HUGEPAGE, _MADV_NOHUGEPAGE = 14, 15
"""Linux's `mman-common.h`."""

_libc = C.CDLL(None)


def view(address: int, size: int) -> memoryview:
    """The `size` bytes at `address` as a writable view; the caller keeps them alive."""
    return memoryview((C.c_char * size).from_address(address)).cast("B")


def use_huge_pages(address: int, size: int, wanted: bool = True) -> None:
    """Ask for huge pages: a step reads all weights, and each page costs a look-up.

    Not `wanted` where only small parts will be used. Where the system has none to
    give, nothing changes.
    """
    begin = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + size - begin) // _HUGE_PAGE * _HUGE_PAGE
    advice = _MADV_HUGEPAGE if wanted else _MADV_NOHUGEPAGE
    if length > 0 and sys.platform == "linux":
        _libc.madvise(C.c_void_p(begin), C.c_size_t(length), advice)


def read_i32(address: int) -> int:
    """The 32-bit integer at `address`."""
    return C.c_int32.from_address(address).value


def array_at(address: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """`count` elements of `dtype` at `address`, not copied."""
    size = count * np.dtype(dtype).itemsize
    array: npt.NDArray[Any] = np.frombuffer(view(address, size), dtype)
    return array


def address_of(data: memoryview) -> int:
    """Where a non-empty contiguous buffer lies; the caller keeps it alive."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)
