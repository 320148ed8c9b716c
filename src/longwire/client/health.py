"""How an endpoint is: how long it may take, and what it means if it does not answer."""

from __future__ import annotations

from dataclasses import dataclass

from longwire.errors import LongwireError
from longwire.transport.endpoint import Endpoint
from longwire.transport.tls import explain

__all__ = ["Deadlines", "Health", "reason_of"]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait, in seconds."""

    connect_s: float = 5.0
    """For the connection and, again, for the HELLO answer."""
    answer_s: float = 1800.0
    """For each answer. A large ubatch on a slow CPU takes minutes."""
    silence_s: float = 10.0
    """For a sign of life of a server that gives any: ours does once per second.
    Such a server is noticed when it is frozen; llama.cpp's only after `answer_s`."""


@dataclass(frozen=True, slots=True)
class Health:
    """How an endpoint is."""

    endpoint: Endpoint
    failure: LongwireError | None
    """What ended the connection; None while all is well."""
    round_trip_s: float | None
    """Of one question; None if none was asked, since the connection is at work."""

    @property
    def ok(self) -> bool:
        return self.failure is None


def reason_of(error: BaseException) -> str:
    """Why a stream failed, in words."""
    if isinstance(error, TimeoutError):
        return "no answer before the deadline"
    # With bytes of ours unread, a closed connection looks like a reset one.
    if isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError)):
        return (
            "the server closed the connection (it refused the last commands, "
            "or it is gone; its log says which)"
        )
    if isinstance(error, OSError):
        return explain(error)
    return str(error) or type(error).__name__
