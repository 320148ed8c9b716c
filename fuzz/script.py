"""From any bytes to one client's life: mostly in order, and wrong in places."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fuzz.opgraphs import OpGraph
from fuzz.recording import ENDINGS, Recording, frame, stand_in
from fuzz.source import Source
from longwire.wire import messages as m
from longwire.wire.constants import U32_MAX, U64_MAX
from longwire.wire.constants import Command as C
from longwire.wire.dialects import DIALECTS, LX_OFFER, LX_SHAPES
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.lx import Top
from longwire.wire.tensors import NULL_TENSOR, TENSOR
from support.client import Buffer
from support.tensors import graph, tensor

__all__ = ["record_script"]

Message = tuple[int, bytes]

_MOST_MESSAGES = 16
_SMALL = (0, 1, 2, 4, 8, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 16, 1 << 31, U32_MAX)
_LARGE = (1 << 32, 1 << 44, 1 << 61, 1 << 62, 1 << 63, U64_MAX - 7, U64_MAX)
_OFFSETS = (0, 0, 0, 4, 8, 60, 64, 192)
_SHAPES = ((8,), (8,), (16,), (4, 4), (32,), (1,), (0,), (2, 2, 2, 2), (64, 2))
_ROOM = (1 << 18, 256, 4096, 1 << 18, 0, 1, 65)
_TOO_MUCH = (1 << 41, 1 << 62, 1 << 63, U64_MAX)
_TYPES = (0, 0, 0, 0, 1, 2, 8, 12, 24, 26, 27, 30, 5, 42, 43)
_starts = {name: int(place[1]) for name, place in (TENSOR.fields or {}).items()}
_FIELDS = [
    (offset + i * dtype.base.itemsize, dtype.base.itemsize)
    for name in TENSOR.names or ()
    if name != "name"
    for dtype, offset in [(TENSOR[name], _starts[name])]
    for i in range(dtype.itemsize // dtype.base.itemsize)
]
"""Offset and size of every number in a tensor record."""

_FIELDS += [(_starts["name"] + at, 4) for at in (48, 52, 56, 60)]
"""Where LX is spoken, the end of the name holds the strides' high halves."""


def record_script(
    data: bytes,
    op_graphs: Sequence[OpGraph],
    protocol: int | None = None,
    allocating: bool | None = None,
) -> Recording:
    """The recording that `data` stands for.

    A given `protocol` or `allocating` overrules what the bytes say of it.
    """
    source = Source(data)
    wanted = source.pick((8, 7))
    writer = _Writer(source, op_graphs, protocol or wanted)
    sizes = [source.pick(_ROOM) for _ in range(source.pick((1, 2, 0, 3)))]
    if allocating is not None:
        sizes = (sizes or [_ROOM[0]]) if allocating else []
    writer.buffers = [stand_in(i, size) for i, size in enumerate(sizes)]
    greet = bool(sizes) or not source.rarely(16)
    writer.lx = greet and source.rarely(2)
    ending = source.pick((*ENDINGS[:1] * 12, *ENDINGS))
    body = b""
    for _ in range(_MOST_MESSAGES):
        if not source.left:
            break
        body += writer.message()
    return Recording(writer.protocol, body, sizes, greet, writer.lx, ending)


