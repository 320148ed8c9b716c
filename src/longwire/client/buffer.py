"""A remote buffer's verbs, one method each; ggml calls them through the plugin."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longwire.client.connection import Connection
from longwire.client.corking import BULK
from longwire.client.links import route
from longwire.client.prepared import PreparedWrites
from longwire.client.records import (
    Records,
    buffer_address,
    name_of,
    read_tensor,
    type_of,
)
from longwire.client.reduction import Reduction
from longwire.client.reduction import current as current_reduction
from longwire.client.reuse import GraphReuse
from longwire.client.together import Post, post_together
from longwire.client.upload import current as current_upload
from longwire.client.uploader import Uploader
from longwire.client.writes import Weight, Write, deliver_alone, weight_write
from longwire.errors import LongwireError, RemoteFailure
from longwire.native import memory
from longwire.native.abi import Usage
from longwire.native.contract import Rows
from longwire.wire import messages as m
from longwire.wire.constants import U64_MAX, Command
from longwire.wire.graphs import Graph
from longwire.wire.links import LinkPart
from longwire.wire.lx import Top
from longwire.wire.patches import Bases
from longwire.wire.tensors import TENSOR_SIZE
from longwire.wire.types import QUANTIZED

if TYPE_CHECKING:
    from longwire.client.device import RemoteDevice

__all__ = ["RemoteBuffer", "Session", "buffer_of", "is_padded", "unusable"]

_PADDED_ROW = 512
"""CUDA pads quantised rows that are no multiple of this."""

_WHOLE = m.SetTensor(bytes(TENSOR_SIZE), 0, 0).encode()[TENSOR_SIZE:]
"""What follows the record of a write at offset 0 that is not to be kept."""

_READ_PARTS = 4
"""llama.cpp's server copies an answer before it sends it. Of one in parts it copies
the next while the last is received."""

_READ_PART = 256 * 1024
"""Smaller ones cost more than that saves."""

_BLOCK = re.compile(rb"blk\.(\d+)\.")


class Session:
    """What all devices of one connection share."""

    def __init__(self, connection: Connection, ops: Sequence[str] = ()) -> None:
        """`ops` are the names of this process's op numbers."""
        self.connection = connection
        self.buffers: dict[int, RemoteBuffer] = {}
        """Live buffers by the address of their `ggml_backend_buffer`."""
        self.unknown_ops: frozenset[int] = frozenset()
        """Our numbers of ops that the server's engine does not have."""
        wide = connection.dialect.lx
        self.records = Records(self.buffers, self._match_ops(ops), wide)
        self.prepared = PreparedWrites(connection) if wide else None
        self.reuse = GraphReuse(connection.dialect)
        self.alloc_sizes: dict[tuple[object, ...], int] = {}
        self.uploaders: set[Uploader] = set()
        """Those that may have writes under way."""
        self._bases: Bases[None] = Bases()
        self._refusals = 0
        self.order = threading.RLock()
        """Held while `reuse` changes and the command that changes it is queued."""

    def heed_refusals(self) -> None:
        """Forget what graphs the server has, if it has refused something since."""
        if self._refusals != self.connection.refusals:
            self._refusals = self.connection.refusals
            self._bases.clear()
            self.reuse.clear()

    def compute(self, message: Graph) -> tuple[Command, list[m.Bytes]]:
        """How a graph is best sent: whole, or as a patch of one before."""
        dialect, traffic = self.connection.dialect, self.connection.traffic
        if dialect.lx:
            words = message.words()
            uid = message.uid if dialect.graph_uid else 0
            patch = self._bases.patch(message.device, uid, words)
            self._bases.add(message.device, words, None)
            if patch is not None:
                traffic.patches += 1
                return Command.LX_GRAPH_PATCH, patch.encode()
        traffic.graphs += 1
        return Command.GRAPH_COMPUTE, message.encode(dialect)

    def _match_ops(self, ours: Sequence[str]) -> npt.NDArray[np.int32] | None:
        """The server's op numbers by ours, matched by name; None if all agree."""
        server = self.connection.server
        if server is None or list(server.ops) == list(ours):
            return None
        numbers = {name: number for number, name in enumerate(server.ops)}
        self.unknown_ops = frozenset(
            number for number, name in enumerate(ours) if name not in numbers
        )
        return np.array([numbers.get(name, 0) for name in ours], np.int32)


# Buffers of every connection: a copy between two of them starts from an address.
_live: dict[int, RemoteBuffer] = {}


def buffer_of(tensor: int) -> RemoteBuffer | None:
    """The remote buffer that the tensor at this address lies in, if it is in one."""
    return _live.get(buffer_address(tensor))


