"""Bytes to and from several peers at the same time, without deadlock.

Every peer may be in the middle of sending, and its buffers full: so whatever can
move does, in either direction, and only when nothing can is there a wait. It begins
with a short time of looking again and again, since a sleeper wakes up late.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from longwire.errors import RemoteFailure
from longwire.transport.duplex import Duplex, yield_core
from longwire.transport.tls import explain

__all__ = ["LONGEST_S", "SILENCE_S", "SPIN_S", "Flow", "broken", "exchange"]

SILENCE_S = 10.0
"""A peer that is waited for and gives no sign of life for so long is gone."""

LONGEST_S = 1800.0
"""Two that wait for each other give signs of life, and wait in vain: a peer from whom
not a byte comes for so long, and to whom none goes, is of no use."""

SPIN_S = 500e-6
"""A wake-up costs 20 to 70 us, and a core that slept is slow at first; ranks that
share a model come within less of each other."""

_LOOK_S = 0.25
"""How often a wait looks whether it still makes sense."""


class Flow:
    """Bytes for one peer and from it, without frames. Not locked."""

    patience_s = LONGEST_S
    """How long its silence is borne."""

    def __init__(self, duplex: Duplex, peer: str) -> None:
        self.duplex = duplex
        self.peer = peer
        self.failure: str | None = None
        """Why it is of no more use."""
        self.unsent = 0
        """Bytes that still have to leave."""
        self.awaited = 0
        """Bytes that still have to come."""
        self._pieces: list[memoryview] = []
        self._target = memoryview(b"")

    @property
    def listens(self) -> bool:
        """Whether bytes that come are of use now."""
        return self.awaited > 0

    @property
    def progress(self) -> object:
        """Changes with all that shows that the peer is alive."""
        return self.unsent, self.awaited

    def send(self, pieces: list[memoryview], more: int = 0) -> None:
        """Have these bytes leave, and `more` that `refill` brings; all from before
        have."""
        self._pieces = pieces
        self.unsent = sum(map(len, pieces)) + more

    def receive(self, target: memoryview, more: int = 0) -> None:
        """Have the next bytes go there, and then `more` to where `empty` says; all is
        here when `awaited` is 0."""
        self._target = target
        self.awaited = len(target) + more

    @property
    def dry(self) -> bool:
        """Whether it has to be refilled before it can send on."""
        return not self._pieces

    @property
    def full(self) -> bool:
        """Whether it has to be emptied before it can receive on."""
        return not len(self._target)

    def refill(self, piece: memoryview) -> None:
        """Send this on."""
        self._pieces = [piece]

    def empty(self, target: memoryview) -> None:
        """Receive on to there."""
        self._target = target

    def push(self) -> bool:
        """Send what can leave now; whether anything did.

        Raises:
            OSError: the connection broke.
        """
        return self._sent(self.duplex.send_some(self._pieces))

    def _sent(self, sent: int) -> bool:
        """So many bytes have left; whether any did."""
        self.unsent -= sent
        if not self.unsent:
            self._pieces = []
            return True
        rest = sent
        while rest and rest >= len(self._pieces[0]):
            rest -= len(self._pieces.pop(0))
        if rest:
            self._pieces[0] = self._pieces[0][rest:]
        return sent > 0

    def pull(self) -> bool:
        """Receive what is there; whether anything was.

        Raises:
            EOFError: the peer closed the connection.
            OSError: the connection broke.
        """
        received = self.duplex.receive_some(self._target)
        if received:
            self._target = self._target[received:]
            self.awaited -= received
        return received > 0

    def close(self, reason: str) -> None:
        """Close the connection; idempotent, and the first reason stays."""
        if self.failure is None:
            self.failure = reason
        self.unsent = self.awaited = 0
        self._pieces, self._target = [], memoryview(b"")
        self.duplex.close()


def exchange(
    flows: Sequence[Flow],
    command: str,
    abandoned: Callable[[], bool],
    step: Callable[[], None] | None = None,
) -> None:
    """Have all leave and come that the flows were told of.

    `step` is called whenever something has moved: no flow may be left dry or full.
    `abandoned` ends the wait.

    Raises:
        RemoteFailure: a peer is gone or silent; its flow is closed.
    """
    wait: _Wait | None = None
    spin_until = 0.0
    while True:
        moved, left = False, False
        for flow in flows:
            try:
                if flow.unsent:
                    moved |= flow.push()
                if flow.listens:
                    moved |= flow.pull()
            except (EOFError, OSError) as error:
                raise broken(flow, command, error) from error
            left |= flow.unsent > 0 or flow.awaited > 0
        if moved and step is not None:
            step()
        if not left:
            return
        now = time.perf_counter()
        if wait is None:
            wait = _Wait(flows, command, abandoned, now)
        elif now >= wait.look_at:
            # Also where something moves all the time: a byte, or a sign of life.
            wait.look(now)
        if moved:
            spin_until = 0.0
        elif not spin_until:
            spin_until = now + SPIN_S
        elif now >= spin_until:
            wait.sleep()
        else:
            yield_core()


class _Wait:
    """The slow part of an exchange: sleeps, and judges who has been silent."""

    def __init__(
        self,
        flows: Sequence[Flow],
        command: str,
        abandoned: Callable[[], bool],
        now: float,
    ) -> None:
        self._flows = flows
        self._command = command
        self._abandoned = abandoned
        self.look_at = now + _LOOK_S
        self._signs = [(flow.progress, now) for flow in flows]
        """When each was seen to be alive first as it is now."""
        self._bytes = [(_left(flow), now) for flow in flows]
        """And to have so much left to do."""

    def sleep(self) -> None:
        """Wait until something can move, or it is time to look around."""
        poll = select.poll()
        for flow in self._flows:
            events = select.POLLIN if flow.listens else 0
            events |= select.POLLOUT if flow.unsent else 0
            if events:
                poll.register(flow.duplex.fileno(), events)
            if flow.listens and flow.duplex.holds:
                return
        poll.poll(_LOOK_S * 1000)

    def look(self, now: float) -> None:
        """Judge all that something is still awaited of.

        Raises:
            RemoteFailure: there is nothing to wait for any more.
        """
        self.look_at = now + _LOOK_S
        for i, flow in enumerate(self._flows):
            if flow.progress != self._signs[i][0]:
                self._signs[i] = flow.progress, now
            if _left(flow) != self._bytes[i][0]:
                self._bytes[i] = _left(flow), now
            if flow.unsent or flow.awaited:
                self._judge(flow, now - self._signs[i][1], now - self._bytes[i][1])

    def _judge(self, flow: Flow, silent_s: float, idle_s: float) -> None:
        if self._abandoned():
            raise _broken(flow, self._command, "the client left, nobody waits for it")
        if silent_s >= flow.patience_s:
            words = f"no sign of life for {flow.patience_s:g} s"
            raise _broken(flow, self._command, words)
        if idle_s >= LONGEST_S:
            words = f"nothing came in {LONGEST_S:g} s but signs of life"
            raise _broken(flow, self._command, words)


def _left(flow: Flow) -> tuple[int, int]:
    return flow.unsent, flow.awaited


def broken(flow: Flow, command: str, error: EOFError | OSError) -> RemoteFailure:
    """Close a flow whose connection broke; returns what to raise."""
    return _broken(flow, command, explain(error))


def _broken(flow: Flow, command: str, words: str) -> RemoteFailure:
    flow.close(words)
    return RemoteFailure(flow.peer, command, words)
