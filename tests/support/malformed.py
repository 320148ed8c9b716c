"""One table of messages that break PROTOCOL.md, and what the log says of each."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from longwire.wire import messages as m
from longwire.wire.constants import (
    MAX_GRAPH_NODES,
    MAX_GRAPH_TENSORS,
    U32_MAX,
    U64_MAX,
    Command,
)
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.tensors import Tensor
from support.client import Buffer
from support.requests import (
    Request,
    Scene,
    addition,
    addition_of,
    alloc,
    alloc_size,
    clear,
    compute,
    copy,
    counts,
    for_device,
    for_handle,
    get_rows,
    get_tensor,
    init,
    memset,
    recompute,
    set_rows,
    set_tensor,
)
from support.tensors import Q4_0, graph, tensor

__all__ = ["CASES", "Case"]

C = Command
G = "GRAPH_COMPUTE: "
Make = Callable[[Scene], Request]


@dataclass(frozen=True)
class Case:
    """A request that a session must refuse."""

    name: str
    reason: str
    """Pattern of the log's line."""
    bad: Make
    legal: Make | None = None
    """The same without its fault, where that is another message."""
    dialects: tuple[Dialect, ...] = (V7, V8)
    greet: bool = True


# A function per family of cases: a lambda in a loop would see the last turn only.


def _new_in_8(number: int) -> Case:
    return Case(
        f"{C(number).name} in 7",
        f"command 0x{number:02x} is not part of protocol 7",
        lambda s: Request(number, bytes(400)),
        dialects=(V7,),
    )


def _of(number: int) -> tuple[Dialect, ...]:
    return tuple(dialect for dialect in (V7, V8) if number in dialect.shapes)


def _too_short(number: int) -> Case:
    return Case(
        f"{C(number).name} short",
        f"{C(number).name}: length",
        lambda s: Request(number, bytes(s.dialect.shapes[number].least - 1)),
        dialects=_of(number),
    )


def _too_long(number: int) -> Case:
    return Case(
        f"{C(number).name} long",
        f"{C(number).name}: length",
        lambda s: Request(number, b"", s.dialect.shapes[number].most + 1),
        dialects=_of(number),
    )


def _huge_graph(bits: int) -> Case:
    return Case(
        f"{bits} bits of GRAPH_COMPUTE",
        f"GRAPH_COMPUTE: length {(1 << bits) - 1}",
        lambda s: Request(C.GRAPH_COMPUTE, bytes(10), (1 << bits) - 1),
    )


def _huge_data(bits: int) -> Case:
    return Case(
        f"{bits} bits of SET_TENSOR",
        f"SET_TENSOR: {(1 << bits) - 306} bytes at 0 in a tensor of 64",
        lambda s: set_tensor(s.t)._replace(length=(1 << bits) - 1),
        lambda s: set_tensor(s.t, bytes(64)),
    )


def _no_device(number: int, device: int, make: Callable[[Scene, int], Request]) -> Case:
    return Case(
        f"device {device} in {C(number).name}",
        f"{C(number).name}: no device {device} of 1",
        lambda s: make(s, device),
        None if number == C.GRAPH_RECOMPUTE else lambda s: make(s, 0),
        dialects=_of(number),
    )


def _no_handle(number: int, kind: str, pick: Callable[[Scene], int]) -> Case:
    def make(handle: int) -> Request:
        return clear(handle) if number == C.BUFFER_CLEAR else for_handle(number, handle)

    return Case(
        f"{kind} handle in {C(number).name}",
        f"{C(number).name}: no buffer has the handle",
        lambda s: make(pick(s)),
        lambda s: make(s.buffer.handle),
    )


def _outside(name: str, move: Callable[[Buffer], int], number: int) -> Case:
    makers: dict[int, Callable[[Tensor], Request]] = {
        C.SET_TENSOR: set_tensor,
        C.GET_TENSOR: get_tensor,
        C.MEMSET_TENSOR: memset,
        C.INIT_TENSOR: init,
    }
    return Case(
        f"{name} in {C(number).name}",
        f"{C(number).name}: tensor of 64 bytes at offset .* is outside its buffer",
        lambda s: makers[number](s.t._replace(data=move(s.buffer))),
        lambda s: makers[number](s.end),
    )


