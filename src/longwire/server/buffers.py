"""What one client owns: buffers under random handles and virtual addresses.

No address of this process ever reaches the wire. A client sees a handle, which
is 64 random bits, and a base in a number space of our own; every use is looked
up here and checked before it becomes an address again.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.native.compute import ComputeDevice, NativeBuffer

__all__ = ["BufferTable", "SessionBuffer"]

_FIRST_BASE = 1 << 44
_BASE_STEP = 1 << 32
"""Bases are multiples of 4 GiB, with a gap after each buffer: a tensor that
runs over the end of one buffer never lands in the next."""

_RECYCLED = 32 << 20
"""Up to this size (glibc's largest mmap threshold) memory may be recycled, and hold
addresses of this process; more comes from the system, as empty pages."""


@dataclass(slots=True)
class SessionBuffer:
    """One live buffer: the client's names for it and the memory behind them."""

    handle: int
    base: int
    """Where the client believes the buffer starts."""
    device: ComputeDevice
    native: NativeBuffer

    @property
    def size(self) -> int:
        return self.native.size


class BufferTable:
    """All buffers of one session. Not shared, not locked."""

    def __init__(self) -> None:
        self._by_handle: dict[int, SessionBuffer] = {}
        self._next_base = _FIRST_BASE
        self.allocated = 0
        """Bytes in live buffers."""
        self.opened = 0
        """Buffers ever made."""

    def __len__(self) -> int:
        return len(self._by_handle)

    def open(self, device: ComputeDevice, size: int) -> SessionBuffer | None:
        """Allocate on `device`, or return None when it has no room."""
        if size > device.max_size():
            return None
        native = device.alloc(size)
        if native is None:
            return None
        if 0 < native.size <= _RECYCLED:
            device.clear(native, 0)
        handle = secrets.randbits(64)
        while handle == 0 or handle in self._by_handle:
            handle = secrets.randbits(64)
        buffer = SessionBuffer(handle, self._next_base, device, native)
        self._next_base += (native.size // _BASE_STEP + 2) * _BASE_STEP
        self._by_handle[handle] = buffer
        self.allocated += native.size
        self.opened += 1
        return buffer

    def close(self, handle: int, command: str) -> SessionBuffer:
        """Free one buffer.

        Raises:
            BadRequest: no such handle.
        """
        buffer = self.of(handle, command)
        del self._by_handle[handle]
        self.allocated -= buffer.size
        buffer.device.free(buffer.native)
        return buffer

    def close_all(self) -> None:
        """Free everything; idempotent."""
        while self._by_handle:
            _, buffer = self._by_handle.popitem()
            buffer.device.free(buffer.native)
        self.allocated = 0

    def find(self, handle: int) -> SessionBuffer | None:
        """The buffer with this handle, if it is live."""
        return self._by_handle.get(handle)

    def of(self, handle: int, command: str) -> SessionBuffer:
        """The buffer with this handle.

        Raises:
            BadRequest: no such handle.
        """
        buffer = self._by_handle.get(handle)
        if buffer is None:
            raise BadRequest(command, f"no buffer has the handle {handle:#018x}")
        return buffer

    def columns(
        self, handles: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.uint64], ...]:
        """Per handle: virtual base, size, address of the buffer, real base.

        A handle that is not live reads as four zeros.
        """
        unique, inverse = np.unique(handles, return_inverse=True)
        rows = np.zeros((len(unique), 4), np.uint64)
        for i, handle in enumerate(unique.tolist()):
            buffer = self._by_handle.get(handle)
            if buffer is not None:
                native = buffer.native
                rows[i] = (buffer.base, native.size, native.address, native.base)
        return tuple(rows[inverse.ravel()].T)
