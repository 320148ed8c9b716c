"""What a session records of itself, when its client wants that."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from longwire.server import spans as module
from longwire.server.spans import SpanRing
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.spans import MAX_SPANS, TraceAnswer, TraceRequest
from support.client import RawClient
from support.lx import WideClient, wide_graph
from support.tensors import ADD, tensor
from support.worker import Worker, running_worker


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running_worker("--protocol", "8") as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[WideClient]:
    client = WideClient(worker.endpoint, V8)
    with client:
        client.hello()
        client.start()
        yield client


def fetch(client: RawClient, on: int = 1) -> TraceAnswer:
    body = TraceRequest(on).encode()
    return TraceAnswer.decode(client.ask(Command.LX_TRACE, body))


def test_a_step(client: WideClient) -> None:
    buffer = client.alloc(96)
    a, b = tensor(1, buffer), tensor(2, buffer, 32)
    c = tensor(3, buffer, 64, op=ADD, src=[a, b])
    first = fetch(client)
    assert (first.spans, first.lost) == ((), 0)
    data = bytes(32)
    client.write(a, data)
    client.write(b, data)
    client.compute(wide_graph(c, a, b))
    assert client.read(c) == data
    last = fetch(client)
    # Each when it ended: what is inside of a command comes before it.
    assert [span.name for span in last.spans] == [
        "SET_TENSOR",
        "SET_TENSOR",
        "compute",
        "GRAPH_COMPUTE",
        "wait for the device",
        "GET_TENSOR",
    ]
    assert [span.size for span in last.spans[:2]] == [305 + 32] * 2
    assert last.spans[-1].size == 312 + 32
    commands = [span for span in last.spans if span.size]
    times = [time for span in commands for time in (span.begun_ns, span.ended_ns)]
    assert times == sorted(times)
    _, _, compute, graph, wait, read = last.spans
    for inside, around in ((compute, graph), (wait, read)):
        assert around.begun_ns <= inside.begun_ns <= inside.ended_ns <= around.ended_ns
    assert first.now_ns <= commands[0].begun_ns and read.ended_ns <= last.now_ns
    # The clock is the machine's own, on which this test runs too.
    assert abs(last.now_ns - time.monotonic_ns()) < 60e9


def test_nothing_is_recorded_before_and_after(client: WideClient) -> None:
    client.device_count()
    assert fetch(client, on=0).spans == ()
    client.device_count()
    assert fetch(client).spans == ()
    client.device_count()
    named = [span.name for span in fetch(client, on=0).spans]
    assert named == ["DEVICE_COUNT"]
    client.device_count()
    assert fetch(client).spans == ()


def test_an_answer_has_room_for_some(client: WideClient) -> None:
    fetch(client)
    ping = REQUEST_HEADER.pack(Command.LX_PING, 0)
    for _ in range(3):
        client.send(ping * 1000)
        for _ in range(1000):
            client.answer()
    one, two = fetch(client), fetch(client)
    assert len(one.spans) == MAX_SPANS
    assert len(two.spans) == 3000 - MAX_SPANS + 1
    begun = [span.begun_ns for span in (*one.spans, *two.spans)]
    assert begun == sorted(begun)


def test_refused_commands_are_recorded_too(client: WideClient) -> None:
    fetch(client)
    client.post(Command.GET_ALIGNMENT, b"\xff\0\0\0")
    assert "no device 255" in client.error()
    assert [span.name for span in fetch(client).spans] == ["GET_ALIGNMENT"]


def test_neither_on_nor_off(client: WideClient) -> None:
    client.post(Command.LX_TRACE, TraceRequest(2).encode())
    assert "2 is neither on (1) nor off (0)" in client.error()
    assert client.device_count() == 1


def test_before_lx_there_is_no_such_command(worker: Worker) -> None:
    with RawClient(worker.endpoint, V8) as client:
        client.hello()
        client.post(Command.LX_TRACE, TraceRequest(1).encode())
        client.expect_closed()


def test_the_newest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOM", 3)
    ring = SpanRing()
    for number in range(5):
        ring.add(number, 10 * number, 7)
    assert ring.lost == 2
    assert [span.kind for span in ring.take(2)] == [2, 3]
    assert [span.kind for span in ring.take(2)] == [4]
    assert ring.take(2) == ()
