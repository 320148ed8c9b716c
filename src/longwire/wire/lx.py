"""The LX dialect's own messages: what the C++ protocol has no room for.

PROTOCOL.md, "LX". Started by a client of ours on a server of ours; from then on
an answer's length with its top bit set announces an error.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.constants import U64_MAX
from longwire.wire.dialects import DIGEST_SIZE, MAX_DIGESTS, MAX_SUPPORT_QUERIES
from longwire.wire.messages import U32, Bytes
from longwire.wire.tensors import TENSOR_SIZE

__all__ = [
    "ERROR_BIT",
    "HAS_PEERS",
    "KEEPS_DATA",
    "KEEP_ALIVE",
    "KEEP_ALIVE_S",
    "MAX_ANSWER",
    "ErrorAnswer",
    "Have",
    "LxDevice",
    "LxStart",
    "LxStartAnswer",
    "QUERY_SIZE",
    "SetDigest",
    "SupportsOps",
    "TOP_ENTRY",
    "TOP_INDEX",
    "TOP_MOST",
    "Top",
]

ERROR_BIT = 1 << 63

KEEPS_DATA = 1 << 0
"""LX_START's flag of a server with a weight cache or model files of its own."""

HAS_PEERS = 1 << 1
"""LX_START's flag of a server with a peer port: LX_LISTEN works."""

KEEP_ALIVE = U64_MAX
"""In place of an answer's length: the answer is not there yet, but the server is."""

KEEP_ALIVE_S = 1.0
"""How often a server says so, about."""

MAX_ANSWER = 1 << 16
"""An LX answer of variable size is names and a sentence; this is plenty."""

QUERY_SIZE = 11 * TENSOR_SIZE
"""One op: its own record and those of its ten sources."""

TOP_ENTRY = np.dtype([("index", "<u4"), ("value", "<f4")])
"""One of the largest numbers of a tensor: where it is, and what."""

TOP_INDEX = struct.Struct("<I")
"""What a `TOP_ENTRY` begins with."""

TOP_MOST = 4096
"""Entries of one answer, as many as `MAX_ANSWER` holds with room to spare."""

_ERROR = struct.Struct("<IH")
_START = struct.Struct("<IIHH")
_DEVICE = struct.Struct("<IQQHH")
_QUERY = struct.Struct("<II")
_TOP = struct.Struct(f"<{TENSOR_SIZE}sQQI")
_SET_DIGEST = struct.Struct(f"<{TENSOR_SIZE}sQQ{DIGEST_SIZE}s")


def _text(body: Bytes, at: int, size: int) -> str:
    return bytes(body[at : at + size]).decode("utf-8", "replace")


class ErrorAnswer(NamedTuple):
    """Why a command, or one before it that has no answer, was not done."""

    code: int
    name: str
    sentence: str

    def encode(self) -> bytes:
        name, sentence = self.name.encode(), self.sentence.encode()
        # A sentence may quote what a client sent; an answer has a limit.
        sentence = sentence[: MAX_ANSWER - _ERROR.size - len(name)]
        return _ERROR.pack(self.code, len(name)) + name + sentence

    @classmethod
    def decode(cls, body: Bytes) -> ErrorAnswer:
        """Raises: BadFrame: shorter than it says."""
        if len(body) < _ERROR.size:
            raise BadFrame("error answer", len(body), f"at least {_ERROR.size}")
        code, size = _ERROR.unpack_from(body)
        start = _ERROR.size + size
        if len(body) < start:
            raise BadFrame("error answer", len(body), f"at least {start}")
        return cls(code, _text(body, _ERROR.size, size), _text(body, start, len(body)))


class LxStart(NamedTuple):
    """Ask for LX, in the highest version the client knows."""

    version: int

    def encode(self) -> bytes:
        return U32.pack(self.version)

    @classmethod
    def decode(cls, body: Bytes) -> LxStart:
        return cls(*U32.unpack(body))


class LxStartAnswer(NamedTuple):
    """The version both speak, and what the server's numbers mean."""

    version: int
    engine: str
    ops: tuple[str, ...]
    """Op names by number: numbers drift between builds, names do not."""
    flags: int = 0

    @property
    def keeps_data(self) -> bool:
        """Whether asking for data by digest may be of use."""
        return bool(self.flags & KEEPS_DATA)

    @property
    def has_peers(self) -> bool:
        """Whether other servers can connect to this one."""
        return bool(self.flags & HAS_PEERS)

    def encode(self) -> bytes:
        engine, ops = self.engine.encode(), "\n".join(self.ops).encode()
        head = _START.pack(self.version, self.flags, len(engine), len(ops))
        return head + engine + ops

    @classmethod
    def decode(cls, body: Bytes) -> LxStartAnswer:
        """Raises: BadFrame: not the length it says."""
        if len(body) < _START.size:
            raise BadFrame("LX_START", len(body), f"at least {_START.size}")
        version, flags, engine, ops = _START.unpack_from(body)
        if len(body) != _START.size + engine + ops:
            expected = f"{_START.size + engine + ops}"
            raise BadFrame("LX_START", len(body), expected)
        names = _text(body, _START.size + engine, ops)
        label = _text(body, _START.size, engine)
        return cls(version, label, tuple(names.split("\n")), flags)


