"""Reading timelines, and what has to hold for every one."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

__all__ = ["named_tracks", "read_timeline", "spans"]

Event = dict[str, Any]


def read_timeline(path: Path) -> list[Event]:
    """A timeline's events; each track has a name, and its spans nest."""
    events: list[Event] = json.loads(path.read_text(encoding="utf-8"))
    assert {event["ph"] for event in events} <= {"M", "X", "i"}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            assert event["name"] and event["ts"] >= 0
            tracks[event["pid"], event["tid"]].append(event)
    assert set(tracks) <= set(named_tracks(events))
    for track in tracks.values():
        check_nesting([event for event in track if event["ph"] == "X"])
    return events


def check_nesting(track: list[Event]) -> None:
    """No span reaches over the end of one that it begins in."""
    around: list[float] = []
    for span in sorted(track, key=lambda s: (s["ts"], -s["dur"])):
        begun, ended = span["ts"], span["ts"] + span["dur"]
        assert span["dur"] >= 0, span
        while around and around[-1] <= begun + 1e-3:
            around.pop()
        assert not around or ended <= around[-1] + 2e-3, (span, around)
        around.append(ended)


def named_tracks(events: list[Event]) -> dict[tuple[int, int], tuple[str, str]]:
    """The names of the group and the row, by their numbers."""
    groups = {
        e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"
    }
    return {
        (e["pid"], e["tid"]): (groups[e["pid"]], e["args"]["name"])
        for e in events
        if e["name"] == "thread_name"
    }


def spans(events: list[Event], row: str) -> list[Event]:
    """The spans of all tracks of that name, in the order of their beginning."""
    tracks = {at for at, names in named_tracks(events).items() if names[1] == row}
    found = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in tracks]
    return sorted(found, key=lambda event: event["ts"])
