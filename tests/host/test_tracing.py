"""Timelines of connections, whatever becomes of them."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from longwire.errors import RemoteFailure
from longwire.host import tracing as module
from longwire.host.tracing import Tracing
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.spans import TraceAnswer, WorkSpan
from support.scripted import Scripted, start_scripted
from support.timelines import named_tracks, read_timeline, spans


def recording() -> dict[Command, Any]:
    """Answers of a server that has always just pinged."""

    def trace(body: bytes) -> bytes:
        now = time.monotonic_ns()
        return TraceAnswer(now, 3, (WorkSpan(now - 9, now, 7, 0x83),)).encode()

    return {Command.LX_TRACE: trace}


@pytest.fixture
def pair() -> Iterator[Scripted]:
    with ExitStack() as stack:
        pair = start_scripted(recording(), V8, lx_flags=0)
        stack.callback(pair.close)
        yield pair


def drawn(file: io.StringIO, path: Path) -> list[dict[str, Any]]:
    path.write_text(file.getvalue())
    return read_timeline(path)


def step(tracing: Tracing, pair: Scripted) -> None:
    begun = time.perf_counter()
    pair.connection.ask(Command.DEVICE_COUNT, b"")
    tracing.note("decode", begun, time.perf_counter(), tokens=1)


def test_host_wire_and_worker(
    pair: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    file = io.StringIO()
    tracing = Tracing(file)
    for _ in range(2):
        tracing.follow([pair.connection])
        step(tracing, pair)
    tracing.close()
    tracing.close()
    assert pair.connection.recorder is None
    step_after = pair.connection.ask(Command.DEVICE_COUNT, b"")
    assert step_after
    events = drawn(file, tmp_path / "timeline")
    rows = list(named_tracks(events).values())
    assert rows[:2] == [("host", "generation"), ("worker:50052", "wire")]
    assert rows[2][1].startswith("worker (clock to within ")
    assert [s["args"] for s in spans(events, "generation")] == [{"tokens": 1}] * 2
    wire = [span["name"] for span in spans(events, "wire")]
    assert wire == ["send", "wait for DEVICE_COUNT", "receive DEVICE_COUNT"] * 2
    # Two fetches, and what is left at the end: three exchanges each.
    worker = spans(events, rows[2][1])
    assert [span["name"] for span in worker] == ["LX_PING"] * 9
    assert [e["name"] for e in events if e["ph"] == "i"] == ["3 spans are missing"]


def test_without_lx_only_the_wire(tmp_path: Path) -> None:
    pair = start_scripted({}, V8)
    file = io.StringIO()
    tracing = Tracing(file)
    tracing.follow([pair.connection])
    step(tracing, pair)
    tracing.close()
    pair.close()
    assert pair.server.commands == ["DEVICE_COUNT"]
    rows = [row for _, row in named_tracks(drawn(file, tmp_path / "t")).values()]
    assert rows == ["generation", "wire"]


def test_a_worker_that_is_lost(
    pair: Scripted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.StringIO()
    tracing = Tracing(file)
    tracing.follow([pair.connection])
    step(tracing, pair)
    pair.server.answers[Command.LX_TRACE] = b"nonsense"
    tracing.close()
    assert "the timeline lacks the end of a worker: worker:50052" in caplog.text
    assert spans(drawn(file, tmp_path / "t"), "wire")


def test_one_that_was_lost_before(
    pair: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.StringIO()
    tracing = Tracing(file)
    tracing.follow([pair.connection])
    pair.connection.close()
    tracing.note("decode", 1.0, 2.0)
    tracing.close()
    assert not caplog.text
    assert json.loads(file.getvalue())


def test_one_that_is_lost_while_it_is_asked(
    pair: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY_S", 0.0)
    tracing = Tracing(io.StringIO())
    tracing.follow([pair.connection])
    pair.server.answers[Command.LX_TRACE] = b"nonsense"
    with pytest.raises(RemoteFailure, match="LX_TRACE: length 8"):
        step(tracing, pair)
    assert not pair.connection.healthy
    tracing.close()
