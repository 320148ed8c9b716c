"""Strides of 4 GiB and more: where LX is spoken, and only there."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from longwire.wire import messages as m
from longwire.wire.constants import U64_MAX, Command
from longwire.wire.dialects import Dialect
from longwire.wire.graphs import Graph
from longwire.wire.lx import (
    SupportsOps,
)
from longwire.wire.tensors import NULL_TENSOR, WIDE_TENSOR, Tensor
from support.client import Buffer
from support.lx import WideClient, wide_graph
from support.tensors import ADD, COMPUTE, Sum, tensor
from support.worker import Worker

GIB = 1 << 30
ROOM = 6 * GIB
"""Nothing but the pages that a test writes to is ever taken from the system."""

OUT_PROD, CONV_2D_DW = 31, 58


@pytest.fixture
def client(worker: Worker, dialect: Dialect) -> Iterator[WideClient]:
    """A client that has said HELLO and no more."""
    client = WideClient(worker.endpoint, dialect)
    with client:
        client.hello()
        yield client


def far_rows(
    number: int,
    buffer: Buffer,
    stride: int,
    op: int = 0,
    src: Sequence[Tensor] = (),
) -> Tensor:
    """Two rows of four f32, so far apart, from the buffer's start."""
    rows = tensor(number, buffer, ne=(4, 2), op=op, src=src)
    return rows._replace(nb=(4, stride, 2 * stride, 2 * stride))


class TestThere:
    """What LX carries."""

    def test_a_sum_over_rows_that_lie_far_apart(self, client: WideClient) -> None:
        client.start()
        buffer = client.alloc(ROOM)
        a = far_rows(1, buffer, 5 * GIB)
        b = tensor(2, buffer, 1024, ne=(4, 2))
        c = tensor(3, buffer, 2048, ne=(4, 2), op=ADD, src=[a, b])
        x = np.arange(8, dtype="<f4")
        client.write(a, x[:4].tobytes())
        client.write(a, x[4:].tobytes(), offset=5 * GIB)
        client.write(b, (10 * x).tobytes())
        client.compute(wide_graph(c, a, b))
        assert client.read(c) == (11 * x).tobytes()
        # A kept graph has kept its strides.
        client.write(a, x[:4].tobytes(), offset=5 * GIB)
        client.recompute(7)
        again = np.concatenate([11 * x[:4], x[:4] + 10 * x[4:]])
        assert client.read(c) == again.tobytes()
        assert client.read(a, 5 * GIB, 16) == x[:4].tobytes()

    def test_a_result_whose_rows_lie_far_apart(self, client: WideClient) -> None:
        client.start()
        buffer = client.alloc(ROOM)
        a, b = (tensor(i, buffer, 1024 * i, ne=(4, 2)) for i in (1, 2))
        c = far_rows(3, buffer, 5 * GIB, op=ADD, src=[a, b])
        x = np.arange(8, dtype="<f4")
        client.write(a, x.tobytes())
        client.write(b, x.tobytes())
        client.compute(wide_graph(c, a, b))
        assert client.read(c, 0, 16) == (2 * x[:4]).tobytes()
        assert client.read(c, 5 * GIB, 16) == (2 * x[4:]).tobytes()

    def test_questions(self, client: WideClient) -> None:
        client.start()
        buffer = client.alloc(256)
        a = far_rows(1, buffer, 5 * GIB)
        record, rest = a.encode(wide=True), NULL_TENSOR * 10
        size = client.ask(
            Command.GET_ALLOC_SIZE, m.GetAllocSize(0, record, rest).encode()
        )
        assert m.U64.unpack(size) == (5 * GIB + 16,)
        c = tensor(2, buffer, ne=(4, 2), op=ADD).encode(wide=True)
        query = b"".join([c, record, record, *[NULL_TENSOR] * 8])
        asked = SupportsOps(0, (query, query)).encode()
        assert client.ask(Command.LX_SUPPORTS_OPS, asked) == b"\1\1"


Message = tuple[int, bytes]
Make = Callable[[Tensor, Dialect], Message]


def reading(t: Tensor, dialect: Dialect) -> Message:
    return Command.GET_TENSOR, m.GetTensor(t.encode(wide=True), 0, 4).encode()


