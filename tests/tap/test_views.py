"""Who is told, when, and that nobody who tells is held up."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from longwire.tap import views as module
from longwire.tap.lines import Lines
from longwire.tap.spans import Spans
from longwire.tap.steps import Step
from longwire.tap.table import TableView
from longwire.tap.views import Closed, Opened, Shown, Source, View, Views
from longwire.wire.constants import Command
from longwire.wire.trace import Undecoded
from support.timelines import named_tracks, read_timeline, spans
from support.traced import answer, request

C = Command

PATIENCE_S = 10.0
ONE, TWO = Source(1, "127.0.0.1:4001"), Source(2, "127.0.0.1:4002")


def session() -> Iterator[Shown]:
    """A connection with one step, in seconds 1 to 9; a refusal; a cut."""
    yield Opened(0.5)
    hello = request(C.HELLO, 1.0, 1.0, 33)
    yield from (hello, answer(hello, 1.5, 1.5, 36, protocol="8.0.0", lx=True))
    yield request(C.SET_TENSOR, 2.0, 3.0, 5000, tensor="w\n", size=4686)
    yield request(C.GRAPH_COMPUTE, 3.5, 4.0, 700, nodes=5, ops={"ADD": 5})
    read = request(C.GET_TENSOR, 5.0, 5.0, 321, tensor="out", size=992)
    yield from (read, answer(read, 7.0, 8.0, 1000))
    ask = request(C.LX_DEVICE, 8.5, 8.5, 13)
    refusal = answer(ask, 8.75, 8.75, 40, True, error="BadRequest", sentence="no")
    yield from (ask, refusal)
    yield request(C.DEVICE_COUNT, 9.0, 9.0, 9)
    yield Undecoded(9.5, "what is this")
    yield Closed(10.0, "one end has left", ("DEVICE_COUNT",))


STEP = Step(3.5, 8.0, 1, 3, 6021, 1000, 1, 2.0)


class Kept:
    """A view that remembers; `gate` keeps it from going on."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.shown: list[tuple[Source, Shown]] = []
        self.flushed = 0
        self.lost: int | None = None

    def show(self, source: Source, event: Shown) -> None:
        if self.gate is not None:
            assert self.gate.wait(PATIENCE_S)
        self.shown.append((source, event))

    def flush(self) -> None:
        self.flushed += 1

    def close(self, lost: int) -> None:
        assert self.lost is None
        self.lost = lost


def show(view: View, *sources: Source) -> None:
    with Views([view]) as views:
        for event in session():
            assert not isinstance(event, Step)
            for source in sources or [ONE]:
                views.note(source, event)


def test_all_is_shown_in_order_with_its_steps() -> None:
    kept = Kept()
    show(kept, ONE, TWO)
    assert kept.lost == 0 and kept.flushed
    for source in (ONE, TWO):
        events = [event for origin, event in kept.shown if origin == source]
        assert events[7] == STEP
        assert [e for e in events if not isinstance(e, Step)] == list(session())


def test_a_slow_view_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_ROOM", 3)
    kept = Kept(threading.Event())
    with Views([kept]) as views:
        for i in range(20):
            views.note(ONE, Opened(float(i)))
        assert kept.gate is not None
        kept.gate.set()
    # One may have been on its way already.
    assert 3 <= len(kept.shown) <= 4
    assert kept.lost == 20 - len(kept.shown)
    assert f"{kept.lost} messages are missing" in caplog.text


def test_a_view_that_is_stuck_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.1)
    kept = Kept(threading.Event())
    show(kept)
    assert "the output takes nothing in" in caplog.text
    assert kept.gate is not None
    kept.gate.set()


def test_a_view_that_breaks_is_let_go(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Kept):
        def show(self, source: Source, event: Shown) -> None:
            super().show(source, event)
            raise BrokenPipeError("the reader has left")

    broken, kept = Broken(), Kept()
    with pytest.raises(BrokenPipeError), Views([broken, kept]) as views:
        for i in range(3):
            views.note(ONE, Opened(float(i)))
    assert (len(broken.shown), len(kept.shown)) == (1, 3)
    assert (broken.lost, kept.lost) == (None, 0)
    assert caplog.text.count("nothing more is shown: the reader has left") == 1


