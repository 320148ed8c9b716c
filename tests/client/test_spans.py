"""Workers' spans in our time, and a connection's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from longwire.client.spans import Span, WorkerSpans
from longwire.errors import ConnectionLost
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.spans import MAX_SPANS, TraceAnswer, TraceRequest, WorkSpan
from support.scripted import Instead, Scripted

Start = Callable[..., Scripted]

AHEAD_S = 5000.0
"""The server's clock, less the client's."""


class Clocks:
    """A client's clock that only exchanges move, and a server that records."""

    def __init__(self, *took_s: float) -> None:
        self.now_s = 100.0
        self.took_s = list(took_s)
        """Of the next exchanges; then 1 s each. There and back take half of it."""
        self.waiting: list[WorkSpan] = []
        self.asked: list[int] = []
        self.lost = 0

    def clock(self) -> float:
        return self.now_s

    def trace(self, body: bytes) -> bytes:
        self.asked.append(TraceRequest.decode(body).on)
        took_s = self.took_s.pop(0) if self.took_s else 1.0
        # The way there takes longer than the way back.
        self.now_s += took_s
        now = self.now_s - 0.25 * took_s + AHEAD_S
        spans, self.waiting = self.waiting[:MAX_SPANS], self.waiting[MAX_SPANS:]
        return TraceAnswer(round(now * 1e9), self.lost, tuple(spans)).encode()

    def record(self, kind: int, begun_s: float, ended_s: float, size: int = 0) -> None:
        """A span at times of the client's clock."""
        begun, ended = (round((s + AHEAD_S) * 1e9) for s in (begun_s, ended_s))
        self.waiting.append(WorkSpan(begun, ended, size, kind))


def spans_of(scripted: Start, clocks: Clocks) -> tuple[WorkerSpans, Scripted]:
    answers = {Command.LX_TRACE: clocks.trace}
    pair = scripted(answers, V8, lx_flags=0)
    return WorkerSpans(pair.connection, clocks.clock), pair


def test_the_fastest_exchange_is_the_measure(scripted: Start) -> None:
    clocks = Clocks(1.0, 0.5, 0.004, 0.5)
    spans, _ = spans_of(scripted, clocks)
    assert clocks.asked == [1] * 8
    assert spans.error_s == pytest.approx(0.002)
    clocks.took_s = [1.0, 0.008, 1.0]
    clocks.record(Command.LX_TOP, 150.0, 151.5, 99)
    (span,) = spans.fetch()
    assert clocks.asked == [1] * 11
    assert (span.name, span.size) == ("LX_TOP", 99)
    assert spans.error_s == pytest.approx(0.004)
    assert abs(span.begun_s - 150.0) <= spans.error_s
    assert span.ended_s - span.begun_s == pytest.approx(1.5)


def test_more_than_fits_an_answer(scripted: Start) -> None:
    clocks = Clocks()
    spans, _ = spans_of(scripted, clocks)
    for number in range(5 * MAX_SPANS):
        clocks.record(Command.LX_PING, number, number + 0.5)
    clocks.lost = 4
    found = spans.fetch()
    assert len(found) == 5 * MAX_SPANS and spans.lost == 4
    assert len(clocks.asked) == 8 + 6
    begun = [span.begun_s for span in found]
    assert begun == sorted(begun)


def test_close_takes_the_rest_and_has_it_end(scripted: Start) -> None:
    clocks = Clocks()
    spans, _ = spans_of(scripted, clocks)
    clocks.record(Command.LX_PING, 1.0, 2.0)
    clocks.record(Command.LX_TRACE, 2.0, 3.0)
    assert [span.name for span in spans.close()] == ["LX_PING"]
    assert clocks.asked == [1] * 11 + [0]


def test_a_server_that_is_gone(scripted: Start) -> None:
    answers = {Command.LX_TRACE: Instead.CLOSE}
    pair = scripted(answers, V8, lx_flags=0)
    with pytest.raises(ConnectionLost):
        WorkerSpans(pair.connection)


def test_a_connection_tells_its_recorder(scripted: Start) -> None:
    connection = scripted({}, V8, lx_flags=0).connection
    told: list[Span] = []
    connection.ask(Command.DEVICE_COUNT, b"")
    connection.recorder = lambda *span: told.append(Span(*span))
    connection.post(Command.FREE_BUFFER, bytes(8))
    connection.ask(Command.DEVICE_COUNT, b"")
    connection.recorder = None
    connection.ask(Command.DEVICE_COUNT, b"")
    assert [(span.name, span.size) for span in told] == [
        ("send", 17 + 9),
        ("wait for DEVICE_COUNT", 0),
        ("receive DEVICE_COUNT", 4),
    ]
    times = [time for span in told for time in (span.begun_s, span.ended_s)]
    assert times == sorted(times)
