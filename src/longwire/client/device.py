"""A remote device's verbs, one method each; ggml calls them through the plugin."""

from __future__ import annotations

import logging
import re
import threading

from longwire.client.connection import Connection
from longwire.client.records import (
    NativeTensor,
    Records,
    buffers_of,
    read_tensor,
)
from longwire.client.reuse import GraphReuse
from longwire.errors import LongwireError, RemoteError, RemoteFailure
from longwire.native import memory
from longwire.native.abi import Usage
from longwire.native.graph import graph_uid
from longwire.native.plugin import DevicePlugin, Registry
from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, POINTER_OPS, U64_MAX, Command
from longwire.wire.fnv import fnv1a_64
from longwire.wire.graphs import GraphRecompute
from longwire.wire.tensors import NULL_TENSOR
from longwire.wire.types import QUANTIZED

__all__ = ["RemoteBuffer", "RemoteDevice", "Session"]

_log = logging.getLogger("longwire.client")

_SIZE_QUERY_OPS = frozenset({16, 29, 30, 69, 70, 74})
"""CUMSUM, MUL_MAT, MUL_MAT_ID, ARGSORT, TOP_K, FLASH_ATTN_EXT: a device may want
more than the tensor's bytes for these (`ggml_op_alloc_size_may_expand`)."""

_PADDED_ROW = 512
"""CUDA pads quantised rows that are no multiple of this."""

_BLOCK = re.compile(rb"blk\.(\d+)\.")


