"""One class per message body: encode and decode side by side.

A body that carries tensors keeps each as its raw 296 bytes, so that a receiver
may recognise a record it has already checked; `Tensor.decode` reads them.
Bulk data never enters these classes: SET_TENSOR's and SET_TENSOR_2D's bytes
follow the encoded head, GET_TENSOR's are the whole answer.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from longwire.wire.constants import CAPS_SIZE
from longwire.wire.tensors import TENSOR_SIZE

__all__ = [
    "SET_TENSOR_2D_HEAD",
    "SET_TENSOR_HEAD",
    "AllocBuffer",
    "AllocBufferAnswer",
    "BufferClear",
    "CommAllreduce",
    "CommInit",
    "CopyTensor",
    "DeviceMemory",
    "GetAllocSize",
    "GetTensor",
    "GetTensor2D",
    "Hello",
    "HelloAnswer",
    "MemsetTensor",
    "SetTensor",
    "SetTensor2D",
    "SetTensorHash",
    "U32",
    "U64",
    "U8",
]

Bytes = bytes | bytearray | memoryview

U8 = struct.Struct("<B")
U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")

_HELLO = struct.Struct(f"<{CAPS_SIZE}s")
_HELLO_ANSWER = struct.Struct(f"<BBBB{CAPS_SIZE}s")
_ALLOC = struct.Struct("<IQ")
_ALLOC_ANSWER = struct.Struct("<QQ")
_CLEAR = struct.Struct("<QB")
_MEMSET = struct.Struct(f"<{TENSOR_SIZE}sQQB")
_SET = struct.Struct(f"<{TENSOR_SIZE}sBQ")
_RANGE = struct.Struct(f"<{TENSOR_SIZE}sQQ")
_COPY = struct.Struct(f"<{TENSOR_SIZE}s{TENSOR_SIZE}s")
_STRIDED = struct.Struct(f"<{TENSOR_SIZE}sQQQQ")
_ALLOC_SIZE = struct.Struct(f"<I{TENSOR_SIZE}s{10 * TENSOR_SIZE}s")
_COMM_INIT = struct.Struct("<IIII64s")
_ALLREDUCE = struct.Struct(f"<I{TENSOR_SIZE}s")

SET_TENSOR_HEAD = _SET.size
SET_TENSOR_2D_HEAD = _STRIDED.size
"""Sizes of what precedes the data in the two messages that carry bulk data."""


class Hello(NamedTuple):
    """First message of a client: its transport capabilities, zero for TCP."""

    caps: bytes = bytes(CAPS_SIZE)

    def encode(self) -> bytes:
        return _HELLO.pack(self.caps)

    @classmethod
    def decode(cls, body: Bytes) -> Hello:
        return cls(*_HELLO.unpack(body))


class HelloAnswer(NamedTuple):
    """The server's protocol version and capabilities.

    `padding` is 0 from the C++ server; the LX dialect will be offered in it.
    """

    major: int
    minor: int
    patch: int
    padding: int = 0
    caps: bytes = bytes(CAPS_SIZE)

    def encode(self) -> bytes:
        return _HELLO_ANSWER.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> HelloAnswer:
        return cls(*_HELLO_ANSWER.unpack(body))


class AllocBuffer(NamedTuple):
    """Allocate `size` bytes on a device."""

    device: int
    size: int

    def encode(self) -> bytes:
        return _ALLOC.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> AllocBuffer:
        return cls(*_ALLOC.unpack(body))


class AllocBufferAnswer(NamedTuple):
    """Handle and true size of the new buffer; handle 0 when there is no memory."""

    handle: int
    size: int

    def encode(self) -> bytes:
        return _ALLOC_ANSWER.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> AllocBufferAnswer:
        return cls(*_ALLOC_ANSWER.unpack(body))


class DeviceMemory(NamedTuple):
    """Answer to GET_DEVICE_MEMORY, in bytes."""

    free: int
    total: int

    def encode(self) -> bytes:
        return _ALLOC_ANSWER.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> DeviceMemory:
        return cls(*_ALLOC_ANSWER.unpack(body))


class BufferClear(NamedTuple):
    """Fill a whole buffer with one byte."""

    handle: int
    value: int

    def encode(self) -> bytes:
        return _CLEAR.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> BufferClear:
        return cls(*_CLEAR.unpack(body))


class MemsetTensor(NamedTuple):
    """Fill `size` bytes of a tensor, from `offset`, with one byte."""

    tensor: bytes
    offset: int
    size: int
    value: int

    def encode(self) -> bytes:
        return _MEMSET.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> MemsetTensor:
        return cls(*_MEMSET.unpack(body))


class SetTensor(NamedTuple):
    """Overwrite part of a tensor; the new bytes follow this head.

    `cache_flag` 1 asks the server to keep the bytes in its file cache.
    """

    tensor: bytes
    cache_flag: int
    offset: int

    def encode(self) -> bytes:
        return _SET.pack(*self)

    @classmethod
    def decode(cls, head: Bytes) -> SetTensor:
        return cls(*_SET.unpack(head))


class SetTensorHash(NamedTuple):
    """Fill a tensor from `offset` out of the server's file cache."""

    tensor: bytes
    offset: int
    hash: int
    """FNV-1a 64 of the bytes (PROTOCOL.md, "File cache")."""

    def encode(self) -> bytes:
        return _RANGE.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> SetTensorHash:
        return cls(*_RANGE.unpack(body))


