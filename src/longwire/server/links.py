"""A link: frames and signs of life between two sessions of two servers.

PROTOCOL.md, "Links". How one comes about is in `doors`, what it is for in
`collectives` and `transfers`.
"""

from __future__ import annotations

import threading

from longwire.server.exchange import SILENCE_S, Flow
from longwire.transport.duplex import Duplex
from longwire.wire.links import FRAME_HEADER, SIGN_OF_LIFE

__all__ = ["Link"]

_PLAIN = 2
"""Pieces of a frame with nothing before it: header and data."""

_BUFFER = 68 * 1024
"""A small frame comes in one call with its header, and is copied from here."""


class Link(Flow):
    """A flow of frames. One thread owns it, any other may call `offer`."""

    patience_s = SILENCE_S

    def __init__(self, number: int, duplex: Duplex, peer: str) -> None:
        super().__init__(duplex, peer)
        self.number = number
        """What the client calls it."""
        self.owner: int | None = None
        """The communicator that it belongs to."""
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._size = 0
        """Of the frame that is awaited; `_headed` once its header has been seen."""
        self._headed = False
        self._signs = 0
        self._owed = b""
        """The rest of a sign of life that did not leave in one piece."""
        self._turn = threading.Lock()
        """Held while a frame leaves: nothing may come in between."""

    @property
    def listens(self) -> bool:
        # Signs of life also come from who takes nothing in.
        return self.awaited > 0 or (self.unsent > 0 and self._end < _BUFFER)

    @property
    def progress(self) -> object:
        return self.unsent, self.awaited, self._signs

    def send(self, pieces: list[memoryview], more: int = 0) -> None:
        """Have one frame leave that consists of these pieces, and `more`."""
        header = FRAME_HEADER.pack(sum(map(len, pieces)) + more)
        self._turn.acquire()
        owed, self._owed = self._owed, b""
        super().send([memoryview(owed + header), *pieces], more)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, and nothing has come ahead."""
        return self.failure is None and not self._owed and self._start == self._end

    def send_now(self, frame: list[memoryview], size: int) -> None:
        """Send a whole frame of `size` bytes, its header included; what cannot leave
        at once is `unsent`. The link has to be idle.

        Raises:
            OSError: the connection broke.
        """
        self._turn.acquire()
        if self._owed:
            # A sign of life has begun since.
            frame, self._owed = [memoryview(self._owed), *frame], b""
        try:
            sent = self.duplex.send_some(frame)
        except OSError:
            # Nothing is `unsent`: whoever closes the link takes its turn anew.
            self._turn.release()
            raise
        if sent == size and len(frame) == _PLAIN:
            self._turn.release()
            return
        Flow.send(self, list(frame))
        self._sent(sent)
        if not self.unsent:
            self._turn.release()

    def put_back(self, data: memoryview, target: memoryview) -> None:
        """Have the next frame go to `target`; `data` of it, or before it, is here."""
        self._view[: len(data)] = data
        self._start, self._end = 0, len(data)
        self.receive(target)

    def receive(self, target: memoryview, more: int = 0) -> None:
        """Have the next frame go there; it must be as large as `target`, and `more`:
        then that holds what is read ahead."""
        assert not more or len(target) >= _BUFFER
        self._target = target
        self._size = len(target) + more
        # The header counts as well, or an empty frame would not be awaited.
        self.awaited = self._size + FRAME_HEADER.size
        self._headed = False

    def push(self) -> bool:
        moved = super().push()
        if not self.unsent:
            self._turn.release()
        return moved

    def pull(self) -> bool:
        if self._headed:
            moved = super().pull()
            self._headed = self.awaited > 0
            return moved
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER:
            rest = self._view[self._start : self._end].tobytes()
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        received = 0
        if not (self.awaited and self._end - self._start >= FRAME_HEADER.size):
            received = self.duplex.receive_some(self._view[self._end :])
            self._end += received
        if self.awaited:
            return self._open() or received > 0
        return self._skip_signs() or received > 0

    def _skip_signs(self) -> bool:
        """Forget signs of life at the front of the buffer; whether there were any."""
        before = self._signs
        while self._view[self._start : self._end][: FRAME_HEADER.size] == SIGN_OF_LIFE:
            self._start += FRAME_HEADER.size
            self._signs += 1
        return self._signs > before

    def _open(self) -> bool:
        """Begin with the frame that is awaited, if its header is here."""
        alive = self._skip_signs()
        if self._end - self._start < FRAME_HEADER.size:
            return alive
        (size,) = FRAME_HEADER.unpack_from(self._buffer, self._start)
        if size != self._size:
            raise EOFError(f"it sent {size} bytes where {self._size} were awaited")
        self._headed = True
        self._start += FRAME_HEADER.size
        at = min(size, self._end - self._start)
        self._target[:at] = self._view[self._start : self._start + at]
        self._start += at
        self._target = self._target[at:]
        self.awaited = size - at
        self._headed = self.awaited > 0
        return True

    def offer(self) -> None:
        """Send a sign of life, unless a frame is on its way; any thread may."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self.failure is None:
                data = self._owed or SIGN_OF_LIFE
                sent = self.duplex.send_some([memoryview(data)])
                # One that cannot leave is no use, unless it has begun to.
                begun = sent > 0 or self._owed or self.duplex.begins_at_once
                self._owed = data[sent:] if begun else b""
        except OSError:
            # Who uses the link will find out.
            pass
        finally:
            self._turn.release()

    def close(self, reason: str) -> None:
        if not self.unsent:
            self._turn.acquire()
        super().close(reason)
        self._turn.release()