def lines(file: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_lines() -> None:
    file = io.StringIO()
    show(Lines(file, 1000.0))
    found = lines(file)
    assert {line.pop("connection") for line in found} == {1}
    assert found[0] == {"time": 1000.5, "peer": ONE.peer, "event": "open"}
    assert found[3:8] == [
        {
            "time": 1003.0,
            "direction": "request",
            "command": "SET_TENSOR",
            "bytes": 5000,
            "seconds": 1.0,
            "details": {"tensor": "w\n", "size": 4686},
        },
        {
            "time": 1004.0,
            "direction": "request",
            "command": "GRAPH_COMPUTE",
            "bytes": 700,
            "seconds": 0.5,
            "details": {"nodes": 5, "ops": {"ADD": 5}},
        },
        {
            "time": 1005.0,
            "direction": "request",
            "command": "GET_TENSOR",
            "bytes": 321,
            "details": {"tensor": "out", "size": 992},
        },
        {
            "time": 1008.0,
            "direction": "answer",
            "command": "GET_TENSOR",
            "bytes": 1000,
            "wait_s": 2.0,
            "seconds": 1.0,
        },
        {
            "time": 1008.0,
            "event": "step",
            "graphs": 1,
            "commands": 3,
            "bytes_out": 6021,
            "bytes_in": 1000,
            "round_trips": 1,
            "wait_s": 2.0,
            "seconds": 4.5,
        },
    ]
    assert found[9]["refused"] is True
    assert found[11:] == [
        {"time": 1009.5, "event": "undecoded", "reason": "what is this"},
        {
            "time": 1010.0,
            "event": "close",
            "reason": "one end has left",
            "owed": ["DEVICE_COUNT"],
        },
    ]


def test_lines_say_what_is_missing() -> None:
    file = io.StringIO()
    view = Lines(file, 0.0)
    view.close(7)
    assert lines(file) == [{"event": "lost", "count": 7}]


def test_spans(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with path.open("w") as file:
        show(Spans(file, 0.0), ONE, TWO)
    events = read_timeline(path)
    names = set(named_tracks(events).values())
    assert {group for group, _ in names} == {f"1: {ONE.peer}", f"2: {TWO.peer}"}
    for row, expected in {
        "steps": [("step", 3.5, 8.0)],
        "graphs": [("GRAPH_COMPUTE", 3.5, 8.0)],
        "commands with an answer": [
            ("HELLO", 1.0, 1.5),
            ("GET_TENSOR", 5.0, 8.0),
            ("LX_DEVICE", 8.5, 8.75),
        ],
        "commands without one": [
            ("SET_TENSOR", 2.0, 3.0),
            ("GRAPH_COMPUTE", 3.5, 4.0),
        ],
    }.items():
        found = [e for e in spans(events, row) if e["pid"] == 1]
        assert [times(span) for span in found] == expected
    (graph, _) = spans(events, "graphs")
    assert graph["args"] == {"bytes out": 700, "nodes": 5, "ops": {"ADD": 5}}
    marks = [e["name"] for e in events if e["ph"] == "i" and e["pid"] == 1]
    assert marks == [
        "open",
        "not decoded from here on: what is this",
        "one end has left",
    ]


def times(span: dict[str, float]) -> tuple[object, float, float]:
    begun = span["ts"] / 1e6
    return span["name"], begun, begun + span["dur"] / 1e6


def test_spans_of_questions_and_graphs_that_overlap(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    first = request(C.GET_TENSOR, 1.0, 2.0)
    graphs = [request(C.GRAPH_RECOMPUTE, at, uid=int(at)) for at in (0.0, 3.0, 4.0)]
    second = request(C.GET_TENSOR, 5.0, 6.0)
    events: list[Shown] = [graphs[0], first, *graphs[1:], second]
    events += [answer(first, 7.0, 8.0), answer(second, 9.0, 10.0)]
    with path.open("w") as file:
        view = Spans(file, 0.0)
        for event in [Opened(0.0), *events]:
            view.show(ONE, event)
        view.close(0)
    found = read_timeline(path)
    asked = [times(span)[1:] for span in spans(found, "commands with an answer")]
    assert asked == [(1.0, 8.0), (8.0, 10.0)]
    assert [(s["args"]["uid"], *times(s)[1:]) for s in spans(found, "graphs")] == [
        (0, 0.0, 8.0),
        (3, 8.0, 10.0),
        (4, 8.0, 10.0),
    ]


def drawn(terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120)
    show(TableView(console))
    return file.getvalue()


def test_table() -> None:
    found = drawn(terminal=False)
    rows = [line.split() for line in found.splitlines()]
    read = "GET_TENSOR 1 321 B 1 kB 2.00 s 2.00 s".split()
    assert read in rows
    assert "SET_TENSOR 1 5 kB 0 B".split() in rows
    assert "LX_DEVICE (1 refused) 1 13 B 40 B 250 ms 250 ms".split() in rows
    assert "6 6.08 kB 1.08 kB 2.75 s 917 ms".split() in rows
    assert "connections: 1, 0 of them open; protocol 8.0.0\n" in found
    assert (
        "steps: 1; the median one: 3 commands, 1 round trips, 6.02 kB out, 1 kB in, "
        "2.00 s waiting of 4.50 s\n"
    ) in found
    assert f"{ONE.peer}: not decoded: what is this\n" in found
    assert f"{ONE.peer}: one end has left; no answer to DEVICE_COUNT\n" in found
    assert "\x1b" not in found


def test_table_on_a_terminal_is_drawn_in_place() -> None:
    found = drawn(terminal=True)
    assert "GET_TENSOR" in found and "\x1b[" in found


def test_table_of_nothing() -> None:
    file = io.StringIO()
    TableView(Console(file=file, width=80)).close(3)
    assert "connections: 0" in file.getvalue()
    assert "3 messages are missing" in file.getvalue()
