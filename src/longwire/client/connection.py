"""One connection per endpoint: order, corking, and the failure latch.

Commands without an answer are only appended here. They leave, all in one
write, with the next command whose answer somebody waits for: a decode step's
inputs, the recompute and the read of its result are one write and one read.

Two rules keep this safe. Nobody waits for an answer while any connection of
the process holds back a graph (`flush_all`), so that workers overlap. And
next to nothing is sent while an answer is owed, so that two full socket buffers
never face each other: what is behind a read in one write is short, and nothing
follows that write until the answers are in.

The first failure is latched. Every later call raises it at once, and touches
no socket.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from longwire.client.traffic import Traffic
from longwire.errors import (
    WIRE_CODES,
    AuthenticationFailed,
    ConnectionLost,
    LongwireError,
    ProtocolError,
    RemoteFailure,
)
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.transport.tls import explain
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import (
    LX_OFFER,
    MAX_PREPARED,
    MAX_PREPARED_DATA,
    Dialect,
)
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER
from longwire.wire.lx import (
    ERROR_BIT,
    KEEP_ALIVE,
    MAX_ANSWER,
    ErrorAnswer,
    LxStartAnswer,
)
from longwire.wire.prepared import SetPrepared

__all__ = ["Connection", "Deadlines", "Health", "Recorder", "reason_of"]

_log = logging.getLogger("longwire.client")

_CORK_LIMIT = 96 * 1024
"""Held-back bytes beyond this leave without waiting for a reader. So much fits the
buffers between the two ends, even of a server that waits for another one's."""

_BULK = 64 * 1024
"""Data from this size on goes from the caller's memory to the socket."""

_BEHIND_READ = 32 * 1024
"""Most bytes that share a write with a read. They must fit the buffers between
the two ends: a server that cannot deliver its answer takes no more in."""


_GRAPHS = frozenset(
    {
        Command.GRAPH_RECOMPUTE,
        Command.GRAPH_COMPUTE,
        Command.LX_GRAPH_PATCH,
        Command.COMM_ALLREDUCE,
        Command.LX_ALLREDUCE,
        Command.LX_SEND,
        Command.LX_RECEIVE,
    }
)
"""What a server computes on or another server waits for; nobody may be left waiting
for it."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long to wait, in seconds."""

    connect_s: float = 5.0
    """For the connection and, again, for the HELLO answer."""
    answer_s: float = 1800.0
    """For each answer. A large ubatch on a slow CPU takes minutes."""
    silence_s: float = 10.0
    """For a sign of life of a server that gives any: ours does once per second.
    Such a server is noticed when it is frozen; llama.cpp's only after `answer_s`."""


@dataclass(frozen=True, slots=True)
class Health:
    """How an endpoint is."""

    endpoint: Endpoint
    failure: LongwireError | None
    """What ended the connection; None while all is well."""
    round_trip_s: float | None
    """Of one question; None if none was asked, since the connection is at work."""

    @property
    def ok(self) -> bool:
        return self.failure is None


@dataclass(slots=True)
class _Read:
    command: Command
    target: memoryview
    sent: bool = False
    limit: int = 0
    """Most bytes of an answer whose size only the server knows."""
    answer: bytes = b""
    """Such an answer."""


Recorder = Callable[[str, float, float, int], None]
"""Called with what was done, from when to when, and with how many bytes; by the
thread that did it, so it must not take long."""

T = TypeVar("T")

_open: weakref.WeakSet[Connection] = weakref.WeakSet()
_open_lock = threading.Lock()


