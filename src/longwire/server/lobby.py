"""Connections that have no session yet: accepted, silent, then waiting in line.

Not a byte is taken from them; that they have spoken is all that counts here.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass

from longwire.server.access import AllowList
from longwire.server.limits import Limits
from longwire.server.metrics import Metrics
from longwire.transport.endpoint import Endpoint

__all__ = ["Guest", "Lobby"]

_log = logging.getLogger("longwire.serve")

_PENDING = 8
"""Clients that may wait for a session; while they do, no more are accepted."""

_LEAST_HELLO_S = 0.1
"""Who speaks just before its time is up gets this much to finish."""


@dataclass(eq=False, slots=True)
class Guest:
    """A connection that no session has yet."""

    socket: socket.socket
    peer: str
    deadline: float
    """When it must have said something."""
    hello_s: float = 0.0
    """Once it has: what is left for the rest of its HELLO; 0 is for ever."""


class Lobby:
    """The listening socket and all who came through it. Not locked."""

    def __init__(
        self,
        listener: socket.socket,
        limits: Limits,
        allow: AllowList,
        metrics: Metrics,
        selector: selectors.BaseSelector,
    ) -> None:
        self.line: deque[Guest] = deque()
        """Those that have spoken, in order."""
        self._silent: dict[socket.socket, Guest] = {}
        """In order of their deadlines."""
        self._listener = listener
        self._limits = limits
        self._allow = allow
        self._metrics = metrics
        self._selector = selector
        self._listening = False

    def __contains__(self, sock: object) -> bool:
        return sock in self._silent

    @property
    def has_room(self) -> bool:
        """Whether another client may be accepted."""
        return len(self.line) < _PENDING

    @property
    def deadline(self) -> float | None:
        """When somebody's time is up."""
        if not self._silent or not self._limits.handshake_s:
            return None
        return next(iter(self._silent.values())).deadline

    def listen(self, wanted: bool) -> None:
        """Have the selector tell of new connections, or not."""
        if wanted and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._listening and not wanted:
            self._selector.unregister(self._listener)
        self._listening = wanted

    def accept(self) -> None:
        """Take in the next connection, if it still is there.

        Raises:
            OSError: the system has no descriptor to give.
        """
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        peer = str(Endpoint(*address[:2]))
        if not self._allow.admits(address[0]):
            sock.close()
            self._refuse(peer, "address", "is not in --allow")
            return
        deadline = time.monotonic() + self._limits.handshake_s
        self._silent[sock] = Guest(sock, peer, deadline)
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._silent) > self._limits.silent:
            self._give_up(next(iter(self._silent)), "silent", "never spoke")

    def expire(self) -> None:
        """Close those that have said nothing for too long."""
        now = time.monotonic()
        while (deadline := self.deadline) is not None and deadline <= now:
            words = f"said nothing for {self._limits.handshake_s:g} s"
            self._give_up(next(iter(self._silent)), "handshake", words)

    def spoke(self, sock: socket.socket) -> None:
        """A silent socket is readable: its client joins the line, or has left."""
        guest = self._leave_silence(sock)
        if _has_left(sock):
            sock.close()
            return
        # The wait for a session is not the client's fault.
        if self._limits.handshake_s:
            guest.hello_s = max(_LEAST_HELLO_S, guest.deadline - time.monotonic())
        self.line.append(guest)

    def close(self) -> int:
        """Close all connections and the listening socket; idempotent.

        Returns how many clients had no session yet.
        """
        self.listen(False)
        self._listener.close()
        guests = [*self._silent.values(), *self.line]
        for sock in list(self._silent):
            self._leave_silence(sock)
        self.line.clear()
        for guest in guests:
            guest.socket.close()
        return len(guests)

    def _give_up(self, sock: socket.socket, reason: str, words: str) -> None:
        guest = self._leave_silence(sock)
        sock.close()
        self._refuse(guest.peer, reason, words)

    def _refuse(self, peer: str, reason: str, words: str) -> None:
        self._metrics.refused(reason)
        fields = {"peer": peer, "refused": reason}
        _log.warning("%s %s, closed", peer, words, extra=fields)

    def _leave_silence(self, sock: socket.socket) -> Guest:
        self._selector.unregister(sock)
        return self._silent.pop(sock)


def _has_left(client: socket.socket) -> bool:
    """Whether a readable socket has its end to offer, and not a byte."""
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