def _pointer(op: int) -> Case:
    return Case(
        f"op {op}",
        rf"{G}op that carries a function pointer \({op}\)",
        lambda s: addition(s, op=op, op_params=struct.pack("<Q56x", 1)),
    )


def _freed_after_use(s: Scene) -> Request:
    """The server has met the record, then its buffer went."""
    s.client.read(s.t)
    s.client.free(s.buffer)
    return get_tensor(s.t)


HEADERS = [
    Case("0xfe", "command 0xfe is not part of", lambda s: Request(0xFE)),
    Case("0xff", "command 0xff is not part of", lambda s: Request(0xFF)),
    Case(
        "the next number of 8",
        "command 0x17 is not part of protocol 8",
        lambda s: Request(0x17),
        dialects=(V8,),
    ),
    *map(_new_in_8, sorted(V8.shapes.keys() - V7.shapes.keys())),
    Case(
        "no HELLO",
        "DEVICE_COUNT: no HELLO",
        lambda s: Request(C.DEVICE_COUNT),
        greet=False,
    ),
    Case(
        "no HELLO, unknown command",
        "command 0x47 is not part of",
        lambda s: Request(ord("G"), b" / HTTP/1.1\r\n\r\n"),
        greet=False,
    ),
    Case(
        "a second HELLO", "HELLO: a second HELLO", lambda s: Request(C.HELLO, bytes(24))
    ),
    Case(
        "a short HELLO",
        "HELLO: length 23, expected 24",
        lambda s: Request(C.HELLO, bytes(23)),
        greet=False,
    ),
]


LENGTHS = [
    *map(_too_short, sorted(V8.shapes.keys() - {C.HELLO, C.DEVICE_COUNT})),
    *map(
        _too_long, sorted(V8.shapes.keys() - {C.HELLO, C.SET_TENSOR, C.SET_TENSOR_2D})
    ),
    *map(_huge_graph, (32, 61, 62, 63, 64)),
    *map(_huge_data, (32, 61, 62, 63, 64)),
    Case(
        "63 bits of SET_TENSOR_2D",
        "SET_TENSOR_2D: .* bytes at 0 in a tensor of 64",
        lambda s: set_rows(s.t, size=1 << 31, n=1 << 31)._replace(
            length=328 + (1 << 62)
        ),
        lambda s: set_rows(s.t),
        dialects=(V8,),
    ),
]

DEVICES = [
    *(_no_device(C.ALLOC_BUFFER, n, lambda s, n: alloc(n)) for n in (1, U32_MAX)),
    *(
        _no_device(C.GRAPH_COMPUTE, n, lambda s, n: compute(s, graph([s.a], device=n)))
        for n in (1, U32_MAX)
    ),
    *(
        _no_device(C.GRAPH_RECOMPUTE, n, lambda s, n: recompute(s, 1, n))
        for n in (1, U32_MAX)
    ),
    _no_device(C.GET_ALIGNMENT, 1, lambda s, n: for_device(C.GET_ALIGNMENT, n)),
    _no_device(C.GET_MAX_SIZE, 1, lambda s, n: for_device(C.GET_MAX_SIZE, n)),
    _no_device(C.GET_DEVICE_MEMORY, 1, lambda s, n: for_device(C.GET_DEVICE_MEMORY, n)),
    _no_device(C.GET_ALLOC_SIZE, 1, lambda s, n: alloc_size(s.t, device=n)),
    _no_device(C.COMM_FREE, 1, lambda s, n: for_device(C.COMM_FREE, n)),
]

