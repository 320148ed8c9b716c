"""Graphs in both directions: ggml's read back, and ours computed by ggml."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longwire.native.abi import GGML_TENSOR, Cgraph, DeviceType, Status
from longwire.native.compute import ComputeDevice, list_devices
from longwire.native.graph import (
    NativeGraph,
    gather,
    graph_nodes,
    graph_uid,
    use_counts,
)
from longwire.native.memory import array_at
from support.ggml import ADD, COMPUTE, F32, MUL, MUL_MAT, NONE, VIEW, Ggml, f32

Addresses = npt.NDArray[np.uint64]


def addresses(*tensors: int) -> Addresses:
    return np.array(tensors, np.uint64)


class TestReadBack:
    def test_a_small_graph(self, ggml: Ggml) -> None:
        library = ggml.library
        with ggml.context() as context:
            a, b = ggml.tensor(context, 4, 3, name="a"), ggml.tensor(context, 4, 3)
            c = library.ggml_add(context, a, b)
            v = library.ggml_view_2d(context, a, 2, 3, 16, 8)
            d = library.ggml_mul_mat(context, v, v)
            e = library.ggml_add(context, c, c)
            graph = ggml.graph(context, d, e)
            stranger = ggml.tensor(context, 4)

            nodes = graph_nodes(graph)
            assert nodes.tolist() == ggml.nodes(graph) == [v, d, c, e]
            tensors = gather(nodes)
            assert tensors["op"].tolist() == [VIEW, MUL_MAT, ADD, ADD]
            assert tensors["src"][1].tolist() == [v, v] + [0] * 8
            assert tensors["view_src"].tolist() == [a, 0, 0, 0]
            assert tensors["view_offs"].tolist() == [8, 0, 0, 0]
            assert tensors["ne"][0].tolist() == [2, 3, 1, 1]
            assert tensors["nb"][0].tolist() == [4, 16, 48, 48]
            assert gather(addresses(a))["name"].tolist() == [b"a"]

            # ggml counts a view as a use of what it views.
            asked = addresses(a, b, c, v, d, e, stranger)
            assert use_counts(graph, asked).tolist() == [2, 1, 2, 2, 0, 0, 0]
            assert use_counts(graph, asked[::-1]).tolist() == [0, 0, 0, 2, 2, 1, 2]
            assert use_counts(graph, addresses()).tolist() == []

    def test_a_part_shares_the_counts_of_the_whole(self, ggml: Ggml) -> None:
        library = ggml.library
        with ggml.context() as context:
            a = ggml.tensor(context, 4)
            b = library.ggml_add(context, a, a)
            c = library.ggml_mul(context, b, a)
            d = library.ggml_add(context, b, c)
            part = ggml.part(ggml.graph(context, d), 1, 3)
            assert graph_nodes(part).tolist() == [c, d]
            assert use_counts(part, addresses(a, b, c, d)).tolist() == [3, 2, 1, 0]

    def test_an_empty_graph(self, ggml: Ggml) -> None:
        with ggml.context() as context:
            graph = ggml.graph(context)
            stranger = ggml.tensor(context, 4)
            assert graph_nodes(graph).tolist() == []
            assert len(gather(graph_nodes(graph))) == 0
            assert use_counts(graph, addresses(stranger)).tolist() == [0]

    def test_a_graph_without_a_table(self, ggml: Ggml) -> None:
        empty = Cgraph()
        counts = use_counts(C.addressof(empty), addresses(16))
        assert counts.tolist() == [0]

    def test_the_uid(self, ggml: Ggml) -> None:
        with ggml.context() as context:
            graph = ggml.graph(context)
            assert graph_uid(graph) == 0
            Cgraph.from_address(graph).uid = 2**64 - 2
            assert graph_uid(graph) == 2**64 - 2

    def test_what_is_read_is_a_copy(self, ggml: Ggml) -> None:
        with ggml.context() as context:
            a = ggml.tensor(context, 4, name="before")
            graph = ggml.graph(context, ggml.library.ggml_add(context, a, a))
            nodes, tensors = graph_nodes(graph), gather(addresses(a))
            ggml.library.ggml_set_name(a, b"after")
            ggml.library.ggml_build_forward_expand(
                graph, ggml.library.ggml_mul(context, a, a)
            )
            assert len(nodes) == 1
            assert tensors["name"].tolist() == [b"before"]

    def test_many_nodes(self, ggml: Ggml) -> None:
        """Counts against those of a walk over all sources."""
        random = np.random.default_rng(3)
        library = ggml.library
        with ggml.context(1 << 23) as context:
            pool = [ggml.tensor(context, 2) for _ in range(20)]
            for _ in range(1500):
                left, right = (pool[i] for i in random.integers(0, len(pool), 2))
                pool.append(library.ggml_add(context, left, right))
            graph = ggml.graph(context, *pool, size=2048)
            nodes = graph_nodes(graph)
            assert nodes.tolist() == ggml.nodes(graph)
            used = gather(nodes)["src"].ravel().tolist()
            expected = [used.count(tensor) for tensor in pool]
            assert use_counts(graph, addresses(*pool)).tolist() == expected


@pytest.fixture
def cpu(ggml: Ggml) -> ComputeDevice:
    (device,) = (d for d in list_devices(ggml.engine) if d.type == DeviceType.CPU)
    return device


def record(
    op: int,
    ne: Sequence[int],
    data: int,
    buffer: int,
    *,
    nb: Sequence[int] = (),
    view_offs: int = 0,
) -> npt.NDArray[Any]:
    """One f32 tensor as a server fills it in, links aside."""
    tensor = np.zeros((), GGML_TENSOR)
    shape = [*ne, 1, 1, 1][:4]
    strides = [4 * int(np.prod(shape[:i])) for i in range(4)]
    tensor["type"], tensor["op"], tensor["ne"] = F32, op, shape
    tensor["nb"] = [*nb, *strides[len(nb) :]]
    tensor["data"], tensor["buffer"] = data, buffer
    tensor["flags"], tensor["view_offs"] = COMPUTE, view_offs
    return tensor


NO_SOURCES = [-1] * 10


def sources(*indices: int) -> list[int]:
    return [*indices, *NO_SOURCES][:10]


class TestCompute:
    def test_the_cpu_computes_it(self, cpu: ComputeDevice) -> None:
        """y = w @ (a + b), then y * view(y's first row)."""
        random = np.random.default_rng(5)
        a, b = f32(random.random((3, 8))), f32(random.random((3, 8)))
        w = f32(random.random((4, 8)))
        buffer = cpu.alloc(1 << 16)
        assert buffer is not None
        assert buffer.bytes is not None
        at = {name: buffer.base + 4096 * i for i, name in enumerate("abwsyvz")}
        for name, values in (("a", a), ("b", b), ("w", w)):
            start = at[name] - buffer.base
            buffer.bytes[start : start + values.nbytes] = values.tobytes()
        row = (4, 16, 16, 16)
        tensors = np.array(
            [
                record(NONE, (8, 3), at["a"], buffer.address),
                record(NONE, (8, 3), at["b"], buffer.address),
                record(NONE, (8, 4), at["w"], buffer.address),
                record(ADD, (8, 3), at["s"], buffer.address),
                record(MUL_MAT, (4, 3), at["y"], buffer.address),
                record(VIEW, (4, 1), at["y"], buffer.address, nb=row),
                record(MUL, (4, 3), at["z"], buffer.address),
            ],
            GGML_TENSOR,
        )
        graph = NativeGraph(
            tensors,
            np.array(
                [
                    *[NO_SOURCES] * 3,
                    sources(0, 1),
                    sources(2, 3),
                    sources(4),
                    sources(4, 5),
                ]
            ),
            np.array([-1, -1, -1, -1, -1, 4, -1]),
            np.array([3, 4, 5, 6]),
            np.array([1, 2, 1, 0], np.int32),
        )
        cpu.open(1)
        try:
            assert cpu.compute(graph.address) == Status.SUCCESS
            cpu.synchronize()
            out = array_at(at["z"], 12, "<f4").reshape(3, 4).copy()
            y = array_at(at["y"], 12, "<f4").reshape(3, 4).copy()
        finally:
            cpu.close()
            cpu.free(buffer)
        np.testing.assert_allclose(y, (a + b) @ w.T, rtol=1e-5)
        np.testing.assert_array_equal(out, y * y[0])

    def test_a_node_without_the_flag_is_left_out(self, cpu: ComputeDevice) -> None:
        buffer = cpu.alloc(4096)
        assert buffer is not None
        cpu.clear(buffer, 0)
        tensors = np.array(
            [
                record(NONE, (4,), buffer.base, buffer.address),
                record(ADD, (4,), buffer.base + 64, buffer.address),
            ],
            GGML_TENSOR,
        )
        array_at(buffer.base, 4, "<f4")[:] = 1.5
        tensors["flags"] = 0
        links = np.array([NO_SOURCES, sources(0, 0)])
        none, zero = np.array([-1, -1]), np.zeros(1, np.int32)
        graph = NativeGraph(tensors, links, none, np.array([1]), zero)
        cpu.open(1)
        try:
            out = array_at(buffer.base + 64, 4, "<f4")
            assert cpu.compute(graph.address) == Status.SUCCESS
            assert not out.any()
            graph.tensors["flags"] = COMPUTE
            assert cpu.compute(graph.address) == Status.SUCCESS
            assert out.tolist() == [3.0] * 4
        finally:
            cpu.close()
            cpu.free(buffer)


class Table:
    """A graph's hash set, looked up in the way that ggml does it."""

    def __init__(self, graph: int) -> None:
        header = Cgraph.from_address(graph)
        table = header.visited_hash_set
        self.size = table.size
        self.used = array_at(table.used, (self.size + 31) // 32, "<u4").tolist()
        self.keys = array_at(table.keys, self.size, "<u8").tolist()
        self.counts = array_at(header.use_counts, self.size, "<i4").tolist()

    def count(self, address: int) -> int | None:
        """The tensor's use count, or None where the probing ends without it."""
        slot = start = (address >> 4) % self.size
        while self.used[slot // 32] >> (slot % 32) & 1:
            if self.keys[slot] == address:
                return int(self.counts[slot])
            slot = (slot + 1) % self.size
            assert slot != start, "the table is full: ggml aborts"
        return None


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_ggml_finds_every_node_and_nothing_else(stride: int) -> None:
    """For every size from 1 to 600; only each `stride`th tensor is a node."""
    for m in range(1, 601):
        nodes = np.arange(0, m, stride)
        counts = (nodes * 7 + 1).astype(np.int32)
        graph = NativeGraph(
            np.zeros(m, GGML_TENSOR),
            np.full((m, 10), -1),
            np.full(m, -1),
            nodes,
            counts,
        )
        header = Cgraph.from_address(graph.address)
        assert (header.size, header.n_nodes, header.uid) == (len(nodes), len(nodes), 0)
        listed = graph_nodes(graph.address).tolist()
        base = graph.tensors.ctypes.data
        assert listed == [base + 336 * i for i in nodes.tolist()]
        table = Table(graph.address)
        for i in range(m):
            expected = 7 * i + 1 if i % stride == 0 else None
            assert table.count(base + 336 * i) == expected, (m, i)
        used = sum(bin(word).count("1") for word in table.used)
        assert used == len(nodes)
        assert use_counts(graph.address, graph_nodes(graph.address)).tolist() == (
            counts.tolist()
        )
