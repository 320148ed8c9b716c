"""What the check of a graph refuses: one table, and the cases of field reports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from longwire.errors import BadRequest
from longwire.native.compute import ComputeDevice, select_devices
from longwire.server.buffers import BufferTable
from longwire.server.graphs import StoredGraph, build_graph
from longwire.server.verify.rules import RULES
from longwire.wire.constants import Command
from longwire.wire.dialects import V8, Dialect
from longwire.wire.graphs import Graph
from support.client import Buffer, RawClient
from support.ggml import ENGINES, Ggml, open_ggml
from support.op_cases import CASES, F16, F32, I32, I64
from support.ops import Case, Maker, built
from support.spoil import Change, spoilt
from support.tensors import Sum, tensor
from support.worker import Worker

BY_NAME = {case.name: case for case in CASES}


def ne(who: str | int, index: int, value: int) -> Change:
    return Change(who, "ne", index, value)


def nb(who: str | int, index: int, value: int) -> Change:
    return Change(who, "nb", index, value)


def kind(who: str | int, value: int) -> Change:
    return Change(who, "type", None, value)


def param(index: int, value: int) -> Change:
    return Change("dst", "op_params", index, value)


def without(slot: int) -> Change:
    return Change("dst", "src", slot, 0)


SPOILT: list[tuple[str, list[Change], str]] = [
    ("DUP", [ne("dst", 1, 2)], "differ in elements"),
    ("CPY f32 to f16", [ne(0, 1, 2)], "differ in elements"),
    (
        "CPY f32 to q8_0",
        [ne(0, 0, 192), ne(0, 1, 1)],
        "row of src 0 is longer than one of dst",
    ),
    ("CPY q4_0 to f32", [without(1)], "no src 1 to copy to"),
    ("CONT", [kind(0, I32)], "differ in type"),
    ("ADD", [ne(1, 0, 3)], "src 1 does not repeat to src 0"),
    ("ADD", [ne(1, 1, 0)], "src 1 does not repeat to src 0"),
    ("SUB", [ne(0, 1, 2)], "differ in shape"),
    ("MUL", [nb("dst", 0, 8), ne("dst", 0, 4), ne(0, 0, 4), ne(1, 0, 4)], "gaps"),
    ("DIV", [without(1)], "no src 1"),
    ("ADD quantised", [kind(1, F16)], "type of src 1"),
    ("ADD_ID", [ne(2, 0, 1)], "differ in rows"),
    ("ADD_ID", [kind(2, F32)], "type of src 2"),
    ("ADD_ID", [ne(1, 2, 0)], "src 1 is empty"),
    ("ADD_ID", [ne(2, 3, 0)], "src 2 is empty"),
    ("ADD1", [kind(1, F16)], "type of src 1"),
    ("ACC", [param(0, -32), param(1, 128)], "negative stride or offset"),
    ("ACC", [param(3, -4)], "negative stride or offset"),
    ("ACC", [param(3, 220)], "reaches beyond dst"),
    ("SET", [param(0, 240)], "reaches beyond dst"),
    ("SQR", [ne(0, 0, 4)], "differ in shape"),
    ("SQRT", [kind("dst", F16)], "differ in type"),
    ("LOG", [nb(0, 0, 0)], "gaps"),
    ("SIN", [without(0)], "no src 0"),
    ("COS", [ne("dst", 1, 1)], "differ in shape"),
    ("SUM", [nb(0, 0, 0)], "gaps"),
    ("SUM_ROWS", [ne("dst", 1, 2)], "shape of dst"),
    ("CUMSUM", [ne("dst", 0, 4)], "differ in shape"),
    ("MEAN", [ne(0, 1, 2)], "shape of dst"),
    ("ARGMAX", [ne("dst", 0, 2)], "shape of dst"),
    ("COUNT_EQUAL", [ne(1, 0, 4)], "differ in shape"),
    ("REPEAT", [ne(0, 0, 3)], "does not repeat"),
    ("REPEAT_BACK", [ne("dst", 0, 3)], "does not repeat"),
    ("CONCAT 0", [param(0, 4)], "dimension that does not exist"),
    ("CONCAT 1", [ne(1, 1, 1)], "shape of dst"),
    ("CONCAT 2", [ne(1, 0, 1)], "does not fit beside"),
    ("CONCAT quantised", [kind(1, 2)], "differ in type"),
    ("SILU_BACK", [ne(1, 1, 2)], "differ in shape"),
    ("NORM", [kind("dst", F16)], "type of dst"),
    ("RMS_NORM", [ne("dst", 1, 2)], "differ in shape"),
    ("RMS_NORM_BACK", [kind(1, F16)], "type of src 1"),
    ("GROUP_NORM", [param(0, 0)], "bad groups"),
    ("L2_NORM", [ne(0, 2, 0)], "differ in shape"),
    ("MUL_MAT f32", [ne(0, 0, 128)], "differ in columns"),
    ("MUL_MAT f32", [ne(0, 1, 4)], "are not the columns of dst"),
    ("MUL_MAT f32", [kind(0, I32)], "type of src 0"),
    ("MUL_MAT f32", [kind("dst", F16)], "type of dst"),
    ("MUL_MAT f32", [param(1, 1)], "not a square"),
    ("MUL_MAT broadcast", [ne(0, 2, 0)], "does not broadcast"),
    ("MUL_MAT broadcast", [ne(1, 2, 3), ne("dst", 2, 3)], "does not broadcast"),
    ("MUL_MAT_ID", [ne(2, 1, 2)], "differ in tokens"),
    ("MUL_MAT_ID", [ne("dst", 1, 1)], "shape of dst"),
    ("MUL_MAT_ID computed", [ne(0, 2, 3)], "nothing bounds them"),
    ("MUL_MAT_ID scaled", [ne(0, 2, 3)], "nothing bounds them"),
    ("OUT_PROD", [ne(1, 1, 5)], "differ in rows"),
    ("SCALE", [nb(0, 1, 16)], "not contiguous"),
    ("SCALE bias", [nb(0, 1, 64)], "not evenly spaced"),
    ("GET_ROWS f32", [ne(1, 0, 2)], "dst has not a row per id"),
    ("GET_ROWS f32", [kind(1, F32)], "type of src 1"),
    ("GET_ROWS f32", [kind(0, 9), nb(0, 0, 36)], "type of src 0"),
    ("GET_ROWS planes", [ne(0, 2, 1)], "differ in planes"),
    ("GET_ROWS_BACK", [ne(0, 1, 2)], "not a row per id"),
    ("SET_ROWS f32 i64", [ne("dst", 2, 1)], "differ in planes"),
    ("SET_ROWS f32 i64", [kind(1, I32), ne(1, 0, 2)], "not a row per id"),
    ("SET_ROWS q8_0 i32", [kind("dst", 24)], "type of dst"),
    ("DIAG", [ne("dst", 1, 4)], "shape of dst"),
    ("DIAG_MASK_INF", [param(0, -1)], "negative past"),
    ("DIAG_MASK_ZERO", [ne(0, 0, 5)], "differ in shape"),
    ("SOFT_MAX", [ne("dst", 0, 4)], "differ in shape"),
    ("SOFT_MAX mask", [ne(1, 0, 7)], "mask and src 0 differ in columns"),
    ("SOFT_MAX mask", [ne(1, 1, 2)], "mask has too few rows"),
    ("SOFT_MAX mask", [kind(1, 24)], "type of src 1"),
    ("SOFT_MAX sinks", [ne(2, 0, 3)], "not one per head"),
    ("SOFT_MAX sinks", [ne(2, 1, 0)], "src 2 is empty"),
    ("SOFT_MAX_BACK", [ne(1, 0, 4)], "differ in shape"),
    ("ROPE 0", [param(1, 10)], "dimensions beyond the row"),
    ("ROPE 0", [param(1, 0)], "bad number of dimensions"),
    ("ROPE 2", [param(1, -2)], "bad number of dimensions"),
    ("ROPE 2", [ne(1, 0, 2)], "not a position each"),
    ("ROPE 8", [param(11, 1), param(12, -1), param(13, 0)], "bad sections"),
    ("ROPE factors", [ne(2, 0, 1)], "too few factors"),
    ("ROPE factors", [ne(2, 0, 4), ne(2, 3, 0)], "src 2 is empty"),
    ("ROPE_BACK", [param(15, -2)], "bad offset"),
    ("CLAMP", [nb(0, 1, 100)], "leave the tensor|outside"),
    ("CONV_TRANSPOSE_1D", [param(0, 3)], "shape of dst"),
    ("IM2COL 1d", [ne(0, 0, 4)], "shape of dst"),
    ("IM2COL 2d", [param(0, 0)], "stride is not positive"),
    ("IM2COL 2d", [nb(1, 1, 32)], "planes of src 1"),
    ("IM2COL_BACK", [param(0, 0)], "stride is not positive"),
    ("IM2COL_3D", [param(9, 0)], "no channels"),
    ("COL2IM_1D", [param(1, 3)], "shape of dst"),
    ("CONV_2D", [ne("dst", 2, 4)], "shape of dst"),
    ("CONV_2D", [param(2, -1)], "padding is negative"),
    ("CONV_3D", [param(11, 4)], "not all channels"),
    ("CONV_2D_DW", [ne(0, 3, 3)], "differ in channels"),
    ("CONV_TRANSPOSE_2D", [param(0, 4)], "shape of dst"),
    ("POOL_1D", [ne("dst", 0, 3)], "shape of dst"),
    ("POOL_2D", [param(0, 2)], "unknown pooling"),
    ("POOL_2D", [nb(0, 2, 4)], "strides of src 0"),
    ("POOL_2D_BACK", [ne(0, 2, 2)], "differ in planes"),
    ("UPSCALE 0", [ne(0, 3, 0)], "src 0 is empty"),
    ("PAD", [param(0, 2)], "shape of dst"),
    ("PAD", [param(0, -1), param(1, 4)], "padding is negative"),
    ("PAD_REFLECT_1D", [param(0, 5), param(1, 0)], "padding is over the row"),
    ("ROLL", [param(0, 5)], "shift is too large"),
    ("ARANGE", [kind("dst", I32)], "type of dst"),
    ("ARANGE", [param(2, 0)], "shape of dst"),
    ("TIMESTEP_EMBEDDING", [param(0, 9)], "shape of dst"),
    ("TIMESTEP_EMBEDDING", [ne(0, 1, 0)], "src 0 is empty"),
    ("ARGSORT", [ne("dst", 0, 8)], "differ in shape"),
    (
        "ARGSORT",
        [ne(0, 2, 2), ne("dst", 2, 2), nb("dst", 1, 4), nb("dst", 2, 400)],
        "strides of dst",
    ),
    ("TOP_K", [ne(0, 0, 3)], "more columns"),
    ("LEAKY_RELU", [ne("dst", 1, 2)], "differ in shape"),
    ("TRI 0", [param(0, 4)], "unknown triangle"),
    ("FILL", [kind("dst", F16)], "differ in type"),
    ("FLASH_ATTN_EXT f16", [ne(1, 1, 8)], "k and v differ in rows"),
    ("FLASH_ATTN_EXT f16", [ne(2, 2, 0)], "src 2 does not broadcast"),
    ("FLASH_ATTN_EXT f16", [ne(3, 0, 15)], "mask has too few columns"),
    ("FLASH_ATTN_EXT f16", [ne(3, 1, 2)], "mask has too few rows"),
    ("FLASH_ATTN_EXT sinks", [kind(1, I32)], "type of src 1"),
    ("FLASH_ATTN_EXT sinks", [ne(4, 0, 3)], "not one per head"),
    ("FLASH_ATTN_EXT sinks", [ne(4, 2, 0)], "src 4 is empty"),
    ("SSM_CONV", [ne(0, 0, 6)], "window per token"),
    ("SSM_SCAN 2", [param(0, 2)], "room for all states"),
    ("SSM_SCAN 2", [nb(0, 3, 4)], "strides of src 0"),
    ("WIN_PART", [param(0, 2)], "shape of dst"),
    ("WIN_UNPART", [ne(0, 3, 5)], "too few windows"),
    ("GET_REL_POS", [ne(0, 1, 8)], "shape of src 0"),
    ("GET_REL_POS", [ne(0, 2, 0)], "src 0 is empty"),
    ("ADD_REL_POS", [ne(1, 0, 2)], "differ in shape"),
    ("RWKV_WKV6", [ne(3, 0, 32)], "shape of src 3"),
    ("GATED_LINEAR_ATTN", [ne(4, 0, 64)], "size of the state"),
    ("RWKV_WKV7", [ne(1, 2, 5)], "shape of src 1"),
    ("SOLVE_TRI", [ne(0, 1, 4)], "no square"),
    ("GATED_DELTA_NET", [ne(0, 1, 0)], "shape of src 0"),
    ("GATED_DELTA_NET", [param(0, 2)], "shape of dst"),
    ("LIGHTNING_INDEXER", [ne(3, 0, 7)], "mask does not fit"),
    ("DSV4_HC_COMB", [ne(0, 0, 23)], "shape of the mixes"),
    ("DSV4_HC_PRE", [ne(1, 0, 3)], "shape of the weights"),
    ("DSV4_HC_POST", [ne(3, 0, 3)], "shape of the combination"),
    ("UNARY 0", [param(0, 22)], "unknown sub-op"),
    ("UNARY 0", [param(0, -1)], "unknown sub-op"),
    ("CROSS_ENTROPY_LOSS", [ne(1, 0, 4)], "differ in shape"),
    ("CROSS_ENTROPY_LOSS_BACK", [kind(2, F16)], "type of src 2"),
    ("OPT_STEP_ADAMW", [ne(4, 0, 6)], "not 7 settings"),
    ("OPT_STEP_SGD", [nb(1, 1, 16)], "differ in nb"),
    ("GLU 0", [ne("dst", 0, 3)], "columns of the result"),
    ("GLU 0 split", [ne(1, 1, 2)], "differ in shape"),
    ("GLU oai", [param(0, 7)], "unknown sub-op"),
    ("VIEW", [Change(0, "nb", 1, 96)], "outside|beyond the tensor it views"),
]


class Local:
    """A session's parts without a session: nothing here can run a graph."""

    def __init__(self, ggml: Ggml, device: ComputeDevice) -> None:
        self.ggml = ggml
        self.buffers = BufferTable()
        buffer = self.buffers.open(device, 1 << 20)
        assert buffer
        self.buffer = buffer

    def build(self, message: Graph) -> StoredGraph:
        return build_graph(message, self.buffers)

    def message(self, graph: Any) -> Graph:
        found: Graph = graph.message(self.buffer.handle, self.buffer.base)
        return found


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    ggml = open_ggml(ENGINES[0])
    (device,) = select_devices(ggml.engine, ["CPU"])
    local = Local(ggml, device)
    yield local
    local.buffers.close_all()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    SPOILT,
    ids=[f"{i} {name}" for i, (name, _, _) in enumerate(SPOILT)],
)
def test_a_spoilt_graph_is_refused(
    name: str, changes: list[Change], reason: str, local: Local
) -> None:
    with built(local.ggml, BY_NAME[name]) as graph:
        message = local.message(graph)
        local.build(message)
        with pytest.raises(BadRequest, match=reason):
            local.build(spoilt(message, *changes))


