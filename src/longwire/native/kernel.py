"""System calls of Linux that the standard library does not offer."""

from __future__ import annotations

import ctypes as C
import os
import struct
from collections.abc import Callable

__all__ = ["Syscall", "drop_capabilities", "other_threads", "prctl", "syscall"]

Syscall = Callable[..., int]
"""Like `syscall`; tests have kernels of their own."""

_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = struct.Struct("=6I")
"""Effective, permitted, inheritable; then the same for the numbers from 32."""

_libc = C.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: int | bytes) -> int:
    """Make a system call; bytes are passed as the address of their content.

    Raises:
        OSError: the kernel refused it.
    """
    words = [a if isinstance(a, bytes) else C.c_long(a) for a in arguments]
    return _checked(_libc.syscall(C.c_long(number), *words))


def prctl(option: int, value: int) -> int:
    """Set a property of this process.

    Raises:
        OSError: the kernel refused it.
    """
    words = [C.c_ulong(word) for word in (value, 0, 0, 0)]
    return _checked(_libc.prctl(option, *words))


def other_threads() -> int:
    """How many threads this process has besides this one."""
    return len(os.listdir("/proc/self/task")) - 1


def drop_capabilities(kept: int) -> bool:
    """Give up all capabilities of this thread but those with a bit in `kept`.

    Returns whether there were any to give up.

    Raises:
        OSError: the kernel refused it.
    """
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    held = C.create_string_buffer(_CAPABILITIES.size)
    _checked(_libc.capget(header, held))
    effective, permitted, *_ = _CAPABILITIES.unpack(held)
    rest = _CAPABILITIES.pack(effective & kept, permitted & kept, 0, 0, 0, 0)
    _checked(_libc.capset(header, rest))
    return bool(permitted & ~kept)


def _checked(result: int) -> int:
    if result < 0:
        number = C.get_errno()
        raise OSError(number, os.strerror(number))
    return result
