"""One function per command, found in a table.

Each decodes, checks everything, and only then acts. What it returns is the
answer's body in pieces; commands that are never answered return None. The two
commands with bulk data receive it themselves, straight into the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from longwire.errors import BadRequest, RemoteFailure
from longwire.native.memory import address_of, copy, fill
from longwire.server.collectives import COMM_HANDLERS
from longwire.server.computing import graph_compute, graph_patch, graph_recompute
from longwire.server.digests import have, keep, set_digest, set_tensor_hash
from longwire.server.lx import LX_HANDLERS
from longwire.server.state import Handler, Pieces, SessionState
from longwire.server.tensors import CheckedTensor, LinkedTensor
from longwire.server.top import largest
from longwire.server.transfers import LINK_HANDLERS
from longwire.wire import messages as m
from longwire.wire.constants import LX_VERSION, Command
from longwire.wire.lx import TOP_MOST, Top
from longwire.wire.prepared import PrepareSet, SetPrepared
from longwire.wire.types import F32_TYPE, nbytes

__all__ = ["HANDLERS", "STREAMED"]

_CHUNK = 16 << 20
"""Bulk data for memory that the host cannot reach passes through this much."""


def _hello(s: SessionState, body: memoryview, length: int) -> Pieces:
    m.Hello.decode(body)
    d = s.dialect
    return [m.HelloAnswer(d.major, d.minor, d.patch, padding=LX_VERSION).encode()]


def _device_count(s: SessionState, body: memoryview, length: int) -> Pieces:
    return [m.U32.pack(len(s.devices))]


def _alloc_buffer(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.AllocBuffer.decode(body)
    device = s.device(request.device, "ALLOC_BUFFER")
    try:
        buffer = s.buffers.open(device, request.size)
    except RemoteFailure:
        if s.dialect.lx:
            raise
        return [m.AllocBufferAnswer(0, 0).encode()]
    return [m.AllocBufferAnswer(buffer.handle, buffer.size).encode()]


def _get_alignment(s: SessionState, body: memoryview, length: int) -> Pieces:
    (index,) = m.U32.unpack(body)
    return [m.U64.pack(s.device(index, "GET_ALIGNMENT").alignment())]


def _get_max_size(s: SessionState, body: memoryview, length: int) -> Pieces:
    (index,) = m.U32.unpack(body)
    return [m.U64.pack(s.device(index, "GET_MAX_SIZE").max_size())]


def _get_device_memory(s: SessionState, body: memoryview, length: int) -> Pieces:
    (index,) = m.U32.unpack(body)
    device = s.device(index, "GET_DEVICE_MEMORY")
    return [m.DeviceMemory(*s.memory(device)).encode()]


def _buffer_get_base(s: SessionState, body: memoryview, length: int) -> Pieces:
    (handle,) = m.U64.unpack(body)
    return [m.U64.pack(s.buffers.of(handle, "BUFFER_GET_BASE").base)]


def _free_buffer(s: SessionState, body: memoryview, length: int) -> Pieces:
    (handle,) = m.U64.unpack(body)
    # Checked records hold views of the memory: they go before it does.
    s.tensors.forget()
    s.graphs.drop(handle)
    s.buffers.close(handle, "FREE_BUFFER")
    return None


def _buffer_clear(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.BufferClear.decode(body)
    buffer = s.buffers.of(request.handle, "BUFFER_CLEAR")
    for overlay in buffer.overlays.all():
        s.buffers.fold(buffer, overlay, preserve=False)
    if buffer.size:
        buffer.device.clear(buffer.native, request.value)
    return None


def _set_tensor(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.SetTensor.decode(body)
    size = length - m.SET_TENSOR_HEAD
    tensor = s.tensors.check_range(request.tensor, request.offset, size, "SET_TENSOR")
    kept = bool(request.cache_flag) and s.cache is not None
    target = tensor.bytes(request.offset, size)
    if target is not None:
        if not kept:
            s.tensors.rewrites.remember(body, target)
        s.stream.take_into(target)
        if kept:
            keep(s, target)
        return None
    # The cache wants the data in one piece; nobody else does.
    chunk = memoryview(bytearray(size if kept else min(size, _CHUNK)))
    for at in range(0, size, len(chunk) or 1):
        part = chunk[: min(len(chunk), size - at)]
        s.stream.take_into(part)
        tensor.store(part, request.offset + at)
    if kept:
        keep(s, chunk)
    return None


def _prepare_set(s: SessionState, body: memoryview, length: int) -> Pieces:
    s.prepared.prepare(PrepareSet.decode(body))
    return None


def _set_prepared(s: SessionState, body: memoryview, length: int) -> Pieces:
    s.prepared.do(SetPrepared.decode(body))
    return None


def _get_tensor(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.GetTensor.decode(body)
    tensor = s.tensors.check_range(
        request.tensor, request.offset, request.size, "GET_TENSOR"
    )
    return [tensor.read(request.offset, request.size)]


def _lx_top(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = Top.decode(body)
    if not 0 < request.k <= TOP_MOST:
        raise BadRequest("LX_TOP", f"{request.k} entries, not 1 to {TOP_MOST}")
    record, offset, size, k = request
    tensor = s.tensors.check_range(record, offset, size, "LX_TOP")
    if tensor.tensor.type != F32_TYPE or offset % 4 or size % 4 or not size:
        raise BadRequest("LX_TOP", "no whole f32 numbers")
    values = np.frombuffer(tensor.read(offset, size), "<f4")
    return [largest(values, k).tobytes()]


def _memset_tensor(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.MemsetTensor.decode(body)
    tensor = s.tensors.check_range(
        request.tensor, request.offset, request.size, "MEMSET_TENSOR"
    )
    target = tensor.bytes(request.offset, request.size)
    if target is None:
        tensor.buffer.device.memset_tensor(
            tensor.native, request.value, request.offset, request.size
        )
    elif request.size:
        fill(address_of(target), request.value, request.size)
    return None


def _copy_tensor(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.CopyTensor.decode(body)
    src = s.tensors.check(request.src, "COPY_TENSOR")
    dst = s.tensors.check(request.dst, "COPY_TENSOR")
    if src.nbytes > dst.nbytes:
        raise BadRequest(
            "COPY_TENSOR", f"{src.nbytes} bytes into a tensor of {dst.nbytes}"
        )
    source, target = src.bytes(0, src.nbytes), dst.bytes(0, src.nbytes)
    if source is None or target is None:
        return [m.U8.pack(src.buffer.device.copy_tensor(src.native, dst.native))]
    if src.nbytes:
        copy(address_of(target), address_of(source), src.nbytes)
    return [m.U8.pack(1)]


def _init_tensor(s: SessionState, body: memoryview, length: int) -> Pieces:
    tensor = s.tensors.check(bytes(body), "INIT_TENSOR")
    record = tensor.native
    tensor.buffer.device.init_tensor(tensor.memory, record)
    if record["extra"][0]:
        raise BadRequest("INIT_TENSOR", "the device wants per-tensor state")
    return None


def _get_alloc_size(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "GET_ALLOC_SIZE"
    request = m.GetAllocSize.decode(body)
    device = s.device(request.device, name)
    linked = LinkedTensor(request.tensor, request.srcs, name, s.dialect.lx)
    if not linked.complete:
        # What a device adds depends on sources that it would look at unchecked.
        tensor = linked.tensor
        return [m.U64.pack(nbytes(tensor.type, tensor.ne, tensor.nb))]
    buffer = s.buffers.find(linked.tensor.buffer)
    native = buffer.native.address if buffer else None
    return [m.U64.pack(device.alloc_size(linked.native, native))]


def _set_tensor_2d(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "SET_TENSOR_2D"
    request = m.SetTensor2D.decode(body)
    size = length - m.SET_TENSOR_2D_HEAD
    if request.size * request.n_copies != size:
        raise BadRequest(
            name, f"{request.n_copies} rows of {request.size} in {size} bytes"
        )
    tensor = _checked_rows(s, request, name)
    row = memoryview(bytearray(request.size))
    for i in range(request.n_copies):
        offset = request.offset + i * request.stride
        target = tensor.bytes(offset, request.size)
        if target is not None:
            s.stream.take_into(target)
        else:
            s.stream.take_into(row)
            tensor.store(row, offset)
    return None


def _get_tensor_2d(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "GET_TENSOR_2D"
    request = m.GetTensor2D.decode(body)
    tensor = _checked_rows(s, request, name)
    size = request.size
    if size * request.n_copies > max(tensor.nbytes, _CHUNK):
        # Overlapping rows may repeat bytes, but not without a bound.
        raise BadRequest(name, f"{request.n_copies} rows of {size} repeat too much")
    out = memoryview(bytearray(size * request.n_copies))
    for i in range(request.n_copies):
        offset = request.offset + i * request.stride
        part = out[i * size : (i + 1) * size]
        source = tensor.bytes(offset, size)
        if source is not None:
            part[:] = source
        else:
            tensor.fetch(part, offset)
    return [out]


def _checked_rows(
    s: SessionState, request: m.SetTensor2D | m.GetTensor2D, command: str
) -> CheckedTensor:
    if request.size == 0 or request.n_copies == 0:
        raise BadRequest(command, "no rows, or rows without bytes")
    span = (request.n_copies - 1) * request.stride + request.size
    return s.tensors.check_range(request.tensor, request.offset, span, command)


HANDLERS: Mapping[int, Handler] = {
    Command.ALLOC_BUFFER: _alloc_buffer,
    Command.GET_ALIGNMENT: _get_alignment,
    Command.GET_MAX_SIZE: _get_max_size,
    Command.BUFFER_GET_BASE: _buffer_get_base,
    Command.FREE_BUFFER: _free_buffer,
    Command.BUFFER_CLEAR: _buffer_clear,
    Command.SET_TENSOR: _set_tensor,
    Command.SET_TENSOR_HASH: set_tensor_hash,
    Command.GET_TENSOR: _get_tensor,
    Command.COPY_TENSOR: _copy_tensor,
    Command.GRAPH_COMPUTE: graph_compute,
    Command.GET_DEVICE_MEMORY: _get_device_memory,
    Command.INIT_TENSOR: _init_tensor,
    Command.GET_ALLOC_SIZE: _get_alloc_size,
    Command.HELLO: _hello,
    Command.DEVICE_COUNT: _device_count,
    Command.GRAPH_RECOMPUTE: graph_recompute,
    Command.MEMSET_TENSOR: _memset_tensor,
    Command.SET_TENSOR_2D: _set_tensor_2d,
    Command.GET_TENSOR_2D: _get_tensor_2d,
    Command.LX_TOP: _lx_top,
    Command.LX_HAVE: have,
    Command.LX_SET_DIGEST: set_digest,
    Command.LX_GRAPH_PATCH: graph_patch,
    Command.LX_PREPARE_SET: _prepare_set,
    Command.LX_SET_PREPARED: _set_prepared,
    **LX_HANDLERS,
    **LINK_HANDLERS,
    **COMM_HANDLERS,
}

STREAMED: Mapping[int, int] = {
    Command.SET_TENSOR: m.SET_TENSOR_HEAD,
    Command.SET_TENSOR_2D: m.SET_TENSOR_2D_HEAD,
}
"""Commands whose handler receives the body after a head of this size."""
