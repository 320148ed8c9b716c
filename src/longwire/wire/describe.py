"""What a message says, as a few words and numbers for people and for JSON.

Only the heads of messages are looked at; `kept` says how much of one is needed. What
is secret, nonces and proofs, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from longwire.errors import ProtocolError
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.constants import LX_OFFERS, Command
from longwire.wire.dialects import Dialect
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.links import LinkConnect, LinkPart, Listening
from longwire.wire.lx import LxDevice, LxStart, LxStartAnswer, SetDigest, Top
from longwire.wire.ops import OP_NAMES
from longwire.wire.patches import PATCH_HEAD, GraphPatch
from longwire.wire.prepared import PrepareSet
from longwire.wire.spans import TraceAnswer, TraceRequest
from longwire.wire.tensors import TENSOR_SIZE

__all__ = ["Details", "describe_answer", "describe_request", "kept"]

Details = dict[str, Any]

_NAME = slice(228, 292)
"""Where a tensor record has its name."""

_OP = slice(52, 56)

_LARGEST_GRAPH = 8 << 20
"""Bytes of a graph whose operations are counted; larger ones pass uncounted."""

_HEADS: Mapping[int, int] = {
    Command.SET_TENSOR: m.SET_TENSOR_HEAD,
    Command.SET_TENSOR_2D: m.SET_TENSOR_2D_HEAD,
    Command.GET_ALLOC_SIZE: 4 + TENSOR_SIZE,
    Command.LX_SUPPORTS_OPS: 8,
    Command.LX_HAVE: 4,
    Command.LX_GRAPH_PATCH: PATCH_HEAD,
    Command.LX_SET_PREPARED: 4,
}
"""How much of a request tells what it is about, where that is not all of it."""

_DATA = (Command.GET_TENSOR, Command.GET_TENSOR_2D, Command.LX_TOP)
"""Their answers are nothing but data."""


def kept(command: int, length: int, *, answer: bool = False) -> int:
    """How many bytes of a body its description needs."""
    if answer:
        return 0 if command in _DATA else length
    if command == Command.GRAPH_COMPUTE and length > _LARGEST_GRAPH:
        return 0
    return min(length, _HEADS.get(command, length))


def describe_request(
    command: int,
    head: m.Bytes,
    length: int,
    dialect: Dialect | None = None,
    ops: Sequence[str] = OP_NAMES,
) -> Details:
    """What a request of that length asks for.

    Graphs need the dialect they are in; `ops` are the names of their operations.
    """
    if command in (Command.GRAPH_COMPUTE, Command.GRAPH_RECOMPUTE):
        if dialect is None or len(head) < length:
            return {}
        if command == Command.GRAPH_COMPUTE:
            return _graph(dialect, head, ops)
        return GraphRecompute.decode(dialect, head)._asdict()
    details = _described(_REQUESTS.get(command), head)
    if command == Command.SET_TENSOR:
        details["size"] = length - len(head)
    return details


def describe_answer(command: int, head: m.Bytes) -> Details:
    """What an answer says that is no error."""
    return _described(_ANSWERS.get(command), head)


def _described(describe: Callable[[m.Bytes], Details] | None, head: m.Bytes) -> Details:
    try:
        return describe(head) if describe else {}
    except ProtocolError as error:
        return {"problem": str(error)}


def _name(record: m.Bytes) -> str:
    name = bytes(record[_NAME]).split(b"\0", 1)[0]
    return name.decode("utf-8", "replace")


def _op_name(number: int, ops: Sequence[str] = OP_NAMES) -> str:
    return ops[number] if number < len(ops) else str(number)


def _graph(dialect: Dialect, body: m.Bytes, ops: Sequence[str]) -> Details:
    try:
        graph = Graph.decode(dialect, body)
    except ProtocolError as error:
        return {"problem": str(error)}
    nodes = np.isin(graph.tensors["id"], graph.nodes)
    numbers, counts = np.unique(graph.tensors["op"][nodes], return_counts=True)
    names = (_op_name(number, ops) for number in numbers.tolist())
    return {
        "device": graph.device,
        "uid": graph.uid,
        "nodes": len(graph.nodes),
        "tensors": len(graph.tensors),
        "ops": dict(zip(names, counts.tolist(), strict=True)),
    }


def _number(name: str) -> Callable[[m.Bytes], Details]:
    def describe(body: m.Bytes) -> Details:
        codec = {1: m.U8, 4: m.U32, 8: m.U64}[len(body)]
        return {name: codec.unpack(body)[0]}

    return describe


def _handle(name: str) -> Callable[[m.Bytes], Details]:
    return lambda body: {name: f"{m.U64.unpack(body)[0]:#x}"}


def _part(message: Any, *fields: str) -> Details:
    """The tensor's name, and some fields."""
    found: Details = {"tensor": _name(message.tensor)}
    return found | {field: getattr(message, field) for field in fields}


