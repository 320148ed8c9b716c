"""The control socket between the supervisor and one session: lines of JSON.

A session reports events, and asks the supervisor before it allocates. The
supervisor hands over clients (a line, and the socket with it), and answers.
"""

from __future__ import annotations

import array
import contextlib
import json
import socket
import threading
from typing import Any

__all__ = ["Control", "tell"]

_LINE_LIMIT = 4096


def tell(control: socket.socket, message: dict[str, Any], *fds: int) -> None:
    """Send a session one message, with descriptors; never waits.

    Raises:
        OSError: the session is gone, or does not read.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    line = json.dumps(message).encode() + b"\n"
    if control.sendmsg([line], rights if fds else []) != len(line):
        raise BlockingIOError("the control socket is full")


class Control:
    """A session's end. Anybody may report; one thread at a time may ask."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)
        self._lock = threading.Lock()

    def report(self, event: str, **facts: Any) -> None:
        """Send one event, if there still is a supervisor."""
        line = json.dumps({"event": event, **facts}).encode() + b"\n"
        with contextlib.suppress(OSError), self._lock:
            self._sock.sendall(line)

    def next_client(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Wait for the next client; None when the supervisor is gone or done."""
        message, fds = self._receive()
        if message is None or not fds:
            return None
        return socket.socket(fileno=fds[0]), message

    def claim(self, size: int) -> str | None:
        """Ask for memory; returns why it may not be had, or None."""
        self.report("claim", size=size)
        message, _ = self._receive()
        refusal: str | None = message["refusal"] if message else "no supervisor"
        return refusal

    def release(self, size: int) -> None:
        """Give memory back."""
        self.report("release", size=size)

    def room(self) -> tuple[int | None, int | None]:
        """What this client may still have, and ever; None where nothing limits it."""
        self.report("room")
        message, _ = self._receive()
        return (message["left"], message["most"]) if message else (0, 0)

    def _receive(self) -> tuple[dict[str, Any] | None, list[int]]:
        """One message and its descriptors; None at the end."""
        line, fds = b"", list[int]()
        while not line.endswith(b"\n"):
            try:
                part, more, _, _ = socket.recv_fds(self._sock, _LINE_LIMIT, 1)
            except ConnectionError:
                return None, fds
            if not part:
                return None, fds
            line += part
            fds += more
        message: dict[str, Any] = json.loads(line)
        return message, fds
