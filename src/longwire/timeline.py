"""Timelines in Chrome's trace event format, which Perfetto opens.

Knows the format and nothing of what is drawn. Times are seconds of one clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

__all__ = ["Timeline", "Track"]

_MICRO = 1e6
"""The format's unit of time."""


class Track(NamedTuple):
    """A row of a timeline, within a group of rows."""

    group: int
    row: int


class Timeline:
    """Writes a timeline to a file as it comes. Close it: the file itself stays open.

    Spans of one track must not overlap, unless one holds the other whole. A file
    that was never closed lacks its last bracket, which viewers do without.
    """

    def __init__(self, file: IO[str], origin_s: float) -> None:
        """Begin; `origin_s` is what the timeline shows as 0."""
        self._file = file
        self._origin_s = origin_s
        self._between = "[\n"

    def name(self, track: Track, group: str, row: str) -> None:
        """Say what the track and its group are called."""
        where = {"pid": track.group, "tid": track.row}
        for kind, name in (("process_name", group), ("thread_name", row)):
            self._put({"name": kind, "ph": "M", **where, "args": {"name": name}})
        order = {"sort_index": track.row}
        self._put({"name": "thread_sort_index", "ph": "M", **where, "args": order})

    def span(
        self,
        track: Track,
        name: str,
        begun_s: float,
        ended_s: float,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Draw something that took time; at least none."""
        begun = self._time(begun_s)
        # From rounded times: spans that touch must not overlap.
        took = max(0.0, round(self._time(ended_s) - begun, 3))
        self._draw(track, name, begun, details, ph="X", dur=took)

    def mark(
        self,
        track: Track,
        name: str,
        at_s: float,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Draw something that happened."""
        self._draw(track, name, self._time(at_s), details, ph="i", s="t")

    def close(self) -> None:
        """Write the end; idempotent."""
        if self._between:
            self._file.write(("[" if self._between == "[\n" else "") + "\n]\n")
            self._between = ""

    def _time(self, at_s: float) -> float:
        return round((at_s - self._origin_s) * _MICRO, 3)

    def _draw(
        self,
        track: Track,
        name: str,
        at: float,
        details: Mapping[str, Any] | None,
        **event: Any,
    ) -> None:
        event |= {"name": name, "ts": at, "pid": track.group, "tid": track.row}
        self._put({**event, "args": dict(details)} if details else event)

    def _put(self, event: Mapping[str, Any]) -> None:
        self._file.write(self._between + json.dumps(event))
        self._between = ",\n"
