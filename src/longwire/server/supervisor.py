"""The supervisor: accepts, counts, and hands the raw socket on.

It never loads the engine and never reads a byte of a client's. Each client
gets a session process from a small pool of warm ones, so that whatever happens
in a session (an abort in ggml, a leak, an endless kernel) ends that one client.

All of it is one loop over file descriptors: the listening socket, a control
socket per session, and the pipe that signals wake.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from longwire.errors import UsageError
from longwire.server.config import SessionConfig

__all__ = ["Supervisor"]

_log = logging.getLogger("longwire.serve")

SPARES = 2
"""Warm sessions kept ready. A C++ client opens several connections in a row."""

MAX_SESSIONS = 64
"""A process each; further clients wait in the kernel's queue."""

_PENDING = 8
"""Accepted clients that may wait for a session to warm up."""

_STOP_S = 5.0
"""How long sessions get to end after SIGTERM, before SIGKILL."""

_RESPAWN_S = 1.0
"""Pause after a session that died before it was ready."""

_REPORT_LIMIT = 1 << 16
"""A session's report is a short line; more means it is out of its mind."""


@dataclass(eq=False, slots=True)
class _Session:
    number: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    ready: bool = False
    peer: str | None = None
    """Who is being served; None for a spare."""
    ended: bool = False
    received: bytearray = field(default_factory=bytearray)


