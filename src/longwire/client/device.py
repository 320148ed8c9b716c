"""A remote device's verbs, one method each; ggml calls them through the plugin."""

from __future__ import annotations

import logging

from longwire.client.buffer import (
    RemoteBuffer,
    Session,
    buffer_of,
    is_padded,
    unusable,
)
from longwire.client.connection import Connection
from longwire.client.memo import remember
from longwire.client.records import (
    NativeTensor,
    buffers_of,
    node_layout,
    op_layout,
    read_tensor,
)
from longwire.client.support import OpSupport
from longwire.errors import LongwireError, RemoteError, RemoteFailure, UsageError
from longwire.native.contract import Rows
from longwire.native.graph import graph_uid
from longwire.native.plugin import DevicePlugin, Registry
from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.constants import POINTER_OPS, Command
from longwire.wire.graphs import GraphRecompute
from longwire.wire.lx import LxDevice
from longwire.wire.tensors import NULL_TENSOR

__all__ = ["RemoteDevice"]

_log = logging.getLogger("longwire.client")

_SIZE_QUERY_OPS = frozenset({16, 29, 30, 69, 70, 74})
"""CUMSUM, MUL_MAT, MUL_MAT_ID, ARGSORT, TOP_K, FLASH_ATTN_EXT: a device may want
more than the tensor's bytes for these (`ggml_op_alloc_size_may_expand`)."""


_NO_ROOM = "ALLOC_BUFFER: no room"
"""In the cause of a refusal that is about an allocation."""


