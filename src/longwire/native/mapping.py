"""Parts of files as memory, and as buffers that a CPU device computes on.

No descriptor stays open for a mapping, so that a session may have thousands.
"""

from __future__ import annotations

import ctypes as C
import mmap
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from longwire.errors import CallFailed
from longwire.native.abi import P, S
from longwire.native.compute import NativeBuffer
from longwire.native.engine import NativeEngine
from longwire.native.library import Signature
from longwire.native.memory import address_of

__all__ = ["lend", "map_part", "take_back"]

_FUNCTIONS: Mapping[str, Signature] = {
    "ggml_backend_cpu_buffer_from_ptr": (P, P, S),
}

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""Writable mappings would else have to fit into memory before anything is written."""

_FAILED = C.c_void_p(-1).value

_libc = C.CDLL(None, use_errno=True)
_libc.mmap.restype = P
_libc.mmap.argtypes = (P, S, C.c_int, C.c_int, C.c_int, C.c_int64)
_libc.munmap.argtypes = (P, S)
_libc.madvise.argtypes = (P, S, C.c_int)


class _Owner:
    """Memory that numpy makes arrays of; each of them keeps this alive."""

    def __init__(self, address: int, size: int, writable: bool) -> None:
        # A ctypes array would do, but each size is a type of its own to ctypes.
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, not writable),
            "shape": (size,),
            "typestr": "|u1",
        }


def map_part(fd: int, offset: int, size: int, writable: bool) -> memoryview:
    """Map `size` bytes (not 0) at `offset` of an open file, for this process alone.

    What is written to a writable view never reaches the file, or another mapping.
    The mapping ends with the last view of it. The file must be as long as that:
    reading beyond its end, also if it is cut later, ends the process.

    Raises:
        OSError: the system has no such mapping to give.
    """
    lead = offset % mmap.PAGESIZE
    length = lead + size
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    address = _libc.mmap(None, length, access, flags, fd, offset - lead)
    if address is None or address == _FAILED:
        number = C.get_errno()
        raise OSError(number, os.strerror(number))
    if writable:
        # About to be computed on: reading from disk begins now. Only a hint.
        _libc.madvise(address, length, mmap.MADV_WILLNEED)
    owner = _Owner(address + lead, size, writable)
    weakref.finalize(owner, _libc.munmap, address, length).atexit = False
    return np.asarray(owner).data


def lend(engine: NativeEngine, data: memoryview) -> NativeBuffer:
    """A buffer of a CPU device over `data`, aligned as the device wants it.

    Raises:
        CallFailed: ggml has none to give.
    """
    library = engine.library
    library.declare(_FUNCTIONS)
    base = address_of(data)
    address = library.ggml_backend_cpu_buffer_from_ptr(base, data.nbytes)
    if not address:
        raise CallFailed("ggml_backend_cpu_buffer_from_ptr", "no buffer")
    return NativeBuffer(address, base, data.nbytes, data)


def take_back(engine: NativeEngine, buffer: NativeBuffer) -> None:
    """End a buffer of `lend`. Its memory stays for as long as it has views."""
    engine.library.ggml_backend_buffer_free(buffer.address)