def writing(t: Tensor, dialect: Dialect) -> Message:
    head = m.SetTensor(t.encode(wide=True), 0, 0).encode()
    return Command.SET_TENSOR, head + b"data"


def filling(t: Tensor, dialect: Dialect) -> Message:
    return Command.MEMSET_TENSOR, m.MemsetTensor(t.encode(wide=True), 0, 4, 9).encode()


def sizing(t: Tensor, dialect: Dialect) -> Message:
    body = m.GetAllocSize(0, t.encode(wide=True), NULL_TENSOR * 10).encode()
    return Command.GET_ALLOC_SIZE, body


def asking(t: Tensor, dialect: Dialect) -> Message:
    op = tensor(2, Buffer(0, 0, 0), op=ADD)
    query = op.encode(wide=True) + t.encode(wide=True) * 2 + NULL_TENSOR * 8
    return Command.LX_SUPPORTS_OPS, SupportsOps(0, (query,)).encode()


def adding(t: Tensor, dialect: Dialect) -> Message:
    node = t._replace(id=2, ne=(4, 2, 1, 1), nb=(4, 16, 32, 32), op=ADD, flags=COMPUTE)
    node = node._replace(src=(t.id, t.id, *[0] * 8))
    return Command.GRAPH_COMPUTE, b"".join(wide_graph(node, t).encode(dialect))


@dataclass(frozen=True)
class Shape:
    """A shape at the start of 256 bytes, and why it must be refused."""

    name: str
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    alone: str
    """The reason for a single record."""
    within: str
    """And for one in a graph."""


_ALONE = "stride {} of {} elements is too large"
_OUTSIDE = " bytes at offset 0 is outside its buffer of 256"
_WITHIN = "strides that are too large"

OUTSIDE = [
    Shape(
        "just over the end",
        (4, 2, 1, 1),
        (4, 1 << 32, 1 << 33, 1 << 33),
        f"tensor of {(1 << 32) + 16}{_OUTSIDE}",
        "tensor outside its buffer",
    ),
    Shape(
        "a sum that wraps",
        (2, 4, 4, 4),
        (4, (1 << 60) - 1, (1 << 60) - 1, (1 << 60) - 1),
        f"tensor of {9 * ((1 << 60) - 1) + 8}{_OUTSIDE}",
        _WITHIN,
    ),
]
"""Here the reason is the buffer: a question that names none has an answer."""


def _too_large(name: str, dim: int, n: int, stride: int) -> Shape:
    ne, nb = [4, 1, 1, 1], [4, 16, 16, 16]
    ne[dim], nb[dim] = n, stride
    a, b, c, d = ne
    e, f, g, h = nb
    reason = _ALONE.format(stride, n)
    return Shape(name, (a, b, c, d), (e, f, g, h), reason, _WITHIN)


TOO_LARGE = [
    _too_large("a span that wraps to nothing", 1, 3, 1 << 63),
    _too_large("a span that wraps below zero", 1, 2, U64_MAX - 15),
    _too_large("a span of 63 bits", 2, 2, 1 << 61),
    _too_large("columns that wrap", 0, 8, 1 << 61),
    _too_large("one element", 1, 1, 1 << 63),
    _too_large("no elements", 3, 0, U64_MAX),
]

PLACED: list[Make] = [reading, writing, filling, adding]
POSTED: list[Make] = [writing, filling, adding]


@pytest.mark.parametrize(
    ("shape", "make"),
    [
        pytest.param(shape, make, id=f"{shape.name}-{make.__name__}")
        for shapes, makes in (
            (OUTSIDE, PLACED),
            (TOO_LARGE, [*PLACED, sizing, asking]),
        )
        for shape in shapes
        for make in makes
    ],
)
def test_strides_that_lead_astray_are_refused(
    shape: Shape,
    make: Make,
    client: WideClient,
    dialect: Dialect,
    neighbours: Callable[[Dialect], Sum],
) -> None:
    neighbour = neighbours(dialect)
    client.start()
    buffer = client.alloc(256)
    whole = tensor(9, buffer, ne=(64,))
    client.write(whole, bytes(range(256)))
    t = tensor(1, buffer)._replace(ne=shape.ne, nb=shape.nb)
    client.post(*make(t, client.dialect))
    if make in POSTED:
        client.post(Command.LX_PING)
    assert (shape.within if make is adding else shape.alone) in client.error()
    # It cost that command alone, and nobody's memory.
    assert client.read(whole) == bytes(range(256))
    neighbour.check(again=True)


