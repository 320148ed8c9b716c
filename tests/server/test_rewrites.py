"""Writes that come again: quicker, and no less careful."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from longwire.server.rewrites import HEAD, Rewrites
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import Dialect
from longwire.wire.frames import REQUEST_HEADER
from support.client import RawClient
from support.lx import WideClient
from support.tensors import Sum, tensor
from support.worker import Worker

RECORD = bytes(range(256)) + bytes(40)


def message(data: bytes, record: bytes = RECORD, flag: int = 0) -> bytes:
    body = m.SetTensor(record, flag, 0).encode() + data
    return REQUEST_HEADER.pack(Command.SET_TENSOR, len(body)) + body


@pytest.fixture
def wire() -> Iterator[tuple[socket.socket, Stream]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Stream(theirs)


class TestFind:
    def known(self, size: int = 8) -> tuple[Rewrites, memoryview]:
        rewrites, target = Rewrites(), memoryview(bytearray(size))
        body = m.SetTensor(RECORD, 0, 0).encode()
        rewrites.remember(memoryview(body), target)
        return rewrites, target

    def test_a_known_head_is_taken(self, wire: tuple[socket.socket, Stream]) -> None:
        (sock, stream), (rewrites, target) = wire, self.known()
        sock.sendall(message(b"12345678") + b"next")
        stream.take(0)
        assert rewrites.find(stream) is None, "nothing is here yet"
        stream.take_some()
        stream._start = 0
        assert rewrites.find(stream) is target
        assert bytes(stream.take(12)) == b"12345678next"

    @pytest.mark.parametrize(
        "other",
        [
            message(b"1234567"),
            message(b"12345678", record=bytes(296)),
            message(b"12345678", flag=1),
            b"\x08" + message(b"12345678")[1:],
            message(b"12345678")[: HEAD - 1],
        ],
        ids=["length", "record", "flag", "command", "half a head"],
    )
    def test_any_other_stays(
        self, wire: tuple[socket.socket, Stream], other: bytes
    ) -> None:
        (sock, stream), (rewrites, _) = wire, self.known()
        sock.sendall(other)
        stream.take_some()
        stream._start = 0
        assert rewrites.find(stream) is None
        assert bytes(stream.take(len(other))) == other

    def test_large_ones_are_not_kept(self) -> None:
        assert len(self.known(64 * 1024)[0]._targets) == 1
        assert len(self.known(64 * 1024 + 1)[0]._targets) == 0

    def test_they_are_bounded(self) -> None:
        rewrites, target = self.known()
        for i in range(5000):
            body = m.SetTensor(RECORD, 0, i).encode()
            rewrites.remember(memoryview(body), target)
        assert 0 < len(rewrites._targets) <= 1024


def test_the_same_write_with_other_data(client: RawClient) -> None:
    total = Sum(client)
    for i in range(5):
        x = np.full(8, i, "<f4")
        client.write(total.a, x.tobytes())
        assert client.read(total.a) == x.tobytes()
        client.compute(total.graph)
        y = np.frombuffer(client.read(total.b), "<f4")
        assert client.read(total.c) == (x + y).tobytes()


def test_many_in_one_segment(client: RawClient) -> None:
    buffer = client.alloc(256)
    t = tensor(1, buffer, ne=(8,))
    head = m.SetTensor(t.encode(), 0, 0).encode()
    frame = REQUEST_HEADER.pack(Command.SET_TENSOR, len(head) + 32) + head
    client.send(b"".join(frame + bytes([i]) * 32 for i in range(100)))
    assert client.read(t) == bytes([99]) * 32


def test_a_buffer_that_is_gone(worker: Worker, dialect: Dialect) -> None:
    with RawClient(worker.endpoint, dialect) as client:
        client.hello()
        total = Sum(client)
        client.write(total.a, bytes(32))
        client.free(total.buffer)
        client.write(total.a, bytes(32))
        client.expect_closed()
        assert "no buffer has the handle" in worker.end_of(client.name)


def test_after_an_error_it_is_not_done(worker: Worker, dialect: Dialect) -> None:
    with WideClient(worker.endpoint, dialect) as client:
        client.hello()
        client.start()
        t = tensor(1, client.alloc(64), ne=(8,))
        for fill in (b"1", b"2"):
            client.write(t, fill * 32)
        client.write(t._replace(buffer=1), bytes(32))
        client.write(t, b"3" * 32)
        client.post(Command.DEVICE_COUNT)
        assert "no buffer" in client.error()
        assert client.read(t) == b"2" * 32
