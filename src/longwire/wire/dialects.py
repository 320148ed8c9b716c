"""Dialects as tables: which commands, which sizes, which answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from longwire.wire.constants import (
    MAX_GRAPH_NODES,
    MAX_GRAPH_TENSORS,
    U64_MAX,
    Command,
)
from longwire.wire.proof import NONCE_SIZE, PROOF_SIZE
from longwire.wire.tensors import TENSOR_SIZE

__all__ = [
    "DIALECTS",
    "DIGEST_SIZE",
    "LX_OFFER",
    "LX_SHAPES",
    "MAX_CERTIFICATE",
    "MAX_DIGESTS",
    "MAX_HOST",
    "MAX_MEMBERS",
    "MAX_SERVERS",
    "MAX_PREPARED",
    "MAX_PREPARED_DATA",
    "MAX_PREPARED_SIZE",
    "MAX_SUPPORT_QUERIES",
    "Dialect",
    "Shape",
    "TICKET_SIZE",
    "V7",
    "V8",
]

ANY = -1
"""An answer whose size follows from the request (GET_TENSOR)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one command's request and answer, in bytes."""

    least: int
    most: int
    answer: int | None
    """None: the command is posted and never answered. `ANY`: as requested."""
    drains: bool = False
    """Protocol 8 servers finish all running graphs before this command acts."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One protocol version."""

    major: int
    minor: int
    patch: int
    shapes: Mapping[int, Shape]
    graph_uid: bool
    """Graphs carry a uid and are kept by it (protocol 8)."""
    lx: bool = False
    """Answers may be errors, and the LX commands are known."""

    @property
    def version(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"

    def has(self, command: Command) -> bool:
        """Whether this dialect knows the command."""
        return command in self.shapes

    def offering_lx(self) -> Dialect:
        """This dialect, and the commands that come before LX or start it."""
        return replace(self, shapes={**self.shapes, **LX_OFFER})

    def with_lx(self) -> Dialect:
        """This dialect once LX has started."""
        return replace(self, shapes={**self.shapes, **LX_SHAPES}, lx=True)


def _fixed(size: int, answer: int | None, drains: bool = False) -> Shape:
    return Shape(size, size, answer, drains)


_GRAPH_BODY = 8 * MAX_GRAPH_NODES + TENSOR_SIZE * MAX_GRAPH_TENSORS
_T = TENSOR_SIZE
_C = Command

_COMMON: dict[int, Shape] = {
    _C.ALLOC_BUFFER: _fixed(12, 16),
    _C.GET_ALIGNMENT: _fixed(4, 8),
    _C.GET_MAX_SIZE: _fixed(4, 8),
    _C.BUFFER_GET_BASE: _fixed(8, 8),
    _C.FREE_BUFFER: _fixed(8, None, drains=True),
    _C.BUFFER_CLEAR: _fixed(9, None, drains=True),
    _C.SET_TENSOR: Shape(_T + 9, U64_MAX, None, drains=True),
    _C.SET_TENSOR_HASH: _fixed(_T + 16, 1, drains=True),
    _C.GET_TENSOR: _fixed(_T + 16, ANY, drains=True),
    _C.COPY_TENSOR: _fixed(2 * _T, 1, drains=True),
    _C.GET_DEVICE_MEMORY: _fixed(4, 16),
    _C.INIT_TENSOR: _fixed(_T, None, drains=True),
    _C.GET_ALLOC_SIZE: _fixed(4 + 11 * _T, 8),
    _C.HELLO: _fixed(24, 28),
    _C.DEVICE_COUNT: _fixed(0, 4),
    _C.MEMSET_TENSOR: _fixed(_T + 17, None, drains=True),
}

V7 = Dialect(
    major=7,
    minor=0,
    patch=0,
    shapes={
        **_COMMON,
        _C.GRAPH_COMPUTE: Shape(8, 12 + _GRAPH_BODY, None),
        _C.GRAPH_RECOMPUTE: _fixed(4, None),
    },
    graph_uid=False,
)

V8 = Dialect(
    major=8,
    minor=0,
    patch=0,
    shapes={
        **_COMMON,
        _C.GRAPH_COMPUTE: Shape(16, 20 + _GRAPH_BODY, None),
        _C.GRAPH_RECOMPUTE: _fixed(12, None),
        _C.SET_TENSOR_2D: Shape(_T + 32, U64_MAX, None, drains=True),
        _C.GET_TENSOR_2D: _fixed(_T + 32, ANY, drains=True),
        _C.COMM_INIT: _fixed(80, 1),
        _C.COMM_ALLREDUCE: _fixed(4 + _T, None),
        _C.COMM_FREE: _fixed(4, None),
    },
    graph_uid=True,
)

MAX_SUPPORT_QUERIES = 1024
"""Ops per LX_SUPPORTS_OPS: more than a graph has kinds of, and below 4 MiB."""

DIGEST_SIZE = 32
"""BLAKE3."""

MAX_DIGESTS = 1 << 15
"""Digests per LX_HAVE: more than the largest model has tensors, and 1 MiB."""

MAX_PATCH = 1 << 19
"""Words of a patch; one over a quarter of its graph is not worth sending."""

MAX_PREPARED = 1024
"""Numbers of prepared writes; a step has some ten of them."""

MAX_PREPARED_SIZE = 1 << 16
"""Bytes of one; more take longer than to look at their message."""

MAX_PREPARED_DATA = 1 << 17
"""Bytes of one LX_SET_PREPARED's writes; it is received whole."""

TICKET_SIZE = 48
"""16 bytes by which a peer port knows it, 32 that only its holders do."""

MAX_HOST = 255
"""A host name in bytes; DNS knows no longer ones."""

MAX_CERTIFICATE = 1 << 13
"""In DER: that of an RSA key of 4096 bits with many names has a third of it."""

MAX_SERVERS = 64
"""In one communicator: each is linked with each."""

MAX_MEMBERS = 16
"""Devices of one server in a communicator: llama.cpp splits a model over 16."""

LX_OFFER: Mapping[int, Shape] = {
    _C.LX_START: _fixed(4, ANY),
    _C.LX_AUTH: _fixed(NONCE_SIZE, NONCE_SIZE),
    _C.LX_PROVE: _fixed(PROOF_SIZE, PROOF_SIZE),
}

LX_SHAPES: Mapping[int, Shape] = {
    _C.LX_DEVICE: _fixed(4, ANY),
    _C.LX_SUPPORTS_OPS: Shape(8, 8 + 11 * _T * MAX_SUPPORT_QUERIES, ANY),
    _C.LX_PING: _fixed(0, 0),
    _C.LX_TOP: _fixed(_T + 20, ANY, drains=True),
    _C.LX_GRAPH_PATCH: Shape(20, 20 + 8 * MAX_PATCH, None),
    _C.LX_HAVE: Shape(4, 4 + DIGEST_SIZE * MAX_DIGESTS, ANY),
    _C.LX_SET_DIGEST: _fixed(_T + 16 + DIGEST_SIZE, None, drains=True),
    _C.LX_TRACE: _fixed(4, ANY),
    _C.LX_LISTEN: _fixed(0, 2 + TICKET_SIZE),
    _C.LX_CONNECT: Shape(
        TICKET_SIZE + 10, TICKET_SIZE + 10 + MAX_HOST + MAX_CERTIFICATE, 4
    ),
    _C.LX_ACCEPT: _fixed(TICKET_SIZE + 4, 4),
    _C.LX_UNLINK: _fixed(4, None),
    _C.LX_SEND: _fixed(_T + 20, None, drains=True),
    _C.LX_RECEIVE: _fixed(_T + 20, None, drains=True),
    _C.LX_COMM_INIT: Shape(28, 28 + 4 * (MAX_SERVERS + MAX_MEMBERS), 0),
    _C.LX_ALLREDUCE: Shape(8 + _T, 8 + MAX_MEMBERS * _T, None, drains=True),
    _C.LX_COMM_FREE: _fixed(4, None),
    _C.LX_PREPARE_SET: _fixed(_T + 20, None),
    _C.LX_SET_PREPARED: Shape(
        4, 4 + 4 * MAX_PREPARED + MAX_PREPARED_DATA, None, drains=True
    ),
}

DIALECTS = {7: V7, 8: V8}
"""By major version, which is all that `serve --protocol` and HELLO choose by."""
