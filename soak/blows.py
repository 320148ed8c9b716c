"""The ways to strike a host or a worker."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

from soak.relay import SIDES
from soak.station import Station

__all__ = ["AFTERMATHS", "FROZEN", "KINDS", "ON_HOST", "RESETS", "send", "strike"]

AFTERMATHS = ("goes on soon", "goes on later", "is killed")
"""What becomes of a frozen process: SIGCONT before a deadline is over, or after it;
or SIGKILL then."""

FROZEN = ("stop-session", "stop-supervisor", "stop-worker", "stop-host")
RESETS = tuple(f"reset-{side}" for side in SIDES)
KILLED = ("kill-session", "kill-supervisor", "kill-worker", "kill-host")
ON_HOST = ("kill-host", "stop-host")
KINDS = (*KILLED, *FROZEN, *RESETS)
"""A worker is its supervisor with all sessions: a machine that is gone. Of a reset,
one side hears or both."""


def strike(kind: str, station: Station, host: int) -> list[int]:
    """Strike `station` or the process `host`; returns the processes now frozen."""
    if kind in RESETS:
        station.relay.reset(kind.partition("-")[2])
        return []
    pids = _victims(kind.partition("-")[2], station, host)
    frozen = kind in FROZEN
    send(signal.SIGSTOP if frozen else signal.SIGKILL, pids)
    return pids if frozen else []


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to those that still are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _victims(what: str, station: Station, host: int) -> list[int]:
    if what == "host":
        return [host]
    if what == "supervisor":
        return [station.pid]
    if what == "worker":
        # All of its group at once, or it could start another one in between.
        return [-station.pid]
    serving = station.serving()
    return [serving] if serving is not None else station.worker.sessions()[:1]
