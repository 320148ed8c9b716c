"""LX_TRACE: what a session has done, and when, for a client that draws it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.frames import command_name
from longwire.wire.messages import U32, Bytes

__all__ = [
    "COMPUTING",
    "MAX_SPANS",
    "WAITING",
    "TraceAnswer",
    "TraceRequest",
    "WorkSpan",
]

COMPUTING = 0x100
"""In place of a command number: a device was given a graph. One that computes on
its own is done before `WAITING` is."""

WAITING = 0x101
"""The session waited for its devices."""

MAX_SPANS = 2048
"""Per answer, which then is smaller than `MAX_ANSWER`."""

_HEAD = struct.Struct("<QQI")
_SPAN = struct.Struct("<QQQI")


class WorkSpan(NamedTuple):
    """Something a session did. Times are the server's own, in ns."""

    begun_ns: int
    ended_ns: int
    size: int
    """Bytes of the request and its answer, 0 for what is no command."""
    kind: int
    """A command number, or one of the constants above."""

    @property
    def name(self) -> str:
        """The kind in words."""
        return {COMPUTING: "compute", WAITING: "wait for the device"}.get(
            self.kind
        ) or command_name(self.kind)


class TraceRequest(NamedTuple):
    """Have a session record what it does, or stop; and take what it recorded."""

    on: int
    """1 or 0."""

    def encode(self) -> bytes:
        return U32.pack(self.on)

    @classmethod
    def decode(cls, body: Bytes) -> TraceRequest:
        return cls(*U32.unpack(body))


class TraceAnswer(NamedTuple):
    """What was recorded since the last answer, the oldest first."""

    now_ns: int
    """The server's clock."""
    lost: int
    """How many were forgotten, for lack of room, since recording began."""
    spans: tuple[WorkSpan, ...] = ()

    def encode(self) -> bytes:
        head = _HEAD.pack(self.now_ns, self.lost, len(self.spans))
        return head + b"".join(_SPAN.pack(*span) for span in self.spans)

    @classmethod
    def decode(cls, body: Bytes) -> TraceAnswer:
        """Raises: BadFrame, LimitExceeded: not what the count says."""
        if len(body) < _HEAD.size:
            raise BadFrame("LX_TRACE", len(body), f"at least {_HEAD.size}")
        now_ns, lost, count = _HEAD.unpack_from(body)
        if count > MAX_SPANS:
            raise LimitExceeded("LX_TRACE", "span count", count, MAX_SPANS)
        expected = _HEAD.size + count * _SPAN.size
        if len(body) != expected:
            raise BadFrame("LX_TRACE", len(body), f"{expected}")
        spans = _SPAN.iter_unpack(memoryview(body)[_HEAD.size :])
        return cls(now_ns, lost, tuple(WorkSpan(*span) for span in spans))
