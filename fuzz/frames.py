"""The frame around every message, and the order that a connection keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from fuzz.source import Source
from longwire.errors import ProtocolError
from longwire.transport.stream import Stream
from longwire.wire.constants import Command
from longwire.wire.dialects import DIALECTS, LX_OFFER, Dialect
from longwire.wire.frames import REQUEST_HEADER, ServerOrder, command_name

__all__ = ["check", "seeds"]

_MOST = 1 << 16
"""Bodies over this length count as not sent."""

Frames = list[tuple[int, int]]


class _Pieces:
    """A socket that gives `data` in pieces of at most `most` bytes."""

    def __init__(self, data: bytes, most: int) -> None:
        self._data = memoryview(data)
        self._most = most

    def recv_into(self, target: memoryview) -> int:
        n = min(len(target), len(self._data), self._most)
        target[:n] = self._data[:n]
        self._data = self._data[n:]
        return n


def check(data: bytes) -> None:
    """Any bytes are frames in order, or one of the errors that PROTOCOL.md names."""
    source = Source(data)
    dialect = DIALECTS[source.pick((8, 7))]
    way = source.below(4)
    if way:
        dialect = dialect.with_lx() if way == 1 else dialect.offering_lx()
    most = 1 + source.below(20)
    sent = source.take(source.left)
    whole = _admitted(dialect, way == 3, sent, 1 << 20)
    cut = _admitted(dialect, way == 3, sent, most)
    assert whole == cut, "the cut changed the meaning"


def _admitted(
    dialect: Dialect, locked: bool, data: bytes, most: int
) -> tuple[Frames, str]:
    """The frames that are let in, and why there are no more."""
    stream = Stream(cast(Any, _Pieces(data, most)))
    order = ServerOrder(dialect, locked=locked)
    frames: Frames = []
    try:
        while True:
            number, length = REQUEST_HEADER.unpack(stream.take(REQUEST_HEADER.size))
            shape = order.admit(number, length)
            assert shape.least <= length <= shape.most
            assert (number == Command.HELLO) is (not frames), "order"
            assert command_name(number)
            assert not locked or number == Command.HELLO or number in LX_OFFER
            frames.append((number, length))
            if length > _MOST:
                return frames, "too long for this test"
            stream.skip(length)
    except EOFError:
        return frames, "end"
    except ProtocolError as error:
        return frames, str(error)


def seeds() -> Iterator[bytes]:
    """A frame of every command's least length, after a HELLO."""
    hello = REQUEST_HEADER.pack(Command.HELLO, 24) + bytes(24)
    for way in range(4):
        shapes = DIALECTS[8].with_lx().shapes
        for number, shape in shapes.items():
            opening = bytes([way % 2, way, 3])
            header = REQUEST_HEADER.pack(number, shape.least)
            yield opening + hello + header + bytes(shape.least)