class TestElsewhere:
    """On a connection without LX a name's bytes are no strides."""

    NAME = b"n" * 64

    def test_a_long_name_is_but_a_name(self, client: WideClient) -> None:
        buffer = client.alloc(256)
        t = tensor(1, buffer, 64)._replace(name=self.NAME)
        client.write(t, b"data")
        assert client.read(t, size=4) == b"data"
        c = tensor(3, buffer, 128, op=ADD, src=[t, t])._replace(name=self.NAME)
        records = t.encode() + c.encode()
        layout = np.frombuffer(records, WIDE_TENSOR)
        assert (layout["nb_high"] == 0x6E6E6E6E).all()
        client.compute(Graph(0, 7, np.array([3], np.uint64), layout))
        assert client.device_count() == 1
        srcs = t.encode() + NULL_TENSOR * 9
        asked = m.GetAllocSize(0, t.encode(), srcs).encode()
        assert m.U64.unpack(client.ask(Command.GET_ALLOC_SIZE, asked)) == (32,)

    def test_a_record_is_looked_at_anew_once_lx_has_started(
        self, client: WideClient
    ) -> None:
        """The same bytes say other strides from then on."""
        buffer = client.alloc(256)
        t = tensor(1, buffer, 64)._replace(name=self.NAME)
        client.write(t, b"data")
        body = m.GetTensor(t.encode(), 0, 4).encode()
        assert client.ask(Command.GET_TENSOR, body) == b"data"
        client.start()
        client.post(Command.GET_TENSOR, body)
        assert "is too large" in client.error()
        assert client.read(t, size=4) == b"data"

    def test_a_graph_kept_from_before_runs_on(
        self, client: WideClient, dialect: Dialect
    ) -> None:
        total = Sum(client)
        total.check()
        client.start()
        total.check(again=True)


class TestKernels:
    """What kernels count in C ints, or checks once counted in 64 bits."""

    def test_an_outer_product_over_rows_far_apart(self, client: WideClient) -> None:
        """Its kernel finds up to 32 rows by ints: from 70 MiB on it would crash."""
        client.start()
        far = 70 << 20
        buffer = client.alloc(32 * far + 4096)
        a = tensor(1, buffer, 0, ne=(8, 32))
        b = tensor(2, buffer, 2048, ne=(4, 32))
        c = tensor(3, buffer, 1024, ne=(8, 4), op=OUT_PROD, src=[a, b])
        client.compute(wide_graph(c, a, b))
        assert client.device_count() == 1
        for spoilt in (
            [a._replace(nb=(4, far, 32 * far, 32 * far)), b],
            [a, b._replace(nb=(4, far, 32 * far, 32 * far))],
        ):
            client.compute(wide_graph(c, *spoilt))
            client.post(Command.LX_PING)
            assert "over 64 MiB apart" in client.error()

    def test_elements_whose_bytes_wrap_overlap(self, client: WideClient) -> None:
        """(2^31 - 1)^2 numbers of 4 bytes in no memory: the kernel would read on."""
        client.start()
        buffer = client.alloc(256)
        side, step = (1 << 31) - 1, 1 << 30
        params = struct.pack("<6i", step, step, 0, 0, 1, 1)
        k = tensor(1, buffer, 0, ne=(1, 1))
        a = tensor(2, buffer, 64, ne=(1, 1))._replace(ne=(side, side, 1, 1))
        a = a._replace(nb=(0, 0, 0, 0))
        c = tensor(3, buffer, 128, (2, 2), op=CONV_2D_DW, src=[k, a], params=params)
        client.compute(wide_graph(c, k, a))
        client.post(Command.LX_PING)
        assert "elements of src 1 overlap" in client.error()
