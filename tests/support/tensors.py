"""Tensors and small graphs as a client would describe them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longwire.wire.constants import Command
from longwire.wire.graphs import Graph
from longwire.wire.messages import MemsetTensor
from longwire.wire.tensors import TENSOR, Tensor
from longwire.wire.types import TYPES
from support.client import Buffer, RawClient

__all__ = ["ADD", "COMPUTE", "F32", "Sum", "graph", "strides", "tensor"]

F32, Q4_0 = 0, 2
ADD = 2
COMPUTE = 16
"""The flag without which a backend skips a node."""


def strides(type_number: int, ne: Sequence[int]) -> tuple[int, int, int, int]:
    """The strides of a tensor without gaps."""
    traits = TYPES[type_number]
    row = ne[0] // traits.block * traits.size
    return (traits.size, row, row * ne[1], row * ne[1] * ne[2])


def tensor(
    number: int,
    buffer: Buffer,
    offset: int = 0,
    ne: Sequence[int] = (8,),
    type_number: int = F32,
    op: int = 0,
    src: Sequence[Tensor] = (),
    params: bytes = b"",
) -> Tensor:
    """A tensor without gaps at an offset of a buffer; `number` is its id."""
    d0, d1, d2, d3 = (*ne, 1, 1, 1)[:4]
    sources = [source.id for source in src]
    return Tensor(
        id=number,
        type=type_number,
        buffer=buffer.handle,
        ne=(d0, d1, d2, d3),
        nb=strides(type_number, (d0, d1, d2, d3)),
        op=op,
        op_params=params.ljust(64, b"\0"),
        flags=COMPUTE if op else 0,
        src=(*sources, *[0] * (10 - len(sources))),
        data=buffer.base + offset,
        name=b"tensor %d" % number,
    )


def graph(
    nodes: Sequence[Tensor],
    others: Sequence[Tensor] = (),
    uid: int = 0,
    device: int = 0,
) -> Graph:
    """A graph of `nodes` in this order; `others` are sent along."""
    records = b"".join(t.encode() for t in [*others, *nodes])
    ids = np.array([node.id for node in nodes], np.uint64)
    return Graph(device, uid, ids, np.frombuffer(records, TENSOR))


class Sum:
    """c = a + b of eight f32 each, in a buffer of their own."""

    SIZE = 32

    def __init__(self, client: RawClient, uid: int = 77) -> None:
        """Allocate, and write a and b. Nothing is computed."""
        self.client = client
        self.uid = uid
        self.buffer = client.alloc(3 * self.SIZE)
        self.a = tensor(1, self.buffer, 0)
        self.b = tensor(2, self.buffer, self.SIZE)
        self.c = tensor(3, self.buffer, 2 * self.SIZE, op=ADD, src=[self.a, self.b])
        self.graph = graph([self.c], [self.a, self.b], uid)
        self.whole = tensor(4, self.buffer, ne=(24,))
        x = np.arange(8, dtype="<f4")
        y = np.float32(0.5) - 3 * x
        client.write(self.a, x.tobytes())
        client.write(self.b, y.tobytes())
        self.expected = np.concatenate([x, y, x + y]).tobytes()
        """The buffer's content after the sum."""

    def check(self, again: bool = False) -> None:
        """Compute (`again`: recompute), and compare the whole buffer."""
        wipe = MemsetTensor(self.c.encode(), 0, self.SIZE, 0xFF)
        self.client.post(Command.MEMSET_TENSOR, wipe.encode())
        if again:
            self.client.recompute(self.uid)
        else:
            self.client.compute(self.graph)
        found = self.client.read(self.whole)
        assert found == self.expected, np.frombuffer(found, "<f4")