HANDLES = [
    *(
        _no_handle(number, kind, pick)
        for number in (C.BUFFER_GET_BASE, C.BUFFER_CLEAR)
        for kind, pick in [
            ("zero", lambda s: 0),
            ("foreign", lambda s: s.foreign.handle),
            ("freed", lambda s: s.freed.handle),
            ("wrong", lambda s: s.buffer.handle ^ 1),
        ]
    ),
    Case(
        "foreign handle in FREE_BUFFER",
        "FREE_BUFFER: no buffer has the handle",
        lambda s: for_handle(C.FREE_BUFFER, s.foreign.handle),
        lambda s: for_handle(C.FREE_BUFFER, s.buffer.handle),
    ),
    Case(
        "freed twice",
        "FREE_BUFFER: no buffer has the handle",
        lambda s: for_handle(C.FREE_BUFFER, s.freed.handle),
    ),
]

RECORDS = [
    Case(
        "type 43",
        "SET_TENSOR: type 43 does not exist",
        lambda s: set_tensor(s.t._replace(type=43)),
        lambda s: set_tensor(s.t._replace(type=30)),
    ),
    Case(
        "type of 32 bits",
        "GET_TENSOR: type 4294967295 does not exist",
        lambda s: get_tensor(s.t._replace(type=U32_MAX)),
    ),
    Case(
        "a removed type",
        "MEMSET_TENSOR: type 4 does not exist",
        lambda s: memset(s.t._replace(type=4)),
    ),
    Case(
        "type 43 in GET_ALLOC_SIZE",
        "GET_ALLOC_SIZE: type 43 does not exist",
        lambda s: alloc_size(s.t._replace(type=43)),
    ),
    Case(
        "type 36 of a source in GET_ALLOC_SIZE",
        "GET_ALLOC_SIZE: type 36 does not exist",
        lambda s: alloc_size(s.t, s.end._replace(type=36)),
        lambda s: alloc_size(s.t, s.end._replace(type=36, id=0)),
    ),
    Case(
        "op 101",
        "INIT_TENSOR: op 101 does not exist",
        lambda s: init(s.t._replace(op=101)),
        lambda s: init(s.t._replace(op=100)),
    ),
    Case(
        "part of a block",
        "SET_TENSOR: row of 1 is no multiple of q4_0's block",
        lambda s: set_tensor(s.t._replace(type=Q4_0, ne=(1, 1, 1, 1))),
        lambda s: set_tensor(s.t._replace(type=Q4_0, ne=(32, 1, 1, 1))),
    ),
    Case(
        "part of a block in GET_ALLOC_SIZE",
        "GET_ALLOC_SIZE: row of 1 is no multiple",
        lambda s: alloc_size(s.t._replace(type=Q4_0, ne=(1, 1, 1, 1))),
    ),
    Case(
        "elements that wrap to none",
        "INIT_TENSOR: shape .* is too large",
        lambda s: init(s.t._replace(ne=(1 << 16,) * 4, nb=(0,) * 4)),
        lambda s: init(s.t._replace(ne=(1 << 15,) * 4, nb=(0,) * 4)),
    ),
    Case(
        "elements in GET_ALLOC_SIZE",
        "GET_ALLOC_SIZE: shape .* is too large",
        lambda s: alloc_size(s.t._replace(ne=(U32_MAX,) * 4)),
    ),
    Case(
        "strides that wrap",
        "GET_TENSOR: tensor of .* bytes at offset 64 is outside its buffer of 256",
        lambda s: get_tensor(
            s.t._replace(ne=(U32_MAX, 3, 1, 1), nb=(U32_MAX, U32_MAX, 0, 0))
        ),
        lambda s: get_tensor(s.t._replace(ne=(16, 3, 1, 1), nb=(4, 64, 0, 0))),
    ),
    Case(
        "data without a buffer",
        "SET_TENSOR: no buffer has the handle 0x0000000000000000",
        lambda s: set_tensor(s.t._replace(buffer=0)),
    ),
    Case(
        "no buffer, no data",
        "COPY_TENSOR: no buffer has the handle",
        lambda s: copy(s.t, s.end._replace(buffer=0, data=0)),
        lambda s: copy(s.t, s.end),
    ),
    Case(
        "foreign handle in SET_TENSOR",
        "SET_TENSOR: no buffer has the handle",
        lambda s: set_tensor(tensor(1, s.foreign)),
        lambda s: set_tensor(tensor(1, s.buffer)),
    ),
    Case(
        "foreign handle in GET_TENSOR",
        "GET_TENSOR: no buffer has the handle",
        lambda s: get_tensor(s.t._replace(buffer=s.foreign.handle)),
    ),
    Case(
        "foreign source in COPY_TENSOR",
        "COPY_TENSOR: no buffer has the handle",
        lambda s: copy(tensor(1, s.foreign), s.t),
    ),
    Case(
        "freed handle in MEMSET_TENSOR",
        "MEMSET_TENSOR: no buffer has the handle",
        lambda s: memset(tensor(1, s.freed)),
    ),
    Case(
        "freed after use",
        "GET_TENSOR: no buffer has the handle",
        _freed_after_use,
    ),
    Case(
        "foreign handle in INIT_TENSOR",
        "INIT_TENSOR: no buffer has the handle",
        lambda s: init(tensor(1, s.foreign)),
        lambda s: init(s.t),
    ),
    Case(
        "foreign handle in SET_TENSOR_2D",
        "SET_TENSOR_2D: no buffer has the handle",
        lambda s: set_rows(tensor(1, s.foreign)),
        dialects=(V8,),
    ),
    Case(
        "foreign handle in GET_TENSOR_2D",
        "GET_TENSOR_2D: no buffer has the handle",
        lambda s: get_rows(tensor(1, s.foreign)),
        dialects=(V8,),
    ),
    _outside("a byte below", lambda b: b.base - 1, C.SET_TENSOR),
    _outside("a byte too high", lambda b: b.base + 193, C.GET_TENSOR),
    _outside("past the end", lambda b: b.base + b.size, C.MEMSET_TENSOR),
    _outside("in the gap", lambda b: b.base + (1 << 32), C.INIT_TENSOR),
    _outside("at zero", lambda b: 0, C.SET_TENSOR),
    _outside("a real address", lambda b: 0x7FFF_0000_0000, C.GET_TENSOR),
    _outside("at the top", lambda b: U64_MAX - (1 << 62), C.SET_TENSOR),
    Case(
        "an address that wraps",
        "SET_TENSOR: ",
        lambda s: set_tensor(s.t._replace(data=U64_MAX - 31)),
    ),
    Case(
        "nothing, past the end",
        "GET_TENSOR: tensor of 0 bytes at offset 257 is outside",
        lambda s: get_tensor(tensor(1, s.buffer, 257, ne=(0,)), size=0),
        lambda s: get_tensor(tensor(1, s.buffer, 256, ne=(0,)), size=0),
    ),
]


