"""Records of real ggml tensors, and the graphs that are made of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from longwire.client.records import Records, buffers_of, read_tensor
from longwire.errors import UsageError
from longwire.wire.graphs import Graph
from longwire.wire.tensors import NULL_TENSOR, Tensor
from support.ggml import (
    ADD,
    COMPUTE,
    F32,
    I8,
    MUL,
    NONE,
    Q4_0,
    VIEW,
    Ggml,
    change,
    fields,
)


@dataclass
class Handle:
    """A buffer of the connection under test."""

    handle: int


@pytest.fixture
def arena(ggml: Ggml) -> Iterator[tuple[int, int, int]]:
    """A ggml context, and two buffers; tests say which of them are remote."""
    with ExitStack() as stack:
        context = stack.enter_context(ggml.context())
        here = stack.enter_context(ggml.cpu_buffer())
        there = stack.enter_context(ggml.cpu_buffer())
        yield context, here, there


Arena = tuple[int, int, int]


class TestOne:
    def test_every_field(self, ggml: Ggml, arena: Arena) -> None:
        context, here, _ = arena
        tensor = ggml.tensor(context, 64, 3, 5, 2, type=Q4_0, name="blk.0.attn_q")
        ggml.place(here, tensor, offset=128)
        change(tensor, "flags", COMPUTE | 1)
        change(tensor, "op_params", np.arange(-8, 8, dtype=np.int32))
        records = Records({here: Handle(0xFEED_0000_0000_0001)})
        record = Tensor.decode(records.of(tensor))
        base = ggml.library.ggml_backend_buffer_get_base(here)
        assert record == Tensor(
            id=record.id,
            type=Q4_0,
            buffer=0xFEED_0000_0000_0001,
            ne=(64, 3, 5, 2),
            nb=(18, 36, 108, 540),
            op=NONE,
            op_params=struct.pack("<16i", *range(-8, 8)),
            flags=COMPUTE | 1,
            data=base + 128,
            name=b"blk.0.attn_q",
        )
        assert record.id != 0

    def test_a_view_has_an_address_of_its_own(self, ggml: Ggml, arena: Arena) -> None:
        context, here, _ = arena
        base = ggml.tensor(context, 8, 4)
        view = ggml.library.ggml_view_2d(context, base, 2, 3, 32, 40)
        ggml.place(here, base)
        ggml.library.ggml_backend_view_init(view)
        records = Records({here: Handle(5)})
        whole, part = (Tensor.decode(records.of(t)) for t in (base, view))
        assert (part.op, part.ne, part.nb) == (VIEW, (2, 3, 1, 1), (4, 32, 96, 96))
        assert part.view_src == whole.id
        assert part.view_offs == 40
        assert part.data == whole.data + 40
        assert part.buffer == whole.buffer == 5
        assert part.src == (0,) * 10

    def test_sources_are_for_graphs_alone(self, ggml: Ggml, arena: Arena) -> None:
        context = arena[0]
        total = ggml.library.ggml_add(
            context, ggml.tensor(context, 4), ggml.tensor(context, 4)
        )
        record = Tensor.decode(Records({}).of(total))
        assert record.op == ADD
        assert record.src == (0,) * 10

    def test_a_tensor_elsewhere_has_no_place(self, ggml: Ggml, arena: Arena) -> None:
        context, here, there = arena
        tensor = ggml.tensor(context, 4)
        ggml.place(there, tensor)
        record = Tensor.decode(Records({here: Handle(5)}).of(tensor))
        assert (record.buffer, record.data) == (0, 0)

    def test_ids_are_no_addresses(self, ggml: Ggml, arena: Arena) -> None:
        """Each connection has numbers of its own."""
        context = arena[0]
        tensors = [ggml.tensor(context, 1) for _ in range(100)]
        ids = [
            {Tensor.decode(records.of(t)).id for t in tensors}
            for records in (Records({}), Records({}))
        ]
        assert len(ids[0]) == len(ids[1]) == 100
        assert len({*ids[0], *ids[1], *tensors, 0}) == 301

    def test_a_remembered_record_follows_its_tensor(
        self, ggml: Ggml, arena: Arena
    ) -> None:
        context, here, _ = arena
        tensor = ggml.tensor(context, 4, name="before")
        records = Records({here: Handle(5)})
        first = records.of(tensor)
        assert records.of(tensor) is first
        ggml.place(here, tensor)
        ggml.library.ggml_set_name(tensor, b"after")
        second = Tensor.decode(records.of(tensor))
        assert (second.name, second.buffer) == (b"after", 5)

    def test_forgetting_takes_the_handle_back(self, ggml: Ggml, arena: Arena) -> None:
        context, here, _ = arena
        tensor = ggml.tensor(context, 4)
        ggml.place(here, tensor)
        buffers = {here: Handle(5)}
        records = Records(buffers)
        assert Tensor.decode(records.of(tensor)).buffer == 5
        buffers[here] = Handle(6)
        records.forget()
        assert Tensor.decode(records.of(tensor)).buffer == 6

    @pytest.mark.parametrize("n", [1, 2000])
    def test_a_long_run_keeps_few_records(
        self, ggml: Ggml, monkeypatch: pytest.MonkeyPatch, n: int
    ) -> None:
        monkeypatch.setattr("longwire.client.memo.LIMIT", 100)
        records = Records({})
        with ggml.context() as context:
            for i in range(n):
                tensor = ggml.tensor(context, 1 + i)
                assert Tensor.decode(records.of(tensor)).ne[0] == 1 + i
        assert len(records._known) <= 100


class TestNarrow:
    """Without LX, what does not fit 32 bits is refused, never cut off."""

    @pytest.mark.parametrize(
        ("ne", "kind", "fits"),
        [
            ((2**32 - 1,), I8, True),
            ((2**32,), I8, False),
            ((2**30 - 1,), F32, True),
            # The stride of one element moves nothing, however wide.
            ((2**30,), F32, True),
            ((2**20, 2**12), I8, True),
            ((2**20, 2**12, 2), I8, False),
            ((1, 1, 1, 2**32), I8, False),
        ],
    )
    def test_one(
        self, ggml: Ggml, arena: Arena, ne: tuple[int, ...], kind: int, fits: bool
    ) -> None:
        tensor = ggml.tensor(arena[0], *ne, type=kind, name="wide")
        assert Records({}).fit(read_tensor(tensor)) is fits
        if fits:
            record = Tensor.decode(Records({}).of(tensor))
            cut = [min(stride, 2**32 - 1) for stride in read_tensor(tensor).nb]
            assert list(record.nb) == cut
        else:
            with pytest.raises(UsageError, match=r"tensor 'wide': shape .* 32 bits"):
                Records({}).of(tensor)

    @pytest.mark.parametrize("position", ["node", "source"])
    def test_a_graph(self, ggml: Ggml, arena: Arena, position: str) -> None:
        context = arena[0]
        node = ggml.library.ggml_add(
            context, ggml.tensor(context, 4), ggml.tensor(context, 4)
        )
        wide = node if position == "node" else int(fields(node)["src"][0])
        change(wide, "nb", [2**32, 2**32, 2**32, 2**32])
        with pytest.raises(UsageError, match="32 bits"):
            Records({}).graph(ggml.graph(context, node), 0, 1)


class TestWide:
    """With LX, strides may have 62 bits with the elements along them."""

    @pytest.mark.parametrize(
        ("ne", "nb", "fits"),
        [
            ((2, 3, 5, 7), (4, 2**32, 2**33, 5 * 2**33 + 3), True),
            ((4, 2, 1, 1), (4, 2**60, 2**61, 2**61), True),
            ((4, 2, 1, 1), (4, 2**61, 64, 64), False),
            ((4, 2, 1, 1), (4, 2**64 - 16, 64, 64), False),
            ((4, 0, 1, 1), (4, 2**62, 64, 64), False),
            ((4, 1, 1, 1), (4, 2**63, 64, 64), False),
            # An extent still has 32 bits.
            ((2**32 - 1, 1, 1, 1), (4, 2**34, 2**34, 2**34), True),
            ((2**32, 1, 1, 1), (4, 2**34, 2**34, 2**34), False),
        ],
    )
    def test_one_and_a_graph(
        self,
        ggml: Ggml,
        arena: Arena,
        ne: tuple[int, ...],
        nb: tuple[int, ...],
        fits: bool,
    ) -> None:
        context = arena[0]
        tensor = ggml.tensor(context, 4, name="wide")
        node = ggml.library.ggml_add(context, tensor, tensor)
        change(tensor, "ne", ne)
        change(tensor, "nb", nb)
        records, graph = Records({}, wide=True), ggml.graph(context, node)
        assert records.fit(read_tensor(tensor)) is fits
        if not fits:
            with pytest.raises(UsageError, match=r"tensor 'wide': .*strides: 62"):
                records.of(tensor)
            with pytest.raises(UsageError, match="a graph's shapes or strides"):
                records.graph(graph, 0, 1)
            return
        single = Tensor.decode(records.of(tensor), wide=True)
        assert (single.ne, single.nb, single.name) == (ne, nb, b"wide")
        built = records.graph(graph, 0, 1)
        found = by_id(built)[single.id].tobytes()
        assert Tensor.decode(found, wide=True)._replace(use_count=0) == single

    @pytest.mark.parametrize("n", [46, 47, 48, 63])
    def test_names_are_cut(self, ggml: Ggml, arena: Arena, n: int) -> None:
        context = arena[0]
        tensor = ggml.tensor(context, 4, name="n" * n)
        records = Records({}, wide=True)
        node = ggml.library.ggml_add(context, tensor, tensor)
        built = records.graph(ggml.graph(context, node), 0, 1)
        for record in (
            records.of(tensor),
            by_id(built)[Tensor.decode(records.of(tensor)).id].tobytes(),
        ):
            found = Tensor.decode(record, wide=True)
            assert found.name == b"n" * min(n, 47)
            assert found.nb == (4, 16, 16, 16)

    def test_a_short_name_hides_no_rest_of_a_longer_one(
        self, ggml: Ggml, arena: Arena
    ) -> None:
        """ggml leaves it behind the NUL, where the strides' halves go."""
        context = arena[0]
        tensor = ggml.tensor(context, 4, name="n" * 63)
        ggml.library.ggml_set_name(tensor, b"short")
        node = ggml.library.ggml_add(context, tensor, tensor)
        built = Records({}, wide=True).graph(ggml.graph(context, node), 0, 1)
        assert (built.tensors["nb_high"] == 0).all()
        assert b"short" in built.tensors["name"].tolist()


