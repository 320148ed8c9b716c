"""Answers as they come in: keep-alives, errors, and data in its place.

In what order they are due, and what a failure here means for what comes after, is
the connection's (`client/connection.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from longwire.client.corking import BULK
from longwire.client.traffic import Recorder, Traffic
from longwire.errors import (
    WIRE_CODES,
    AuthenticationFailed,
    ProtocolError,
    RemoteFailure,
)
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire.constants import Command
from longwire.wire.dialects import LX_OFFER, Dialect
from longwire.wire.frames import ANSWER_HEADER
from longwire.wire.lx import ERROR_BIT, KEEP_ALIVE, MAX_ANSWER, ErrorAnswer

__all__ = ["Answers", "Read"]


@dataclass(slots=True)
class Read:
    """A command that somebody wants the answer of."""

    command: Command
    target: memoryview
    limit: int = 0
    """Most bytes of an answer whose size only the server knows."""
    answer: bytes = b""
    """Such an answer."""
    whole: memoryview | None = None
    """What the target is a part of, where it is one."""

    def void(self) -> None:
        """Nobody may take what is in the target for an answer."""
        target = self.target if self.whole is None else self.whole
        target[:] = bytes(len(target))


class Answers:
    """Receives what one server answers. Not locked."""

    def __init__(
        self, endpoint: Endpoint, stream: Stream, answer_s: float, traffic: Traffic
    ) -> None:
        """Each answer may take `answer_s` seconds, with signs of life before it."""
        self._endpoint = endpoint
        self._stream = stream
        self._answer_s = answer_s
        self._traffic = traffic

    def take(
        self, read: Read, dialect: Dialect, recorder: Recorder | None
    ) -> RemoteFailure | None:
        """Receive one answer in its place; an LX server may give its error.

        Raises:
            RemoteFailure: it has a wrong size, or is no error that could be read.
            TimeoutError: there were signs of life, and no answer.
            EOFError: the server closed the stream first.
            OSError: the stream broke.
        """
        started = time.perf_counter()
        # A server that has just started LX may be slow to say so.
        lx = dialect.lx or read.command in LX_OFFER
        ahead = 0
        if lx or len(read.target) < BULK:
            (size,) = ANSWER_HEADER.unpack(self._stream.take(ANSWER_HEADER.size))
        else:
            # No more is received than this answer has.
            head = memoryview(bytearray(ANSWER_HEADER.size))
            ahead = self._stream.take_ahead(head, read.target)
            (size,) = ANSWER_HEADER.unpack(head)
        while size == KEEP_ALIVE and lx:
            if time.perf_counter() - started > self._answer_s:
                raise TimeoutError
            (size,) = ANSWER_HEADER.unpack(self._stream.take(ANSWER_HEADER.size))
        arrived = time.perf_counter()
        self._traffic.wait_s += arrived - started
        refused = None
        if size & ERROR_BIT and lx:
            size &= ~ERROR_BIT
            refused = self._take_error(read, size)
        elif read.limit and size <= read.limit:
            read.answer = bytes(self._stream.take(size))
        elif size == len(read.target) and not read.limit:
            self._stream.take_into(read.target[ahead:])
        else:
            due = f"up to {read.limit}" if read.limit else f"{len(read.target)}"
            raise self._wrong_answer(read, f"{size} bytes where {due} were due")
        ended = time.perf_counter()
        self._traffic.receive_s += ended - arrived
        self._traffic.bytes_received += ANSWER_HEADER.size + size
        if recorder is not None:
            recorder(f"wait for {read.command.name}", started, arrived, 0)
            recorder(f"receive {read.command.name}", arrived, ended, size)
        return refused

    def _take_error(self, read: Read, size: int) -> RemoteFailure:
        if size > MAX_ANSWER:
            raise self._wrong_answer(read, f"an error of {size} bytes")
        try:
            error = ErrorAnswer.decode(self._stream.take(size))
        except ProtocolError as wrong:
            raise self._wrong_answer(read, str(wrong)) from wrong
        read.void()
        kind = RemoteFailure
        if error.code == WIRE_CODES["Unauthenticated"]:
            kind = AuthenticationFailed
        name = read.command.name
        # The sentence may name the command itself.
        sentence = error.sentence.removeprefix(f"{name}: ")
        return kind(str(self._endpoint), name, f"{error.name}: {sentence}")

    def _wrong_answer(self, read: Read, what: str) -> RemoteFailure:
        name = read.command.name
        return RemoteFailure(str(self._endpoint), name, f"answered {what}")
