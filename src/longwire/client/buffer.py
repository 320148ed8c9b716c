"""A remote buffer's verbs, one method each; ggml calls them through the plugin."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from longwire.client.connection import Connection
from longwire.client.records import NativeTensor, Records, read_tensor
from longwire.client.reduction import Reduction, current
from longwire.client.reuse import GraphReuse
from longwire.errors import LongwireError, RemoteFailure
from longwire.native import memory
from longwire.native.abi import Usage
from longwire.native.plugin import Rows
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, U64_MAX, Command
from longwire.wire.fnv import fnv1a_64
from longwire.wire.lx import Top
from longwire.wire.types import QUANTIZED

if TYPE_CHECKING:
    from longwire.client.device import RemoteDevice

__all__ = ["RemoteBuffer", "Session", "buffer_of", "is_padded", "unusable"]

_PADDED_ROW = 512
"""CUDA pads quantised rows that are no multiple of this."""

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
        self.reuse = GraphReuse(connection.dialect)
        self.alloc_sizes: dict[tuple[object, ...], int] = {}
        self.order = threading.RLock()
        """Held while `reuse` changes and the command that changes it is queued."""

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
    return _live.get(read_tensor(tensor).buffer)


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
                raise unusable(self._connection, Command.BUFFER_GET_BASE, reason)
            self._base = base
        return self._base

    def init_tensor(self, tensor: int) -> bool:
        if is_padded(read_tensor(tensor)):
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
            self._note_layer(tensor)
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

    def _note_layer(self, tensor: int) -> None:
        """Weights tell by their names which layers a device holds."""
        match = _BLOCK.match(read_tensor(tensor).name)
        if match:
            self.device.layers.add(int(match[1]))

    def get_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._read_into(tensor, memory.view(data, size), offset)

    def queue_read(self, tensor: int, data: int, offset: int, size: int) -> None:
        """Read by the next `synchronize` of the connection."""
        reduction = current()
        if reduction is not None and self._connection.dialect.lx:
            if reduction.covers(read_tensor(tensor).name, size):
                self._queue_top(tensor, data, offset, size, reduction)
                return
        self._read_into(tensor, memory.view(data, size), offset, wait=False)

    def _queue_top(
        self, tensor: int, data: int, offset: int, size: int, reduction: Reduction
    ) -> None:
        """Read the largest numbers only."""
        record = self._session.records.of(tensor)
        connection, row = self._connection, m.GetTensor(record, offset, size).encode()

        def fetch() -> None:
            connection.ask_into(Command.GET_TENSOR, row, memory.view(data, size))

        body = Top(record, offset, size, reduction.k).encode()
        connection.queue_read(Command.LX_TOP, body, reduction.expect(fetch))

    def _read_into(
        self, tensor: int, target: memoryview, offset: int, wait: bool = True
    ) -> None:
        size = len(target)
        read = self._connection.ask_into if wait else self._connection.queue_read
        try:
            record = self._session.records.of(tensor)
            read(Command.GET_TENSOR, m.GetTensor(record, offset, size).encode(), target)
        except BaseException:
            # C has no way to hear of the failure: zeros, not garbage.
            target[:] = bytes(size)
            raise

    def set_tensor_2d(self, tensor: int, rows: Rows) -> None:
        record = self._session.records.of(tensor)
        if self.device.plugin.usage(self._address) == Usage.WEIGHTS:
            self._note_layer(tensor)
        views = rows.views()
        if self._connection.dialect.has(Command.SET_TENSOR_2D):
            head = m.SetTensor2D(record, *_strided(rows)).encode()
            self._connection.post(Command.SET_TENSOR_2D, head, b"".join(views))
            return
        for i, view in enumerate(views):
            head = m.SetTensor(record, 0, rows.offset + i * rows.stride_tensor).encode()
            self._connection.post(Command.SET_TENSOR, head, view)

    def get_tensor_2d(self, tensor: int, rows: Rows) -> None:
        views = rows.views()
        try:
            self._read_rows(tensor, rows, views)
        except BaseException:
            for view in views:
                view[:] = bytes(rows.size)
            raise

    def _read_rows(self, tensor: int, rows: Rows, views: list[memoryview]) -> None:
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
        if source._connection is self._connection:
            of = self._session.records.of
            body = m.CopyTensor(of(src), of(dst)).encode()
            (done,) = m.U8.unpack(self._connection.ask(Command.COPY_TENSOR, body))
            return bool(done)
        size = self.device._nbytes(src)
        if size:
            relayed = memoryview(bytearray(size))
            source._read_into(src, relayed, 0)
            head = m.SetTensor(self._session.records.of(dst), 0, 0).encode()
            self._connection.post(Command.SET_TENSOR, head, relayed)
        return True

    def clear(self, value: int) -> None:
        body = m.BufferClear(self.handle, value).encode()
        self._connection.post(Command.BUFFER_CLEAR, body)


def _strided(rows: Rows) -> tuple[int, int, int, int]:
    return rows.offset, rows.size, rows.n_copies, rows.stride_tensor


def unusable(connection: Connection, command: Command, reason: str) -> LongwireError:
    """Latch an answer that nobody can work with."""
    failure = RemoteFailure(str(connection.endpoint), command.name, reason)
    return connection.fail(failure, command.name)


def is_padded(tensor: NativeTensor) -> bool:
    """Whether the server's device may pad this tensor's rows."""
    return (
        bool(QUANTIZED[tensor.type])
        and tensor.ne[0] % _PADDED_ROW != 0
        and not tensor.view_src
    )