RANGES = [
    Case(
        "a byte more than the tensor",
        "SET_TENSOR: 4 bytes at 61 in a tensor of 64",
        lambda s: set_tensor(s.t, offset=61),
        lambda s: set_tensor(s.t, offset=60),
    ),
    Case(
        "a byte after the buffer",
        "SET_TENSOR: 1 bytes at 64 in a tensor of 64",
        lambda s: set_tensor(s.end, b"x", offset=64),
        lambda s: set_tensor(s.end, b"", offset=64),
    ),
    Case(
        "nothing, after the tensor",
        "SET_TENSOR: 0 bytes at 65 in a tensor of 64",
        lambda s: set_tensor(s.t, b"", offset=65),
    ),
    Case(
        "an offset that wraps",
        f"SET_TENSOR: 4 bytes at {U64_MAX - 3} in",
        lambda s: set_tensor(s.t, offset=U64_MAX - 3),
    ),
    Case(
        "a read too long",
        "GET_TENSOR: 65 bytes at 0 in a tensor of 64",
        lambda s: get_tensor(s.t, 0, 65),
        lambda s: get_tensor(s.t, 0, 64),
    ),
    Case(
        "a read of everything",
        f"GET_TENSOR: {U64_MAX} bytes at 0 in",
        lambda s: get_tensor(s.t, 0, U64_MAX),
    ),
    Case(
        "a read that wraps",
        f"GET_TENSOR: {1 << 63} bytes at {1 << 63} in",
        lambda s: get_tensor(s.t, 1 << 63, 1 << 63),
    ),
    Case(
        "a fill too long",
        "MEMSET_TENSOR: 64 bytes at 1 in a tensor of 64",
        lambda s: memset(s.t, 1, 64),
        lambda s: memset(s.t, 1, 63),
    ),
    Case(
        "a fill that wraps",
        f"MEMSET_TENSOR: 2 bytes at {U64_MAX} in",
        lambda s: memset(s.t, U64_MAX, 2),
    ),
    Case(
        "a copy into a smaller tensor",
        "COPY_TENSOR: 64 bytes into a tensor of 32",
        lambda s: copy(s.t, s.a),
        lambda s: copy(s.a, s.t),
    ),
    Case(
        "hidden bytes count in a copy",
        "COPY_TENSOR: 68 bytes into a tensor of 64",
        lambda s: copy(s.t._replace(ne=(2, 1, 1, 1), nb=(64, 64, 64, 64)), s.end),
        lambda s: copy(s.t._replace(ne=(2, 1, 1, 1), nb=(60, 64, 64, 64)), s.end),
    ),
]