class RemoteDevice:
    """One device of a remote server, under the name that ggml knows it by."""

    def __init__(
        self,
        registry: Registry,
        name: str,
        index: int,
        session: Session,
        info: LxDevice | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.registry = registry
        self.endpoint: Endpoint = session.connection.endpoint
        self.description = str(self.endpoint)
        if info is not None:
            self.description += f" ({info.name}: {info.description})"
        self.attach(session, info)
        self._nbytes = registry.engine.library.ggml_nbytes
        self._plain_sizes: dict[tuple[object, ...], int] = {}
        """Of what no server is asked about."""
        self.plugin: DevicePlugin = registry.add(self)

    def attach(self, session: Session, info: LxDevice | None = None) -> None:
        """Use a fresh connection from now on; buffers of the old one stay dead."""
        self.session = session
        self.info = info
        """What the device really is, from a server that speaks LX."""
        self.support = OpSupport(
            session.connection,
            session.records,
            self.index,
            self.registry.engine.profile.label,
        )
        self._supported: dict[tuple[bytes, ...], bool] = {}
        self.layers: set[int] = set()
        """Model layers whose weights were put here."""
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
                raise unusable(self.connection, Command.GET_ALIGNMENT, reason)
            self._alignment = alignment
        return self._alignment

    def max_size(self) -> int:
        if self._max_size is None:
            answer = self.connection.ask(Command.GET_MAX_SIZE, m.U32.pack(self.index))
            (self._max_size,) = m.U64.unpack(answer)
        return self._max_size

    def alloc_size(self, tensor: int) -> int:
        """Bytes the tensor takes there, asked once per shape.

        Source shapes count for nothing: a growing KV cache would have it asked each
        time, and the worst case is always asked first.
        """
        asked, key = self.session.alloc_sizes, (self.index, *op_layout(tensor))
        size = asked.get(key) or self._plain_sizes.get(key)
        if size is None:
            size = int(self._nbytes(tensor))
            t = read_tensor(tensor)
            if not size or (t.op not in _SIZE_QUERY_OPS and not is_padded(tensor)):
                remember(self._plain_sizes, key, size)
            elif self.connection.healthy and self.session.records.fit(t):
                # Kept for good: what is asked later may not be the worst case.
                size = asked[key] = max(size, self._ask_alloc_size(t))
        return size

    def _ask_alloc_size(self, tensor: NativeTensor) -> int:
        encode, fit = self.session.records.encode, self.session.records.fit
        sources = [read_tensor(src) if src else None for src in tensor.src]
        srcs = b"".join(encode(s) if s and fit(s) else NULL_TENSOR for s in sources)
        body = m.GetAllocSize(self.index, encode(tensor), srcs).encode()
        (size,) = m.U64.unpack(self.connection.ask(Command.GET_ALLOC_SIZE, body))
        return int(size)

    def alloc_buffer(self, size: int) -> tuple[RemoteBuffer, int] | None:
        body = m.AllocBuffer(self.index, size).encode()
        try:
            answer = self.connection.ask(Command.ALLOC_BUFFER, body)
        except RemoteFailure as error:
            if self.connection.refusal is not error or _NO_ROOM not in error.cause:
                # Of another command, whose error came with this answer.
                raise
            # llama.cpp has its own ways when memory is short.
            self.connection.refusal = None
            _log.warning("%s (%s): %s", self.name, self.endpoint, error.cause)
            return None
        handle, true_size = m.AllocBufferAnswer.decode(answer)
        if handle == 0:
            words = "%s (%s): no room for %d bytes"
            _log.warning(words, self.name, self.endpoint, size)
            return None
        if true_size < size:
            reason = f"gave {true_size} bytes where {size} were asked for"
            raise unusable(self.connection, Command.ALLOC_BUFFER, reason)
        return RemoteBuffer(self, handle, true_size), true_size

    def lacks(self, size: int) -> None:
        """Let nothing be computed until somebody has heard that there is no room.

        The connection is well, and others may have models on it.
        """
        reason = f"{self.name} has no room for {size} bytes"
        refusal = RemoteFailure(str(self.endpoint), Command.ALLOC_BUFFER.name, reason)
        self.connection.refusal = self.connection.refusal or refusal

    def supports_op(self, op: int) -> bool:
        """What the wire can carry, and the device can do.

        Pointers cannot travel, and wide strides only where LX is spoken. What the
        device can do is known from a server that speaks LX; another is believed to
        do everything.
        """
        answers, key = self._supported, node_layout(op)
        known = answers.get(key)
        if known is None:
            known = self._can_do(op)
            if self.connection.healthy:
                remember(answers, key, known)
        return known

    def _can_do(self, op: int) -> bool:
        t, fit = read_tensor(op), self.session.records.fit
        if t.op in POINTER_OPS or not fit(t) or t.op in self.session.unknown_ops:
            return False
        sources = [read_tensor(src) if src else None for src in t.src]
        if not all(fit(source) for source in sources if source):
            return False
        if self.connection.server is None or not self.connection.healthy:
            return True
        return self.support.supports(t, sources)

    # Backend.

    def set_tensor_async(self, tensor: int, data: int, offset: int, size: int) -> None:
        _at(tensor).set_tensor(tensor, data, offset, size)

    def set_tensor_2d_async(self, tensor: int, rows: Rows) -> None:
        _at(tensor).set_tensor_2d(tensor, rows)

    def get_tensor_2d_async(self, tensor: int, rows: Rows) -> None:
        _at(tensor).get_tensor_2d(tensor, rows)

    def get_tensor_async(self, tensor: int, data: int, offset: int, size: int) -> None:
        _at(tensor).queue_read(tensor, data, offset, size)

    def cpy_tensor_async(self, src: int, dst: int) -> bool:
        """Copy between remote devices; False for anything else."""
        target = buffer_of(dst)
        return target is not None and target.cpy_tensor(src, dst)

    def synchronize(self) -> None:
        self.connection.synchronize()

    def graph_compute(self, graph: int) -> bool:
        session, connection = self.session, self.connection
        if connection.refusal is not None:
            # An earlier command was not done: nothing that builds on it may run.
            return False
        if session.uploaders:
            self._settle(graph)
        uid = graph_uid(graph)
        with session.order:
            session.heed_refusals()
            if session.reuse.may_recompute(self.index, uid):
                body = GraphRecompute(self.index, uid).encode(connection.dialect)
                connection.post(Command.GRAPH_RECOMPUTE, body)
                connection.traffic.recomputes += 1
                return True
            if self._is_stale(graph):
                return False
            message = session.records.graph(graph, self.index, uid)
            session.reuse.sent(self.index, uid)
            command, pieces = session.compute(message)
            connection.post(command, *pieces)
            return True

    def _settle(self, graph: int) -> None:
        """Wait for weights of this graph that are under way."""
        session = self.session
        session.uploaders = {u for u in session.uploaders if u.alive}
        for address in buffers_of(graph) if session.uploaders else ():
            buffer = session.buffers.get(address)
            if buffer is not None:
                buffer.settle()

    def _is_stale(self, graph: int) -> bool:
        """Whether a graph lies in buffers of a connection that was lost."""
        lost = self.plugin.buffers.keys() - self.session.buffers.keys()
        return bool(lost) and not lost.isdisjoint(buffers_of(graph))


def _at(tensor: int) -> RemoteBuffer:
    buffer = buffer_of(tensor)
    if buffer is None:
        raise UsageError("the tensor is in no remote buffer")
    return buffer