class Supervisor:
    """Serves until `stop` is called or SIGTERM or SIGINT arrives."""

    def __init__(
        self,
        host: str,
        port: int,
        config: SessionConfig,
        on_ready: Callable[[tuple[str, int], dict[str, Any]], None],
    ) -> None:
        """Bind `host:port` (port 0: any free one); `on_ready` gets the address
        and the first session's report once clients can be served.

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._listener.setblocking(False)
        self._config = config
        self._on_ready: Callable[..., None] | None = on_ready
        self._selector = selectors.DefaultSelector()
        self._sessions: dict[socket.socket, _Session] = {}
        self._pending: deque[tuple[socket.socket, str]] = deque()
        self._accepting = False
        self._stopping = False
        self._count = 0
        self._spawn_after = 0.0
        self._failure: str | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that clients connect to."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def run(self) -> None:
        """Serve; returns after a stop, with every session ended.

        Raises:
            UsageError: the first session could not start, and why.
        """
        previous = self._take_signals()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        try:
            while not self._stopping:
                self._fill_pool()
                self._listen(self._has_room())
                for key, _ in self._selector.select(self._timeout()):
                    self._dispatch(key.fileobj)
        finally:
            self._shut_down()
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._failure is not None:
            raise UsageError(self._failure)

    def stop(self) -> None:
        """Ask `run` to return; safe from other threads and signal handlers."""
        self._stopping = True
        # A full pipe wakes the loop just as well.
        with contextlib.suppress(BlockingIOError):
            self._wake_out.send(b"\0")

    def _take_signals(self) -> dict[int, Any]:
        try:
            signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        except ValueError:
            # Not the main thread: whoever runs us calls `stop`.
            return {}
        handler = lambda number, frame: self.stop()  # noqa: E731
        return {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT)}

    def _dispatch(self, ready: Any) -> None:
        if ready is self._wake_in:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        elif ready is self._listener:
            self._accept()
        else:
            self._hear(self._sessions[ready])

    # The pool.

    def _spares(self) -> list[_Session]:
        return [s for s in self._sessions.values() if s.peer is None and not s.ended]

    def _fill_pool(self) -> None:
        wanted = SPARES + len(self._pending) - len(self._spares())
        room = MAX_SESSIONS + SPARES - len(self._sessions)
        if time.monotonic() < self._spawn_after:
            return
        for _ in range(min(wanted, room)):
            self._spawn()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "longwire.server.session",
                    str(theirs.fileno()),
                    self._config.encode(),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        ours.setblocking(False)
        self._count += 1
        session = _Session(self._count, process, ours)
        self._sessions[ours] = session
        self._selector.register(ours, selectors.EVENT_READ)

    def _timeout(self) -> float | None:
        wait = self._spawn_after - time.monotonic()
        return wait if wait > 0 else None

    # Clients.

    def _has_room(self) -> bool:
        if self._on_ready is not None:
            return False
        busy = sum(1 for s in self._sessions.values() if s.peer is not None)
        return len(self._pending) < _PENDING and busy < MAX_SESSIONS

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepting and not wanted:
            self._selector.unregister(self._listener)
        self._accepting = wanted

    def _accept(self) -> None:
        try:
            client, address = self._listener.accept()
        except OSError as error:
            # The client left before we looked, or descriptors ran out.
            _log.warning("accept: %s", error)
            return
        peer = f"{address[0]}:{address[1]}"
        self._pending.append((client, peer))
        self._assign()

    def _assign(self) -> None:
        idle = deque(s for s in self._spares() if s.ready)
        while self._pending and idle:
            session = idle.popleft()
            client, peer = self._pending.popleft()
            try:
                socket.send_fds(session.control, [b"c"], [client.fileno()])
            except OSError as error:
                _log.warning("session %d took no client: %s", session.number, error)
                self._pending.appendleft((client, peer))
                session.ended = True
                session.process.kill()
                continue
            client.close()
            session.peer = peer
            _log.info("session %d (pid %d) serves %s", session.number, session.process.pid, peer)

    # Reports.

    def _hear(self, session: _Session) -> None:
        try:
            received = session.control.recv(_REPORT_LIMIT)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._bury(session)
            return
        session.received += received
        *lines, rest = session.received.split(b"\n")
        session.received = bytearray(rest)
        for line in lines:
            self._report(session, json.loads(line))
        if len(session.received) > _REPORT_LIMIT:
            session.process.kill()

    def _report(self, session: _Session, report: dict[str, Any]) -> None:
        event = report.pop("event")
        if event == "ready":
            session.ready = True
            if self._on_ready is not None:
                announce, self._on_ready = self._on_ready, None
                announce(self.address, report)
            self._assign()
        elif event == "failed":
            self._failed(session, report["reason"])
        elif event == "aborted":
            _log.error("session %d: ggml aborted: %s", session.number, report["reason"])
        else:
            level = logging.INFO
            if report["reason"].startswith("refused"):
                level = logging.WARNING
            _log.log(
                level, "session %d of %s: %s", session.number, session.peer, report
            )
            session.peer = None
            session.ended = event == "ended"
            self._assign()

    def _failed(self, session: _Session, reason: str) -> None:
        session.ended = True
        if self._on_ready is not None:
            self._failure = reason
            self._stopping = True
        else:
            _log.error("session %d cannot start: %s", session.number, reason)

    def _bury(self, session: _Session) -> None:
        self._selector.unregister(session.control)
        del self._sessions[session.control]
        session.control.close()
        try:
            status = session.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            session.process.kill()
            status = session.process.wait()
        if not session.ended:
            peer = f" of {session.peer}" if session.peer else ""
            _log.error(
                "session %d%s died: %s", session.number, peer, _exit_text(status)
            )
        if not session.ready:
            self._spawn_after = time.monotonic() + _RESPAWN_S
            if self._on_ready is not None and not self._stopping:
                self._failure = f"a session died at start: {_exit_text(status)}"
                self._stopping = True

    # The end.

    def _shut_down(self) -> None:
        self._listen(False)
        self._listener.close()
        for client, _ in self._pending:
            client.close()
        for session in self._sessions.values():
            session.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for session in self._sessions.values():
            try:
                session.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                session.process.kill()
                session.process.wait()
            session.control.close()
        self._sessions.clear()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def default_threads() -> int:
    """The C++ server's default: half the hardware threads, at least one."""
    return max(1, (os.cpu_count() or 1) // 2)