class LxDevice(NamedTuple):
    """A device as its own engine describes it."""

    type: int
    """`enum ggml_backend_dev_type`."""
    free: int
    total: int
    name: str
    description: str

    def encode(self) -> bytes:
        name, description = self.name.encode(), self.description.encode()
        head = _DEVICE.pack(
            self.type, self.free, self.total, len(name), len(description)
        )
        return head + name + description

    @classmethod
    def decode(cls, body: Bytes) -> LxDevice:
        """Raises: BadFrame: not the length it says."""
        if len(body) < _DEVICE.size:
            raise BadFrame("LX_DEVICE", len(body), f"at least {_DEVICE.size}")
        kind, free, total, name, description = _DEVICE.unpack_from(body)
        if len(body) != _DEVICE.size + name + description:
            expected = f"{_DEVICE.size + name + description}"
            raise BadFrame("LX_DEVICE", len(body), expected)
        at = _DEVICE.size + name
        return cls(
            kind,
            free,
            total,
            _text(body, _DEVICE.size, name),
            _text(body, at, description),
        )


class SupportsOps(NamedTuple):
    """Ask which of some ops a device can do; the answer is a byte for each."""

    device: int
    queries: tuple[bytes, ...]
    """Per op 11 records: its own and its sources', zeros for none."""

    def encode(self) -> bytes:
        head = _QUERY.pack(self.device, len(self.queries))
        return head + b"".join(self.queries)

    @classmethod
    def decode(cls, body: Bytes) -> SupportsOps:
        """Raises: BadFrame, LimitExceeded: not what the count says."""
        device, count = _QUERY.unpack_from(body)
        if count > MAX_SUPPORT_QUERIES:
            name = "LX_SUPPORTS_OPS"
            raise LimitExceeded(name, "op count", count, MAX_SUPPORT_QUERIES)
        if len(body) != _QUERY.size + count * QUERY_SIZE:
            expected = f"{_QUERY.size + count * QUERY_SIZE}"
            raise BadFrame("LX_SUPPORTS_OPS", len(body), expected)
        starts = range(_QUERY.size, len(body), QUERY_SIZE)
        return cls(device, tuple(bytes(body[i : i + QUERY_SIZE]) for i in starts))


class Top(NamedTuple):
    """Ask for the `k` largest of the f32 numbers in part of a tensor.

    The answer is `TOP_ENTRY` by `TOP_ENTRY`, largest first and of equals the first
    one first; `k` of them, or all if there are fewer.
    """

    tensor: bytes
    offset: int
    size: int
    """Bytes."""
    k: int

    def encode(self) -> bytes:
        return _TOP.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> Top:
        return cls(*_TOP.unpack(body))


class Have(NamedTuple):
    """Ask which of some tensors' data, by BLAKE3 digest, the server has at hand.

    The answer is a byte for each: 1 it has it, and keeps it for this session.
    """

    digests: tuple[bytes, ...]

    def encode(self) -> bytes:
        return U32.pack(len(self.digests)) + b"".join(self.digests)

    @classmethod
    def decode(cls, body: Bytes) -> Have:
        """Raises: BadFrame, LimitExceeded: not what the count says."""
        (count,) = U32.unpack_from(body)
        if count > MAX_DIGESTS:
            raise LimitExceeded("LX_HAVE", "digest count", count, MAX_DIGESTS)
        expected = U32.size + count * DIGEST_SIZE
        if len(body) != expected:
            raise BadFrame("LX_HAVE", len(body), f"{expected}")
        starts = range(U32.size, len(body), DIGEST_SIZE)
        return cls(tuple(bytes(body[i : i + DIGEST_SIZE]) for i in starts))


class SetDigest(NamedTuple):
    """Fill part of a tensor with data that the server said it has."""

    tensor: bytes
    offset: int
    size: int
    """Bytes; all that the digest is of."""
    digest: bytes

    def encode(self) -> bytes:
        return _SET_DIGEST.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> SetDigest:
        return cls(*_SET_DIGEST.unpack(body))
