"""What one client owns: buffers under random handles and virtual addresses.

No address of this process ever reaches the wire. A client sees a handle, which
is 64 random bits, and a base in a number space of our own; every use is looked
up here and checked before it becomes an address again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest, RemoteFailure
from longwire.native.compute import ComputeDevice, NativeBuffer
from longwire.native.mapping import lend, take_back
from longwire.native.memory import copy, use_huge_pages
from longwire.server.overlays import Overlay, Overlays

__all__ = ["BufferTable", "Quota", "SessionBuffer"]

_log = logging.getLogger("longwire.session")

_FIRST_BASE = 1 << 44
_BASE_STEP = 1 << 32
"""Bases are multiples of 4 GiB, with a gap after each buffer: a tensor that
runs over the end of one buffer never lands in the next."""

_RECYCLED = 32 << 20
"""Up to this size (glibc's largest mmap threshold) memory may be recycled, and hold
addresses of this process; more comes from the system, as empty pages."""


class Quota(Protocol):
    """Who keeps count of the memory of all clients."""

    def claim(self, size: int) -> str | None:
        """Ask for memory; returns why it may not be had, or None."""

    def release(self, size: int) -> None:
        """Give memory back."""

    def room(self) -> tuple[int | None, int | None]:
        """What may still be had, and ever; None where nothing limits it."""


@dataclass(slots=True)
class SessionBuffer:
    """One live buffer: the client's names for it and the memory behind them."""

    handle: int
    base: int
    """Where the client believes the buffer starts."""
    device: ComputeDevice
    native: NativeBuffer
    claimed: int
    """Bytes that its client asked for, and that the quota counts."""
    overlays: Overlays = field(default_factory=Overlays)
    """Ranges whose bytes are in mapped files; `native` has no say there."""

    @property
    def size(self) -> int:
        return self.native.size

    @property
    def takes_overlays(self) -> bool:
        """Whether its device computes on any memory of the host's."""
        return self.native.bytes is not None and not self.device.accelerates


class BufferTable:
    """All buffers of one session. Not shared, not locked."""

    def __init__(self, quota: Quota | None = None) -> None:
        self._quota = quota
        self._by_handle: dict[int, SessionBuffer] = {}
        self._next_base = _FIRST_BASE
        self.allocated = 0
        """Bytes in live buffers."""
        self.opened = 0
        """Buffers ever made."""
        self.layout = 0
        """Counts up whenever the memory behind some address becomes another."""
        self.folding: Callable[[SessionBuffer, Overlay], None] | None = None
        """Called before an overlay is taken away: nothing may point there any more."""

    def __len__(self) -> int:
        return len(self._by_handle)

    def open(self, device: ComputeDevice, size: int) -> SessionBuffer:
        """Allocate on `device`.

        Raises:
            RemoteFailure: there is no room, and why.
        """
        native = self._alloc(device, size)
        if 0 < native.size <= _RECYCLED:
            device.clear(native, 0)
        handle = secrets.randbits(64)
        while handle == 0 or handle in self._by_handle:
            handle = secrets.randbits(64)
        buffer = SessionBuffer(handle, self._next_base, device, native, size)
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
        self._free(buffer)
        return buffer

    def close_all(self) -> None:
        """Free everything; idempotent."""
        while self._by_handle:
            _, buffer = self._by_handle.popitem()
            self._free(buffer)

    def room(self) -> tuple[int | None, int | None]:
        """Bytes that the limits leave, and allow; None where there is no limit."""
        return self._quota.room() if self._quota else (None, None)

    def _alloc(self, device: ComputeDevice, size: int) -> NativeBuffer:
        most = device.max_size()
        if size > most:
            raise _no_room(device, size, f"a buffer has at most {most} bytes")
        refusal = self._quota.claim(size) if self._quota else None
        if refusal is not None:
            raise _no_room(device, size, refusal)
        native = device.alloc(size)
        if native is None:
            if self._quota:
                self._quota.release(size)
            raise _no_room(device, size, "its memory is taken")
        return native

    def _free(self, buffer: SessionBuffer) -> None:
        for overlay in buffer.overlays.all():
            buffer.overlays.remove(overlay)
            take_back(buffer.device.engine, overlay.memory)
        self.allocated -= buffer.size
        buffer.device.free(buffer.native)
        if self._quota:
            self._quota.release(buffer.claimed)

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

    def place(
        self, buffer: SessionBuffer, start: int, size: int
    ) -> tuple[NativeBuffer, int]:
        """The memory of a range inside of a buffer, and the offset in it.

        A range has to be in one piece: overlays that hold a part of it are folded.
        """
        for overlay in buffer.overlays.torn(start, size):
            self.fold(buffer, overlay)
        around = buffer.overlays.around(start, size)
        if around is None:
            return buffer.native, start
        return around.memory, start - around.start

    def lay(self, buffer: SessionBuffer, start: int, data: memoryview) -> None:
        """Put `data`, which is ours alone and aligned, in place of a range that no
        overlay touches. Nothing that is kept may point there.

        Raises:
            CallFailed: ggml has no buffer for it.
        """
        if not len(buffer.overlays):
            # Of its own memory only small parts between overlays will be used.
            use_huge_pages(buffer.native.base, buffer.native.size, wanted=False)
        memory = lend(buffer.device.engine, data)
        buffer.overlays.add(Overlay(start, start + data.nbytes, memory))
        self.layout += 1

    def fold(
        self, buffer: SessionBuffer, overlay: Overlay, preserve: bool = True
    ) -> None:
        """Take an overlay away; the range has its content (`preserve`) in its own
        memory again."""
        if self.folding is not None:
            self.folding(buffer, overlay)
        buffer.overlays.remove(overlay)
        self.layout += 1
        if preserve:
            own = buffer.native.base + overlay.start
            copy(own, overlay.memory.base, overlay.memory.size)
        take_back(buffer.device.engine, overlay.memory)

    def overlaid(self, handles: Iterable[int]) -> list[SessionBuffer]:
        """Those buffers of these handles that have overlays."""
        if not any(len(b.overlays) for b in self._by_handle.values()):
            return []
        found = map(self._by_handle.get, handles)
        return [buffer for buffer in found if buffer and len(buffer.overlays)]

    def memory(self, handles: Iterable[int]) -> dict[int, NativeBuffer]:
        """By its address, all memory behind some handles; dead ones have none."""
        found = [b for b in map(self._by_handle.get, handles) if b]
        pieces = [o.memory for buffer in found for o in buffer.overlays.all()]
        pieces += [buffer.native for buffer in found]
        return {memory.address: memory for memory in pieces}

    def columns(
        self, handles: npt.NDArray[np.uint64]
    ) -> tuple[frozenset[int], tuple[npt.NDArray[np.uint64], ...]]:
        """The different handles, and for each of all: virtual base, size, address of
        the buffer, real base.

        A handle that is not live reads as four zeros.
        """
        unique, inverse = np.unique(handles, return_inverse=True)
        different = unique.tolist()
        rows = np.zeros((len(unique), 4), np.uint64)
        for i, handle in enumerate(different):
            buffer = self._by_handle.get(handle)
            if buffer is not None:
                native = buffer.native
                rows[i] = (buffer.base, native.size, native.address, native.base)
        return frozenset(different), tuple(rows[inverse.ravel()].T)


def _no_room(device: ComputeDevice, size: int, reason: str) -> RemoteFailure:
    cause = f"no room for {size} bytes: {reason}"
    _log.warning("%s: %s", device.name, cause)
    return RemoteFailure(device.name, "ALLOC_BUFFER", cause)
