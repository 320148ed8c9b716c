"""Values of a client's messages, from any bytes: mostly in order, wrong in places."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from fuzz.opgraphs import OpGraph
from fuzz.recording import frame
from fuzz.source import Source
from longwire.wire.constants import U32_MAX, U64_MAX
from longwire.wire.dialects import DIALECTS
from longwire.wire.tensors import TENSOR, Tensor
from longwire.wire.types import TYPES, nbytes
from support.client import Buffer
from support.tensors import tensor

__all__ = ["FIELDS", "ROOM", "SMALL", "TOO_MUCH", "Maker", "Message", "Writer"]

Message = tuple[int, bytes]

SMALL = (0, 1, 2, 4, 8, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 16, 1 << 31, U32_MAX)
ROOM = (1 << 18, 1 << 18, 4096, 1 << 18, 256, 1 << 18, 0, 1, 65)
TOO_MUCH = (1 << 41, 1 << 62, 1 << 63, U64_MAX)
_LARGE = (1 << 32, 1 << 44, 1 << 61, 1 << 62, 1 << 63, U64_MAX - 7, U64_MAX)
_OFFSETS = (0, 0, 0, 4, 8, 60, 64, 192)
_PARTS = (32, 32, 64, 4, 0, 33, 512)
_SHAPES = ((8,), (8,), (16,), (4, 4), (32,), (1,), (0,), (2, 2, 2, 2), (64, 2))
_TYPES = (0, 0, 0, 0, 1, 2, 8, 12, 24, 26, 27, 30, 5, 42, 43)
_WIDE = (1 << 32, 1 << 33, (1 << 32) + 32, 1 << 60, (1 << 62) - 1, 1 << 62, U64_MAX)
"""Strides that LX alone has bits for; a long one is fine along a single element."""

_starts = {name: int(place[1]) for name, place in (TENSOR.fields or {}).items()}
FIELDS = [
    (offset + i * dtype.base.itemsize, dtype.base.itemsize)
    for name in TENSOR.names or ()
    if name != "name"
    for dtype, offset in [(TENSOR[name], _starts[name])]
    for i in range(dtype.itemsize // dtype.base.itemsize)
]
"""Offset and size of every number in a tensor record."""

_HIGH = _starts["name"] + 48
"""Where LX is spoken, the end of the name holds the strides' high halves."""

FIELDS += [(_HIGH + 4 * i, 4) for i in range(4)]

_ROOMY = 256

_MOST_SENT = 6
"""Graphs remembered: two more than a server keeps for patches."""


class Writer:
    """Draws values and frames, and remembers what of it later messages may name."""

    def __init__(
        self, source: Source, op_graphs: Sequence[OpGraph], protocol: int
    ) -> None:
        self.source = source
        self.op_graphs = op_graphs
        self.protocol = protocol
        self.dialect = DIALECTS[protocol]
        self.buffers: list[Buffer] = []
        self.lx = False
        self.proves = False
        """Whether it tries to show that it knows a token."""
        self.sent: deque[npt.NDArray[Any]] = deque(maxlen=_MOST_SENT)
        """Graphs as words, the last one first."""
        self.uid = 0
        """Of the last graph that has one."""
        self.written: list[tuple[bytes, int]] = []
        """What came before the data of each SET_TENSOR, and how much data."""
        self.prepared: dict[int, int] = {}
        """Bytes of the writes that it has given numbers to."""
        self.sums = False
        """Whether it has asked for a communicator."""
        self.asked: list[int] = []
        """The contents that it has asked for by digest."""

    def framed(self, message: Message) -> bytes:
        """One frame, now and then a broken one."""
        number, body = message
        source = self.source
        if not source.rarely(24):
            return frame(number, body)
        whole = bytearray(frame(number, body))
        way, at = source.below(5), source.number(2) % (len(whole) + 1)
        if way == 0:
            whole[at : at + 1] = source.take(1)
        elif way == 1:
            del whole[at:]
        elif way == 2:
            whole += source.take(source.below(40))
        elif way == 3:
            return frame(number, body, self.size())
        else:
            return frame(source.number(), body)
        return bytes(whole)

    # Values.

    def size(self) -> int:
        source = self.source
        return source.number(8) if source.rarely(8) else source.pick(SMALL + _LARGE)

    def offset(self) -> int:
        return self.size() if self.source.rarely(8) else self.source.pick(_OFFSETS)

    def device(self) -> int:
        return self.source.pick(SMALL) if self.source.rarely(16) else 0

    def buffer(self) -> Buffer:
        """Most often one that has room for a tensor, if there is one."""
        roomy = [buffer for buffer in self.buffers if buffer.size >= _ROOMY]
        if not roomy or self.source.rarely(12):
            roomy = self.buffers
        return self.source.pick(roomy) if roomy else Buffer(0, 0, 0)

    def handle(self) -> int:
        if self.buffers and not self.source.rarely(16):
            return self.source.pick(self.buffers).handle
        return self.size()

    def record(self) -> bytes:
        """A tensor record, often one that is in order."""
        source = self.source
        buffer = self.buffer()
        kind = source.pick(_TYPES) if source.rarely(6) else 0
        ne = source.pick(_SHAPES)
        offset = source.pick(_OFFSETS) if self.buffers else 0
        plain = tensor(1 + source.below(6), buffer, offset, ne)._replace(type=kind)
        return self.spoil(plain.encode())

    def part(self, record: bytes) -> tuple[int, int]:
        """Offset and size of a part of that tensor, most often a real one."""
        source = self.source
        if source.rarely(8):
            return self.offset(), self.offset()
        found = Tensor.decode(record, self.lx)
        whole = 0
        if found.type in TYPES:
            whole = nbytes(found.type, found.ne, found.nb)
        offset = min(source.pick((0, 0, 0, 4, 32)), whole)
        return offset, min(source.pick(_PARTS), whole - offset)

    def spoil(self, records: bytes) -> bytes:
        """Change up to two numbers of any of the records."""
        source = self.source
        changes = source.pick((0, 0, 0, 0, 0, 1, 1, 2))
        if not changes:
            return records
        changed = bytearray(records)
        for _ in range(changes):
            row = source.below(len(records) // TENSOR.itemsize) * TENSOR.itemsize
            if self.lx and source.rarely(4):
                self._widen(changed, row)
                continue
            at, size = source.pick(FIELDS)
            at += row
            old = int.from_bytes(changed[at : at + size], "little")
            changed[at : at + size] = self.other(old, size).to_bytes(size, "little")
        return bytes(changed)

    def other(self, old: int, size: int) -> int:
        """Another number of that many bytes; now and then one close by."""
        source = self.source
        value = source.pick(SMALL) if size == 4 else self.size()
        if source.rarely(3):
            value = (old + source.pick((1, -1, 8, -8))) % (1 << 8 * size)
        return value

    def _widen(self, records: bytearray, row: int) -> None:
        """Give a record a stride of over 32 bits, the last more often than others."""
        dimension = self.source.pick((3, 3, 2, 1, 0))
        stride = self.source.pick(_WIDE)
        for start, half in ((_starts["nb"], stride & U32_MAX), (_HIGH, stride >> 32)):
            at = row + start + 4 * dimension
            records[at : at + 4] = half.to_bytes(4, "little")


Maker = Callable[[Writer], Message]
