"""What a session has done, kept for a client that wants to draw it."""

from __future__ import annotations

import time
from collections import deque

from longwire.wire.spans import WorkSpan

__all__ = ["SpanRing"]

_ROOM = 1 << 14
"""Spans kept, a few MB: a thousand decode steps between two fetches."""


class SpanRing:
    """The newest spans of one session. Not for several threads."""

    def __init__(self) -> None:
        self.lost = 0
        """Spans that had to make room."""
        self._spans: deque[WorkSpan] = deque(maxlen=_ROOM)

    def add(self, kind: int, begun_ns: int, size: int = 0) -> None:
        """Something that began then has ended now."""
        if len(self._spans) == self._spans.maxlen:
            self.lost += 1
        self._spans.append(WorkSpan(begun_ns, time.monotonic_ns(), size, kind))

    def take(self, most: int) -> tuple[WorkSpan, ...]:
        """The oldest ones, which are forgotten with that."""
        count = min(most, len(self._spans))
        return tuple(self._spans.popleft() for _ in range(count))
