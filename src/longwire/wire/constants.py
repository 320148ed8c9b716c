"""Command numbers, sizes and limits; each limit with its reason.

The numbers are those of llama.cpp's `ggml-rpc.cpp` (protocols 7.0.0 and 8.0.0).
"""

from __future__ import annotations

from enum import IntEnum

__all__ = [
    "CAPS_SIZE",
    "Command",
    "DEFAULT_PORT",
    "GRAPH_CACHE_MAX",
    "HASH_THRESHOLD",
    "LX_OFFERS",
    "LX_VERSION",
    "MAX_GRAPH_NODES",
    "MAX_GRAPH_TENSORS",
    "NO_LIMIT",
    "OP_COUNT",
    "PEERS_ABOVE",
    "POINTER_OPS",
    "U32_MAX",
    "U64_MAX",
]

DEFAULT_PORT = 50052
"""The C++ server's default (`tools/rpc/rpc-server.cpp`)."""

PEERS_ABOVE = 1000
"""From a server's port to the one for other servers, as C++ clients expect it of any
server (`ggml-rpc.cpp`)."""

CAPS_SIZE = 24
"""Transport capabilities in HELLO; all zero means plain TCP."""

GRAPH_CACHE_MAX = 1024
"""Graphs a protocol 8 server keeps per device; both sides clear by this rule."""

HASH_THRESHOLD = 10 * 1024 * 1024
"""Weights strictly larger than this are asked for by hash before they are sent."""

U32_MAX = 0xFFFF_FFFF
U64_MAX = 0xFFFF_FFFF_FFFF_FFFF
NO_LIMIT = U64_MAX
"""GET_MAX_SIZE's way to say that a buffer may have any size."""

LX_VERSION = 1
"""What our server puts in the HELLO answer's padding byte."""

LX_OFFERS = range(1, 16)
"""Values of that byte which offer LX; all others are reserved and mean nothing."""

MAX_GRAPH_NODES = 1 << 17
MAX_GRAPH_TENSORS = 1 << 18
"""llama.cpp's largest graphs hold some ten thousand nodes; ten times that
leaves room, and keeps the largest GRAPH_COMPUTE below 80 MiB."""

OP_COUNT = 101
"""`GGML_OP_COUNT` of protocols 7.0.0 and 8.0.0."""

POINTER_OPS = frozenset({92, 93, 94, 95})
"""MAP_CUSTOM1..3 and CUSTOM: their op_params hold a function pointer."""


class Command(IntEnum):
    """A request's first byte. 0x80 and up are the LX dialect's."""

    ALLOC_BUFFER = 0x00
    GET_ALIGNMENT = 0x01
    GET_MAX_SIZE = 0x02
    BUFFER_GET_BASE = 0x03
    FREE_BUFFER = 0x04
    BUFFER_CLEAR = 0x05
    SET_TENSOR = 0x06
    SET_TENSOR_HASH = 0x07
    GET_TENSOR = 0x08
    COPY_TENSOR = 0x09
    GRAPH_COMPUTE = 0x0A
    GET_DEVICE_MEMORY = 0x0B
    INIT_TENSOR = 0x0C
    GET_ALLOC_SIZE = 0x0D
    HELLO = 0x0E
    DEVICE_COUNT = 0x0F
    GRAPH_RECOMPUTE = 0x10
    MEMSET_TENSOR = 0x11
    SET_TENSOR_2D = 0x12
    GET_TENSOR_2D = 0x13
    COMM_INIT = 0x14
    COMM_ALLREDUCE = 0x15
    COMM_FREE = 0x16

    LX_START = 0x80
    LX_DEVICE = 0x81
    LX_SUPPORTS_OPS = 0x82
    LX_PING = 0x83
    LX_AUTH = 0x84
    LX_PROVE = 0x85
    LX_TOP = 0x86
    LX_HAVE = 0x87
    LX_SET_DIGEST = 0x88
    LX_GRAPH_PATCH = 0x89
    LX_TRACE = 0x8A
    LX_LISTEN = 0x8B
    LX_CONNECT = 0x8C
    LX_ACCEPT = 0x8D
    LX_UNLINK = 0x8E
    LX_SEND = 0x8F
    LX_RECEIVE = 0x90
    LX_COMM_INIT = 0x91
    LX_ALLREDUCE = 0x92
    LX_COMM_FREE = 0x93
    LX_PREPARE_SET = 0x94
    LX_SET_PREPARED = 0x95