class RemoteBuffer:
    """Memory on a remote device. Dies with its connection."""

    def __init__(self, device: RemoteDevice, handle: int, size: int) -> None:
        self.device = device
        self.handle = handle
        self.size = size
        self._session = device.session
        self._connection = device.connection
        self._base: int | None = None
        self._weights: bool | None = None
        self._address = 0
        self._uploader: Uploader | None = None
        """Who may have writes to this buffer under way: only weights ever are."""

    @property
    def address(self) -> int:
        """Of the `ggml_backend_buffer`; set by the plugin, once it has one."""
        return self._address

    @address.setter
    def address(self, address: int) -> None:
        self._address = address
        self._session.buffers[address] = self
        _live[address] = self

    @property
    def session(self) -> Session:
        """What it lives in, and dies with."""
        return self._session

    @property
    def live(self) -> bool:
        """Whether ggml has not freed it."""
        return _live.get(self._address) is self

    def settle(self) -> None:
        """Let no command overtake the writes to this buffer that are under way."""
        uploader, self._uploader = self._uploader, None
        if uploader is not None:
            uploader.wait_for(self.handle)

    def _join_upload(self) -> Uploader | None:
        """Who is to send weights of this thread's load to this buffer."""
        upload = current_upload()
        uploader = None if upload is None else upload.uploader(self._connection)
        if self._uploader is not uploader:
            self.settle()
            self._uploader = uploader
        if uploader is not None:
            self._session.uploaders.add(uploader)
        return uploader

    def free(self) -> None:
        if self._uploader is not None:
            self._uploader.forget(self.handle)
        self.settle()
        self._session.buffers.pop(self._address, None)
        _live.pop(self._address, None)
        self._session.records.forget()
        if self._session.prepared is not None:
            self._session.prepared.forget()
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
                raise unusable(self._connection, Command.BUFFER_GET_BASE, reason)
            self._base = base
        return self._base

    def init_tensor(self, tensor: int) -> bool:
        self.settle()
        if is_padded(tensor):
            record = self._session.records.of(tensor)
            self._connection.post(Command.INIT_TENSOR, record)
        return True

    def memset_tensor(self, tensor: int, value: int, offset: int, size: int) -> None:
        self.settle()
        record = self._session.records.of(tensor)
        body = m.MemsetTensor(record, offset, size, value).encode()
        self._connection.post(Command.MEMSET_TENSOR, body)

    def set_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        prepared = self._session.prepared
        if prepared is not None and not offset and prepared.write(tensor, data, size):
            return
        record = self._session.records.of(tensor)
        if self._holds_weights():
            name = self._note_layer(tensor)
            self._set_weight(Weight(name, record, memory.view(data, size), offset))
            return
        # Of a few bytes a copy is made sooner than a view.
        content = memory.view(data, size) if size >= BULK else memory.read(data, size)
        # A step's inputs are many, and whole tensors.
        head = m.SetTensor(record, 0, offset).encode() if offset else record + _WHOLE
        self._connection.post(Command.SET_TENSOR, head, content)
        if prepared is not None and not offset:
            prepared.note(tensor, record, size)

    def _holds_weights(self) -> bool:
        if self._weights is None:
            # Said once, before the first write.
            usage = self.device.plugin.usage(self._address)
            self._weights = usage == Usage.WEIGHTS
        return self._weights

    def _set_weight(self, weight: Weight) -> None:
        uploader = self._join_upload()
        if uploader is not None:
            uploader.take(self.handle, weight)
            return
        write = weight_write(self._connection, weight)
        deliver_alone(self._connection, write)

    def _note_layer(self, tensor: int) -> bytes:
        """Weights tell by their names which layers a device holds."""
        name = name_of(tensor)
        match = _BLOCK.match(name)
        if match:
            self.device.layers.add(int(match[1]))
        return name

    def get_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._read_into(tensor, memory.view(data, size), offset)

    def queue_read(self, tensor: int, data: int, offset: int, size: int) -> None:
        """Read by the next `synchronize` of the connection."""
        reduction = current_reduction()
        if reduction is not None and self._connection.dialect.lx:
            if reduction.covers(tensor, size):
                self._queue_top(tensor, data, offset, size, reduction)
                return
        self._read_into(tensor, memory.view(data, size), offset, wait=False)

    def _queue_top(
        self, tensor: int, data: int, offset: int, size: int, reduction: Reduction
    ) -> None:
        """Read the largest numbers only."""
        self.settle()
        record = self._session.records.of(tensor)
        connection = self._connection

        def fetch() -> None:
            row = m.GetTensor(record, offset, size).encode()
            connection.ask_into(Command.GET_TENSOR, row, memory.view(data, size))

        body = Top(record, offset, size, reduction.k).encode()
        connection.queue_read(Command.LX_TOP, body, reduction.expect(fetch))

    def _read_into(
        self, tensor: int, target: memoryview, offset: int, wait: bool = True
    ) -> None:
        connection = self._connection
        try:
            self.settle()
            record = self._session.records.of(tensor)
            for part in self._parts(tensor, len(target)):
                body = m.GetTensor(record, offset + part.start, len(part)).encode()
                into = target[part.start : part.stop]
                connection.queue_read(Command.GET_TENSOR, body, into, target)
            if wait:
                connection.synchronize()
        except BaseException:
            # C has no way to hear of the failure: zeros, not garbage.
            target[:] = bytes(len(target))
            raise

    def _parts(self, tensor: int, size: int) -> list[range]:
        """How a read of so many bytes is cut; an empty one is a part, too."""
        small = size <= _READ_PART
        # Of what a device has repacked it may only give the whole.
        if small or self._connection.dialect.lx or QUANTIZED[type_of(tensor)]:
            return [range(size)]
        step = max(-(-size // _READ_PARTS), _READ_PART)
        return [range(at, min(at + step, size)) for at in range(0, size, step)]

    def set_tensor_2d(self, tensor: int, rows: Rows) -> None:
        uploader = None
        if self._holds_weights():
            self._note_layer(tensor)
            uploader = self._join_upload()
        for write in self._row_writes(tensor, rows):
            if uploader is not None:
                uploader.put(self.handle, write)
            else:
                self._connection.post(write.command, write.head, write.data)

    def _row_writes(self, tensor: int, rows: Rows) -> list[Write]:
        record = self._session.records.of(tensor)
        packed = memoryview(b"".join(rows.views()))
        if self._connection.dialect.has(Command.SET_TENSOR_2D):
            head = m.SetTensor2D(record, *_strided(rows)).encode()
            return [Write(record, Command.SET_TENSOR_2D, head, packed, copied=True)]
        writes = []
        for i in range(rows.n_copies):
            head = m.SetTensor(record, 0, rows.offset + i * rows.stride_tensor).encode()
            row = packed[i * rows.size : (i + 1) * rows.size]
            writes.append(Write(record, Command.SET_TENSOR, head, row, copied=True))
        return writes

    def get_tensor_2d(self, tensor: int, rows: Rows) -> None:
        views = rows.views()
        try:
            self._read_rows(tensor, rows, views)
        except BaseException:
            for view in views:
                view[:] = bytes(rows.size)
            raise

    def _read_rows(self, tensor: int, rows: Rows, views: list[memoryview]) -> None:
        self.settle()
        record = self._session.records.of(tensor)
        connection = self._connection
        size = rows.size
        if connection.dialect.has(Command.GET_TENSOR_2D):
            body = m.GetTensor2D(record, *_strided(rows)).encode()
            packed = memoryview(bytearray(size * len(views)))
            connection.ask_into(Command.GET_TENSOR_2D, body, packed)
            for i, view in enumerate(views):
                view[:] = packed[i * size : (i + 1) * size]
            return
        for i, view in enumerate(views):
            offset = rows.offset + i * rows.stride_tensor
            body = m.GetTensor(record, offset, size).encode()
            connection.queue_read(Command.GET_TENSOR, body, view)
        connection.synchronize()

    def cpy_tensor(self, src: int, dst: int) -> bool:
        """Copy onto a tensor in this buffer, from any remote buffer."""
        source = buffer_of(src)
        if source is None:
            return False
        source.settle()
        self.settle()
        if source._connection is self._connection:
            of = self._session.records.of
            body = m.CopyTensor(of(src), of(dst)).encode()
            (done,) = m.U8.unpack(self._connection.ask(Command.COPY_TENSOR, body))
            return bool(done)
        size = self.device._nbytes(src)
        if size and not self._receive_from(source, src, dst, size):
            relayed = memoryview(bytearray(size))
            source._read_into(src, relayed, 0)
            head = m.SetTensor(self._session.records.of(dst), 0, 0).encode()
            self._connection.post(Command.SET_TENSOR, head, relayed)
        return True

    def _receive_from(
        self, source: RemoteBuffer, src: int, dst: int, size: int
    ) -> bool:
        """Have another server send a tensor here, if the two have a link."""
        sender, receiver = source._connection, self._connection
        if sender.server is None or receiver.server is None:
            return False
        link = route(sender, receiver)
        if link is None:
            return False
        send = LinkPart(link.first, source._session.records.of(src), 0, size)
        receive = LinkPart(link.second, self._session.records.of(dst), 0, size)
        post_together(
            [
                Post(sender, Command.LX_SEND, send.encode()),
                Post(receiver, Command.LX_RECEIVE, receive.encode()),
            ]
        )
        # It may as well begin while this machine prepares what the other one needs.
        sender.start()
        return True

    def clear(self, value: int) -> None:
        self.settle()
        body = m.BufferClear(self.handle, value).encode()
        self._connection.post(Command.BUFFER_CLEAR, body)


def _strided(rows: Rows) -> tuple[int, int, int, int]:
    return rows.offset, rows.size, rows.n_copies, rows.stride_tensor


def unusable(connection: Connection, command: Command, reason: str) -> LongwireError:
    """Latch an answer that nobody can work with."""
    failure = RemoteFailure(str(connection.endpoint), command.name, reason)
    return connection.fail(failure, command.name)


def is_padded(tensor: int) -> bool:
    """Whether the server's device may pad this tensor's rows."""
    # Most are not quantised, and the type tells soonest.
    if not QUANTIZED[type_of(tensor)]:
        return False
    t = read_tensor(tensor)
    return t.ne[0] % _PADDED_ROW != 0 and not t.view_src
