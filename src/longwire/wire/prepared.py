"""LX_PREPARE_SET and LX_SET_PREPARED: writes that come again with each step.

PROTOCOL.md, "Prepared writes". A write's tensor is named and checked once; from then
on a step sends the numbers of its writes and their data, in one message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.dialects import (
    MAX_PREPARED,
    MAX_PREPARED_DATA,
    MAX_PREPARED_SIZE,
)
from longwire.wire.messages import U32, Bytes
from longwire.wire.tensors import TENSOR_SIZE

__all__ = ["PrepareSet", "SetPrepared"]

_PREPARE = struct.Struct(f"<I{TENSOR_SIZE}sQQ")


class PrepareSet(NamedTuple):
    """Give a number to writes of `size` bytes at `offset` of a tensor."""

    number: int
    """Below `MAX_PREPARED`; one that is taken is given anew."""
    tensor: bytes
    offset: int
    size: int

    def encode(self) -> bytes:
        return _PREPARE.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> PrepareSet:
        """Raises: LimitExceeded: a number or size that no write may have."""
        request = cls(*_PREPARE.unpack(body))
        name = "LX_PREPARE_SET"
        if request.number >= MAX_PREPARED:
            raise LimitExceeded(name, "number", request.number, MAX_PREPARED - 1)
        if request.size > MAX_PREPARED_SIZE:
            raise LimitExceeded(name, "size", request.size, MAX_PREPARED_SIZE)
        return request


class SetPrepared(NamedTuple):
    """Do prepared writes, in this order."""

    numbers: bytes
    """u32 each."""
    data: memoryview
    """All their data, one after the other."""

    @staticmethod
    def head(numbers: Sequence[int]) -> bytes:
        """What precedes the data."""
        return struct.pack(f"<I{len(numbers)}I", len(numbers), *numbers)

    @classmethod
    def decode(cls, body: memoryview) -> SetPrepared:
        """Raises: BadFrame, LimitExceeded: not the numbers it says, or too many or
        too much."""
        name = "LX_SET_PREPARED"
        (count,) = U32.unpack_from(body)
        if count > MAX_PREPARED:
            raise LimitExceeded(name, "count", count, MAX_PREPARED)
        start = U32.size + U32.size * count
        if len(body) < start:
            raise BadFrame(name, len(body), f"at least {start}")
        if len(body) - start > MAX_PREPARED_DATA:
            raise LimitExceeded(name, "data", len(body) - start, MAX_PREPARED_DATA)
        return cls(bytes(body[U32.size : start]), body[start:])

    def each(self) -> Sequence[int]:
        """The numbers."""
        return struct.unpack(f"<{len(self.numbers) // U32.size}I", self.numbers)
