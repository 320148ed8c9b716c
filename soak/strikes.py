"""A rank of a communicator is struck in mid-sum: do the others report it in time?"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

from longwire.server.exchange import SILENCE_S
from soak.blows import send, strike
from soak.bouts import Plan, Refused, enter, take_part
from soak.station import Station

__all__ = ["BLOWS", "Blow", "Report", "play"]

BLOWS = ("kill-session", "kill-worker", "stop-session", "stop-worker")
"""A worker is its supervisor with all sessions: a machine that is gone, or frozen."""

_MARGIN_S = 4.0
"""For a busy machine; what is killed is noticed at once but for that."""


@dataclass(frozen=True)
class Blow:
    """Which rank is struck, how, and how long after the sums began."""

    kind: str
    rank: int
    after_s: float


@dataclass
class Report:
    """What the other ranks made of it."""

    blow: Blow
    took_s: list[float] = field(default_factory=list)
    """From the blow to their errors."""
    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def deadline_s(self) -> float:
        silence_s = SILENCE_S if self.blow.kind.startswith("stop") else 0
        return silence_s + _MARGIN_S


def play(stations: Sequence[Station], plan: Plan, blow: Blow) -> Report:
    """Strike the server of a rank while all sum, and see to it that each station is
    as before in the end; `stations` are by rank."""
    report, victim = Report(blow), stations[blow.rank]
    endpoints = [station.worker.endpoint for station in stations]
    with ExitStack() as stack:
        members, placed = enter(stack, endpoints, plan)
        pool = stack.enter_context(ThreadPoolExecutor(plan.size))
        ends: list[float] = [0.0] * plan.size

        def share(rank: int) -> None:
            mine, bursts = placed[rank], plan.bursts()
            try:
                take_part(members[rank], rank, plan, mine, bursts, False, report.wrong)
            finally:
                ends[rank] = time.monotonic()

        shares = [pool.submit(share, rank) for rank in range(plan.size)]
        time.sleep(blow.after_s)
        report.wrong += [
            f"rank {rank} had ended before" for rank, s in enumerate(shares) if s.done()
        ]
        struck = time.monotonic()
        frozen = strike(blow.kind, victim, 0)
        others = [s for rank, s in enumerate(shares) if rank != blow.rank]
        wait(others, timeout=report.deadline_s)
        for rank in range(plan.size):
            if rank != blow.rank:
                _judge(report, rank, shares[rank], ends[rank] - struck)
        for member in members:
            # Whoever still waits need not any more.
            with contextlib.suppress(OSError):
                member.socket.shutdown(socket.SHUT_RDWR)
        if frozen:
            send(signal.SIGCONT, frozen)
    for station in stations:
        report.wrong += station.settle()
    return report


def _judge(report: Report, rank: int, share: Future[None], took_s: float) -> None:
    if not share.done():
        report.wrong.append(f"rank {rank} hangs after {report.deadline_s} s")
        return
    error = share.exception()
    if isinstance(error, Refused) and "LX_ALLREDUCE: " in str(error):
        report.said.append("LX error")
    elif isinstance(error, (EOFError, ConnectionError)):
        report.said.append("connection closed")
    else:
        report.wrong.append(f"rank {rank}: {error!r}")
    report.took_s.append(took_s)
