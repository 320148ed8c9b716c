"""The control socket between the supervisor and one session: lines of JSON.

A session reports events, and asks the supervisor before it allocates and for
streams from and to other servers. The supervisor hands over clients (a line, and
the socket with it), and answers, with streams in the same way.
"""

from __future__ import annotations

import array
import contextlib
import json
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Control", "tell"]

_LINE_LIMIT = 4096

_LOOK_MS = 250
"""How often a question that may take long looks whether it still makes sense."""

_PATIENCE_S = 5.0
"""For a supervisor to answer, or to read, over what a question itself may take. It
never waits for anything, so one that takes longer is frozen; and clients have
deadlines as well."""


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

    def __init__(self, fd: int, patience_s: float = _PATIENCE_S) -> None:
        self._sock = socket.socket(fileno=fd)
        self._patience_ms = int(patience_s * 1000)
        whole, part = divmod(self._patience_ms, 1000)
        patience = struct.pack("@ll", whole, part * 1000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._lock = threading.Lock()
        self.forsaken = False
        """A question stayed without an answer; one that comes late is not read."""

    def close(self) -> None:
        """Leave the supervisor; idempotent."""
        self._sock.close()

    def report(self, event: str, **facts: Any) -> None:
        """Send one event, if there still is a supervisor, and it reads."""
        line = json.dumps({"event": event, **facts}).encode() + b"\n"
        with contextlib.suppress(OSError), self._lock:
            self._sock.sendall(line)

    def next_client(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Wait for the next client; None when the supervisor is gone or done."""
        if self.forsaken:
            return None
        message, fds = self._receive()
        if message is None or not fds:
            return None
        return socket.socket(fileno=fds[0]), message

    def claim(self, size: int) -> str | None:
        """Ask for memory; returns why it may not be had, or None.

        Raises:
            OSError: the supervisor is gone, or frozen.
        """
        refusal: str | None = self._ask("claim", size=size)["refusal"]
        return refusal

    def release(self, size: int) -> None:
        """Give memory back."""
        self.report("release", size=size)

    def room(self) -> tuple[int | None, int | None]:
        """What this client may still have, and ever; None where nothing limits it.

        Raises:
            OSError: as `claim`.
        """
        message = self._ask("room")
        return message["left"], message["most"]

    def listen(self) -> tuple[int, bytes]:
        """Ask for a port and the id of a ticket, for one stream of another server.

        Raises:
            OSError: as `claim`; or there is no port, or no more tickets.
        """
        message = self._ask("listen")
        if message["refusal"] is not None:
            raise ConnectionRefusedError(message["refusal"])
        return message["port"], bytes.fromhex(message["id"])

    def accept(
        self, ticket_id: bytes, patience_s: float, abandoned: Callable[[], bool]
    ) -> tuple[socket.socket, str]:
        """Wait for the stream of who was given a ticket; returns its peer as well.

        Raises:
            OSError: as `claim`; or nobody came.
        """
        facts = {"id": ticket_id.hex(), "patience_s": patience_s}
        return self._ask_for_stream("accept", facts, abandoned)

    def pair(
        self, patience_s: float, abandoned: Callable[[], bool]
    ) -> tuple[socket.socket, str]:
        """Wait for the stream of a rank 1 of protocol 8.

        Raises:
            OSError: as `accept`.
        """
        facts = {"patience_s": patience_s}
        return self._ask_for_stream("pair", facts, abandoned)

    def dial(
        self,
        host: str,
        port: int,
        patience_s: float,
        abandoned: Callable[[], bool],
        again: bool = False,
    ) -> tuple[socket.socket, str]:
        """Have the supervisor connect, `again` and again if nobody listens yet.

        Raises:
            OSError: as `claim`; or it cannot.
        """
        facts = {"host": host, "port": port, "patience_s": patience_s, "again": again}
        return self._ask_for_stream("dial", facts, abandoned)

    def _ask_for_stream(
        self, question: str, facts: dict[str, Any], abandoned: Callable[[], bool]
    ) -> tuple[socket.socket, str]:
        message, fds = self._inquire(question, facts, facts["patience_s"], abandoned)
        if not fds:
            raise ConnectionError(message["refusal"])
        return socket.socket(fileno=fds[0]), message["peer"]

    def _ask(self, question: str, **facts: Any) -> dict[str, Any]:
        return self._inquire(question, facts)[0]

    def _inquire(
        self,
        question: str,
        facts: dict[str, Any],
        patience_s: float = 0.0,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[str, Any], list[int]]:
        # No answer is no refusal: a client that hears of one believes that it has
        # asked for too much, where it could go on with another server.
        self.report(question, **facts)
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        left_ms = int(patience_s * 1000) + self._patience_ms
        while not self.forsaken and not poll.poll(min(left_ms, _LOOK_MS)):
            left_ms -= _LOOK_MS
            if abandoned():
                self.forsaken = True
                raise ConnectionError("the client left, nobody waits for it")
            self.forsaken = left_ms <= 0
        if self.forsaken:
            raise ConnectionError("the supervisor does not answer")
        message, fds = self._receive()
        if message is None:
            raise ConnectionError("the supervisor is gone")
        return message, fds

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
