"""What passes as JSON, a line for each message, step, beginning and end."""

from __future__ import annotations

import json
from typing import IO, Any

from longwire.tap.steps import Step
from longwire.tap.views import Opened, Shown, Source
from longwire.wire.trace import Answer, Request, Undecoded

__all__ = ["Lines"]


class Lines:
    """A view that writes lines. Times are of `time.time`, durations in seconds."""

    def __init__(self, file: IO[str], epoch_s: float) -> None:
        """`epoch_s` is to be added to the times of events."""
        self._file = file
        self._epoch_s = epoch_s

    def show(self, source: Source, event: Shown) -> None:
        facts = _facts(event)
        at_s = facts.pop("at_s")
        line = {
            "time": round(self._epoch_s + at_s, 6),
            "connection": source.number,
            **({"peer": source.peer} if isinstance(event, Opened) else {}),
            **facts,
        }
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self, lost: int) -> None:
        if lost:
            self._file.write(json.dumps({"event": "lost", "count": lost}) + "\n")
        self._file.flush()


def _facts(event: Shown) -> dict[str, Any]:
    """What there is to say, and `at_s`, when it was."""
    if isinstance(event, Request):
        return {"at_s": event.ended_s, **_message("request", event), **_rest(event)}
    if isinstance(event, Answer):
        return {
            "at_s": event.ended_s,
            **_message("answer", event),
            "wait_s": round(event.wait_s, 6),
            **({"refused": True} if event.refused else {}),
            **({"keep_alives": event.keep_alives} if event.keep_alives else {}),
            **_rest(event),
        }
    if isinstance(event, Step):
        return {
            "at_s": event.ended_s,
            "event": "step",
            "graphs": event.graphs,
            "commands": event.commands,
            "bytes_out": event.bytes_out,
            "bytes_in": event.bytes_in,
            "round_trips": event.round_trips,
            "wait_s": round(event.wait_s, 6),
            "seconds": round(event.took_s, 6),
        }
    if isinstance(event, Undecoded):
        return {"at_s": event.at_s, "event": "undecoded", "reason": event.reason}
    if isinstance(event, Opened):
        return {"at_s": event.at_s, "event": "open"}
    return {
        "at_s": event.at_s,
        "event": "close",
        "reason": event.reason,
        "owed": list(event.owed),
    }


def _message(direction: str, message: Request | Answer) -> dict[str, Any]:
    request = message.request if isinstance(message, Answer) else message
    return {
        "direction": direction,
        "command": request.name,
        "bytes": message.size,
    }


def _rest(message: Request | Answer) -> dict[str, Any]:
    """How long its bytes took to pass, if that is anything, and what they say."""
    took_s = round(message.ended_s - message.begun_s, 6)
    took = {"seconds": took_s} if took_s else {}
    return took | ({"details": message.details} if message.details else {})
