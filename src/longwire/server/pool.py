"""The session processes of a server: started, heard, killed and reaped.

Who is served by which of them, and what their reports mean, is the supervisor's.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from longwire.server.config import SessionConfig
from longwire.server.control import tell

__all__ = ["Pool", "Session", "exit_text", "interrupts_blocked"]

_log = logging.getLogger("longwire.serve")

_STOP_S = 5.0
"""How long sessions get to end, before SIGKILL."""

_REPORT_LIMIT = 1 << 16
"""A session's report is a short line; more means it is out of its mind."""


@dataclass(eq=False, slots=True)
class Session:
    """One session process, as its supervisor sees it."""

    number: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    ready: bool = False
    peer: str | None = None
    """Who is being served; None for a spare."""
    proven: bool = False
    """Has served a client before."""
    idle_since: float = 0.0
    """When it was ready, or its last client left."""
    ended: bool = False
    """Expected to exit."""
    stale: bool = False
    """Made before the last reload: serves its client, and nobody after."""
    counted: dict[str, Any] = field(default_factory=dict)
    """What it has done for its client, as far as that is in the metrics."""
    received: bytearray = field(default_factory=bytearray)
    deadline: float = 0.0
    """When the process is killed, once its control socket is closed."""

    def __str__(self) -> str:
        return f"session {self.number}" + (f" of {self.peer}" if self.peer else "")

    @property
    def fields(self) -> dict[str, Any]:
        """What a structured log line says of it."""
        return {"session": self.number, "peer": self.peer}

    def serve(self, client: socket.socket, peer: str, hello_s: float) -> None:
        """Hand a client over.

        Raises:
            OSError: the session is gone.
        """
        facts = {"session": self.number, "peer": peer, "hello_s": hello_s}
        tell(self.control, facts, client.fileno())
        self.peer = peer
        self.proven = True
        self.counted = {}

    def answer(self, **facts: Any) -> None:
        """Answer a question; a session that does not listen is killed."""
        try:
            tell(self.control, facts)
        except OSError:
            self.process.kill()

    def hand_over(self, stream: socket.socket, peer: str) -> None:
        """Answer a question with a stream of another server."""
        try:
            tell(self.control, {"refusal": None, "peer": peer}, stream.fileno())
        except OSError:
            self.process.kill()

    def dismiss(self) -> None:
        """Let it go; it must have nobody to serve."""
        self.ended = True
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def hear(self) -> list[dict[str, Any]] | None:
        """The reports that have come; None when its end is closed.

        Raises:
            RecursionError, ValueError: that is no report.
        """
        try:
            received = self.control.recv(_REPORT_LIMIT)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not received:
            return None
        *lines, rest = (self.received + received).split(b"\n")
        self.received = bytearray(rest)
        if len(rest) > _REPORT_LIMIT:
            raise ValueError("an endless report")
        return [json.loads(line) for line in lines]


class Pool:
    """All sessions of one supervisor. Not locked."""

    def __init__(self, config: SessionConfig, selector: selectors.BaseSelector) -> None:
        """Sessions get `config`; their control sockets go to `selector`."""
        self.sessions: dict[socket.socket, Session] = {}
        """By control socket."""
        self.leaving: list[Session] = []
        """Their control socket is closed, their process may still be there."""
        self._config = config.encode()
        self._selector = selector
        self._count = 0

    def __len__(self) -> int:
        return len(self.sessions) + len(self.leaving)

    def spares(self) -> list[Session]:
        """Those without a client, ready or on the way to it."""
        return [s for s in self._free() if not s.stale]

    def stale(self) -> list[Session]:
        """Spares from before the last reload: only while there are no others."""
        return [s for s in self._free() if s.stale]

    def ready(self) -> list[Session]:
        """Those that could take a client now, the proven ones first."""
        ready = (s for s in self._free() if s.ready)
        return sorted(ready, key=lambda session: (session.stale, not session.proven))

    def _free(self) -> list[Session]:
        return [s for s in self.sessions.values() if s.peer is None and not s.ended]

    def tired(self, most: int, patience_s: float) -> list[Session]:
        """Spares over `most` that nobody has needed for so long."""
        crowd = len(self.spares()) - most
        if crowd <= 0:
            return []
        before = time.monotonic() - patience_s
        idle = [s for s in self.ready() if s.idle_since <= before]
        return sorted(idle, key=lambda session: session.idle_since)[:crowd]

    def busy(self) -> int:
        """How many have a client."""
        return sum(1 for s in self.sessions.values() if s.peer is not None)

    def starting(self) -> int:
        """How many are on the way to their first client."""
        return sum(1 for s in self.sessions.values() if not s.ready)

    def spawn(self) -> None:
        """Start a session.

        Raises:
            OSError: the system has no process, or no descriptor, to give.
        """
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs, interrupts_blocked():
            undo.callback(ours.close)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "longwire.server.session",
                    str(theirs.fileno()),
                    self._config,
                ],
                stdin=subprocess.DEVNULL,
                # numpy would start a thread per core, out of the sandbox's reach.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
            )
            undo.pop_all()
        ours.setblocking(False)
        self._count += 1
        self.sessions[ours] = Session(self._count, process, ours)
        self._selector.register(ours, selectors.EVENT_READ)

    def bury(self, session: Session) -> None:
        """A session has closed its end: its process has to follow."""
        self._selector.unregister(session.control)
        del self.sessions[session.control]
        session.control.close()
        session.deadline = time.monotonic() + _STOP_S
        self.leaving.append(session)

    def reap(self) -> list[tuple[Session, int]]:
        """Take leave of processes that have ended, and hurry the others.

        Returns those that nobody expected to end, with their exit status.
        """
        died = []
        for session in list(self.leaving):
            status = session.process.poll()
            if status is None:
                if time.monotonic() > session.deadline:
                    session.process.kill()
                continue
            self.leaving.remove(session)
            if not session.ended:
                died.append((session, status))
        return died

    def close(self) -> None:
        """End all processes; idempotent."""
        sessions = [*self.sessions.values(), *self.leaving]
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
        self.sessions.clear()
        self.leaving.clear()


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Have children start without SIGINT: a Ctrl-C is for the supervisor alone."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def exit_text(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
