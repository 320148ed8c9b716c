"""Bytes to and from several peers at the same time, without deadlock.

Every peer may be in the middle of sending, and its buffers full: so whatever can
move does, in either direction, and only when nothing can is there a wait. It begins
with a short time of looking again and again, since a sleeper wakes up late.
"""

from __future__ import annotations

import select
import ssl
import time
from collections.abc import Callable, Sequence

from longwire.errors import RemoteFailure
from longwire.transport.duplex import Duplex, yield_core
from longwire.transport.tls import explain

__all__ = ["LONGEST_S", "SILENCE_S", "SPIN_S", "Flow", "broken", "exchange"]

SILENCE_S = 10.0
"""A peer that is waited for and gives no sign of life for so long is gone."""

LONGEST_S = 1800.0
"""Two that wait for each other give signs of life, and wait in vain."""

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

    def send(self, pieces: list[memoryview]) -> None:
        """Have these bytes leave; all from before have."""
        self._pieces = pieces
        self.unsent = sum(map(len, pieces))

    def receive(self, target: memoryview) -> None:
        """Have the next bytes go there; `target` is filled when `awaited` is 0."""
        self._target = target
        self.awaited = len(target)

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

    `step` is called whenever something has moved. `abandoned` ends the wait.

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
        if moved:
            spin_until = 0.0
            continue
        now = time.perf_counter()
        if not spin_until:
            spin_until = now + SPIN_S
        elif now >= spin_until:
            if wait is None:
                wait = _Wait(flows, command, abandoned)
            wait.once()
        else:
            yield_core()


class _Wait:
    """The slow part of an exchange: sleeps, and judges who has been silent."""

    def __init__(
        self, flows: Sequence[Flow], command: str, abandoned: Callable[[], bool]
    ) -> None:
        self._flows = flows
        self._command = command
        self._abandoned = abandoned
        self._begun = time.monotonic()
        self._look_at = self._begun + _LOOK_S
        self._seen = [flow.progress for flow in flows]
        self._heard = [self._begun for _ in flows]

    def once(self) -> None:
        """Sleep until something can move, or it is time to look around.

        Raises:
            RemoteFailure: there is nothing to wait for any more.
        """
        poll = select.poll()
        for flow in self._flows:
            events = select.POLLIN if flow.listens else 0
            events |= select.POLLOUT if flow.unsent else 0
            if events:
                poll.register(flow.duplex.fileno(), events)
            if flow.listens and flow.duplex.holds:
                return
        poll.poll(_LOOK_S * 1000)
        now = time.monotonic()
        looks = now >= self._look_at
        if looks:
            self._look_at = now + _LOOK_S
        for i, flow in enumerate(self._flows):
            if (progress := flow.progress) != self._seen[i]:
                self._seen[i], self._heard[i] = progress, now
            if looks and (flow.unsent or flow.awaited):
                self._judge(flow, now - self._heard[i], now - self._begun)

    def _judge(self, flow: Flow, silent_s: float, waited_s: float) -> None:
        if self._abandoned():
            raise _broken(flow, self._command, "the client left, nobody waits for it")
        if silent_s >= flow.patience_s:
            words = f"no sign of life for {flow.patience_s:g} s"
            raise _broken(flow, self._command, words)
        if waited_s >= LONGEST_S:
            words = f"nothing came in {LONGEST_S:g} s but signs of life"
            raise _broken(flow, self._command, words)


def broken(flow: Flow, command: str, error: EOFError | OSError) -> RemoteFailure:
    """Close a flow whose connection broke; returns what to raise."""
    return _broken(flow, command, _words(error))


def _broken(flow: Flow, command: str, words: str) -> RemoteFailure:
    flow.close(words)
    return RemoteFailure(flow.peer, command, words)


def _words(error: EOFError | OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return explain(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)