class GetTensor(NamedTuple):
    """Read `size` bytes of a tensor from `offset`."""

    tensor: bytes
    offset: int
    size: int

    def encode(self) -> bytes:
        return _RANGE.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> GetTensor:
        return cls(*_RANGE.unpack(body))


class CopyTensor(NamedTuple):
    """Copy one tensor onto another of the same server."""

    src: bytes
    dst: bytes

    def encode(self) -> bytes:
        return _COPY.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> CopyTensor:
        return cls(*_COPY.unpack(body))


class GetAllocSize(NamedTuple):
    """Ask how many bytes a tensor takes on a device; `srcs` are ten records."""

    device: int
    tensor: bytes
    srcs: bytes

    def encode(self) -> bytes:
        return _ALLOC_SIZE.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> GetAllocSize:
        return cls(*_ALLOC_SIZE.unpack(body))


class SetTensor2D(NamedTuple):
    """Write `n_copies` rows of `size` bytes, `stride` apart in the tensor.

    The rows follow this head without gaps. Protocol 8 only.
    """

    tensor: bytes
    offset: int
    size: int
    n_copies: int
    stride: int

    def encode(self) -> bytes:
        return _STRIDED.pack(*self)

    @classmethod
    def decode(cls, head: Bytes) -> SetTensor2D:
        return cls(*_STRIDED.unpack(head))


class GetTensor2D(NamedTuple):
    """Read `n_copies` rows of `size` bytes, `stride` apart. Protocol 8 only."""

    tensor: bytes
    offset: int
    size: int
    n_copies: int
    stride: int

    def encode(self) -> bytes:
        return _STRIDED.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> GetTensor2D:
        return cls(*_STRIDED.unpack(body))


class CommInit(NamedTuple):
    """Join a pairwise communicator. Protocol 8 only."""

    device: int
    rank: int
    world: int
    port: int
    host: bytes
    """Rank 0's host, NUL-padded to 64; empty for rank 0 itself."""

    def encode(self) -> bytes:
        return _COMM_INIT.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> CommInit:
        device, rank, world, port, host = _COMM_INIT.unpack(body)
        return cls(device, rank, world, port, host.split(b"\0", 1)[0])


class CommAllreduce(NamedTuple):
    """Sum a tensor with the communicator's peer. Protocol 8 only."""

    device: int
    tensor: bytes

    def encode(self) -> bytes:
        return _ALLREDUCE.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> CommAllreduce:
        return cls(*_ALLREDUCE.unpack(body))