def test_every_rule_refuses_something() -> None:
    refused = {BY_NAME[name].op for name, _, _ in SPOILT}
    assert {rule.name for rule in RULES.values()} - refused == {"FLASH_ATTN_BACK"}


def test_the_reason_names_op_tensor_and_rule(local: Local) -> None:
    with built(local.ggml, BY_NAME["MUL_MAT f32"]) as graph:
        message = spoilt(local.message(graph), ne(0, 0, 128))
        message.tensors["name"][-1] = b"ffn_out-3"
        with pytest.raises(BadRequest) as caught:
            local.build(message)
    assert str(caught.value) == (
        "GRAPH_COMPUTE: MUL_MAT 'ffn_out-3': src 0 and src 1 differ in columns"
    )


def test_an_op_without_a_constructor_is_refused(local: Local) -> None:
    with built(local.ggml, BY_NAME["FLASH_ATTN_EXT f32"]) as graph:
        message = spoilt(local.message(graph), Change("dst", "op", None, 75))
        with pytest.raises(BadRequest, match="FLASH_ATTN_BACK .* not supported"):
            local.build(message)


def test_an_empty_result_may_come_of_empty_sources(local: Local) -> None:
    none = [ne(0, 2, 0), ne(2, 1, 0), ne("dst", 2, 0)]
    with built(local.ggml, BY_NAME["ADD_ID"]) as graph:
        local.build(spoilt(local.message(graph), *none))


