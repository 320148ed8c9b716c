"""Requests by hand: each legal with its defaults, and ready to be spoilt."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.tensors import TENSOR_SIZE, Tensor
from support.client import Buffer, RawClient
from support.tensors import ADD, graph, tensor

__all__ = [
    "Request",
    "Scene",
    "addition",
    "addition_of",
    "alloc",
    "alloc_size",
    "clear",
    "compute",
    "copy",
    "counts",
    "for_device",
    "for_handle",
    "get_rows",
    "get_tensor",
    "init",
    "memset",
    "recompute",
    "set_rows",
    "set_tensor",
]

C = Command


class Scene:
    """What a case may build on: a client, its buffer, and a neighbour's."""

    def __init__(self, client: RawClient, foreign: Buffer) -> None:
        self.client = client
        self.dialect = client.dialect
        self.foreign = foreign
        """A live buffer of another session."""

    @cached_property
    def buffer(self) -> Buffer:
        """256 bytes: t is at 64 to 128, end at 192 to 256."""
        return self.client.alloc(256)

    @cached_property
    def freed(self) -> Buffer:
        buffer = self.client.alloc(256)
        self.client.free(buffer)
        return buffer

    @property
    def t(self) -> Tensor:
        return tensor(1, self.buffer, 64, ne=(16,))

    @property
    def end(self) -> Tensor:
        return tensor(2, self.buffer, 192, ne=(16,))

    @property
    def a(self) -> Tensor:
        return tensor(11, self.buffer, 0)

    @property
    def b(self) -> Tensor:
        return tensor(12, self.buffer, 32)

    @property
    def c(self) -> Tensor:
        return tensor(13, self.buffer, 64, op=ADD, src=[self.a, self.b])


class Request(NamedTuple):
    """A command number and a body."""

    command: int
    body: bytes = b""
    length: int | None = None
    """What the header claims, where that is not the truth."""


def set_tensor(t: Tensor, data: bytes = b"data", offset: int = 0) -> Request:
    return Request(C.SET_TENSOR, m.SetTensor(t.encode(), 0, offset).encode() + data)


def get_tensor(t: Tensor, offset: int = 0, size: int = 4) -> Request:
    return Request(C.GET_TENSOR, m.GetTensor(t.encode(), offset, size).encode())


def memset(t: Tensor, offset: int = 0, size: int = 4) -> Request:
    body = m.MemsetTensor(t.encode(), offset, size, 1).encode()
    return Request(C.MEMSET_TENSOR, body)


def copy(src: Tensor, dst: Tensor) -> Request:
    return Request(C.COPY_TENSOR, m.CopyTensor(src.encode(), dst.encode()).encode())


def init(t: Tensor) -> Request:
    return Request(C.INIT_TENSOR, t.encode())


def alloc_size(t: Tensor, src: Tensor | None = None, device: int = 0) -> Request:
    srcs = (src.encode() if src else b"").ljust(10 * TENSOR_SIZE, b"\0")
    body = m.GetAllocSize(device, t.encode(), srcs).encode()
    return Request(C.GET_ALLOC_SIZE, body)


def set_rows(
    t: Tensor,
    data: bytes = b"data",
    offset: int = 0,
    size: int = 2,
    n: int = 2,
    stride: int = 8,
) -> Request:
    head = m.SetTensor2D(t.encode(), offset, size, n, stride).encode()
    return Request(C.SET_TENSOR_2D, head + data)


def get_rows(
    t: Tensor, offset: int = 0, size: int = 2, n: int = 2, stride: int = 8
) -> Request:
    body = m.GetTensor2D(t.encode(), offset, size, n, stride).encode()
    return Request(C.GET_TENSOR_2D, body)


def clear(handle: int) -> Request:
    return Request(C.BUFFER_CLEAR, m.BufferClear(handle, 1).encode())


def for_handle(command: int, handle: int) -> Request:
    return Request(command, m.U64.pack(handle))


def for_device(command: int, device: int) -> Request:
    return Request(command, m.U32.pack(device))


def alloc(device: int) -> Request:
    return Request(C.ALLOC_BUFFER, m.AllocBuffer(device, 64).encode())


def compute(s: Scene, g: Graph) -> Request:
    return Request(C.GRAPH_COMPUTE, b"".join(g.encode(s.dialect)))


def recompute(s: Scene, uid: int, device: int = 0) -> Request:
    return Request(C.GRAPH_RECOMPUTE, GraphRecompute(device, uid).encode(s.dialect))


def addition(s: Scene, **changes: Any) -> Request:
    """c = a + b, with fields of c's record changed."""
    return compute(s, graph([s.c._replace(**changes)], [s.a, s.b]))


def addition_of(s: Scene, **changes: Any) -> Request:
    """c = a + b, with fields of a's record changed."""
    return compute(s, graph([s.c], [s.a._replace(**changes), s.b]))


def counts(s: Scene, nodes: int, tensors: int, rest: bytes = b"") -> Request:
    """A graph that claims these counts; up to four ids are really there."""
    uid = bytes(8 if s.dialect.graph_uid else 0)
    ids = bytes(8 * nodes) if nodes <= 4 else b""
    body = bytes(4) + uid + m.U32.pack(nodes) + ids + m.U32.pack(tensors) + rest
    return Request(C.GRAPH_COMPUTE, body)