class Connection:
    """A greeted connection. Safe to use from several threads."""

    def __init__(
        self,
        endpoint: Endpoint,
        stream: Stream,
        dialect: Dialect,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.dialect = dialect
        self.failure: LongwireError | None = None
        self.refusal: RemoteFailure | None = None
        """LX: a command was not done. The connection itself is well, and `check`
        takes this away."""
        self.refusals = 0
        """How many commands were refused so far."""
        self.server: LxStartAnswer | None = None
        """What an LX server says of itself; None for any other."""
        self.traffic = Traffic()
        self.recorder: Recorder | None = None
        """Told of every send, wait and receive, if anybody wants to know."""
        self.credentials: object = None
        """What it was made with; `remote` gives it to nobody who comes with others."""
        self.users = 0
        """Who counts on this connection; `remote` closes it after the last."""
        self._deadlines = deadlines or Deadlines()
        self._stream = stream
        stream.be_eager()
        self._lock = threading.RLock()
        self._corked = bytearray()
        self._numbers: list[int] = []
        """Of prepared writes that are not in `_corked` yet."""
        self._prepared = bytearray()
        """Their data."""
        self._last = Command.HELLO
        """The last command queued; names a failure to send."""
        self._holds_graph = False
        self._reason: LongwireError | None = None
        """Of a failure that is about to be latched."""
        self._reads: list[_Read] = []
        with _open_lock:
            _open.add(self)

    @property
    def healthy(self) -> bool:
        """Whether nothing has failed on this connection so far."""
        return self.failure is None

    def post(self, command: Command, *pieces: m.Bytes) -> None:
        """Queue a command that has no answer.

        Raises:
            LongwireError: the latched failure.
        """
        size = sum(map(len, pieces))
        self._claim(size)
        try:
            if self._numbers:
                self._fold_writes()
            self._last = command
            self._corked += REQUEST_HEADER.pack(command, size)
            if size >= _BULK:
                self._send(pieces)
                return
            for piece in pieces:
                self._corked += piece
            if command in _GRAPHS:
                self._holds_graph = True
            if len(self._corked) > _CORK_LIMIT:
                self._send()
        finally:
            self._lock.release()

    def write_prepared(self, number: int, data: bytes) -> None:
        """Queue a prepared write; those in a row leave as one message.

        Raises:
            LongwireError: the latched failure.
        """
        self._claim(len(data) + m.U32.size)
        try:
            if len(self._prepared) + len(data) > MAX_PREPARED_DATA:
                self._fold_writes()
            self._numbers.append(number)
            self._prepared += data
            if len(self._numbers) == MAX_PREPARED:
                self._fold_writes()
            if len(self._corked) > _CORK_LIMIT:
                self._send()
        finally:
            self._lock.release()

    def _fold_writes(self) -> None:
        """Cork the prepared writes. Called with the lock held."""
        head = SetPrepared.head(self._numbers)
        size = len(head) + len(self._prepared)
        self._corked += REQUEST_HEADER.pack(Command.LX_SET_PREPARED, size)
        self._corked += head
        self._corked += self._prepared
        self._numbers.clear()
        self._prepared.clear()

    def ask(self, command: Command, body: m.Bytes) -> bytes:
        """Send a command and wait for its answer, of the size its table gives.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        size = self.dialect.shapes[command].answer
        assert size is not None and size >= 0, command
        answer = bytearray(size)
        self.ask_into(command, body, memoryview(answer))
        return bytes(answer)

    def ask_sized(self, command: Command, body: m.Bytes, limit: int) -> bytes:
        """Send a command and wait for an answer of at most `limit` bytes.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        read = _Read(command, memoryview(bytearray()), limit=limit)
        self._queue(read, body)
        self.synchronize()
        return read.answer

    def ask_message(
        self, command: Command, body: m.Bytes, decode: Callable[[bytes], T]
    ) -> T:
        """Send a command of LX and decode its answer.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        answer = self.ask_sized(command, body, MAX_ANSWER)
        try:
            return decode(answer)
        except ProtocolError as error:
            wrong = RemoteFailure(str(self.endpoint), command.name, str(error))
            raise self.fail(wrong, command.name) from error

    def ask_into(self, command: Command, body: m.Bytes, target: memoryview) -> None:
        """Send a command and receive its answer in place.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        self.queue_read(command, body, target)
        self.synchronize()

    def queue_read(self, command: Command, body: m.Bytes, target: memoryview) -> None:
        """Queue a command whose answer goes to `target`, by `synchronize` at latest.

        Raises:
            LongwireError: the latched failure.
        """
        self._queue(_Read(command, target), body)

    def _queue(self, read: _Read, body: m.Bytes) -> None:
        self._claim(len(body))
        try:
            if self._numbers:
                self._fold_writes()
            self._last = read.command
            self._corked += REQUEST_HEADER.pack(read.command, len(body))
            self._corked += body
            self._reads.append(read)
        finally:
            self._lock.release()

    def synchronize(self) -> None:
        """Send what a graph waits for, and receive all queued reads.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        if self._reads:
            flush_all(but=self)
        with self._lock:
            self._raise_failure()
            if self._reads:
                self._settle()
            elif self._holds_graph:
                self._send()

    def flush(self) -> None:
        """Send everything held back; answers stay owed.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        with self._lock:
            self._raise_failure()
            if self._numbers:
                self._fold_writes()
            if self._corked:
                self._send()

    def start(self) -> None:
        """Send everything held back, unless there are reads to be answered first.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        with self._lock:
            self._raise_failure()
            if self._reads:
                return
            if self._numbers:
                self._fold_writes()
            if self._corked:
                self._send()

    def fail(self, error: BaseException, command: str) -> LongwireError:
        """Latch a failure, unless there is one, and return the latched one."""
        if not isinstance(error, LongwireError):
            lost = ConnectionLost(str(self.endpoint), command, reason_of(error))
            lost.__cause__ = error
            error = lost
        if not self._lock.acquire(blocking=False):
            # Whoever holds it may be sending to a peer that takes nothing in; what
            # that comes to is of no interest beside this.
            self._reason = self._reason or error
            self._stream.hang_up()
            self._lock.acquire()
        try:
            if self.failure is None:
                self.failure = self._reason or error
                self._stream.close()
                self._corked = bytearray()
                self._numbers.clear()
                self._prepared.clear()
                self._holds_graph = False
                # Nobody may take what is in these for an answer.
                for read in self._reads:
                    read.target[:] = bytes(len(read.target))
                self._reads.clear()
            return self.failure
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Have calls that wait for the server fail; any thread may."""
        self._stream.hang_up()

    def check(self) -> None:
        """Raise the latched failure, if there is one.

        Raises:
            LongwireError: names the endpoint, the command and the cause.
        """
        self._raise_failure()
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal

    def health(self) -> Health:
        """Ask the server for a sign of life, unless another thread is at work here.

        No answer within `Deadlines.silence_s` is a failure of the connection; from
        a server without keep-alives (llama.cpp's), one within `answer_s`.
        """
        round_trip_s = None
        if self.failure is None and self._lock.acquire(blocking=False):
            # Not kept while asking: that waits for other connections' locks.
            self._lock.release()
            started = time.perf_counter()
            try:
                self.ask(*self._ping())
                round_trip_s = time.perf_counter() - started
            except LongwireError as error:
                # A refusal of an earlier command stays there for `check`.
                _log.debug("%s: %s", self.endpoint, error)
        return Health(self.endpoint, self.failure, round_trip_s)

    def _ping(self) -> tuple[Command, bytes]:
        if self.dialect.lx:
            return Command.LX_PING, b""
        return Command.DEVICE_COUNT, b""

    @property
    def certificate(self) -> bytes | None:
        """The server's, in DER; None without TLS."""
        return self._stream.certificate

    def set_patience(self, silence_s: float) -> None:
        """Take so long a silence of the server, while it is waited for, as its end."""
        self._stream.set_deadline(silence_s)

    def detach(self) -> Stream:
        """Give the stream away; later calls say that this connection is closed.

        Raises:
            LongwireError: the latched failure.
        """
        with self._lock:
            self._raise_failure()
            assert not self._reads and not self._corked and not self._numbers
            self.failure = ConnectionLost(str(self.endpoint), "detach", "closed")
            return self._stream

    def close(self) -> None:
        """Leave the server; idempotent. Later calls say that it is closed."""
        self.fail(ConnectionLost(str(self.endpoint), "close", "closed"), "close")

    def _claim(self, size: int) -> None:
        """Take the lock, once `size` bytes may be queued without blocking a read.

        Queued reads are settled first if the bytes would not fit behind them;
        without the lock, since that waits for other connections too. What will not
        be held back may find a server that takes nothing in before another one has
        its commands: those leave first.
        """
        if size >= _BULK or self._held_back + size > _CORK_LIMIT:
            flush_all(but=self)
        while True:
            self._lock.acquire()
            if self.failure is not None:
                self._lock.release()
                self._raise_failure()
            if not self._reads or self._held_back + size <= _BEHIND_READ:
                return
            self._lock.release()
            self.synchronize()

    @property
    def _held_back(self) -> int:
        """Bytes, but for headers."""
        return len(self._corked) + len(self._prepared) + m.U32.size * len(self._numbers)

    def _raise_failure(self) -> None:
        if self.failure is not None:
            if isinstance(self.failure.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from self.failure
            # Raised over and over: each time would add to the traceback.
            raise self.failure.with_traceback(None)

    def _send(self, pieces: Sequence[m.Bytes] = ()) -> None:
        """Write what is corked, then `pieces`. Called with the lock held."""
        if any(read.sent for read in self._reads):
            self._receive()
        corked, self._corked = self._corked, bytearray()
        self._holds_graph = False
        started = time.perf_counter()
        try:
            self._stream.send([corked, *pieces])
        except BaseException as error:
            self.fail(error, self._last.name)
        self._raise_failure()
        ended = time.perf_counter()
        size = len(corked) + sum(map(len, pieces))
        self.traffic.send_s += ended - started
        self.traffic.bytes_sent += size
        if self.recorder is not None:
            self.recorder("send", started, ended, size)
        for read in self._reads:
            read.sent = True

    def _settle(self) -> None:
        """Send, and receive every queued read. Called with the lock held."""
        if self._corked:
            self._send()
        self._receive()

    def _receive(self) -> None:
        self.traffic.round_trips += 1
        refusal: RemoteFailure | None = None
        while self._reads and self._reads[0].sent:
            read = self._reads[0]
            try:
                refused = self._take_answer(read)
            except BaseException as error:
                self.fail(error, read.command.name)
            self._raise_failure()
            refusal = refusal or refused
            self._reads.pop(0)
        if refusal is not None:
            self.refusal = self.refusal or refusal
            self.refusals += 1
            raise refusal

    def _take_answer(self, read: _Read) -> RemoteFailure | None:
        """Receive one answer in its place; an LX server may give its error."""
        started = time.perf_counter()
        # A server that has just started LX may be slow to say so.
        lx = self.dialect.lx or read.command in LX_OFFER
        ahead = 0
        if lx or len(read.target) < _BULK:
            (size,) = ANSWER_HEADER.unpack(self._stream.take(ANSWER_HEADER.size))
        else:
            # Nothing but this answer can follow.
            head = memoryview(bytearray(ANSWER_HEADER.size))
            ahead = self._stream.take_ahead(head, read.target)
            (size,) = ANSWER_HEADER.unpack(head)
        while size == KEEP_ALIVE and lx:
            if time.perf_counter() - started > self._deadlines.answer_s:
                raise TimeoutError
            (size,) = ANSWER_HEADER.unpack(self._stream.take(ANSWER_HEADER.size))
        arrived = time.perf_counter()
        self.traffic.wait_s += arrived - started
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
        self.traffic.receive_s += ended - arrived
        self.traffic.bytes_received += ANSWER_HEADER.size + size
        if self.recorder is not None:
            self.recorder(f"wait for {read.command.name}", started, arrived, 0)
            self.recorder(f"receive {read.command.name}", arrived, ended, size)
        return refused

    def _take_error(self, read: _Read, size: int) -> RemoteFailure:
        if size > MAX_ANSWER:
            raise self._wrong_answer(read, f"an error of {size} bytes")
        try:
            error = ErrorAnswer.decode(self._stream.take(size))
        except ProtocolError as wrong:
            raise self._wrong_answer(read, str(wrong)) from wrong
        read.target[:] = bytes(len(read.target))
        kind = RemoteFailure
        if error.code == WIRE_CODES["Unauthenticated"]:
            kind = AuthenticationFailed
        name = read.command.name
        # The sentence may name the command itself.
        sentence = error.sentence.removeprefix(f"{name}: ")
        return kind(str(self.endpoint), name, f"{error.name}: {sentence}")

    def _wrong_answer(self, read: _Read, what: str) -> RemoteFailure:
        name = read.command.name
        return RemoteFailure(str(self.endpoint), name, f"answered {what}")


def flush_all(but: Connection | None = None) -> None:
    """Send the graphs that any connection holds back, before somebody waits."""
    with _open_lock:
        connections = list(_open)
    for connection in connections:
        if connection is not but and connection._holds_graph:
            try:
                connection.flush()
            except LongwireError:
                # Latched there; whoever uses that connection will be told.
                continue


def reason_of(error: BaseException) -> str:
    """Why a stream failed, in words."""
    if isinstance(error, TimeoutError):
        return "no answer before the deadline"
    # With bytes of ours unread, a closed connection looks like a reset one.
    if isinstance(error, (EOFError, ConnectionResetError, BrokenPipeError)):
        return (
            "the server closed the connection (it refused the last commands, "
            "or it is gone; its log says which)"
        )
    if isinstance(error, OSError):
        return explain(error)
    return str(error) or type(error).__name__