ROWS = [
    Case(name, reason, bad, legal, dialects=(V8,))
    for name, reason, bad, legal in [
        (
            "no rows to write",
            "SET_TENSOR_2D: no rows",
            lambda s: set_rows(s.t, b"", n=0),
            None,
        ),
        (
            "empty rows to write",
            "SET_TENSOR_2D: no rows",
            lambda s: set_rows(s.t, b"", size=0),
            None,
        ),
        (
            "no rows to read",
            "GET_TENSOR_2D: no rows",
            lambda s: get_rows(s.t, n=0),
            None,
        ),
        (
            "empty rows to read",
            "GET_TENSOR_2D: no rows",
            lambda s: get_rows(s.t, size=0, n=U64_MAX),
            None,
        ),
        (
            "less data than rows",
            "SET_TENSOR_2D: 2 rows of 2 in 3 bytes",
            lambda s: set_rows(s.t, b"dat"),
            lambda s: set_rows(s.t),
        ),
        (
            "rows that wrap to no data",
            f"SET_TENSOR_2D: 2 rows of {1 << 63} in 0 bytes",
            lambda s: set_rows(s.t, b"", size=1 << 63, n=2, stride=0),
            None,
        ),
        (
            "a stride that wraps",
            "SET_TENSOR_2D: .* bytes at 0 in a tensor of 64",
            lambda s: set_rows(s.t, n=2, stride=U64_MAX - 1),
            lambda s: set_rows(s.t, n=2, stride=62),
        ),
        (
            "a stride that wraps to the tensor",
            "GET_TENSOR_2D: .* bytes at 0 in a tensor of 64",
            lambda s: get_rows(s.t, n=5, stride=1 << 62),
            None,
        ),
        (
            "the last row a byte too far",
            "SET_TENSOR_2D: 10 bytes at 55 in a tensor of 64",
            lambda s: set_rows(s.t, offset=55),
            lambda s: set_rows(s.t, offset=54),
        ),
        (
            "an offset that wraps in rows",
            "GET_TENSOR_2D: 10 bytes at 18446744073709551608 in",
            lambda s: get_rows(s.t, offset=U64_MAX - 7),
            lambda s: get_rows(s.t, offset=54),
        ),
        (
            "an answer that wraps",
            "GET_TENSOR_2D: .* bytes at 0 in a tensor of 64",
            lambda s: get_rows(s.t, size=1 << 33, n=1 << 31, stride=0),
            None,
        ),
        (
            "an answer without a bound",
            "GET_TENSOR_2D: 1099511627776 rows of 64 repeat too much",
            lambda s: get_rows(s.t, size=64, n=1 << 40, stride=0),
            lambda s: get_rows(s.t, size=64, n=1 << 10, stride=0),
        ),
    ]
]

