"""What wakes the supervisor's loop when no client does: signals and other threads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

__all__ = ["Alarm"]


class Alarm:
    """A pipe that a selector can watch, and the signals that write to it."""

    def __init__(self) -> None:
        self.pipe, self._end = socket.socketpair()
        self.pipe.setblocking(False)
        self._end.setblocking(False)
        self._previous: dict[int, Any] = {}
        """What the signals did before they were taken."""

    def ring(self) -> None:
        """Wake the loop; safe from other threads and signal handlers."""
        # A full pipe wakes the loop just as well, and a closed one need not.
        with contextlib.suppress(OSError):
            self._end.send(b"\0")

    def hush(self) -> None:
        """The loop is awake."""
        with contextlib.suppress(BlockingIOError):
            self.pipe.recv(4096)

    def take_signals(
        self,
        drain: Callable[[], None],
        stop: Callable[[], None],
        reload: Callable[[], None],
    ) -> None:
        """Have SIGTERM, SIGINT and SIGHUP ask for these, until `give_signals_back`."""
        try:
            signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        except ValueError:
            # Not the main thread: whoever runs us calls `stop`.
            return
        terminal = _has_terminal()

        def hung_up() -> None:
            # Without its terminal nobody could stop us with Ctrl-C any more.
            if terminal and not _has_terminal():
                stop()
            else:
                reload()

        actions: dict[int, Callable[[], None]] = {
            signal.SIGTERM: drain,
            signal.SIGINT: stop,
        }
        # Under nohup it stays ignored, as sessions inherit it.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            actions[signal.SIGHUP] = hung_up
        self._previous = {
            number: signal.signal(number, lambda number, frame: actions[number]())
            for number in actions
        }

    def give_signals_back(self) -> None:
        """Have them do what they did before."""
        if self._previous:
            signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def close(self) -> None:
        """Close both ends; idempotent."""
        self.pipe.close()
        self._end.close()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
