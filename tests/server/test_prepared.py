"""Writes by number: many in one message, and each as careful as a SET_TENSOR."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.constants import Command
from longwire.wire.dialects import Dialect
from longwire.wire.prepared import PrepareSet, SetPrepared
from longwire.wire.tensors import Tensor
from longwire.wire.types import nbytes
from support.lx import WideClient, wide_graph
from support.tensors import ADD, tensor
from support.worker import Worker


@pytest.fixture
def client(worker: Worker, dialect: Dialect) -> Iterator[WideClient]:
    with WideClient(worker.endpoint, dialect) as client:
        client.hello()
        client.start()
        yield client


def prepare(
    client: WideClient,
    number: int,
    t: Tensor,
    offset: int = 0,
    size: int | None = None,
) -> None:
    if size is None:
        size = nbytes(t.type, t.ne, t.nb) - offset
    body = PrepareSet(number, t.encode(wide=True), offset, size).encode()
    client.post(Command.LX_PREPARE_SET, body)


def write(client: WideClient, numbers: Sequence[int], data: bytes) -> None:
    client.post(Command.LX_SET_PREPARED, [SetPrepared.head(numbers), data])


def test_each_goes_where_its_number_says(client: WideClient) -> None:
    buffer = client.alloc(256)
    a, b = tensor(1, buffer), tensor(2, buffer, 64, (4,))
    prepare(client, 5, a)
    prepare(client, 1023, b, offset=4, size=8)
    client.write(b, b"-" * 16)
    for fill in (b"x", b"y"):
        write(client, [1023, 5], fill * 8 + fill.upper() * 32)
        assert client.read(a) == fill.upper() * 32
        assert client.read(b) == b"----" + fill * 8 + b"----"


def test_the_last_of_two_stays(client: WideClient) -> None:
    t = tensor(1, client.alloc(64))
    prepare(client, 0, t)
    write(client, [0, 0], b"1" * 32 + b"2" * 32)
    assert client.read(t) == b"2" * 32


def test_none_at_all(client: WideClient) -> None:
    write(client, [], b"")
    assert client.ask(Command.LX_PING) == b""


def test_a_number_given_anew(client: WideClient) -> None:
    buffer = client.alloc(128)
    a, b = tensor(1, buffer), tensor(2, buffer, 64)
    for t in (a, b):
        client.write(t, bytes(32))
    prepare(client, 0, a)
    write(client, [0], b"1" * 32)
    prepare(client, 0, b)
    write(client, [0], b"2" * 32)
    assert (client.read(a), client.read(b)) == (b"1" * 32, b"2" * 32)


def test_a_running_graph_is_waited_for(client: WideClient) -> None:
    """What a graph reads must not change under it."""
    buffer = client.alloc(3 << 22)
    x, y = (tensor(i, buffer, i << 22, (1 << 20,)) for i in range(1, 3))
    total = tensor(3, buffer, 0, (1 << 20,), op=ADD, src=(x, y))
    client.write(x, np.ones(1 << 20, "<f4").tobytes())
    client.write(y, np.ones(1 << 20, "<f4").tobytes())
    prepare(client, 0, x, size=4096)
    client.compute(wide_graph(total, x, y))
    write(client, [0], bytes(4096))
    assert (np.frombuffer(client.read(total), "<f4") == 2).all()


def test_a_number_that_nobody_gave(client: WideClient) -> None:
    t = tensor(1, client.alloc(64))
    client.write(t, b"0" * 32)
    prepare(client, 3, t)
    write(client, [3, 4], b"1" * 64)
    client.post(Command.DEVICE_COUNT)
    assert "nothing has number 4" in client.error()
    assert client.read(t) == b"0" * 32, "then none is done"
    write(client, [3], b"2" * 32)
    assert client.read(t) == b"2" * 32


@pytest.mark.parametrize("length", [0, 31, 33])
def test_data_of_another_length(client: WideClient, length: int) -> None:
    t = tensor(1, client.alloc(64))
    client.write(t, b"0" * 32)
    prepare(client, 0, t)
    write(client, [0], b"1" * length)
    client.post(Command.DEVICE_COUNT)
    assert "LX_SET_PREPARED data" in client.error()
    assert client.read(t) == b"0" * 32


def test_outside_of_the_tensor(client: WideClient) -> None:
    t = tensor(1, client.alloc(64))
    prepare(client, 0, t, offset=4, size=32)
    client.post(Command.DEVICE_COUNT)
    assert "32 bytes at 4 in a tensor of 32" in client.error()
    write(client, [0], bytes(32))
    client.post(Command.DEVICE_COUNT)
    assert "nothing has number 0" in client.error()


def test_a_buffer_that_is_gone(client: WideClient) -> None:
    kept, gone = client.alloc(64), client.alloc(64)
    a, b = tensor(1, kept), tensor(2, gone)
    prepare(client, 0, a)
    prepare(client, 1, b)
    write(client, [0, 1], b"1" * 64)
    client.free(gone)
    write(client, [1], b"2" * 32)
    client.post(Command.DEVICE_COUNT)
    assert "no buffer has the handle" in client.error()
    write(client, [0], b"3" * 32)
    assert client.read(a) == b"3" * 32


class TestMessages:
    RECORD = bytes(296)

    def test_both_directions(self) -> None:
        write = PrepareSet(7, self.RECORD, 8, 64)
        assert PrepareSet.decode(write.encode()) == write
        body = memoryview(SetPrepared.head([1, 2]) + b"data")
        decoded = SetPrepared.decode(body)
        assert (decoded.each(), bytes(decoded.data)) == ((1, 2), b"data")

    @pytest.mark.parametrize(("number", "size"), [(1024, 0), (0, 65537)])
    def test_limits(self, number: int, size: int) -> None:
        with pytest.raises(LimitExceeded):
            PrepareSet.decode(PrepareSet(number, self.RECORD, 0, size).encode())

    @pytest.mark.parametrize(("count", "size"), [(1025, 0), (1, (1 << 17) + 1)])
    def test_limits_of_a_step(self, count: int, size: int) -> None:
        # Not more than the longest message: one limit leaves room for the other.
        body = SetPrepared.head([0] * count) + bytes(size)
        with pytest.raises(LimitExceeded):
            SetPrepared.decode(memoryview(body))

    def test_fewer_numbers_than_it_says(self) -> None:
        body = SetPrepared.head([1, 2])
        with pytest.raises(BadFrame):
            SetPrepared.decode(memoryview(body[:-1]))