GRAPHS = [
    Case(
        "no nodes, no tensors", G + "a graph without nodes", lambda s: counts(s, 0, 0)
    ),
    Case(
        "no nodes",
        G + "a graph without nodes",
        lambda s: compute(s, graph([], [s.a])),
        lambda s: compute(s, graph([s.a], [])),
    ),
    Case("no tensors", G + "a graph without nodes", lambda s: counts(s, 1, 0)),
    Case(
        "nothing but the header",
        G + "length (8|16), expected at least (12|20)",
        lambda s: Request(C.GRAPH_COMPUTE, bytes(s.dialect.shapes[0x0A].least)),
    ),
    Case(
        "more nodes than bytes",
        G + "length .*, expected at least",
        lambda s: counts(s, MAX_GRAPH_NODES, 1),
    ),
    Case(
        "more tensors than bytes",
        G + "length .*, expected at least",
        lambda s: counts(s, 1, 2, s.a.encode()),
    ),
    Case(
        "too many nodes",
        G + f"node count {U32_MAX} is over {MAX_GRAPH_NODES}",
        lambda s: counts(s, U32_MAX, 1),
    ),
    Case(
        "too many tensors",
        G + f"tensor count {MAX_GRAPH_TENSORS + 1} is over",
        lambda s: counts(s, 1, MAX_GRAPH_TENSORS + 1),
    ),
    Case(
        "node id 0",
        G + "node id 0",
        lambda s: compute(
            s, graph([s.c], [s.a, s.b])._replace(nodes=np.array([13, 0], np.uint64))
        ),
        lambda s: addition(s),
    ),
    Case(
        "node id 0 with a record",
        G + "node id 0",
        lambda s: compute(s, graph([s.c._replace(id=0)], [s.a, s.b])),
    ),
    Case(
        "a node that is not sent",
        rf"{G}node that is not sent \(99\)",
        lambda s: compute(
            s, graph([s.c], [s.a, s.b])._replace(nodes=np.array([99], np.uint64))
        ),
    ),
    Case(
        "a source that is not sent",
        rf"{G}source that is not sent \(12\)",
        lambda s: compute(s, graph([s.c], [s.a])),
        lambda s: compute(s, graph([s.c], [s.a, s.b])),
    ),
    Case(
        "a source of a source that is not sent",
        rf"{G}source that is not sent \(99\)",
        lambda s: addition_of(s, src=(99,) + (0,) * 9),
    ),
    Case(
        "a viewed tensor that is not sent",
        rf"{G}viewed tensor that is not sent \({U64_MAX}\)",
        lambda s: addition(s, view_src=U64_MAX),
        lambda s: addition(s, view_src=11),
    ),
    Case(
        "a node twice",
        G + "a node is listed twice",
        lambda s: compute(
            s, graph([s.c], [s.a, s.b])._replace(nodes=np.array([13, 13], np.uint64))
        ),
    ),
    *map(_pointer, (92, 93, 94, 95)),
    Case(
        "op 95 of a source",
        G + "op that carries a function pointer",
        lambda s: addition_of(s, op=95),
    ),
    Case(
        "op 101 of a node", G + "op that does not exist", lambda s: addition(s, op=101)
    ),
    Case(
        "op of 32 bits",
        G + "op that does not exist",
        lambda s: addition(s, op=U32_MAX),
    ),
    Case(
        "type 43 of a node",
        rf"{G}type that does not exist \(43\)",
        lambda s: addition(s, type=43),
    ),
    Case(
        "type of 32 bits of a source",
        G + "type that does not exist",
        lambda s: addition_of(s, type=1 << 31),
    ),
    Case(
        "a removed type of a source",
        rf"{G}type that was removed \(5\)",
        lambda s: addition_of(s, type=5),
    ),
    Case(
        "part of a block of a source",
        G + "row that is no multiple of its type's block",
        lambda s: addition_of(s, type=Q4_0, ne=(1, 1, 1, 1)),
    ),
    Case(
        "elements that wrap in a graph",
        G + "shape that is too large",
        lambda s: addition(s, ne=(1 << 16,) * 4),
    ),
    Case(
        "strides that wrap in a graph",
        G + "strides that are too large",
        lambda s: addition_of(s, ne=(U32_MAX, 2, 1, 1), nb=(U32_MAX,) * 4),
    ),
    Case(
        "strides that leave the buffer",
        G + "tensor outside its buffer",
        lambda s: addition_of(s, nb=(4, 4, 4, 4), ne=(8, 60, 1, 1)),
    ),
    Case(
        "a node a byte outside",
        G + "tensor outside its buffer",
        lambda s: addition(s, data=s.buffer.base + 225),
        lambda s: addition(s, data=s.buffer.base + 224),
    ),
    Case(
        "a source a byte below",
        G + "tensor outside its buffer",
        lambda s: addition_of(s, data=s.buffer.base - 1),
    ),
    Case(
        "a source at zero",
        G + "tensor outside its buffer",
        lambda s: addition_of(s, data=0),
    ),
    Case(
        "a source that wraps",
        G + "tensor outside its buffer",
        lambda s: addition_of(s, data=U64_MAX - 7),
    ),
    Case(
        "a view outside",
        G + "tensor outside its buffer",
        lambda s: addition_of(s, data=s.buffer.base + 256, op=37, view_src=12),
    ),
    Case(
        "an unused record outside",
        G + "tensor outside its buffer",
        lambda s: compute(s, graph([s.c], [s.a, s.b, s.t._replace(data=1)])),
        lambda s: compute(s, graph([s.c], [s.a, s.b, s.t])),
    ),
    Case(
        "another buffer's address",
        G + "tensor outside its buffer",
        lambda s: addition_of(s, data=s.client.alloc(256).base),
    ),
    Case(
        "a source in no buffer",
        G + "tensor without a live buffer has an address",
        lambda s: addition_of(s, buffer=0),
    ),
    Case(
        "a node in a foreign buffer",
        G + "tensor without a live buffer has an address",
        lambda s: addition(s, buffer=s.foreign.handle, data=s.foreign.base),
    ),
    Case(
        "a source in a freed buffer",
        G + "tensor without a live buffer has an address",
        lambda s: addition_of(s, buffer=s.freed.handle, data=s.freed.base),
    ),
    Case(
        "a node whose elements overlap",
        G + "node whose elements overlap",
        lambda s: addition(s, ne=(8, 2, 1, 1), nb=(4, 0, 0, 0)),
    ),
    Case(
        "a node whose rows overlap",
        G + "node whose elements overlap",
        lambda s: addition(s, ne=(4, 2, 1, 1), nb=(4, 12, 0, 0)),
        lambda s: addition(s, nb=(4, 0, 0, 0)),
    ),
    Case(
        "a node without memory",
        G + "node works on a tensor without memory",
        lambda s: addition(s, buffer=0, data=0),
    ),
    Case(
        "a source without memory",
        G + "node works on a tensor without memory",
        lambda s: addition_of(s, buffer=0, data=0),
    ),
]

REPEATS = [
    Case(
        "nothing to run again",
        "GRAPH_RECOMPUTE: no graph .* on device 0",
        lambda s: recompute(s, 1),
    ),
    Case(
        "an unknown uid",
        "GRAPH_RECOMPUTE: no graph 6 on device 0",
        lambda s: recompute(s, 6),
        lambda s: compute(s, graph([s.c], [s.a, s.b], uid=5)),
        dialects=(V8,),
    ),
    Case(
        "uid 0",
        "GRAPH_RECOMPUTE: no graph 0 on device 0",
        lambda s: recompute(s, 0),
        lambda s: compute(s, graph([s.c], [s.a, s.b], uid=0)),
        dialects=(V8,),
    ),
    Case(
        "COMM_ALLREDUCE",
        "COMM_ALLREDUCE: there is no communicator",
        lambda s: Request(C.COMM_ALLREDUCE, m.U32.pack(0) + s.t.encode()),
        dialects=(V8,),
    ),
]

CASES = [
    *HEADERS,
    *LENGTHS,
    *DEVICES,
    *HANDLES,
    *RECORDS,
    *RANGES,
    *ROWS,
    *GRAPHS,
    *REPEATS,
]
