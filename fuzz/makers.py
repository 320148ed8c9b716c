"""Makers of the messages that every client may send, one for each command."""

from __future__ import annotations

import numpy as np

from fuzz.contents import CONTENTS, KEYS
from fuzz.writer import ROOM, TOO_MUCH, Maker, Message, Writer
from longwire.wire import messages as m
from longwire.wire.constants import Command as C
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.tensors import NULL_TENSOR
from support.tensors import ADD, graph, tensor

__all__ = [
    "ANYWHERE",
    "WITHOUT",
    "WITH_TENSORS",
    "nothing",
    "of_device",
    "one_op",
    "sound_graph",
]


_BUFFER = slice(12, 20)
"""Where a tensor record has its buffer's handle."""


def of_device(number: int) -> Maker:
    return lambda w: (number, m.U32.pack(w.device()))


def _of_handle(number: int) -> Maker:
    return lambda w: (number, m.U64.pack(w.handle()))


def _clear(w: Writer) -> Message:
    return C.BUFFER_CLEAR, m.BufferClear(w.handle(), 1).encode()


def _alloc(w: Writer) -> Message:
    size = w.source.pick(ROOM if w.buffers else TOO_MUCH)
    return C.ALLOC_BUFFER, m.AllocBuffer(w.device(), size).encode()


def _set(w: Writer) -> Message:
    source = w.source
    flag = source.rarely(4)
    record = w.record()
    offset, size = w.part(record)
    head = m.SetTensor(record, flag, offset).encode()
    # What is kept should be asked for again.
    known = source.pick(CONTENTS) if flag and source.rarely(2) else b""
    data = known or source.take(min(size, 64))
    w.written.append((head, len(data)))
    return C.SET_TENSOR, head + data


def _set_again(w: Writer) -> Message:
    """A SET_TENSOR that was sent before, with other data, or more or less of it."""
    if not w.written:
        return _set(w)
    head, size = w.source.pick(w.written[-4:])
    if w.source.rarely(6):
        # Next time its memory is gone.
        return C.FREE_BUFFER, head[_BUFFER]
    if w.source.rarely(8):
        size = w.source.below(65)
    return C.SET_TENSOR, head + w.source.take(size)


def _get(w: Writer) -> Message:
    record = w.record()
    return C.GET_TENSOR, m.GetTensor(record, *w.part(record)).encode()


def _hash(w: Writer) -> Message:
    key = 7 if w.source.rarely(4) else w.source.pick(KEYS)
    record = w.record()
    offset, _ = w.part(record)
    return C.SET_TENSOR_HASH, m.SetTensorHash(record, offset, key).encode()


def _memset(w: Writer) -> Message:
    record = w.record()
    return C.MEMSET_TENSOR, m.MemsetTensor(record, *w.part(record), 3).encode()


def _copy(w: Writer) -> Message:
    return C.COPY_TENSOR, m.CopyTensor(w.record(), w.record()).encode()


def _init(w: Writer) -> Message:
    return C.INIT_TENSOR, w.record()


def _alloc_size(w: Writer) -> Message:
    tensors = one_op(w)
    body = m.GetAllocSize(w.device(), tensors[:296], tensors[296:]).encode()
    return C.GET_ALLOC_SIZE, body


