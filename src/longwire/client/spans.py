"""What a worker's session records, fetched, and told in this machine's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.wire.constants import Command
from longwire.wire.spans import MAX_SPANS, TraceAnswer, TraceRequest

__all__ = ["Span", "WorkerSpans"]

_FIRST_EXCHANGES = 8
"""To compare clocks by; the fastest one counts."""

_EXCHANGES = 3
"""Later on: clocks drift apart by some 10 us per second."""


class Span(NamedTuple):
    """Something that took time, in seconds of `time.perf_counter`."""

    name: str
    begun_s: float
    ended_s: float
    size: int
    """Bytes; 0 for what has none."""


class WorkerSpans:
    """Has one LX server record; close it to have that end.

    Nobody else may use the connection meanwhile.
    """

    def __init__(
        self, connection: Connection, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begin.

        Raises:
            RemoteError: the server failed.
        """
        self.lost = 0
        """Spans that the server had no room for."""
        self.error_s = 0.0
        """How far the times may be off."""
        self._connection = connection
        self._clock = clock
        self._ahead_s = 0.0
        """The server's clock, less ours."""
        self._fetch(_FIRST_EXCHANGES)

    def fetch(self) -> list[Span]:
        """What was recorded since the last time.

        Raises:
            RemoteError: the server failed.
        """
        return self._fetch(_EXCHANGES)

    def close(self) -> list[Span]:
        """Have the recording end; returns what is left.

        Raises:
            RemoteError: the server failed.
        """
        spans = self.fetch()
        self._ask(0)
        return spans

    def _fetch(self, exchanges: int) -> list[Span]:
        best_s = float("inf")
        found: list[TraceAnswer] = []
        # Until all are here, too: an answer has room for some of them only.
        while exchanges > 0 or len(found[-1].spans) == MAX_SPANS:
            exchanges -= 1
            begun_s = self._clock()
            answer = self._ask(1)
            took_s = self._clock() - begun_s
            if took_s < best_s:
                best_s = took_s
                self._ahead_s = answer.now_ns / 1e9 - (begun_s + took_s / 2)
            found.append(answer)
        self.error_s = best_s / 2
        self.lost = found[-1].lost
        return [
            Span(
                span.name,
                span.begun_ns / 1e9 - self._ahead_s,
                span.ended_ns / 1e9 - self._ahead_s,
                span.size,
            )
            for answer in found
            for span in answer.spans
            if span.kind != Command.LX_TRACE
        ]

    def _ask(self, on: int) -> TraceAnswer:
        body = TraceRequest(on).encode()
        ask = self._connection.ask_message
        return ask(Command.LX_TRACE, body, TraceAnswer.decode)
