"""The supervisor: accepts, counts, and hands the raw socket on.

It never loads the engine and takes no byte of a client's. Each client that has
spoken gets a session process from a small pool of warm ones, so that whatever
happens in a session (an abort in ggml, a leak, an endless kernel) ends that one
client.

All of it is one loop over file descriptors: the listening socket, silent clients,
a control socket per session, and the pipe that signals wake.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from longwire.errors import UsageError
from longwire.server.config import SessionConfig

__all__ = ["Supervisor"]

_log = logging.getLogger("longwire.serve")

SPARES = 2
"""Warm sessions kept ready. A C++ client opens several connections in a row."""

MAX_SPARES = 4
"""More than these are let go after a rush; more than SPARES, or every short visit
would cost a new process."""

MAX_SESSIONS = 64
"""A process each; further clients wait, most of them in the kernel's queue."""

MAX_SILENT = 256
"""Connections without a first byte: they cost a descriptor, and the oldest goes."""

_PENDING = 8
"""Clients that may wait for a session; while they do, no more are accepted."""

_STARTING = 8
"""Sessions that start at the same time; more would only slow each other."""

_STOP_S = 5.0
"""How long sessions get to end, before SIGKILL."""

_REAP_S = 0.05
"""How often a session that is about to end is looked at."""

