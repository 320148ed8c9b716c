"""What an engine does as one timeline: the host, the wire, and the workers."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import IO, Any

from longwire.client.connection import Connection
from longwire.client.spans import Span, WorkerSpans
from longwire.errors import LongwireError
from longwire.timeline import Timeline, Track

__all__ = ["Tracing"]

_log = logging.getLogger("longwire.host")

_EVERY_S = 1.0
"""How often workers are asked for what they recorded. They keep some 16,000 spans."""

_ROOM = 1 << 16
"""What passes in one step, at most; a step has some tens of spans."""

_HOST = Track(1, 1)


class Tracing:
    """Draws into a file for as long as it is open. Close it.

    Servers that do not speak LX record nothing: of these, only the wire is drawn.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._timeline = Timeline(file, time.perf_counter())
        self._timeline.name(_HOST, "host", "generation")
        self._followed: dict[Connection, _Followed] = {}
        self._asked_s = time.perf_counter()

    def follow(self, connections: Sequence[Connection]) -> None:
        """Draw what passes on these from now on, and what their workers do.

        Raises:
            RemoteError: a worker failed.
        """
        for connection in connections:
            if connection not in self._followed:
                group = 2 + len(self._followed)
                followed = _Followed(connection, self._timeline, group)
                self._followed[connection] = followed

    def note(self, name: str, begun_s: float, ended_s: float, **details: Any) -> None:
        """Draw what the host did; a good moment to draw the rest, too.

        Raises:
            RemoteError: a worker failed.
        """
        self._timeline.span(_HOST, name, begun_s, ended_s, details)
        due = ended_s - self._asked_s >= _EVERY_S
        for followed in self._followed.values():
            followed.draw(fetch=due)
        if due:
            self._asked_s = time.perf_counter()

    def close(self) -> None:
        """Draw what is left, and write the end; idempotent.

        A worker that has failed is left out: who uses it is told anyway.
        """
        followed, self._followed = self._followed, {}
        for each in followed.values():
            try:
                each.close()
            except LongwireError as error:
                _log.warning("the timeline lacks the end of a worker: %s", error)
        self._timeline.close()
        self._file.flush()


class _Followed:
    """One connection: a group of two tracks."""

    def __init__(self, connection: Connection, timeline: Timeline, group: int) -> None:
        self._connection = connection
        self._timeline = timeline
        self._wire, self._worker = Track(group, 1), Track(group, 2)
        self._passed: deque[Span] = deque(maxlen=_ROOM)
        self._spans: WorkerSpans | None = None
        name = str(connection.endpoint)
        timeline.name(self._wire, name, "wire")
        if connection.dialect.lx:
            self._spans = WorkerSpans(connection)
            error_us = self._spans.error_s * 1e6
            row = f"worker (clock to within {error_us:.0f} us)"
            timeline.name(self._worker, name, row)
        connection.recorder = self._record

    def _record(self, name: str, begun_s: float, ended_s: float, size: int) -> None:
        self._passed.append(Span(name, begun_s, ended_s, size))

    def draw(self, *, fetch: bool) -> None:
        """Draw what has passed; with `fetch`, what the worker did as well."""
        while self._passed:
            self._span(self._wire, self._passed.popleft())
        if fetch and self._spans is not None and self._connection.healthy:
            with self._unrecorded():
                for span in self._spans.fetch():
                    self._span(self._worker, span)

    def close(self) -> None:
        self._connection.recorder = None
        self.draw(fetch=False)
        if self._spans is not None and self._connection.healthy:
            for span in self._spans.close():
                self._span(self._worker, span)
            if self._spans.lost:
                missing = f"{self._spans.lost} spans are missing"
                self._timeline.mark(self._worker, missing, time.perf_counter())

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Keep what this asks for itself out of the timeline."""
        recorder, self._connection.recorder = self._connection.recorder, None
        try:
            yield
        finally:
            self._connection.recorder = recorder

    def _span(self, track: Track, span: Span) -> None:
        details = {"bytes": span.size} if span.size else None
        self._timeline.span(track, span.name, span.begun_s, span.ended_s, details)
