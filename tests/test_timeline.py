"""Timelines are files that a viewer takes."""

from __future__ import annotations

import io
import json

from longwire.timeline import Timeline, Track

HERE = Track(3, 4)


def test_what_is_drawn() -> None:
    file = io.StringIO()
    timeline = Timeline(file, origin_s=100.0)
    timeline.name(HERE, "a group", "a row")
    timeline.span(HERE, "work", 100.5, 100.75, {"bytes": 7})
    timeline.span(HERE, "backwards", 101.0, 100.5)
    timeline.mark(HERE, "an end", 102.0)
    timeline.close()
    timeline.close()
    events = json.loads(file.getvalue())
    at = {"pid": 3, "tid": 4}
    assert events[0] == {
        "name": "process_name",
        "ph": "M",
        **at,
        "args": {"name": "a group"},
    }
    assert events[1]["args"] == {"name": "a row"}
    assert events[3:] == [
        {"ph": "X", "name": "work", "ts": 5e5, "dur": 25e4, **at, "args": {"bytes": 7}},
        {"ph": "X", "name": "backwards", "ts": 1e6, "dur": 0, **at},
        {"ph": "i", "s": "t", "name": "an end", "ts": 2e6, **at},
    ]


def test_an_empty_one() -> None:
    file = io.StringIO()
    Timeline(file, 0.0).close()
    assert json.loads(file.getvalue()) == []


def test_one_that_was_cut_off_lacks_its_end_alone() -> None:
    file = io.StringIO()
    timeline = Timeline(file, 0.0)
    timeline.mark(HERE, "one", 1.0)
    timeline.mark(HERE, "two", 2.0)
    assert len(json.loads(file.getvalue() + "]")) == 2
