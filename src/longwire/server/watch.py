"""A thread beside each served client: it ends sessions that nothing else would.

It looks on from outside, about once per second, so that a deadline costs the
commands nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from longwire.server.config import SessionConfig
from longwire.server.control import Control
from longwire.server.state import SessionState
from longwire.wire.frames import ANSWER_HEADER, command_name
from longwire.wire.lx import KEEP_ALIVE, KEEP_ALIVE_S

__all__ = ["Deadlines", "Sight", "Verdict", "Watch"]

_SLOWEST = 1024
"""Bytes per second that keep a message alive: a modem manages that."""


class Sight(NamedTuple):
    """What can be seen of a session from outside, at one moment."""

    commands: int
    """Done so far."""
    received: int
    """Bytes so far."""
    waiting: bool
    """For bytes of the client."""
    admitted: bool
    """Its handshake is done."""
    command: str | None
    """What is being received; None between messages."""


class Verdict(NamedTuple):
    """Why a session has to end."""

    cause: str
    reason: str


@dataclass(slots=True)
class Deadlines:
    """Decides from a row of sights whether a client was silent or slow for too long.

    Seconds of 0 mean for ever.
    """

    hello_s: float
    """For the handshake, counted from the first sight."""
    idle_s: float
    """Between two messages."""
    stall_s: float
    """Within a message, for each piece of it."""
    _begun: float | None = field(default=None, init=False)
    _last: Sight | None = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)
    _received: int = field(default=0, init=False)

    @property
    def tick_s(self) -> float:
        """How often to look."""
        limits = [s / 4 for s in (self.hello_s, self.idle_s, self.stall_s) if s]
        return max(0.02, min([KEEP_ALIVE_S, *limits]))

    def judge(self, now: float, sight: Sight) -> Verdict | None:
        """Look once; a verdict ends the session."""
        if self._begun is None:
            self._begun = now
        last, self._last = self._last, sight
        inside = sight.command is not None
        if (
            last is None
            or not sight.waiting
            or sight.commands != last.commands
            or inside != (last.command is not None)
        ):
            self._mark(now, sight)
        if self.hello_s and not sight.admitted and sight.waiting:
            if now - self._begun >= self.hello_s:
                return Verdict("handshake", "no complete handshake in time")
        elif not inside:
            if self.idle_s and now - self._since >= self.idle_s:
                return Verdict("idle", f"no command for {self.idle_s:g} s")
        elif self.stall_s:
            if sight.received - self._received >= _SLOWEST * self.stall_s:
                self._mark(now, sight)
            elif now - self._since >= self.stall_s:
                reason = f"{sight.command} stalled for {self.stall_s:g} s"
                return Verdict("stalled", reason)
        return None

    def _mark(self, now: float, sight: Sight) -> None:
        self._since = now
        self._received = sight.received


class Watch:
    """Watches one client while the body of a `with` serves it.

    Ends the process if the body goes on after the client has left: else a kernel
    that a client made endless would keep a core busy for ever.
    """

    def __init__(
        self,
        state: SessionState,
        control: Control,
        config: SessionConfig,
        hello_s: float,
    ) -> None:
        self.verdict: Verdict | None = None
        """Why this thread ended the connection, if it did."""
        self._state = state
        self._control = control
        self._config = config
        self._deadlines = Deadlines(
            hello_s, config.idle_timeout_s, config.stall_timeout_s
        )
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._reported: object = None
        self._commands = -1
        """How many were done at the last look."""

    def __enter__(self) -> Watch:
        self._watched = self._state.stream.duplicate()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        # Also wakes the thread, where it was not the client who ended this.
        self._state.stream.close()
        self._thread.join()

    def _run(self) -> None:
        with self._watched:
            poll = select.poll()
            # Linux tells this apart from bytes to read; others only see a reset.
            poll.register(self._watched, getattr(select, "POLLRDHUP", 0))
            tick_ms = self._deadlines.tick_s * 1000
            while not self._has_left(poll.poll(tick_ms)) and not self._done.is_set():
                self.verdict = self._deadlines.judge(time.monotonic(), self._look())
                if self.verdict is not None:
                    with contextlib.suppress(OSError):
                        self._watched.shutdown(socket.SHUT_RDWR)
                    break
                self._keep_alive()
                self._report()
        if not self._done.wait(self._config.grace_s):
            self._control.report(
                "ended",
                reason="the client left, its last command took over "
                f"{self._config.grace_s} s",
                refused="grace",
                **self._state.served.figures(),
            )
            os._exit(1)

    def _has_left(self, found: list[tuple[int, int]]) -> bool:
        if found:
            self._state.links.abandon()
        return bool(found)

    def _look(self) -> Sight:
        state, stream = self._state, self._state.stream
        command = None
        if state.command >= 0:
            command = command_name(state.command)
        elif stream.buffered:
            command = "a header"
        return Sight(
            state.served.commands,
            stream.received,
            stream.waiting,
            state.admitted,
            command,
        )

    def _keep_alive(self) -> None:
        """Tell peers, and a client that waits for the same command as at the last
        look."""
        state = self._state
        # Also while nothing is asked of this session: a peer may have been told of its
        # part of a copy, or a sum, before this one was of its own.
        state.links.offer()
        commands, before = state.served.commands, self._commands
        self._commands = commands
        if commands == before and state.command >= 0 and state.dialect.lx:
            # A stream that broke is the business of who serves it.
            with contextlib.suppress(OSError):
                state.stream.offer(ANSWER_HEADER.pack(KEEP_ALIVE))

    def _report(self) -> None:
        if not self._config.live_figures:
            return
        figures = self._state.served.figures()
        if figures != self._reported:
            self._reported = figures
            self._control.report("figures", **figures)
