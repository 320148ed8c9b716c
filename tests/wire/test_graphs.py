"""Graph messages: both layouts, their limits, and bodies that lie."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.constants import MAX_GRAPH_NODES, MAX_GRAPH_TENSORS, Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.tensors import TENSOR

NODES = [0x1111111111111111, 2**64 - 1, 5]
RECORDS = [bytes((13 * i + k) % 251 + 1 for i in range(296)) for k in range(2)]
TAIL = (
    bytes.fromhex("1111111111111111 ffffffffffffffff 0500000000000000 02000000")
    + RECORDS[0]
    + RECORDS[1]
)
BODIES = {
    7: bytes.fromhex("04000000 03000000") + TAIL,
    8: bytes.fromhex("04000000 8877665544332211 03000000") + TAIL,
}
UIDS = {7: 0, 8: 0x1122334455667788}

both = pytest.mark.parametrize("dialect", [V7, V8], ids=["v7", "v8"])


def graph(dialect: Dialect) -> Graph:
    """The graph that `BODIES` holds."""
    return Graph(
        device=4,
        uid=UIDS[dialect.major],
        nodes=np.array(NODES, np.uint64),
        tensors=np.frombuffer(b"".join(RECORDS), TENSOR),
    )


def of_size(n: int, m: int) -> Graph:
    """A graph of `n` nodes and `m` tensors."""
    return Graph(0, 9, np.arange(1, n + 1, dtype=np.uint64), np.zeros(m, TENSOR))


def head(dialect: Dialect, n_nodes: int) -> bytes:
    """The start of a body that announces `n_nodes` nodes."""
    if dialect is V8:
        return struct.pack("<IQI", 0, 1, n_nodes)
    return struct.pack("<II", 0, n_nodes)


@both
def test_encode_gives_the_bytes(dialect: Dialect) -> None:
    assert b"".join(graph(dialect).encode(dialect)) == BODIES[dialect.major]


@both
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_gives_the_graph(dialect: Dialect, kind: type) -> None:
    found = Graph.decode(dialect, kind(BODIES[dialect.major]))
    assert (found.device, found.uid) == (4, UIDS[dialect.major])
    assert found.nodes.tolist() == NODES
    assert [record.tobytes() for record in found.tensors] == RECORDS


def test_protocol_7_drops_the_uid() -> None:
    sent = graph(V7)._replace(uid=77)
    body = b"".join(sent.encode(V7))
    assert body == BODIES[7]
    assert Graph.decode(V7, body).uid == 0


@pytest.mark.parametrize(
    ("dialect", "n", "m", "size"),
    [(V7, 816, 1097, 331_252), (V8, 25, 40, 12_060), (V7, 0, 0, 12), (V8, 0, 0, 20)],
)
def test_sizes_are_those_seen_on_the_wire(
    dialect: Dialect, n: int, m: int, size: int
) -> None:
    body = b"".join(of_size(n, m).encode(dialect))
    assert len(body) == size
    found = Graph.decode(dialect, body)
    assert (len(found.nodes), len(found.tensors)) == (n, m)


@both
def test_every_truncation_is_refused(dialect: Dialect) -> None:
    body = BODIES[dialect.major]
    for length in range(len(body)):
        with pytest.raises(BadFrame) as caught:
            Graph.decode(dialect, body[:length])
        assert caught.value.length == length


@both
@pytest.mark.parametrize("surplus", [b"\0", b"\xff" * 295, bytes(296)])
def test_surplus_bytes_are_ignored(dialect: Dialect, surplus: bytes) -> None:
    found = Graph.decode(dialect, BODIES[dialect.major] + surplus)
    assert found.nodes.tolist() == NODES
    assert found.tensors.tobytes() == b"".join(RECORDS)


@both
def test_more_nodes_than_the_body_holds_are_refused(dialect: Dialect) -> None:
    for n_nodes in (1, 2, MAX_GRAPH_NODES):
        with pytest.raises(BadFrame):
            Graph.decode(dialect, head(dialect, n_nodes) + bytes(8 * n_nodes + 3))


@both
def test_more_tensors_than_the_body_holds_are_refused(dialect: Dialect) -> None:
    for n_tensors in (1, 2, MAX_GRAPH_TENSORS):
        body = head(dialect, 0) + struct.pack("<I", n_tensors) + bytes(295)
        with pytest.raises(BadFrame):
            Graph.decode(dialect, body)


@both
@pytest.mark.parametrize("n_nodes", [MAX_GRAPH_NODES + 1, 2**31, 2**32 - 1])
def test_a_node_count_over_the_limit_is_refused(dialect: Dialect, n_nodes: int) -> None:
    with pytest.raises(LimitExceeded) as caught:
        Graph.decode(dialect, head(dialect, n_nodes))
    assert (caught.value.value, caught.value.limit) == (n_nodes, MAX_GRAPH_NODES)


@both
@pytest.mark.parametrize("n_tensors", [MAX_GRAPH_TENSORS + 1, 2**31, 2**32 - 1])
def test_a_tensor_count_over_the_limit_is_refused(
    dialect: Dialect, n_tensors: int
) -> None:
    body = head(dialect, 1) + bytes(8) + struct.pack("<I", n_tensors)
    with pytest.raises(LimitExceeded) as caught:
        Graph.decode(dialect, body)
    assert (caught.value.value, caught.value.limit) == (n_tensors, MAX_GRAPH_TENSORS)


@both
def test_the_frame_admits_the_largest_graph_and_no_more(dialect: Dialect) -> None:
    empty = len(b"".join(of_size(0, 0).encode(dialect)))
    largest = empty + 8 * MAX_GRAPH_NODES + 296 * MAX_GRAPH_TENSORS
    shape = dialect.shapes[Command.GRAPH_COMPUTE]
    assert shape.most == largest < 80 * 2**20
    assert shape.least == len(head(dialect, 0))


@both
def test_ids_round_trip(dialect: Dialect) -> None:
    ids = np.array([1, 2**32, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
    tensors = np.zeros(len(ids), TENSOR)
    tensors["id"] = ids
    tensors["src"][:, 9] = ids[::-1]
    tensors["view_src"] = ids
    sent = Graph(0, 1, ids[::-1].copy(), tensors)
    found = Graph.decode(dialect, b"".join(sent.encode(dialect)))
    assert np.array_equal(found.nodes, sent.nodes)
    assert found.nodes.dtype == np.uint64
    for field in ("id", "src", "view_src"):
        assert np.array_equal(found.tensors[field], tensors[field])


@both
def test_encode_copies_no_array(dialect: Dialect) -> None:
    sent = of_size(3, 2)
    pieces = [np.frombuffer(piece, np.uint8) for piece in sent.encode(dialect)]
    assert np.shares_memory(pieces[1], sent.nodes)
    assert np.shares_memory(pieces[3], sent.tensors)


@both
def test_decode_copies_no_array(dialect: Dialect) -> None:
    body = bytearray(BODIES[dialect.major])
    whole = np.frombuffer(body, np.uint8)
    found = Graph.decode(dialect, body)
    assert np.shares_memory(whole, found.nodes)
    assert np.shares_memory(whole, found.tensors)


@both
@pytest.mark.parametrize("shift", [1, 3, 9])
def test_an_unaligned_body_can_be_passed_on(dialect: Dialect, shift: int) -> None:
    body = memoryview(bytes(shift) + BODIES[dialect.major])[shift:]
    assert b"".join(Graph.decode(dialect, body).encode(dialect)) == body


@pytest.mark.parametrize(
    ("dialect", "message", "body"),
    [
        (V7, GraphRecompute(device=3), "03000000"),
        (V8, GraphRecompute(3, 0x1122334455667788), "03000000 8877665544332211"),
    ],
    ids=["v7", "v8"],
)
def test_recompute(dialect: Dialect, message: GraphRecompute, body: str) -> None:
    raw = bytes.fromhex(body)
    assert message.encode(dialect) == raw
    assert GraphRecompute.decode(dialect, raw) == message
    assert dialect.shapes[Command.GRAPH_RECOMPUTE].least == len(raw)
    for length in range(len(raw)):
        with pytest.raises(struct.error):
            GraphRecompute.decode(dialect, raw[:length])
    with pytest.raises(struct.error):
        GraphRecompute.decode(dialect, raw + b"\0")
