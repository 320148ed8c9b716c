"""What passes as a timeline: a group of tracks for each connection."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import IO, Any

from longwire.tap.steps import GRAPHS, Step
from longwire.tap.views import Closed, Opened, Shown, Source
from longwire.timeline import Timeline, Track
from longwire.wire.trace import Answer, Request, Undecoded

__all__ = ["Spans"]

_ROWS = ("steps", "graphs", "commands with an answer", "commands without one")
_STEPS, _GRAPHS, _ANSWERED, _POSTED = range(1, 5)

_MOST = 4096
"""Graphs and questions of a connection that may wait for an answer; the oldest are
not drawn if there are more."""


class Spans:
    """A view that writes a timeline."""

    def __init__(self, file: IO[str], origin_s: float) -> None:
        self._file = file
        self._timeline = Timeline(file, origin_s)
        self._connections: dict[Source, _Connection] = {}

    def show(self, source: Source, event: Shown) -> None:
        if isinstance(event, Opened):
            self._connections[source] = _Connection(self._timeline, source)
        if source in self._connections:
            self._connections[source].show(event)
        if isinstance(event, Closed):
            self._connections.pop(source, None)

    def flush(self) -> None:
        """Nothing: a file that is read later need not be up to date."""

    def close(self, lost: int) -> None:
        if lost:
            at = Track(0, 0)
            self._timeline.name(at, "tap", "")
            self._timeline.mark(at, f"{lost} messages are missing", 0.0)
        self._timeline.close()
        self._file.flush()


class _Connection:
    """One connection's tracks.

    On each of them a span begins at the end of the one before at the earliest: the
    server does one thing after the other, and what overlaps cannot be drawn.
    """

    def __init__(self, timeline: Timeline, source: Source) -> None:
        self._timeline = timeline
        self._source = source
        self._waiting: deque[Request] = deque(maxlen=_MOST)
        """Graphs, and what has an answer, in their order."""
        self._answered_s = 0.0
        """When the last answer was through."""
        name = f"{source.number}: {source.peer}"
        for row, what in enumerate(_ROWS, 1):
            timeline.name(self._track(row), name, what)

    def show(self, event: Shown) -> None:
        if isinstance(event, Request):
            self._asked(event)
        elif isinstance(event, Answer):
            self._answered(event)
        elif isinstance(event, Step):
            details = asdict(event)
            times = details.pop("begun_s"), details.pop("ended_s")
            self._timeline.span(self._track(_STEPS), "step", *times, details)
        elif isinstance(event, Undecoded):
            self._mark(f"not decoded from here on: {event.reason}", event.at_s)
        elif isinstance(event, Opened):
            self._mark("open", event.at_s)
        else:
            self._mark(event.reason, event.at_s, {"owed": list(event.owed)})

    def _track(self, row: int) -> Track:
        return Track(self._source.number, row)

    def _mark(
        self, name: str, at_s: float, details: dict[str, Any] | None = None
    ) -> None:
        self._timeline.mark(self._track(_ANSWERED), name, at_s, details)

    def _asked(self, request: Request) -> None:
        if request.answer is not None or request.command in GRAPHS:
            self._waiting.append(request)
        if request.answer is None:
            self._timeline.span(
                self._track(_POSTED),
                request.name,
                request.begun_s,
                request.ended_s,
                {"bytes": request.size, **request.details},
            )

    def _answered(self, answer: Answer) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            if request is answer.request:
                break
            self._draw(_GRAPHS, request, answer.ended_s, {})
        told = {f"answer {name}": value for name, value in answer.details.items()}
        facts = {"bytes in": answer.size, "wait_s": answer.wait_s, **told}
        if answer.refused:
            facts["refused"] = True
        self._draw(_ANSWERED, answer.request, answer.ended_s, facts)
        self._answered_s = answer.ended_s

    def _draw(
        self, row: int, request: Request, ended_s: float, facts: dict[str, Any]
    ) -> None:
        begun_s = max(request.begun_s, self._answered_s)
        details = {"bytes out": request.size, **request.details, **facts}
        self._timeline.span(self._track(row), request.name, begun_s, ended_s, details)
