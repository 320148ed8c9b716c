"""What a connection has carried."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["Recorder", "Traffic"]

Recorder = Callable[[str, float, float, int], None]
"""Called with what was done, from when to when, and with how many bytes; by the
thread that did it, so it must not take long."""


@dataclass(slots=True)
class Traffic:
    """What one connection has carried, and where the time went."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_saved: int = 0
    """Data that was not sent because the server had it."""
    round_trips: int = 0
    """Waits for an answer; answers that arrive together count once."""
    graphs: int = 0
    """Graphs sent whole."""
    patches: int = 0
    """Graphs sent as what differs from one before."""
    recomputes: int = 0
    send_s: float = 0.0
    wait_s: float = 0.0
    """From the last byte sent to the first byte of the answer."""
    receive_s: float = 0.0

    def snapshot(self) -> Traffic:
        """A copy, to subtract from a later one."""
        return replace(self)

    def since(self, earlier: Traffic) -> Traffic:
        """The difference to an earlier snapshot."""
        return self._combined(earlier, operator.sub)

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return self._combined(other, operator.add)

    def _combined(self, other: Traffic, by: Callable[[Any, Any], Any]) -> Traffic:
        names = [f.name for f in fields(self)]
        return Traffic(*(by(getattr(self, n), getattr(other, n)) for n in names))