def in_the_place_of(message: Graph, slot: int) -> Graph:
    """The graph with the last node's result where that node's source is."""
    records = message.tensors
    (last,) = np.flatnonzero(records["id"] == message.nodes[-1])
    (source,) = np.flatnonzero(records["id"] == records["src"][last, slot])
    return spoilt(message, Change("dst", "data", None, records["data"][source]))


def test_a_sort_in_place_is_refused(local: Local) -> None:
    with built(local.ggml, BY_NAME["ARGSORT"]) as graph:
        message = in_the_place_of(local.message(graph), 0)
        with pytest.raises(BadRequest, match="dst overlaps src 0"):
            local.build(message)


# Ids that kernels follow unchecked.


def chosen(rows: Callable[[Maker], int]) -> Case:
    """A MUL_MAT_ID over four matrices with ids from somewhere."""

    def make(g: Maker) -> int:
        return g.mul_mat_id(g.new(8, 5, 4), g.new(8, 1, 3), rows(g))

    return Case("MUL_MAT_ID", make)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (lambda g: g.argsort_top_k(g.new(4, 3), 2), None),
        (lambda g: g.argsort_top_k(g.new(5, 3), 2), "nothing bounds them"),
        (lambda g: g.top_k(g.new(4, 3), 2), None),
        (lambda g: g.top_k(g.new(5, 3), 2), "nothing bounds them"),
        (lambda g: g.cont(g.argsort_top_k(g.new(4, 3), 2)), None),
        (lambda g: g.cast(g.new(2, 3), I32), "nothing bounds them"),
        (
            lambda g: g.cast(
                g.scale(g.cast(g.argsort_top_k(g.new(8, 3), 2), F32), 0.6), I32
            ),
            "nothing bounds them",
        ),
        (lambda g: g.add(g.ids(2, 2, 3), g.ids(2, 2, 3)), "nothing bounds them"),
    ],
)
def test_computed_ids_follow_from_a_shape(
    rows: Callable[[Maker], int], reason: str | None, local: Local
) -> None:
    with built(local.ggml, chosen(rows)) as graph:
        message = local.message(graph)
        if reason is None:
            assert len(local.build(message).indices) == 0
        else:
            with pytest.raises(BadRequest, match=reason):
                local.build(message)


