"""Sockets that are never waited for: bytes both ways, as many as go right now.

For several peers at once, each of which may be busy sending. Whoever has nothing
left to do waits for all of their descriptors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Sequence

__all__ = ["MAX_CALL", "MAX_PIECES", "Duplex", "TlsDuplex", "yield_core"]

_RECORD = 16 * 1024
"""What TLS sends as one record."""

MAX_CALL = 1 << 30
"""macOS refuses to send or receive 2 GiB and more in one call."""

MAX_PIECES = 512
"""Linux refuses a `sendmsg` of more than 1024 pieces."""


yield_core = getattr(os, "sched_yield", lambda: None)
"""Let whoever else wants this core have it: for busy waits. Windows has none."""


class Duplex:
    """One connected socket. Two threads may use it, one of them for `send_some`."""

    begins_at_once = False
    """Bytes that `send_some` was given have to leave, even those it said 0 of."""

    def __init__(self, sock: socket.socket) -> None:
        """Take a connected socket over."""
        sock.setblocking(False)
        self._sock = sock

    @property
    def holds(self) -> bool:
        """Whether bytes are here that no descriptor tells of."""
        return False

    def fileno(self) -> int:
        """The descriptor, to wait for; -1 once closed."""
        return self._sock.fileno()

    def send_some(self, pieces: Sequence[memoryview]) -> int:
        """Send the first bytes of all pieces; returns how many, 0 for none now.

        After a 0 the next call has to begin with the same bytes, if one
        `begins_at_once`.

        Raises:
            OSError: the connection broke.
        """
        if len(pieces) == 1 and len(pieces[0]) > MAX_CALL:
            pieces = [pieces[0][:MAX_CALL]]
        try:
            return self._sock.sendmsg(pieces[:MAX_PIECES])
        except BlockingIOError:
            return 0

    def receive_some(self, target: memoryview) -> int:
        """Receive up to `len(target)` bytes, at least one; 0 when there are none now.

        Raises:
            EOFError: the peer closed the connection.
            OSError: the connection broke.
        """
        try:
            received = self._sock.recv_into(target[:MAX_CALL])
        except BlockingIOError:
            return 0
        if received == 0:
            raise EOFError("it closed the connection")
        return received

    def ended(self) -> bool:
        """Whether nothing will ever come any more; nothing is taken."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection; idempotent."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()


class TlsDuplex(Duplex):
    """The same over TLS, after its handshake."""

    # OpenSSL keeps the record that it could not send, and sends it with the next call
    # as if those were its bytes.
    begins_at_once = True

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock
        # OpenSSL wants one thread at a time, and a call takes no time here.
        self._turn = threading.Lock()

    @property
    def holds(self) -> bool:
        return self._tls.pending() > 0

    def send_some(self, pieces: Sequence[memoryview]) -> int:
        data = pieces[0][:_RECORD]
        if len(data) < _RECORD and len(pieces) > 1:
            joined = bytearray()
            for piece in pieces:
                joined += piece[: _RECORD - len(joined)]
            data = memoryview(joined)
        with self._turn:
            try:
                return self._tls.send(data)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return 0

    def receive_some(self, target: memoryview) -> int:
        with self._turn:
            try:
                received = self._tls.recv_into(target[:MAX_CALL])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return 0
        if received == 0:
            raise EOFError("it closed the connection")
        return received

    def ended(self) -> bool:
        raise NotImplementedError("TLS has no way to look without taking")