class _Writer:
    """Draws one message after the other."""

    def __init__(
        self, source: Source, op_graphs: Sequence[OpGraph], protocol: int
    ) -> None:
        self.source = source
        self.op_graphs = op_graphs
        self.protocol = protocol
        self.dialect = DIALECTS[protocol]
        self.buffers: list[Buffer] = []
        self.lx = False

    def message(self) -> bytes:
        """One frame, now and then a broken one."""
        number, body = self._maker()(self)
        source = self.source
        if not source.rarely(24):
            return frame(number, body)
        whole = bytearray(frame(number, body))
        way, at = source.below(5), source.number(2) % (len(whole) + 1)
        if way == 0:
            whole[at : at + 1] = source.take(1)
        elif way == 1:
            del whole[at:]
        elif way == 2:
            whole += source.take(source.below(40))
        elif way == 3:
            return frame(number, body, self.size())
        else:
            return frame(source.number(), body)
        return bytes(whole)

    def _maker(self) -> Maker:
        source = self.source
        if self.lx and source.rarely(4):
            return source.pick(_LX)
        # What names a tensor ends a session that has none.
        likely = _WITH_TENSORS if self.buffers else _WITHOUT
        makers = _ALL if source.rarely(16) else likely
        return source.pick(makers)

    # Values.

    def size(self) -> int:
        source = self.source
        return source.number(8) if source.rarely(8) else source.pick(_SMALL + _LARGE)

    def offset(self) -> int:
        return self.size() if self.source.rarely(8) else self.source.pick(_OFFSETS)

    def device(self) -> int:
        return self.source.pick(_SMALL) if self.source.rarely(16) else 0

    def handle(self) -> int:
        if self.buffers and not self.source.rarely(16):
            return self.source.pick(self.buffers).handle
        return self.size()

    def record(self) -> bytes:
        """A tensor record, often one that is in order."""
        source = self.source
        buffer = source.pick(self.buffers) if self.buffers else Buffer(0, 0, 0)
        kind = source.pick(_TYPES) if source.rarely(6) else 0
        ne = source.pick(_SHAPES)
        offset = source.pick(_OFFSETS) if self.buffers else 0
        plain = tensor(1 + source.below(6), buffer, offset, ne)._replace(type=kind)
        return self.spoil(plain.encode())

    def spoil(self, records: bytes) -> bytes:
        """Change up to two numbers of any of the records."""
        source = self.source
        changes = source.pick((0, 0, 0, 0, 0, 1, 1, 2))
        if not changes:
            return records
        changed = bytearray(records)
        for _ in range(changes):
            at, size = source.pick(_FIELDS)
            at += source.below(len(records) // TENSOR.itemsize) * TENSOR.itemsize
            value = source.pick(_SMALL) if size == 4 else self.size()
            if source.rarely(3):
                old = int.from_bytes(changed[at : at + size], "little")
                value = (old + source.pick((1, -1, 8, -8))) % (1 << 8 * size)
            changed[at : at + size] = value.to_bytes(size, "little")
        return bytes(changed)


Maker = Callable[[_Writer], Message]


def _of_device(number: int) -> Maker:
    return lambda w: (number, m.U32.pack(w.device()))


def _of_handle(number: int) -> Maker:
    return lambda w: (number, m.U64.pack(w.handle()))


def _clear(w: _Writer) -> Message:
    return C.BUFFER_CLEAR, m.BufferClear(w.handle(), 1).encode()


def _alloc(w: _Writer) -> Message:
    size = w.source.pick(_ROOM if w.buffers else _TOO_MUCH)
    return C.ALLOC_BUFFER, m.AllocBuffer(w.device(), size).encode()


def _set(w: _Writer) -> Message:
    flag = w.source.rarely(8)
    head = m.SetTensor(w.record(), flag, w.offset()).encode()
    return C.SET_TENSOR, head + w.source.take(w.source.pick((4, 0, 32, 33, 64)))


def _get(w: _Writer) -> Message:
    body = m.GetTensor(w.record(), w.offset(), w.offset()).encode()
    return C.GET_TENSOR, body


def _hash(w: _Writer) -> Message:
    return C.SET_TENSOR_HASH, m.SetTensorHash(w.record(), w.offset(), 7).encode()


def _memset(w: _Writer) -> Message:
    body = m.MemsetTensor(w.record(), w.offset(), w.offset(), 3).encode()
    return C.MEMSET_TENSOR, body


def _copy(w: _Writer) -> Message:
    return C.COPY_TENSOR, m.CopyTensor(w.record(), w.record()).encode()


def _init(w: _Writer) -> Message:
    return C.INIT_TENSOR, w.record()


def _alloc_size(w: _Writer) -> Message:
    tensors = _one_op(w)
    body = m.GetAllocSize(w.device(), tensors[:296], tensors[296:]).encode()
    return C.GET_ALLOC_SIZE, body


def _set_rows(w: _Writer) -> Message:
    size, n = w.source.below(20), w.source.below(4)
    data = w.source.take(size * n)
    head = m.SetTensor2D(w.record(), w.offset(), size, n, w.offset()).encode()
    return C.SET_TENSOR_2D, head + data


def _get_rows(w: _Writer) -> Message:
    n = w.size() if w.source.rarely(4) else w.source.below(9)
    values = (w.offset(), w.source.below(20), n, w.offset())
    return C.GET_TENSOR_2D, m.GetTensor2D(w.record(), *values).encode()


def _comm_init(w: _Writer) -> Message:
    host = w.source.take(4)
    return C.COMM_INIT, m.CommInit(w.device(), 0, 2, 5, host).encode()


def _allreduce(w: _Writer) -> Message:
    return C.COMM_ALLREDUCE, m.CommAllreduce(w.device(), w.record()).encode()


def _graph(w: _Writer) -> Message:
    """A graph of few nodes, or one op's legal graph with a number or two changed."""
    uid = w.source.below(4)
    if w.op_graphs and not w.source.rarely(3):
        buffer = w.source.pick(w.buffers) if w.buffers else Buffer(0, 0, 0)
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
    return C.GRAPH_COMPUTE, b"".join(parts)


def _small_graph(w: _Writer, uid: int) -> Graph:
    source = w.source
    buffer = source.pick(w.buffers) if w.buffers else Buffer(0, 0, 0)
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


def _recompute(w: _Writer) -> Message:
    body = GraphRecompute(w.device(), w.source.below(4)).encode(w.dialect)
    return C.GRAPH_RECOMPUTE, body


def _nothing(number: int) -> Maker:
    return lambda w: (number, b"")


def _hello(w: _Writer) -> Message:
    return C.HELLO, m.Hello(w.source.take(24)).encode()


def _junk(w: _Writer) -> Message:
    return w.source.number(), w.source.take(w.source.below(256))


def _shapeless(w: _Writer) -> Message:
    """A command of the right length and of any content."""
    shapes = {**w.dialect.shapes, **LX_OFFER, **LX_SHAPES}
    number = w.source.pick(sorted(shapes))
    return number, w.source.take(min(shapes[number].least, 4096))


def _one_op(w: _Writer) -> bytes:
    """An op's record and those of its ten sources."""
    if not w.op_graphs or w.source.rarely(4):
        return (w.record() + w.record()).ljust(11 * len(NULL_TENSOR), b"\0")
    tensors = w.source.pick(w.op_graphs).tensors
    node = tensors[-1]
    sources = [tensors[i - 1].tobytes() if i else NULL_TENSOR for i in node["src"]]
    return w.spoil(node.tobytes() + b"".join(sources))


def _supports(w: _Writer) -> Message:
    ops = [_one_op(w) for _ in range(1 + w.source.below(3))]
    count = w.size() & U32_MAX if w.source.rarely(16) else len(ops)
    head = m.U32.pack(w.device()) + m.U32.pack(count)
    return C.LX_SUPPORTS_OPS, head + b"".join(ops)


def _top(w: _Writer) -> Message:
    k = w.source.pick(_SMALL)
    return C.LX_TOP, Top(w.record(), w.offset(), w.offset(), k).encode()


def _start(w: _Writer) -> Message:
    return C.LX_START, m.U32.pack(w.source.number())


_WITHOUT: list[Maker] = [
    *map(_of_device, (C.GET_ALIGNMENT, C.GET_MAX_SIZE, C.GET_DEVICE_MEMORY)),
    *(_nothing(C.DEVICE_COUNT), _alloc_size, _alloc_size, _alloc, _hash),
    *(_graph, _graph),
]
_WITH_TENSORS: list[Maker] = [
    *(_set, _get, _memset, _copy, _init, _set_rows, _get_rows, _hash, _clear, _alloc),
    *(_graph, _graph, _graph, _recompute, _alloc_size, _of_handle(C.FREE_BUFFER)),
    *(_of_handle(C.BUFFER_GET_BASE), _comm_init, _of_device(C.COMM_FREE)),
]
_LX: list[Maker] = [_of_device(C.LX_DEVICE), _nothing(C.LX_PING), _supports, _top]
_ALL = [*_WITHOUT, *_WITH_TENSORS, *_LX, _start, _hello, _junk, _allreduce]
_ALL += [_shapeless] * 4
