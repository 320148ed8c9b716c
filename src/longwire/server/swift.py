"""The short way of a small all-reduce, with all that can be made before it made.

A decode step has two for each layer, of some kilobytes, and waits for each. What
`reduce` and `exchange` do is done here with fewer steps, in the frames and the order
of theirs; whatever does not come at once is left to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.server.exchange import SPIN_S, broken
from longwire.server.links import Link
from longwire.server.members import raw
from longwire.transport.duplex import yield_core
from longwire.wire.links import FRAME_HEADER

__all__ = ["Room", "Swift"]

Floats = npt.NDArray[Any]

_NAME = "LX_ALLREDUCE"

_LARGEST = 64 * 1024
"""Bytes: as many as every socket takes in at once, and a link can put back."""

_LOOKS = 64
"""Between two looks at the clock."""


class Room:
    """Memory that all sums of one communicator come in. Not locked."""

    def __init__(self, own: int, links: Sequence[Link]) -> None:
        """`links` to the other servers in rank order."""
        self.own = own
        self.links = links
        self.frames = [
            memoryview(bytearray(FRAME_HEADER.size + _LARGEST)) for _ in links
        ]

    def swift(self, numbers: Floats) -> Swift | None:
        """A sum of these numbers, in place; None where the short way is none."""
        if not self.links or not 0 < numbers.nbytes <= _LARGEST:
            return None
        return Swift(self, numbers)


class Swift:
    """One all-reduce that comes again with each step."""

    def __init__(self, room: Room, numbers: Floats) -> None:
        size = numbers.nbytes
        self._header = FRAME_HEADER.pack(size)
        self._size = FRAME_HEADER.size + size
        self._numbers = numbers
        self._frame = [memoryview(self._header), raw(numbers)]
        self._links = room.links
        self._incoming = [frame[: self._size] for frame in room.frames]
        parts = [
            np.frombuffer(frame, np.float32, len(numbers), FRAME_HEADER.size)
            for frame in room.frames
        ]
        self._targets = [raw(part) for part in parts]
        parts.insert(room.own, numbers)
        self._parts = parts

    def begin(self) -> bool:
        """Send to everybody, if nothing is under way; else nothing has happened.

        Raises:
            RemoteFailure: a peer is gone; its link is closed.
        """
        for link in self._links:
            if not link.idle:
                return False
        for link in self._links:
            try:
                link.send_now(self._frame, self._size)
            except OSError as error:
                raise broken(link, _NAME, error) from error
        return True

    def end(self) -> bool:
        """Wait a moment for what the others send, and sum. False: it is not all
        there yet, and every link knows what it still has to do.

        Raises:
            RemoteFailure: a peer is gone; its link is closed.
        """
        done = True
        for link, frame, target in zip(
            self._links, self._incoming, self._targets, strict=True
        ):
            try:
                got = _receive(link, frame)
            except (EOFError, OSError) as error:
                raise broken(link, _NAME, error) from error
            whole = got == self._size and frame[: FRAME_HEADER.size] == self._header
            if not whole:
                link.put_back(frame[:got], target)
            done &= whole and not link.unsent
        if done:
            self.sum()
        return done

    def sum(self) -> None:
        """Have the numbers become the sum, in the order of ranks."""
        total, *others = self._parts
        for part in others[:-1]:
            np.add(total, part, out=total)
        np.add(total, others[-1], out=self._numbers)


def _receive(link: Link, frame: memoryview) -> int:
    """Look busily for a whole frame; returns how many of its bytes came in time."""
    got, looks, until = 0, 0, 0.0
    receive_some = link.duplex.receive_some
    while True:
        got += receive_some(frame[got:] if got else frame)
        if got == len(frame):
            return got
        looks += 1
        if looks % _LOOKS == 1:
            now = time.perf_counter()
            until = until or now + SPIN_S
            if now >= until:
                return got
        yield_core()