def _set_tensor(head: m.Bytes) -> Details:
    message = m.SetTensor.decode(head)
    cached = {"cache": True} if message.cache_flag else {}
    return {**_part(message, "offset"), **cached}


def _set_tensor_hash(body: m.Bytes) -> Details:
    message = m.SetTensorHash.decode(body)
    return {**_part(message, "offset"), "hash": f"{message.hash:016x}"}


def _copy_tensor(body: m.Bytes) -> Details:
    message = m.CopyTensor.decode(body)
    return {"tensor": _name(message.src), "to": _name(message.dst)}


def _get_alloc_size(head: m.Bytes) -> Details:
    record = head[4:]
    op = _op_name(int.from_bytes(record[_OP], "little"))
    return {**_number("device")(head[:4]), "tensor": _name(record), "op": op}


def _buffer_clear(body: m.Bytes) -> Details:
    message = m.BufferClear.decode(body)
    return {"buffer": f"{message.handle:#x}", "value": message.value}


def _comm_init(body: m.Bytes) -> Details:
    message = m.CommInit.decode(body)
    return {"device": message.device, "rank": message.rank, "world": message.world}


def _graph_patch(head: m.Bytes) -> Details:
    names = ("device", "uid", "base", "words")
    return dict(zip(names, GraphPatch.decode_head(head), strict=True))


def _set_digest(body: m.Bytes) -> Details:
    message = SetDigest.decode(body)
    return {**_part(message, "offset", "size"), "digest": message.digest.hex()}


def _connect(body: m.Bytes) -> Details:
    message = LinkConnect.decode(body)
    tls = {"tls": True} if message.certificate else {}
    return {"host": message.host, "port": message.port, **tls}


def _link_part(body: m.Bytes) -> Details:
    return _part(LinkPart.decode(body), "link", "offset", "size")


def _lx_comm_init(body: m.Bytes) -> Details:
    message = LxCommInit.decode(body)
    servers = {"rank": message.own, "world": len(message.links)}
    return {"comm": message.comm, **servers, "devices": len(message.devices)}


def _lx_allreduce(body: m.Bytes) -> Details:
    message = LxAllreduce.decode(body)
    absent = {"absent": message.absent} if message.absent else {}
    return {"comm": message.comm, "tensor": _name(message.tensors[0]), **absent}


_ROWS = ("offset", "size", "n_copies", "stride")