def by_id(graph: Graph) -> dict[int, Any]:
    """The graph's records; no id may come twice, nor be 0."""
    found = {int(record["id"]): record for record in graph.tensors}
    assert len(found) == len(graph.tensors)
    assert 0 not in found
    return found


def check_closed(graph: Graph) -> None:
    """Every id resolves, and only nodes have sources."""
    records, nodes = by_id(graph), set(graph.nodes.tolist())
    assert len(nodes) == len(graph.nodes)
    assert nodes <= records.keys()
    for number, record in records.items():
        sources = {int(src) for src in record["src"]} - {0}
        assert sources <= records.keys()
        assert int(record["view_src"]) in {0, *records}
        assert number in nodes or not sources


class TestGraph:
    def test_nodes_and_their_inputs(self, ggml: Ggml, arena: Arena) -> None:
        context, here, there = arena
        a, b = ggml.tensor(context, 4, name="a"), ggml.tensor(context, 4, name="b")
        c = ggml.library.ggml_add(context, a, b)
        d = ggml.library.ggml_mul(context, c, c)
        ggml.place(here, a, c, d)
        ggml.place(there, b)
        built = Records({here: Handle(5)}).graph(ggml.graph(context, d), 2, 77)
        check_closed(built)
        assert (built.device, built.uid) == (2, 77)
        records = by_id(built)
        first, second = (records[number] for number in built.nodes.tolist())
        assert (first["op"], second["op"]) == (ADD, MUL)
        names = [records[int(i)]["name"] for i in first["src"][:2]]
        assert names == [b"a", b"b"]
        assert second["src"][:2].tolist() == [first["id"]] * 2
        base = ggml.library.ggml_backend_buffer_get_base(here)
        placed = {r["name"]: (int(r["buffer"]), int(r["data"])) for r in built.tensors}
        assert placed[b"a"] == (5, base)
        # The other connection's tensor is known by shape alone.
        assert placed[b"b"] == (0, 0)
        assert len(built.tensors) == 4

    def test_use_counts_are_ggmls(self, ggml: Ggml, arena: Arena) -> None:
        context = arena[0]
        a = ggml.tensor(context, 4)
        b = ggml.library.ggml_add(context, a, a)
        c = ggml.library.ggml_mul(context, b, a)
        d = ggml.library.ggml_add(context, c, b)
        built = Records({}).graph(ggml.graph(context, d), 0, 1)
        records = by_id(built)
        counts = [int(records[i]["use_count"]) for i in built.nodes.tolist()]
        assert counts == [2, 1, 0]
        (leaf,) = (r for i, r in records.items() if i not in built.nodes.tolist())
        assert leaf["use_count"] == 3

    def test_history_is_pruned_and_views_are_followed(
        self, ggml: Ggml, arena: Arena
    ) -> None:
        """Only the second half of a graph: what came before is data to it."""
        context = arena[0]
        library = ggml.library
        a = ggml.tensor(context, 8, 4, name="a")
        old = library.ggml_add(context, a, a)
        older_view = library.ggml_view_2d(context, old, 4, 2, 32, 0)
        view = library.ggml_view_2d(context, older_view, 2, 2, 32, 8)
        node = library.ggml_mul(context, view, view)
        last = library.ggml_add(context, node, node)
        whole = ggml.graph(context, last)
        n = library.ggml_graph_n_nodes(whole)
        half = ggml.part(whole, n - 2, n)
        records = Records({})
        built = records.graph(half, 0, 1)
        check_closed(built)
        assert built.tensors["op"].tolist().count(ADD) == 2
        names = set(built.tensors["name"].tolist())
        # `old` stays as what the view is of; what computed it does not.
        assert len(built.tensors) == 4
        assert b"a" not in names
        number = Tensor.decode(records.of(old)).id
        kept = by_id(built)[number]
        assert (kept["op"], kept["src"].any()) == (ADD, False)
        (seen,) = (r for r in built.tensors if r["op"] == VIEW)
        # ggml itself resolves a view of a view.
        assert (seen["view_src"], seen["view_offs"]) == (number, 8)

    def test_a_long_random_graph(self, ggml: Ggml) -> None:
        random = np.random.default_rng(7)
        with ggml.context(1 << 22) as context:
            library = ggml.library
            pool = [ggml.tensor(context, 4, 2) for _ in range(5)]
            for _ in range(400):
                left, right = (pool[i] for i in random.integers(0, len(pool), 2))
                kind = random.integers(0, 3)
                if kind == 0:
                    pool.append(library.ggml_add(context, left, right))
                elif kind == 1:
                    pool.append(library.ggml_mul(context, left, right))
                else:
                    pool.append(library.ggml_view_2d(context, left, 4, 2, 16, 0))
            whole = ggml.graph(context, *pool, size=1024)
            n = library.ggml_graph_n_nodes(whole)
            records = Records({})
            for start, end in ((0, n), (0, n // 2), (n // 2, n), (n - 1, n)):
                built = records.graph(ggml.part(whole, start, end), 0, 1)
                check_closed(built)
                ids = [Tensor.decode(records.of(t)).id for t in ggml.nodes(whole)]
                assert built.nodes.tolist() == ids[start:end]

    def test_graphs_and_single_records_agree(self, ggml: Ggml, arena: Arena) -> None:
        context, here, _ = arena
        a = ggml.tensor(context, 64, 2, type=Q4_0, name="weights")
        x = ggml.tensor(context, 64, name="x")
        y = ggml.library.ggml_mul_mat(context, a, x)
        ggml.place(here, a, x, y)
        records = Records({here: Handle(9)})
        built = records.graph(ggml.graph(context, y), 0, 1)
        for tensor in (a, x):
            single = Tensor.decode(records.of(tensor))
            record = Tensor.decode(by_id(built)[single.id].tobytes())
            assert record == single._replace(use_count=1)

    def test_a_shorter_name_leaves_nothing_behind(
        self, ggml: Ggml, arena: Arena
    ) -> None:
        context = arena[0]
        a = ggml.tensor(context, 4, name="a much longer name")
        ggml.library.ggml_set_name(a, b"short")
        assert fields(a).tobytes()[256:].startswith(b"short\0 longer")
        total = ggml.library.ggml_add(context, a, a)
        records = Records({})
        built = records.graph(ggml.graph(context, total), 0, 1)
        single = records.of(a)
        (record,) = (r for r in built.tensors if r["op"] == NONE)
        assert record.tobytes()[228:292] == b"short" + bytes(59) == single[228:292]

    def test_a_graph_leaves_the_tensors_alone(self, ggml: Ggml, arena: Arena) -> None:
        context = arena[0]
        a = ggml.tensor(context, 4)
        b = ggml.library.ggml_add(context, a, a)
        c = ggml.library.ggml_mul(context, b, b)
        whole = ggml.graph(context, c)
        before = [fields(t).tobytes() for t in (a, b, c)]
        Records({}).graph(ggml.part(whole, 1, 2), 0, 1)
        assert [fields(t).tobytes() for t in (a, b, c)] == before


def test_the_buffers_of_a_graph(ggml: Ggml, arena: Arena) -> None:
    context, here, there = arena
    a, b = ggml.tensor(context, 4), ggml.tensor(context, 4)
    total = ggml.library.ggml_add(context, a, b)
    graph = ggml.graph(context, total)
    assert buffers_of(graph) == set()
    ggml.place(here, total)
    assert buffers_of(graph) == {here}
    ggml.place(there, b)
    assert buffers_of(graph) == {here, there}


def test_no_tensor_is_all_zero() -> None:
    assert Tensor.decode(NULL_TENSOR).id == 0