def test_ids_that_another_node_overwrites_are_refused(local: Local) -> None:
    def make(g: Maker) -> int:
        ids = g.ids(4, 2, 3)
        chosen = g.mul_mat_id(g.new(8, 5, 4), g.new(8, 1, 3), ids)
        return g.add(chosen, g.sum(g.sqr(g.new(2, 3))))

    with built(local.ggml, Case("MUL_MAT_ID", make)) as graph:
        message = local.message(graph)
        records, order = message.tensors, message.nodes.tolist()
        ops = dict(zip(records["id"].tolist(), records["op"].tolist(), strict=True))
        square = next(node for node in order if ops[node] == 9)
        product = next(node for node in order if ops[node] == 30)
        # First in the order, and in the place of the ids.
        order.remove(square)
        message = message._replace(nodes=np.array([square, *order], np.uint64))
        (ids,) = records["src"][records["id"] == product][:, 2]
        place = records["data"][records["id"] == ids]
        assert len(local.build(message).indices) == 1
        records["data"][records["id"] == square] = place
        with pytest.raises(BadRequest, match="nothing bounds them"):
            local.build(message)


@pytest.mark.parametrize(("name", "slot"), [("MUL_MAT_ID", 2), ("SSM_SCAN 2", 6)])
def test_ids_that_their_own_node_overwrites_are_refused(
    name: str, slot: int, local: Local
) -> None:
    with built(local.ggml, BY_NAME[name]) as graph:
        message = in_the_place_of(local.message(graph), slot)
        with pytest.raises(BadRequest, match="dst overlaps the ids"):
            local.build(message)


