"""Messages as a decoder of passing bytes would report them."""

from __future__ import annotations

from typing import Any

from longwire.wire.constants import Command
from longwire.wire.dialects import LX_OFFER, LX_SHAPES, V8
from longwire.wire.trace import Answer, Request

__all__ = ["answer", "request"]

_SHAPES = {**V8.shapes, **LX_OFFER, **LX_SHAPES}


def request(
    command: Command,
    begun_s: float,
    ended_s: float | None = None,
    size: int = 10,
    /,
    **details: Any,
) -> Request:
    """A request; whether it has an answer is the command's matter."""
    due = _SHAPES[command].answer
    ended_s = begun_s if ended_s is None else ended_s
    return Request(command, begun_s, ended_s, size, details, due)


def answer(
    to: Request,
    begun_s: float,
    ended_s: float | None = None,
    size: int = 8,
    refused: bool = False,
    /,
    **details: Any,
) -> Answer:
    ended_s = begun_s if ended_s is None else ended_s
    return Answer(to, begun_s, ended_s, size, details, refused)