_REQUESTS: Mapping[int, Callable[[m.Bytes], Details]] = {
    Command.ALLOC_BUFFER: lambda b: m.AllocBuffer.decode(b)._asdict(),
    Command.GET_ALIGNMENT: _number("device"),
    Command.GET_MAX_SIZE: _number("device"),
    Command.BUFFER_GET_BASE: _handle("buffer"),
    Command.FREE_BUFFER: _handle("buffer"),
    Command.BUFFER_CLEAR: _buffer_clear,
    Command.SET_TENSOR: _set_tensor,
    Command.SET_TENSOR_HASH: _set_tensor_hash,
    Command.GET_TENSOR: lambda b: _part(m.GetTensor.decode(b), "offset", "size"),
    Command.COPY_TENSOR: _copy_tensor,
    Command.GET_DEVICE_MEMORY: _number("device"),
    Command.INIT_TENSOR: lambda b: {"tensor": _name(b)},
    Command.GET_ALLOC_SIZE: _get_alloc_size,
    Command.MEMSET_TENSOR: lambda b: _part(
        m.MemsetTensor.decode(b), "offset", "size", "value"
    ),
    Command.SET_TENSOR_2D: lambda b: _part(m.SetTensor2D.decode(b), *_ROWS),
    Command.GET_TENSOR_2D: lambda b: _part(m.GetTensor2D.decode(b), *_ROWS),
    Command.COMM_INIT: _comm_init,
    Command.COMM_ALLREDUCE: lambda b: _part(m.CommAllreduce.decode(b), "device"),
    Command.COMM_FREE: _number("device"),
    Command.LX_START: lambda b: LxStart.decode(b)._asdict(),
    Command.LX_DEVICE: _number("device"),
    Command.LX_SUPPORTS_OPS: lambda b: {
        **_number("device")(b[:4]),
        **_number("count")(b[4:]),
    },
    Command.LX_TOP: lambda b: _part(Top.decode(b), "offset", "size", "k"),
    Command.LX_HAVE: _number("count"),
    Command.LX_SET_DIGEST: _set_digest,
    Command.LX_GRAPH_PATCH: _graph_patch,
    Command.LX_TRACE: lambda b: TraceRequest.decode(b)._asdict(),
    Command.LX_CONNECT: _connect,
    Command.LX_UNLINK: _number("link"),
    Command.LX_SEND: _link_part,
    Command.LX_RECEIVE: _link_part,
    Command.LX_COMM_INIT: _lx_comm_init,
    Command.LX_ALLREDUCE: _lx_allreduce,
    Command.LX_COMM_FREE: _number("comm"),
    Command.LX_PREPARE_SET: lambda b: _part(
        PrepareSet.decode(b), "number", "offset", "size"
    ),
    Command.LX_SET_PREPARED: _number("count"),
}


def _hello(body: m.Bytes) -> Details:
    hello = m.HelloAnswer.decode(body)
    version = f"{hello.major}.{hello.minor}.{hello.patch}"
    return {"protocol": version, "lx": hello.padding in LX_OFFERS}


def _allocated(body: m.Bytes) -> Details:
    answer = m.AllocBufferAnswer.decode(body)
    return {"buffer": f"{answer.handle:#x}", "size": answer.size}


def _started(body: m.Bytes) -> Details:
    answer = LxStartAnswer.decode(body)
    return {"version": answer.version, "engine": answer.engine, "flags": answer.flags}


def _recorded(body: m.Bytes) -> Details:
    answer = TraceAnswer.decode(body)
    return {"spans": len(answer.spans), "lost": answer.lost}


def _marks(body: m.Bytes) -> Details:
    return {"yes": sum(map(bool, body)), "count": len(body)}


_ANSWERS: Mapping[int, Callable[[m.Bytes], Details]] = {
    Command.HELLO: _hello,
    Command.ALLOC_BUFFER: _allocated,
    Command.GET_ALIGNMENT: _number("alignment"),
    Command.GET_MAX_SIZE: _number("max_size"),
    Command.BUFFER_GET_BASE: _handle("base"),
    Command.SET_TENSOR_HASH: _number("done"),
    Command.COPY_TENSOR: _number("done"),
    Command.COMM_INIT: _number("done"),
    Command.GET_DEVICE_MEMORY: lambda b: m.DeviceMemory.decode(b)._asdict(),
    Command.GET_ALLOC_SIZE: _number("size"),
    Command.DEVICE_COUNT: _number("count"),
    Command.LX_START: _started,
    Command.LX_DEVICE: lambda b: LxDevice.decode(b)._asdict(),
    Command.LX_SUPPORTS_OPS: _marks,
    Command.LX_HAVE: _marks,
    Command.LX_TRACE: _recorded,
    Command.LX_LISTEN: lambda b: {"port": Listening.decode(b).port},
    Command.LX_CONNECT: _number("link"),
    Command.LX_ACCEPT: _number("link"),
}