_RETRY_S = 1.0
"""Pause after the system refused a process or a descriptor."""

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
    """Expected to exit."""
    received: bytearray = field(default_factory=bytearray)
    deadline: float = 0.0
    """When the process is killed, once its control socket is closed."""

    def __str__(self) -> str:
        return f"session {self.number}" + (f" of {self.peer}" if self.peer else "")


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
        self._leaving: list[_Session] = []
        self._silent: dict[socket.socket, str] = {}
        self._pending: deque[tuple[socket.socket, str]] = deque()
        self._accepting = False
        self._stopping = False
        self._count = 0
        self._resume_at = 0.0
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
                self._reap()
        finally:
            self._shut_down()
            if previous:
                signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self._failure is not None:
            raise UsageError(self._failure)

    def stop(self) -> None:
        """Ask `run` to return; safe from other threads and signal handlers."""
        self._stopping = True
        # A full pipe wakes the loop just as well, and a closed one need not.
        with contextlib.suppress(OSError):
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
        elif ready in self._silent:
            self._spoke(ready)
        elif ready in self._sessions:
            self._hear(self._sessions[ready])

    # The pool.

    def _spares(self) -> list[_Session]:
        return [s for s in self._sessions.values() if s.peer is None and not s.ended]

    def _busy(self) -> int:
        return sum(1 for s in self._sessions.values() if s.peer is not None)

    def _fill_pool(self) -> None:
        wanted = SPARES + len(self._pending) - len(self._spares())
        room = MAX_SESSIONS + SPARES - len(self._sessions) - len(self._leaving)
        starting = sum(1 for s in self._sessions.values() if not s.ready)
        for _ in range(min(wanted, room, _STARTING - starting)):
            if time.monotonic() < self._resume_at:
                return
            try:
                self._spawn()
            except OSError as error:
                self._failed(f"cannot start a session: {error}")

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs, _interrupts_blocked():
            undo.callback(ours.close)
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
            undo.pop_all()
        ours.setblocking(False)
        self._count += 1
        session = _Session(self._count, process, ours)
        self._sessions[ours] = session
        self._selector.register(ours, selectors.EVENT_READ)

    def _timeout(self) -> float | None:
        if self._leaving:
            return _REAP_S
        wait = self._resume_at - time.monotonic()
        return wait if wait > 0 else None

    # Clients.

    def _has_room(self) -> bool:
        if self._on_ready is not None or time.monotonic() < self._resume_at:
            return False
        return len(self._pending) < _PENDING

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ)
        elif self._accepting and not wanted:
            self._selector.unregister(self._listener)
        self._accepting = wanted

    def _accept(self) -> None:
        try:
            client, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Without a pause, a lack of descriptors would keep this loop spinning.
            _log.warning("accept: %s", error)
            self._resume_at = time.monotonic() + _RETRY_S
            return
        self._silent[client] = f"{address[0]}:{address[1]}"
        self._selector.register(client, selectors.EVENT_READ)
        if len(self._silent) > MAX_SILENT:
            oldest = next(iter(self._silent))
            _log.warning("%s never spoke, closed", self._leave_silence(oldest))
            oldest.close()

    def _spoke(self, client: socket.socket) -> None:
        peer = self._leave_silence(client)
        if _has_left(client):
            client.close()
            return
        self._pending.append((client, peer))
        self._assign()

    def _leave_silence(self, client: socket.socket) -> str:
        self._selector.unregister(client)
        return self._silent.pop(client)

    def _assign(self) -> None:
        idle = deque(s for s in self._spares() if s.ready)
        while self._pending and idle and self._busy() < MAX_SESSIONS:
            session = idle.popleft()
            client, peer = self._pending.popleft()
            try:
                socket.send_fds(session.control, [b"c"], [client.fileno()])
            except OSError as error:
                _log.warning("%s took no client: %s", session, error)
                self._pending.appendleft((client, peer))
                session.ended = True
                session.process.kill()
                continue
            client.close()
            session.peer = peer
            _log.info(
                "session %d (pid %d) serves %s",
                session.number,
                session.process.pid,
                peer,
            )

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
        try:
            for line in lines:
                self._report(session, json.loads(line))
        except (AttributeError, KeyError, TypeError, ValueError):
            # Whatever overwrote its memory, nothing it says can be relied on.
            _log.error("%s reports nonsense, killed", session)
            session.process.kill()
        if len(session.received) > _REPORT_LIMIT:
            session.process.kill()

    def _report(self, session: _Session, report: dict[str, Any]) -> None:
        event = report.pop("event")
        if event == "ready":
            session.ready = True
            if self._on_ready is not None:
                announce, self._on_ready = self._on_ready, None
                announce(self.address, report)
        elif event == "failed":
            session.ended = True
            self._failed(report["reason"])
        elif event == "aborted":
            _log.error("%s: ggml aborted: %s", session, report["reason"])
        else:
            refused = report["reason"].startswith("refused")
            level = logging.WARNING if refused else logging.INFO
            _log.log(level, "%s: %s", session, report)
            session.peer = None
            session.ended = event == "ended"
            if len(self._spares()) > MAX_SPARES + len(self._pending):
                self._dismiss(session)
        self._assign()

    def _dismiss(self, session: _Session) -> None:
        """Let a session go that has nobody to serve."""
        session.ended = True
        with contextlib.suppress(OSError):
            session.control.shutdown(socket.SHUT_WR)

    def _failed(self, reason: str) -> None:
        """A session could not start: the end for the first one, else bad luck."""
        self._resume_at = time.monotonic() + _RETRY_S
        if self._on_ready is None:
            _log.error("%s", reason)
        elif not self._stopping:
            self._failure = reason
            self._stopping = True

    # The end.

    def _bury(self, session: _Session) -> None:
        self._selector.unregister(session.control)
        del self._sessions[session.control]
        session.control.close()
        session.deadline = time.monotonic() + _STOP_S
        self._leaving.append(session)

    def _reap(self) -> None:
        """Take leave of the processes that have ended, and hurry the others."""
        for session in list(self._leaving):
            status = session.process.poll()
            if status is None:
                if time.monotonic() > session.deadline:
                    session.process.kill()
                continue
            self._leaving.remove(session)
            if session.ended:
                continue
            died = f"{session} died: {_exit_text(status)}"
            if session.ready:
                _log.error("%s", died)
            else:
                self._failed(f"{died} at its start")

    def _shut_down(self) -> None:
        self._listen(False)
        self._listener.close()
        for client in [*self._silent, *(client for client, _ in self._pending)]:
            client.close()
        sessions = [*self._sessions.values(), *self._leaving]
        for session in sessions:
            session.process.terminate()
        deadline = time.monotonic() + _STOP_S
        for session in sessions:
            try:
                session.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                session.process.kill()
                session.process.wait()
            session.control.close()
        self._sessions.clear()
        self._leaving.clear()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Have children start without SIGINT: a Ctrl-C is for the supervisor alone."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _has_left(client: socket.socket) -> bool:
    """Whether a readable socket has its end to offer, and not a byte."""
    try:
        return not client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


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
