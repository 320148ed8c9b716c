"""Bytes on their way into a tensor, and the ways of not sending them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from longwire.client.connection import Connection
from longwire.errors import RemoteFailure
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, Command
from longwire.wire.dialects import MAX_DIGESTS
from longwire.wire.fnv import fnv1a_64
from longwire.wire.lx import Have, SetDigest
from longwire.wire.tensors import TENSOR_SIZE

__all__ = ["Source", "Weight", "Write"]
__all__ += ["deliver", "deliver_alone", "keeps_data", "known_digests", "weight_write"]


_SET_DIGEST_SIZE = TENSOR_SIZE + 48
"""Bytes of an LX_SET_DIGEST: data as short as that may as well be sent."""

_COMPARED = 64
"""Bytes at the start, in the middle and at the end of a weight."""


class Write(NamedTuple):
    """Data for one tensor, as one message."""

    record: bytes
    command: Command
    """SET_TENSOR or SET_TENSOR_2D."""
    head: bytes
    data: memoryview
    offset: int = 0
    digest: bytes | None = None
    """Of `data`, where it may be asked for with LX_HAVE."""
    fnv: int | None = None
    """Of `data`, if it is known."""
    probes: bool = False
    """Whether a C++ server is asked for it by hash."""
    copied: bool = False
    """Whether `data` is memory that was taken for this write."""


class Weight(NamedTuple):
    """Part of a weight as llama.cpp hands it over."""

    name: bytes
    record: bytes
    content: memoryview
    """Valid for the call only."""
    offset: int


class Source(NamedTuple):
    """A whole tensor as a model file holds it."""

    data: memoryview
    """In a mapping of ours: llama.cpp's may be gone before the data has left."""
    digest: bytes | None = None
    fnv: int | None = None

    def is_of(self, weight: Weight) -> bool:
        """Whether this is the same data, by its size and some bytes of it."""
        content, size = weight.content, len(self.data)
        if weight.offset != 0 or len(content) != size:
            return False
        middle, end = max(0, (size - _COMPARED) // 2), max(0, size - _COMPARED)
        return all(
            content[at : at + _COMPARED] == self.data[at : at + _COMPARED]
            for at in (0, middle, end)
        )


def weight_write(
    connection: Connection, weight: Weight, source: Source | None = None
) -> Write:
    """Part of a weight, for the server to keep if it keeps any.

    Large ones are kept, and by our servers all that a `source` has a digest of, for
    that is what they will be asked by.
    """
    data, digest, fnv = source or Source(weight.content)
    large = len(data) > HASH_THRESHOLD
    probes = large and connection.server is None
    keeps = probes or (keeps_data(connection) and (large or digest is not None))
    record, offset = weight.record, weight.offset
    head = m.SetTensor(record, int(keeps), offset).encode()
    return Write(record, Command.SET_TENSOR, head, data, offset, digest, fnv, probes)


def keeps_data(connection: Connection) -> bool:
    """Whether a server of ours is there that may be asked for data by digest."""
    return connection.server is not None and connection.server.keeps_data


def known_digests(connection: Connection, digests: Sequence[bytes]) -> set[bytes]:
    """Which of some data the server has, asked in as few questions as can be.

    Raises:
        RemoteError: the server failed, or its answer is no answer.
    """
    known: set[bytes] = set()
    for at in range(0, len(digests), MAX_DIGESTS):
        part = tuple(digests[at : at + MAX_DIGESTS])
        body = Have(part).encode()
        answer = connection.ask_sized(Command.LX_HAVE, body, len(part))
        if len(answer) != len(part):
            reason = f"answered {len(answer)} bytes for {len(part)} digests"
            error = RemoteFailure(str(connection.endpoint), "LX_HAVE", reason)
            raise connection.fail(error, "LX_HAVE")
        known.update(d for d, has in zip(part, answer, strict=True) if has)
    return known


def deliver(connection: Connection, write: Write, had: bool) -> bool:
    """Send a write, or have the server take its data from its store.

    `had`: it said that it has data of this digest. Returns whether the data did
    not travel.

    Raises:
        RemoteError: the server failed.
    """
    size = len(write.data)
    # A reference to a few bytes is longer than they are.
    if had and write.digest is not None and size > _SET_DIGEST_SIZE:
        body = SetDigest(write.record, write.offset, size, write.digest).encode()
        connection.post(Command.LX_SET_DIGEST, body)
    elif not (write.probes and _filled_by_hash(connection, write)):
        connection.post(write.command, write.head, write.data)
        return False
    connection.traffic.bytes_saved += size
    return True


def deliver_alone(connection: Connection, write: Write) -> None:
    """Send a weight that is no part of a load of ours; a large one is asked for.

    Raises:
        RemoteError: the server failed.
    """
    had = False
    if keeps_data(connection) and len(write.data) > HASH_THRESHOLD:
        digest = blake3(write.data).digest()
        had = bool(known_digests(connection, [digest]))
        write = write._replace(digest=digest)
    deliver(connection, write, had)


def _filled_by_hash(connection: Connection, write: Write) -> bool:
    """Ask a server to take the data from its file cache."""
    fnv = fnv1a_64(write.data) if write.fnv is None else write.fnv
    body = m.SetTensorHash(write.record, write.offset, fnv).encode()
    (hit,) = m.U8.unpack(connection.ask(Command.SET_TENSOR_HASH, body))
    return bool(hit)
