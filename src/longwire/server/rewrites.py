"""Small writes that come again with each step, done without looking at them twice.

A decode step writes its inputs to the same places as the one before, in messages
that differ in their data alone. What such a message begins with was checked when
it first came, and leads straight to the memory it is for.
"""

from __future__ import annotations

from longwire.transport.stream import Stream
from longwire.wire.constants import Command
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.messages import SET_TENSOR_HEAD

__all__ = ["HEAD", "Rewrites"]

HEAD = REQUEST_HEADER.size + SET_TENSOR_HEAD
"""Bytes of a SET_TENSOR before its data."""

_LARGEST = 64 * 1024
"""Bytes of data: more take longer than to look at their message."""

_MOST = 1024
"""A step has some ten of them."""


class Rewrites:
    """Where the data of each known SET_TENSOR goes. Not locked."""

    def __init__(self) -> None:
        self._targets: dict[bytes, memoryview] = {}

    def forget(self) -> None:
        """Memory is gone, or is another."""
        self._targets.clear()

    def remember(self, body: memoryview, target: memoryview) -> None:
        """A SET_TENSOR whose body begins like this has been checked, for `target`."""
        if len(target) > _LARGEST:
            return
        if len(self._targets) >= _MOST:
            self._targets.clear()
        length = len(body) + len(target)
        head = REQUEST_HEADER.pack(Command.SET_TENSOR, length) + bytes(body)
        self._targets[head] = target

    def find(self, stream: Stream) -> memoryview | None:
        """Where the data of the next message goes, and its head is taken; None if it
        is no known one, and nothing is taken."""
        head = stream.peek(HEAD)
        if head is None or head[0] != Command.SET_TENSOR:
            return None
        target = self._targets.get(bytes(head))
        if target is not None:
            stream.take(HEAD)
        return target