class Session:
    """What all devices of one connection share."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.buffers: dict[int, RemoteBuffer] = {}
        """Live buffers by the address of their `ggml_backend_buffer`."""
        self.records = Records(self.buffers)
        self.reuse = GraphReuse(connection.dialect)
        self.alloc_sizes: dict[tuple[object, ...], int] = {}
        self.order = threading.RLock()
        """Held while `reuse` changes and the command that changes it is queued."""


# Buffers of every connection: a copy between two of them starts from an address.
_live: dict[int, RemoteBuffer] = {}


class RemoteDevice:
    """One device of a remote server, under the name that ggml knows it by."""

    def __init__(
        self, registry: Registry, name: str, index: int, session: Session
    ) -> None:
        self.name = name
        self.index = index
        self.registry = registry
        self.endpoint: Endpoint = session.connection.endpoint
        self.description = str(self.endpoint)
        self.attach(session)
        self._nbytes = registry.engine.library.ggml_nbytes
        self.plugin: DevicePlugin = registry.add(self)

    def attach(self, session: Session) -> None:
        """Use a fresh connection from now on; buffers of the old one stay dead."""
        self.session = session
        self.layers: set[int] = set()
        """Model layers whose weights were put here."""
        self.weight_bytes = 0
        self._alignment: int | None = None
        self._max_size: int | None = None

    @property
    def connection(self) -> Connection:
        return self.session.connection

    @property
    def allocated(self) -> int:
        """Bytes in live buffers on this device."""
        return sum(b.size for b in self.session.buffers.values() if b.device is self)

    def failed(self, error: BaseException) -> None:
        """Something raised inside a call from C."""
        if isinstance(error, RemoteError):
            # Latched where it happened: by another connection, if a copy or an
            # old buffer brought it here.
            return
        if not isinstance(error, LongwireError):
            _log.debug("%s", self.name, exc_info=error)
        self.connection.fail(error, "callback")

    # Device and buffer type.

    def memory(self) -> tuple[int, int]:
        """Free and total bytes on the server's device, asked for each time."""
        if not self.connection.healthy:
            return 0, 0
        answer = self.connection.ask(Command.GET_DEVICE_MEMORY, m.U32.pack(self.index))
        free, total = m.DeviceMemory.decode(answer)
        return min(free, total), total

    def alignment(self) -> int:
        if self._alignment is None:
            answer = self.connection.ask(Command.GET_ALIGNMENT, m.U32.pack(self.index))
            (alignment,) = m.U64.unpack(answer)
            if alignment == 0 or alignment & (alignment - 1):
                # ggml would divide by it.
                reason = f"{alignment} is no power of two"
                raise _unusable(self.connection, Command.GET_ALIGNMENT, reason)
            self._alignment = alignment
        return self._alignment

    def max_size(self) -> int:
        if self._max_size is None:
            answer = self.connection.ask(Command.GET_MAX_SIZE, m.U32.pack(self.index))
            (self._max_size,) = m.U64.unpack(answer)
        return self._max_size

    def alloc_size(self, tensor: int) -> int:
        """Bytes the tensor takes there, asked once per shape."""
        least: int = self._nbytes(tensor)
        if not self.connection.healthy:
            return least
        t = read_tensor(tensor)
        if t.op not in _SIZE_QUERY_OPS and not _is_padded(t):
            return least
        if not t.fits:
            return least
        # Source shapes stay out of the key: a growing KV cache would miss it
        # each time, and the worst case is always asked first.
        key = (self.index, t.type, t.op, t.op_params, t.ne, t.nb)
        size = self.session.alloc_sizes.get(key)
        if size is None:
            size = self._ask_alloc_size(t)
            self.session.alloc_sizes[key] = size
        return max(size, least)

    def _ask_alloc_size(self, tensor: NativeTensor) -> int:
        encode = self.session.records.encode
        sources = [read_tensor(src) if src else None for src in tensor.src]
        srcs = b"".join(encode(s) if s and s.fits else NULL_TENSOR for s in sources)
        body = m.GetAllocSize(self.index, encode(tensor), srcs).encode()
        (size,) = m.U64.unpack(self.connection.ask(Command.GET_ALLOC_SIZE, body))
        return int(size)

    def alloc_buffer(self, size: int) -> tuple[RemoteBuffer, int] | None:
        answer = self.connection.ask(
            Command.ALLOC_BUFFER, m.AllocBuffer(self.index, size).encode()
        )
        handle, true_size = m.AllocBufferAnswer.decode(answer)
        if handle == 0:
            _log.warning(
                "%s (%s) has no room for %d bytes", self.name, self.endpoint, size
            )
            return None
        if true_size < size:
            reason = f"gave {true_size} bytes where {size} were asked for"
            raise _unusable(self.connection, Command.ALLOC_BUFFER, reason)
        return RemoteBuffer(self, handle, true_size), true_size

    def supports_op(self, op: int) -> bool:
        """Everything but what the wire cannot carry: wide strides, pointers."""
        t = read_tensor(op)
        if t.op in POINTER_OPS or not t.fits:
            return False
        return all(read_tensor(src).fits for src in t.src if src)

    # Backend.

    def set_tensor_async(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._buffer_of(tensor).set_tensor(tensor, data, offset, size)

    def get_tensor_async(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._buffer_of(tensor).queue_read(tensor, data, offset, size)

    def cpy_tensor_async(self, src: int, dst: int) -> bool:
        """Copy between remote devices; False for anything else."""
        target = _live.get(read_tensor(dst).buffer)
        return target is not None and target.cpy_tensor(src, dst)

    def synchronize(self) -> None:
        self.connection.synchronize()

    def graph_compute(self, graph: int) -> bool:
        session, connection = self.session, self.connection
        uid = graph_uid(graph)
        with session.order:
            if session.reuse.may_recompute(self.index, uid):
                body = GraphRecompute(self.index, uid).encode(connection.dialect)
                connection.post(Command.GRAPH_RECOMPUTE, body)
                connection.traffic.recomputes += 1
                return True
            if self._is_stale(graph):
                return False
            message = session.records.graph(graph, self.index, uid)
            session.reuse.sent(self.index, uid)
            connection.post(Command.GRAPH_COMPUTE, *message.encode(connection.dialect))
            connection.traffic.graphs += 1
            return True

    def _is_stale(self, graph: int) -> bool:
        """Whether a graph lies in buffers of a connection that was lost."""
        lost = self.plugin.buffers.keys() - self.session.buffers.keys()
        return bool(lost) and not lost.isdisjoint(buffers_of(graph))

    def _buffer_of(self, tensor: int) -> RemoteBuffer:
        return _live[read_tensor(tensor).buffer]


class RemoteBuffer:
    """Memory on a remote device. Dies with its connection."""

    def __init__(self, device: RemoteDevice, handle: int, size: int) -> None:
        self.device = device
        self.handle = handle
        self.size = size
        self._session = device.session
        self._connection = device.connection
        self._base: int | None = None
        self._address = 0

    @property
    def address(self) -> int:
        """Of the `ggml_backend_buffer`; set by the plugin, once it has one."""
        return self._address

    @address.setter
    def address(self, address: int) -> None:
        self._address = address
        self._session.buffers[address] = self
        _live[address] = self

    def free(self) -> None:
        self._session.buffers.pop(self._address, None)
        _live.pop(self._address, None)
        self._session.records.forget()
        if not self._connection.healthy:
            return
        with self._session.order:
            self._session.reuse.freed()
            self._connection.post(Command.FREE_BUFFER, m.U64.pack(self.handle))
        self._connection.flush()

    def base(self) -> int:
        if self._base is None:
            answer = self._connection.ask(
                Command.BUFFER_GET_BASE, m.U64.pack(self.handle)
            )
            (base,) = m.U64.unpack(answer)
            if not 0 < base <= U64_MAX - self.size:
                # ggml aborts on both.
                reason = f"{base:#x} is no base for {self.size} bytes"
                raise _unusable(self._connection, Command.BUFFER_GET_BASE, reason)
            self._base = base
        return self._base

    def init_tensor(self, tensor: int) -> bool:
        if _is_padded(read_tensor(tensor)):
            record = self._session.records.of(tensor)
            self._connection.post(Command.INIT_TENSOR, record)
        return True

    def memset_tensor(self, tensor: int, value: int, offset: int, size: int) -> None:
        record = self._session.records.of(tensor)
        body = m.MemsetTensor(record, offset, size, value).encode()
        self._connection.post(Command.MEMSET_TENSOR, body)

    def set_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        record = self._session.records.of(tensor)
        content = memory.view(data, size)
        weights = self.device.plugin.usage(self._address) == Usage.WEIGHTS
        if weights:
            self._count_weight(tensor, size)
        large = weights and size > HASH_THRESHOLD
        if large and self._set_by_hash(record, content, offset):
            return
        head = m.SetTensor(record, int(large), offset).encode()
        self._connection.post(Command.SET_TENSOR, head, content)

    def _set_by_hash(self, record: bytes, content: memoryview, offset: int) -> bool:
        """Ask the server to take the data from its file cache."""
        body = m.SetTensorHash(record, offset, fnv1a_64(content)).encode()
        (hit,) = m.U8.unpack(self._connection.ask(Command.SET_TENSOR_HASH, body))
        return bool(hit)

    def _count_weight(self, tensor: int, size: int) -> None:
        self.device.weight_bytes += size
        match = _BLOCK.match(read_tensor(tensor).name)
        if match:
            self.device.layers.add(int(match[1]))

    def get_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._read_into(tensor, memory.view(data, size), offset, size)

    def queue_read(self, tensor: int, data: int, offset: int, size: int) -> None:
        """Read by the next `synchronize` of the connection."""
        target = memory.view(data, size)
        try:
            record = self._session.records.of(tensor)
            body = m.GetTensor(record, offset, size).encode()
            self._connection.queue_read(Command.GET_TENSOR, body, target)
        except BaseException:
            target[:] = bytes(size)
            raise

    def _read_into(
        self, tensor: int, target: memoryview, offset: int, size: int
    ) -> None:
        try:
            record = self._session.records.of(tensor)
            body = m.GetTensor(record, offset, size).encode()
            self._connection.ask_into(Command.GET_TENSOR, body, target)
        except BaseException:
            # C has no way to hear of the failure: zeros, not garbage.
            target[:] = bytes(size)
            raise

    def set_tensor_2d(
        self,
        tensor: int,
        data: int,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        rows = [memory.view(data + i * stride_data, size) for i in range(n_copies)]
        record = self._session.records.of(tensor)
        if self.device.plugin.usage(self._address) == Usage.WEIGHTS:
            self._count_weight(tensor, size * n_copies)
        if self._connection.dialect.has(Command.SET_TENSOR_2D):
            head = m.SetTensor2D(record, offset, size, n_copies, stride_tensor).encode()
            self._connection.post(Command.SET_TENSOR_2D, head, b"".join(rows))
            return
        for i, row in enumerate(rows):
            head = m.SetTensor(record, 0, offset + i * stride_tensor).encode()
            self._connection.post(Command.SET_TENSOR, head, row)

    def get_tensor_2d(
        self,
        tensor: int,
        data: int,
        offset: int,
        size: int,
        n_copies: int,
        stride_tensor: int,
        stride_data: int,
    ) -> None:
        rows = [memory.view(data + i * stride_data, size) for i in range(n_copies)]
        try:
            self._read_rows(tensor, rows, offset, size, stride_tensor)
        except BaseException:
            for row in rows:
                row[:] = bytes(size)
            raise

    def _read_rows(
        self,
        tensor: int,
        rows: list[memoryview],
        offset: int,
        size: int,
        stride: int,
    ) -> None:
        record = self._session.records.of(tensor)
        connection = self._connection
        if connection.dialect.has(Command.GET_TENSOR_2D):
            body = m.GetTensor2D(record, offset, size, len(rows), stride).encode()
            packed = memoryview(bytearray(size * len(rows)))
            connection.ask_into(Command.GET_TENSOR_2D, body, packed)
            for i, row in enumerate(rows):
                row[:] = packed[i * size : (i + 1) * size]
            return
        for i, row in enumerate(rows):
            body = m.GetTensor(record, offset + i * stride, size).encode()
            connection.queue_read(Command.GET_TENSOR, body, row)
        connection.synchronize()

    def cpy_tensor(self, src: int, dst: int) -> bool:
        """Copy onto a tensor in this buffer, from any remote buffer."""
        source = _live.get(read_tensor(src).buffer)
        if source is None:
            return False
        if source._connection is self._connection:
            of = self._session.records.of
            body = m.CopyTensor(of(src), of(dst)).encode()
            (done,) = m.U8.unpack(self._connection.ask(Command.COPY_TENSOR, body))
            return bool(done)
        size = self.device._nbytes(src)
        if size:
            relayed = memoryview(bytearray(size))
            source._read_into(src, relayed, 0, size)
            head = m.SetTensor(self._session.records.of(dst), 0, 0).encode()
            self._connection.post(Command.SET_TENSOR, head, relayed)
        return True

    def clear(self, value: int) -> None:
        body = m.BufferClear(self.handle, value).encode()
        self._connection.post(Command.BUFFER_CLEAR, body)


def _unusable(connection: Connection, command: Command, reason: str) -> LongwireError:
    """Latch an answer that nobody can work with."""
    failure = RemoteFailure(str(connection.endpoint), command.name, reason)
    return connection.fail(failure, command.name)


def _is_padded(tensor: NativeTensor) -> bool:
    """Whether the server's device may pad this tensor's rows."""
    return (
        bool(QUANTIZED[tensor.type])
        and tensor.ne[0] % _PADDED_ROW != 0
        and not tensor.view_src
    )
