"""Connections to other servers, made by a few threads: names take time to resolve."""

from __future__ import annotations

import errno
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from longwire.server.access import AllowList
from longwire.transport.endpoint import Endpoint

__all__ = ["NO_ANSWER", "Call", "Dialer"]

NO_ANSWER = "no answer in time"

_THREADS = 8
"""Connect at the same time; others wait for their turn."""

_MOST = 256
"""Calls at a time. Those that nobody waits for any more may still be in line."""

_AGAIN_S = 0.05
"""Pause before the next try of who calls again and again: what C++ servers do."""

_LOOK_S = 0.2
"""How often a thread looks whether it is to stop."""

_STOP_S = 2.0
"""For threads to end, at the end. None can be called back out of a name look-up."""


@dataclass(eq=False, slots=True)
class Call:
    """One connection that somebody wants, and then what became of it."""

    host: str
    port: int
    deadline: float
    again: bool
    """Try again while nobody listens there."""
    sock: socket.socket | None = None
    """Connected, once it is."""
    reason: str = ""
    """Why not, if it is not."""
    cancelled: bool = False
    """Nobody waits for it any more; set by another thread than reads it."""

    @property
    def where(self) -> str:
        return str(Endpoint(self.host, self.port))

    def check(self) -> None:
        """Raises: TimeoutError: there is no use in going on."""
        if self.cancelled or time.monotonic() >= self.deadline:
            raise TimeoutError(errno.ETIMEDOUT, NO_ANSWER)


class Dialer:
    """The threads. `done` may be asked for calls that came to an end."""

    def __init__(self, allow: AllowList, wake: Callable[[], None]) -> None:
        """`wake` is called, by any thread, when `done` has news."""
        self._allow = allow
        self._wake = wake
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._open = 0
        """Calls that are not in `done` yet."""
        self._stopping = threading.Event()

    def dial(self, call: Call) -> None:
        """Have a call made; it comes back through `done`."""
        self._open += 1
        if self._open > _MOST:
            call.reason = "too many calls are under way"
            self._done.put(call)
            self._wake()
            return
        if len(self._threads) < min(self._open, _THREADS):
            thread = threading.Thread(target=self._run, name="dialer", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._calls.put(call)

    def done(self) -> Iterator[Call]:
        """The calls that have come to an end since it was asked last."""
        while not self._done.empty():
            self._open -= 1
            yield self._done.get()

    def close(self) -> None:
        """End the threads, and close what nobody has fetched; idempotent."""
        self._stopping.set()
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()
        for call in self.done():
            if call.sock is not None:
                call.sock.close()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.sock = self._connect(call)
            except (OSError, UnicodeError) as error:
                # A name that is none is a UnicodeError.
                reason = error.strerror if isinstance(error, OSError) else None
                call.reason = reason or str(error)
            self._done.put(call)
            self._wake()

    def _connect(self, call: Call) -> socket.socket:
        while True:
            try:
                return self._try(call)
            except ConnectionRefusedError:
                if call.cancelled or not call.again:
                    raise
                if time.monotonic() + _AGAIN_S > call.deadline:
                    raise
            if self._stopping.wait(_AGAIN_S):
                raise ConnectionAbortedError(errno.ECONNABORTED, "the server stops")

    def _try(self, call: Call) -> socket.socket:
        """Connect to the first address of the host that takes it."""
        call.check()
        failure: OSError = PermissionError(errno.EACCES, "it is not in --allow")
        found = socket.getaddrinfo(call.host, call.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in found:
            if not self._allow.admits(str(address[0])):
                continue
            call.check()
            try:
                # A family that this system does not have fails here already.
                sock = socket.socket(family, kind, protocol)
            except OSError as error:
                failure = error
                continue
            try:
                sock.setblocking(False)
                self._check(sock.connect_ex(address))
                self._wait_for(sock, call)
                return sock
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def _wait_for(self, sock: socket.socket, call: Call) -> None:
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        while not poll.poll(_LOOK_S * 1000):
            if self._stopping.is_set():
                raise ConnectionAbortedError(errno.ECONNABORTED, "the server stops")
            call.check()
        self._check(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    @staticmethod
    def _check(code: int) -> None:
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