# Field reports, section B, on a real worker.


class Scene:
    """A client with one buffer, and a graph in it."""

    def __init__(self, client: RawClient, ggml: Ggml, name: str) -> None:
        self.client = client
        self.buffer: Buffer = client.alloc(1 << 20)
        self._context = built(ggml, BY_NAME[name])
        self.graph = self._context.__enter__()
        self.whole = tensor(1, self.buffer, ne=(self.graph.size // 4,))
        client.write(self.whole, self.graph.before)
        self.message = self.graph.message(self.buffer.handle, self.buffer.base, uid=5)

    def close(self) -> None:
        self._context.__exit__(None, None, None)

    def compute(self) -> bytes:
        self.client.compute(self.message)
        return self.client.read(self.whole)

    def record(self, slot: int) -> Any:
        """The record of the last node's source."""
        records = self.message.tensors
        last = records[records["id"] == self.message.nodes[-1]][0]
        return records[records["id"] == last["src"][slot]][0]

    def write_ids(self, slot: int, *values: int) -> None:
        record = self.record(slot)
        offset = int(record["data"]) - self.buffer.base
        kind = "<i8" if record["type"] == I64 else "<i4"
        data = np.array(values, kind).tobytes()
        self.client.write(self.whole, data, offset)


@pytest.fixture
def scene(
    workers: Callable[[Dialect], Worker],
) -> Iterator[Callable[[str], Scene]]:
    ggml = open_ggml(ENGINES[0])
    scenes: list[Scene] = []

    def open_scene(name: str) -> Scene:
        client = RawClient(workers(V8).endpoint, V8)
        client.hello()
        scenes.append(Scene(client, ggml, name))
        return scenes[-1]

    yield open_scene
    for scene in scenes:
        scene.client.close()
        scene.close()


REPORTS: list[tuple[int, str, list[Change], str]] = [
    (26825, "GET_ROWS planes", [ne(0, 2, 1)], "differ in planes"),
    (26825, "GET_ROWS f32", [ne(1, 1, 2), ne("dst", 2, 2)], "differ in planes"),
    (26912, "SET_ROWS f32 i64", [ne("dst", 2, 1)], "differ in planes"),
    (25764, "ACC", [param(0, -128), param(1, 128)], "negative stride"),
    (25764, "SET", [param(0, -128), param(1, 128)], "negative stride"),
]


@pytest.mark.parametrize(("number", "name", "changes", "reason"), REPORTS)
def test_a_reported_shape_is_refused(
    number: int,
    name: str,
    changes: list[Change],
    reason: str,
    scene: Callable[[str], Scene],
    workers: Callable[[Dialect], Worker],
    neighbours: Callable[[Dialect], Sum],
) -> None:
    neighbour = neighbours(V8)
    legal = scene(name)
    legal.compute()
    with suppress(ConnectionError):
        legal.client.compute(spoilt(legal.message, *changes))
    legal.client.expect_closed()
    line = workers(V8).end_of(legal.client.name)
    assert re.search(f"refused: GRAPH_COMPUTE: .*{reason}", line), line
    neighbour.check(again=True)


@pytest.mark.parametrize("name", ["MUL_MAT_ID", "SSM_SCAN 2"])
@pytest.mark.parametrize("bad", [-1, 1 << 20, -(1 << 31), 5])
def test_bad_ids_are_refused_at_a_re_run(
    name: str,
    bad: int,
    scene: Callable[[str], Scene],
    workers: Callable[[Dialect], Worker],
    neighbours: Callable[[Dialect], Sum],
) -> None:
    neighbour = neighbours(V8)
    run = scene(name)
    slot = 2 if name == "MUL_MAT_ID" else 6
    first = run.compute()
    run.client.recompute(5)
    assert run.client.read(run.whole) == first
    run.write_ids(slot, 0, bad)
    with suppress(ConnectionError):
        run.client.recompute(5)
    run.client.expect_closed()
    line = workers(V8).end_of(run.client.name)
    assert re.search("refused: GRAPH_RECOMPUTE: .*an id is not below", line), line
    neighbour.check(again=True)


@pytest.mark.parametrize(
    ("name", "slot"),
    [
        ("GET_ROWS f32", 1),
        ("SET_ROWS f32 i32", 1),
        ("SET_ROWS f32 i64", 1),
        ("ADD_ID", 2),
    ],
)
@pytest.mark.parametrize("bad", [-1, 5])
def test_ids_that_kernels_check_end_one_session_only(
    name: str,
    slot: int,
    bad: int,
    scene: Callable[[str], Scene],
    workers: Callable[[Dialect], Worker],
    neighbours: Callable[[Dialect], Sum],
) -> None:
    neighbour = neighbours(V8)
    run = scene(name)
    run.compute()
    run.write_ids(slot, 0, bad)
    with suppress(ConnectionError):
        run.client.post(
            Command.GRAPH_RECOMPUTE, b"\0\0\0\0" + (5).to_bytes(8, "little")
        )
    run.client.expect_closed(5.0)
    line = workers(V8).end_of(run.client.name)
    assert "ggml aborted: " in line and "GGML_ASSERT(i" in line, line
    neighbour.check(again=True)
