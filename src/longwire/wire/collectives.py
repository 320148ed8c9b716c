"""LX's collectives: sums over the devices of several servers.

PROTOCOL.md, "Communicators". Those of protocol 8, for two, are in `messages`.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.dialects import MAX_MEMBERS, MAX_SERVERS
from longwire.wire.messages import Bytes
from longwire.wire.tensors import TENSOR_SIZE

__all__ = ["COMM_INIT_HEAD", "LxAllreduce", "LxCommInit", "WireType"]

_INIT = struct.Struct("<IIQIII")
_ALLREDUCE = struct.Struct("<II")

COMM_INIT_HEAD = _INIT.size


class WireType(IntEnum):
    """As what the f32 numbers of a communicator travel."""

    F32 = 0
    BF16 = 1
    F16 = 2


class LxCommInit(NamedTuple):
    """Make a communicator of n servers out of links to all others."""

    comm: int
    """The client's number for it."""
    wire: int
    """A `WireType`, for messages of at least `least` bytes of f32."""
    least: int
    own: int
    """This server's rank."""
    links: tuple[int, ...]
    """By rank; what stands at `own` is ignored."""
    devices: tuple[int, ...]
    """Those of this session that take part, in the order of their sum."""

    def encode(self) -> bytes:
        n, m = len(self.links), len(self.devices)
        head = _INIT.pack(self.comm, self.wire, self.least, self.own, n, m)
        return head + struct.pack(f"<{n + m}I", *self.links, *self.devices)

    @classmethod
    def decode(cls, body: Bytes) -> LxCommInit:
        """Raises: BadFrame, LimitExceeded: not what the counts say."""
        name = "LX_COMM_INIT"
        comm, wire, least, own, n, m = _INIT.unpack_from(body)
        if n > MAX_SERVERS:
            raise LimitExceeded(name, "server count", n, MAX_SERVERS)
        if m > MAX_MEMBERS:
            raise LimitExceeded(name, "device count", m, MAX_MEMBERS)
        expected = COMM_INIT_HEAD + 4 * (n + m)
        if len(body) != expected:
            raise BadFrame(name, len(body), f"{expected}")
        numbers = struct.unpack_from(f"<{n + m}I", body, COMM_INIT_HEAD)
        return cls(comm, wire, least, own, numbers[:n], numbers[n:])


class LxAllreduce(NamedTuple):
    """Overwrite a tensor per local device with the sum over all devices."""

    comm: int
    absent: int
    """Bit i: the device's tensor counts as zeros, whatever is in it."""
    tensors: tuple[bytes, ...]

    def encode(self) -> bytes:
        return _ALLREDUCE.pack(self.comm, self.absent) + b"".join(self.tensors)

    @classmethod
    def decode(cls, body: Bytes) -> LxAllreduce:
        """Raises: BadFrame: no whole number of records."""
        comm, absent = _ALLREDUCE.unpack_from(body)
        if (len(body) - _ALLREDUCE.size) % TENSOR_SIZE:
            expected = f"{_ALLREDUCE.size} and {TENSOR_SIZE} for each tensor"
            raise BadFrame("LX_ALLREDUCE", len(body), expected)
        starts = range(_ALLREDUCE.size, len(body), TENSOR_SIZE)
        return cls(
            comm, absent, tuple(bytes(body[i : i + TENSOR_SIZE]) for i in starts)
        )
