"""What looks on: any bytes both ways, and a session's own bytes as they pass."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from fuzz import sequences
from fuzz.recording import frame
from fuzz.rehearsal import Tap, rehearse
from fuzz.source import Source
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import ANY, DIALECTS, LX_OFFER
from longwire.wire.frames import ANSWER_HEADER
from longwire.wire.lx import ERROR_BIT, KEEP_ALIVE, ErrorAnswer
from longwire.wire.trace import Answer, Event, Request, Undecoded

__all__ = ["check", "seeds"]

logging.getLogger("longwire.session").setLevel(logging.CRITICAL)

_MOST_PARTS = 24
_SIZES = (0, 1, 4, 8, 28, 1 << 16, (1 << 16) + 1, 1 << 62)

Passing = tuple[bool, bytes]
"""Whether it comes from the client, and what."""


def check(data: bytes) -> None:
    """Events are in order whatever passes, and a server's own bytes are understood."""
    source = Source(data)
    most = 1 + source.below(20)
    if source.rarely(4):
        _check_session(source.take(source.left))
        return
    parts = _drawn(source)
    whole, cut = _traced(parts, 1 << 20), _traced(parts, most)
    assert whole == cut, "the cut changed the meaning"
    _check_order(whole, parts)


def _check_session(data: bytes) -> None:
    # Of pieces so small none has a request that overtakes HELLO's answer.
    played = replace(sequences.recording(data), ending="pieces")
    tap = Tap()
    answers = rehearse(played, tap=tap)
    _check_events(tap.events)
    found = sum(isinstance(event, Answer) for event in tap.events)
    assert tap.trace.undecoded or found == len(answers.bodies), "an answer is missing"


def _traced(parts: list[Passing], most: int) -> list[Event]:
    tap, events = Tap(), []
    for i, (up, data) in enumerate(parts):
        for at in range(0, len(data), most):
            piece = data[at : at + most]
            put = tap.trace.from_client if up else tap.trace.from_server
            events += put(float(i), piece)
    return events


def _check_order(events: list[Event], parts: list[Passing]) -> None:
    _check_events(events)
    for kind, up in ((Request, True), (Answer, False)):
        told = sum(event.size for event in events if isinstance(event, kind))
        assert told <= sum(len(data) for way, data in parts if way is up)


def _check_events(events: list[Event]) -> None:
    """Answers follow the oldest request without one; nothing follows the end."""
    owed: deque[Request] = deque()
    for i, event in enumerate(events):
        match event:
            case Request():
                assert event.begun_s <= event.ended_s and event.name
                if event.answer is not None:
                    owed.append(event)
            case Answer():
                assert event.request is owed.popleft()
                assert event.begun_s <= event.ended_s
            case Undecoded():
                assert i == len(events) - 1, "more after the end"
                assert event.reason


def _drawn(source: Source) -> list[Passing]:
    """A conversation that is often in order, of least bodies."""
    dialect = DIALECTS[source.pick((8, 7))]
    version = source.pick((dialect.major, dialect.major, 6, 9))
    answer = m.HelloAnswer(version, 0, 0, padding=source.pick((1, 0, 1, 16)))
    parts = [(True, frame(Command.HELLO, m.Hello().encode()))]
    owed = deque([answer.encode()])
    shapes = {**dialect.with_lx().shapes, **LX_OFFER}
    numbers = sorted(shapes)
    while source.left and len(parts) < _MOST_PARTS:
        if owed and not source.rarely(4):
            parts.append((False, _answer(source, owed.popleft())))
        elif source.rarely(12):
            parts.append((not source.rarely(2), source.take(source.below(60))))
        else:
            number = Command.LX_START if source.rarely(6) else source.pick(numbers)
            shape = shapes[number]
            body = source.take(min(shape.least, 64)).ljust(shape.least, b"\0")
            parts.append((True, frame(number, body)))
            if shape.answer is not None:
                size = source.below(64) if shape.answer == ANY else shape.answer
                owed.append(source.take(size))
    return parts


def _answer(source: Source, body: bytes) -> bytes:
    """That answer, or an error, or one of another length; maybe late."""
    alive = ANSWER_HEADER.pack(KEEP_ALIVE) if source.rarely(8) else b""
    if source.rarely(8):
        error = ErrorAnswer(4, "BadRequest", "no")
        body = error.encode()[source.below(12) :]
        return alive + ANSWER_HEADER.pack(len(body) | ERROR_BIT) + body
    size = source.pick(_SIZES) if source.rarely(12) else len(body)
    return alive + ANSWER_HEADER.pack(size) + body


def seeds() -> Iterator[bytes]:
    """Both ways of looking on."""
    for i, seed in enumerate(sequences.seeds()):
        yield bytes([i % 20, 3 if i % 2 else 0]) + seed