def _rows(w: Writer, record: bytes) -> tuple[int, int, int, int]:
    """Offset, size, number and stride of rows in a tensor."""
    source = w.source
    offset, size = w.part(record)
    n = source.below(9) if source.rarely(4) else source.pick((1, 2, 4))
    row = min(size // n, 32) if n else 0
    return offset, row, n, w.offset() if source.rarely(3) else row


def _set_rows(w: Writer) -> Message:
    record = w.record()
    offset, size, n, stride = _rows(w, record)
    head = m.SetTensor2D(record, offset, size, n, stride).encode()
    return C.SET_TENSOR_2D, head + w.source.take(size * n)


def _get_rows(w: Writer) -> Message:
    record = w.record()
    offset, size, n, stride = _rows(w, record)
    if w.source.rarely(8):
        n = w.size()
    return C.GET_TENSOR_2D, m.GetTensor2D(record, offset, size, n, stride).encode()


def _comm_init(w: Writer) -> Message:
    host = w.source.take(4)
    return C.COMM_INIT, m.CommInit(w.device(), 0, 2, 5, host).encode()


def _allreduce(w: Writer) -> Message:
    return C.COMM_ALLREDUCE, m.CommAllreduce(w.device(), w.record()).encode()


def _graph(w: Writer) -> Message:
    """A graph of few nodes, or one op's legal graph with a number or two changed."""
    uid = w.source.pick((1, 2, 3, 0))
    w.uid = uid or w.uid
    if w.op_graphs and not w.source.rarely(3):
        buffer = w.buffer()
        sent = w.source.pick(w.op_graphs).placed(buffer, uid)
        if not w.buffers:
            # Without elements it may run without memory.
            sent.tensors["data"] = 0
            sent.tensors["ne"][:, w.source.below(4)] = 0
    else:
        sent = _small_graph(w, uid)
    parts = [bytes(part) for part in sent.encode(w.dialect)]
    if len(parts[-1]):
        parts[-1] = w.spoil(parts[-1])
    return _sent(w, parts)


def sound_graph(w: Writer) -> Message:
    """A graph that a server with room for it has no reason to refuse."""
    buffer, uid = w.buffer(), w.source.pick((1, 2, 3, 0))
    ne = (8,) if w.buffers else (0,)
    a, b = (tensor(i, buffer, 32 * (i - 1) if w.buffers else 0, ne) for i in (1, 2))
    c = tensor(3, buffer, 64 if w.buffers else 0, ne, op=ADD, src=[a, b])
    w.uid = uid or w.uid
    return _sent(w, [bytes(part) for part in graph([c], [a, b], uid).encode(w.dialect)])


def _sent(w: Writer, parts: list[bytes]) -> Message:
    body = b"".join(parts)
    w.sent.appendleft(np.frombuffer(body, "<u4", offset=12 if w.protocol == 8 else 4))
    return C.GRAPH_COMPUTE, body


def _small_graph(w: Writer, uid: int) -> Graph:
    source = w.source
    buffer = w.buffer()
    step = 32 if w.buffers else 0
    ne = (8,) if w.buffers else (0,)
    a, b = (tensor(i, buffer, step * (i - 1), ne) for i in (1, 2))
    nodes = []
    for i in range(1 + source.below(3)):
        op = (
            source.pick((2, 2, 7, 0, 37)) if not source.rarely(4) else source.below(101)
        )
        node = tensor(3 + i, buffer, step * (2 + i), ne, op=op, src=[a, b])
        nodes.append(node)
        a = node
    return graph(nodes, [tensor(1, buffer, 0, ne), b], uid)


def _recompute(w: Writer) -> Message:
    uid = w.source.below(4) if w.source.rarely(4) else w.uid
    body = GraphRecompute(w.device(), uid).encode(w.dialect)
    return C.GRAPH_RECOMPUTE, body


def nothing(number: int) -> Maker:
    return lambda w: (number, b"")


def _hello(w: Writer) -> Message:
    return C.HELLO, m.Hello(w.source.take(24)).encode()


def _junk(w: Writer) -> Message:
    return w.source.number(), w.source.take(w.source.below(256))


def one_op(w: Writer) -> bytes:
    """An op's record and those of its ten sources."""
    if not w.op_graphs or w.source.rarely(4):
        return (w.record() + w.record()).ljust(11 * len(NULL_TENSOR), b"\0")
    tensors = w.source.pick(w.op_graphs).tensors
    node = tensors[-1]
    sources = [tensors[i - 1].tobytes() if i else NULL_TENSOR for i in node["src"]]
    return w.spoil(node.tobytes() + b"".join(sources))


WITHOUT: list[Maker] = [
    *map(of_device, (C.GET_ALIGNMENT, C.GET_MAX_SIZE, C.GET_DEVICE_MEMORY)),
    *(nothing(C.DEVICE_COUNT), _alloc_size, _alloc_size, _alloc),
    *(_graph, _graph),
]
"""For a client that holds no memory: what names a tensor would end its session."""

WITH_TENSORS: list[Maker] = [
    *(_set, _get, _memset, _copy, _init, _set_rows, _get_rows, _hash, _clear, _alloc),
    *(_set_again, _set_again, _graph, _graph, _graph, _recompute),
    *(_alloc_size, _of_handle(C.FREE_BUFFER), _of_handle(C.BUFFER_GET_BASE)),
    *(_comm_init, of_device(C.COMM_FREE)),
]

ANYWHERE: list[Maker] = [_hello, _junk, _allreduce]
"""What no client sends, or none of this server."""
