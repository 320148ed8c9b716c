"""TCP: connect with a deadline, send pieces in one call, receive in place."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from longwire.transport.duplex import MAX_CALL, MAX_PIECES, yield_core
from longwire.transport.endpoint import Endpoint

__all__ = ["Stream", "connect", "tune"]

Bytes = bytes | bytearray | memoryview

_BUFFER = 256 * 1024
"""Small messages of many steps fit; bulk data bypasses the buffer."""

_SMALL = 4096
"""Receiving this little in place would cost a call for each; copying is cheaper."""

_JOINED = 4096
"""Pieces of together no more are sent as one: a copy is made sooner than views."""

_EAGER_S = 500e-6
"""Longest busy wait. A sleeping thread is woken 20 to 70 us late, each time."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A host that vanished is noticed after a minute of silence; the default is hours."""


def tune(sock: socket.socket) -> None:
    """Set what every connection of ours wants: no Nagle, keep-alive."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    """Open a connection to an endpoint.

    Raises:
        OSError: refused, unreachable, unknown, or no answer in `timeout_s`.
    """
    sock = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
    tune(sock)
    return sock


class Stream:
    """A connected socket with a receive buffer.

    One owner at a time, but for `offer`. After an error the stream is of no use.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.taken = 0
        """Bytes handed out so far."""
        self.received = 0
        """Bytes that have come so far; for another thread to watch, as `waiting`."""
        self.waiting = False
        """Inside of a call that receives."""
        self._arrivals: select.poll | None = None
        """Looked at busily, where that may be done."""
        self._answers_only = False
        """Look at it so only for the first of an answer."""
        self._answer_due = False
        """Something was sent, and nothing has been waited for since."""
        self._prompt = False
        """What was waited for so last came so soon that this was right."""
        self._turn = threading.Lock()
        """Held inside of each call that sends or receives."""

    @property
    def buffered(self) -> int:
        """Bytes that have come and are not handed out."""
        return self._end - self._start

    @property
    def certificate(self) -> bytes | None:
        """The other end's, in DER; None if it showed none."""
        return None

    def be_eager(self, answers_only: bool = False) -> None:
        """Wait busily from now on for what is likely to come within half a
        millisecond, since what was waited for last did. With `answers_only` that is
        the first of what comes after something was sent: what follows says nothing
        of the next time. Not where the system cannot be asked what has come, as
        Windows cannot."""
        self._answers_only = answers_only
        if not hasattr(select, "poll"):
            return
        self._arrivals = select.poll()
        self._arrivals.register(self._sock, select.POLLIN)

    def set_deadline(self, timeout_s: float | None) -> None:
        """Let every later call fail with `TimeoutError` after so long a silence."""
        self._sock.settimeout(timeout_s)

    def send(self, pieces: Sequence[Bytes]) -> None:
        """Write all pieces in order; many bytes are neither joined nor copied.

        A deadline counts from the last bytes that went either way: a peer that
        takes nothing in, but says that it is alive, is waited for.

        Raises:
            OSError: the stream broke; an unknown part of the bytes has left.
        """
        if sum(map(len, pieces)) <= _JOINED:
            pieces = [b"".join(pieces)]
        pending = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
        # One turn for all: nothing that is offered may come in between.
        with self._turn:
            self._answer_due = True
            while pending:
                sent = self._write_some(_capped(pending[:MAX_PIECES]))
                while pending and sent >= len(pending[0]):
                    sent -= len(pending.pop(0))
                if sent:
                    pending[0] = pending[0][sent:]

    def offer(self, data: Bytes) -> bool:
        """Send a few bytes now or not at all; any thread may.

        Not at all: while the owner sends or receives, or when they would not leave.

        Raises:
            OSError: the stream broke.
        """
        if not self._turn.acquire(blocking=False):
            return False
        try:
            poll = select.poll()
            poll.register(self._sock, select.POLLOUT)
            if not poll.poll(0):
                return False
            self._write([memoryview(data)])
            return True
        except ValueError as error:
            # What `poll` says of a closed socket.
            raise OSError("the stream is closed") from error
        finally:
            self._turn.release()

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, as a view that is valid until the next call.

        Raises:
            EOFError: the peer closed the stream first.
            OSError: the stream broke.
        """
        if size > _BUFFER:
            body = memoryview(bytearray(size))
            self.take_into(body)
            return body
        self.taken += size
        while self._end - self._start < size:
            self._fill(size)
        start = self._start
        self._start += size
        return self._view[start : start + size]

    def peek(self, size: int) -> memoryview | None:
        """The next `size` bytes if they are here already, not taken; else None."""
        if self._end - self._start < size:
            return None
        return self._view[self._start : self._start + size]

    def take_into(self, target: memoryview) -> None:
        """Receive exactly `len(target)` bytes into `target`.

        Raises:
            EOFError: the peer closed the stream first.
            OSError: the stream broke.
        """
        if len(target) <= min(_SMALL, _BUFFER):
            target[:] = self.take(len(target))
            return
        self.taken += len(target)
        at = min(len(target), self._end - self._start)
        target[:at] = self._view[self._start : self._start + at]
        self._start += at
        while at < len(target):
            at += self._receive(target[at : at + MAX_CALL])

    def take_ahead(self, head: memoryview, target: memoryview) -> int:
        """Receive `head` whole, and of what follows as much as is there already,
        straight into `target`; returns how much that is.

        Raises:
            EOFError: the peer closed the stream first.
            OSError: the stream broke.
        """
        if self.buffered:
            head[:] = self.take(len(head))
            return 0
        at = 0
        while at < len(head):
            at += self._receive(head[at:], target[:MAX_CALL])
        self.taken += at
        return at - len(head)

    def skip(self, size: int) -> None:
        """Receive `size` bytes and forget them.

        Raises:
            EOFError: the peer closed the stream first.
            OSError: the stream broke.
        """
        while size > 0:
            part = min(size, _BUFFER)
            self.take(part)
            size -= part

    def fileno(self) -> int:
        """The descriptor, to wait for."""
        return self._sock.fileno()

    @property
    def holds(self) -> bool:
        """Whether bytes are here that no descriptor tells of."""
        return self.buffered > 0 or self._holds_more()

    def take_some(self) -> memoryview:
        """The bytes that are there, or else the next that come; valid until the next
        call.

        Raises:
            EOFError: the peer closed the stream.
            OSError: the stream broke.
        """
        if self._start == self._end:
            self._fill(1)
        start, self._start = self._start, self._end
        self.taken += self._end - start
        return self._view[start : self._end]

    def duplicate(self) -> socket.socket:
        """The bare socket under another descriptor: to look at, and to shut down."""
        return socket.socket(fileno=os.dup(self._sock.fileno()))

    def hang_up(self) -> None:
        """Have all calls end that wait here; any thread may. `close` is still due."""
        # A peer that is already gone makes this fail.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut the socket down and close it; idempotent."""
        self.hang_up()
        self._sock.close()

    def _fill(self, size: int) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > _BUFFER:
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        self._end += self._receive(self._view[self._end :])

    def _write_some(self, pieces: list[memoryview]) -> int:
        """Send some of the bytes, for as long as the peer gives signs of life."""
        while True:
            try:
                return self._write(pieces)
            except TimeoutError:
                if not self._heard():
                    raise

    def _write(self, pieces: list[memoryview]) -> int:
        """Send some of the bytes; returns how many."""
        return self._sock.sendmsg(pieces)

    def _heard(self) -> bool:
        """Whether bytes have come that nobody has waited for. All are taken in: what
        is left there would look like a sign of life later."""
        if self._start == self._end:
            self._start = self._end = 0
        before, timeout_s = self.received, self._sock.gettimeout()
        self._sock.settimeout(0)
        try:
            while self._end < _BUFFER:
                received = self._sock.recv_into(self._view[self._end :])
                if received == 0:
                    break
                self._end += received
                self.received += received
        except (BlockingIOError, ssl.SSLWantReadError):
            # No more for now.
            pass
        finally:
            self._sock.settimeout(timeout_s)
        return self.received > before

    def _receive_soon(
        self,
        targets: tuple[memoryview, ...],
        poll: Callable[[float], list[tuple[int, int]]],
    ) -> int:
        """Receive, and wait busily if the last wait was short."""
        self._answer_due = False
        started = time.perf_counter()
        if self._prompt and not self._holds_more():
            until = started + _EAGER_S
            while not poll(0) and time.perf_counter() < until:
                # Whoever else wants this core may have it.
                yield_core()
        received = self._read(targets)
        self._prompt = time.perf_counter() - started < _EAGER_S
        return received

    def _holds_more(self) -> bool:
        """Whether bytes have come that the socket no longer has."""
        return False

    def _read(self, targets: tuple[memoryview, ...]) -> int:
        """One call that receives; returns how many bytes."""
        if len(targets) == 1:
            return self._sock.recv_into(targets[0])
        return self._sock.recvmsg_into(targets)[0]

    def _receive(self, *targets: memoryview) -> int:
        with self._turn:
            self.waiting = True
            if self._arrivals is None or (self._answers_only and not self._answer_due):
                received = self._read(targets)
            else:
                received = self._receive_soon(targets, self._arrivals.poll)
            self.waiting = False
        if received == 0:
            raise EOFError("the peer closed the connection")
        self.received += received
        return received


def _capped(pieces: list[memoryview]) -> list[memoryview]:
    total = 0
    for i, piece in enumerate(pieces):
        if total + len(piece) > MAX_CALL:
            return [*pieces[:i], piece[: MAX_CALL - total]]
        total += len(piece)
    return pieces
