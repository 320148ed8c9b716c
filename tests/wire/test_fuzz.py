"""Bytes and values of hypothesis's choosing."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.errors import ProtocolError
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.frames import ServerOrder
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.messages import (
    AllocBuffer,
    AllocBufferAnswer,
    BufferClear,
    CommAllreduce,
    CommInit,
    CopyTensor,
    DeviceMemory,
    GetAllocSize,
    GetTensor,
    GetTensor2D,
    Hello,
    HelloAnswer,
    MemsetTensor,
    SetTensor,
    SetTensor2D,
    SetTensorHash,
)
from longwire.wire.tensors import TENSOR, Tensor
from longwire.wire.types import TYPES, nbytes

quick = settings(deadline=None, max_examples=60)

u8 = st.integers(0, 2**8 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
four_u32 = st.tuples(u32, u32, u32, u32)
text = st.binary(max_size=64).filter(lambda value: b"\0" not in value)
dialects = st.sampled_from([V7, V8])

# Drawn as a pattern: most of a record's bytes do not matter to these messages.
record = st.binary(min_size=8, max_size=8).map(lambda seed: seed * 37)
ten_records = record.map(lambda value: value * 10)
caps = st.binary(min_size=24, max_size=24)

tensors = st.builds(
    Tensor,
    id=u64,
    type=u32,
    buffer=u64,
    ne=four_u32,
    nb=four_u32,
    op=u32,
    op_params=st.binary(min_size=64, max_size=64),
    flags=i32,
    src=st.tuples(*[u64] * 10),
    view_src=u64,
    view_offs=u64,
    data=u64,
    name=text,
    use_count=i32,
)

FIELDS: dict[Callable[..., Any], list[st.SearchStrategy[Any]]] = {
    Hello: [caps],
    HelloAnswer: [u8, u8, u8, u8, caps],
    AllocBuffer: [u32, u64],
    AllocBufferAnswer: [u64, u64],
    DeviceMemory: [u64, u64],
    BufferClear: [u64, u8],
    MemsetTensor: [record, u64, u64, u8],
    SetTensor: [record, u8, u64],
    SetTensorHash: [record, u64, u64],
    GetTensor: [record, u64, u64],
    CopyTensor: [record, record],
    GetAllocSize: [u32, record, ten_records],
    SetTensor2D: [record, u64, u64, u64, u64],
    GetTensor2D: [record, u64, u64, u64, u64],
    CommInit: [u32, u32, u32, u32, text],
    CommAllreduce: [u32, record],
}


@st.composite
def graph_like(draw: st.DrawFn) -> bytes:
    """A body whose counts are often small enough to be believed."""
    small = st.integers(0, 3) | u32
    n_nodes = draw(small)
    opening = draw(st.sampled_from([b"", bytes(8)])) + draw(st.binary(max_size=4))
    ids = draw(st.binary(max_size=40))
    rest = bytes(draw(st.integers(0, 900)))
    return (
        opening
        + struct.pack("<I", n_nodes)
        + ids
        + struct.pack("<I", draw(small))
        + rest
    )


@quick
@given(dialects, st.binary(max_size=400) | graph_like())
def test_any_bytes_are_a_graph_or_a_protocol_error(
    dialect: Dialect, body: bytes
) -> None:
    try:
        graph = Graph.decode(dialect, body)
    except ProtocolError:
        return
    again = b"".join(graph.encode(dialect))
    assert body.startswith(again)


@quick
@given(dialects, st.data())
def test_one_wrong_byte_in_a_graph_harms_nobody(
    dialect: Dialect, data: st.DataObject
) -> None:
    nodes = np.array([1, 2], np.uint64)
    body = bytearray(b"".join(Graph(0, 7, nodes, np.zeros(2, TENSOR)).encode(dialect)))
    at = data.draw(st.integers(0, 48))
    body[at] = data.draw(u8)
    try:
        graph = Graph.decode(dialect, body)
    except ProtocolError:
        return
    assert body.startswith(b"".join(graph.encode(dialect)))


@quick
@given(
    dialects,
    u32,
    u64,
    st.lists(u64, max_size=5),
    st.lists(tensors, max_size=3),
)
def test_graphs_round_trip(
    dialect: Dialect, device: int, uid: int, nodes: list[int], items: list[Tensor]
) -> None:
    records = b"".join(item.encode() for item in items)
    sent = Graph(
        device, uid, np.array(nodes, np.uint64), np.frombuffer(records, TENSOR)
    )
    found = Graph.decode(dialect, b"".join(sent.encode(dialect)))
    assert found.device == device
    assert found.uid == (uid if dialect.graph_uid else 0)
    assert found.nodes.tolist() == nodes
    assert found.tensors.tobytes() == records


@quick
@given(tensors)
def test_tensors_round_trip(tensor: Tensor) -> None:
    body = tensor.encode()
    assert Tensor.decode(body) == tensor
    found = np.frombuffer(body, TENSOR)[0]
    assert (found["id"], found["data"]) == (tensor.id, tensor.data)
    assert tuple(found["ne"]) == tensor.ne
    assert tuple(found["nb"]) == tensor.nb
    assert tuple(found["src"]) == tensor.src
    assert found["name"] == tensor.name
    assert found["op_params"].tobytes() == tensor.op_params


@quick
@given(st.binary(min_size=296, max_size=296))
def test_any_296_bytes_are_a_tensor(body: bytes) -> None:
    tensor = Tensor.decode(body)
    assert Tensor.decode(tensor.encode()) == tensor


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_messages_round_trip(kind: Any) -> None:
    @settings(quick, max_examples=15)
    @given(st.tuples(*FIELDS[kind]))
    def check(values: tuple[Any, ...]) -> None:
        message = kind(*values)
        assert kind.decode(message.encode()) == message

    check()


@quick
@given(u32, u64)
def test_recomputes_round_trip(device: int, uid: int) -> None:
    for dialect, message in [
        (V7, GraphRecompute(device)),
        (V8, GraphRecompute(device, uid)),
    ]:
        assert GraphRecompute.decode(dialect, message.encode(dialect)) == message


@quick
@given(dialects, st.booleans(), u8, st.integers(0, 4000) | u64)
def test_any_header_is_admitted_or_a_protocol_error(
    dialect: Dialect, greeted: bool, number: int, length: int
) -> None:
    order = ServerOrder(dialect, greeted)
    try:
        shape = order.admit(number, length)
    except ProtocolError:
        assert order.greeted is greeted
        return
    assert shape.least <= length <= shape.most
    assert (number == Command.HELLO) is not greeted


@quick
@given(st.sampled_from(sorted(TYPES)), four_u32, four_u32)
def test_nbytes_is_exact(
    type_number: int, ne: tuple[int, ...], nb: tuple[int, ...]
) -> None:
    traits = TYPES[type_number]
    size = nbytes(type_number, ne, nb)
    if 0 in ne:
        assert size == 0
        return
    last = sum((n - 1) * b for n, b in zip(ne[1:], nb[1:], strict=True))
    if traits.block == 1:
        assert size == last + (ne[0] - 1) * nb[0] + traits.size
    else:
        assert size == last + ne[0] * nb[0] // traits.block
