"""One connection per endpoint: order, the lock, and the failure latch.

Commands without an answer are held back (`client/corking.py`) until there is one
whose answer somebody waits for (`client/answers.py`); for a server of llama.cpp only
those between a step's first one and its graph.

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
from typing import TypeVar

from longwire.client.answers import Answers, Read
from longwire.client.corking import (
    BEHIND_READ,
    BULK,
    CORK_LIMIT,
    GRAPHS,
    NUMBER_SIZE,
    Cork,
)
from longwire.client.health import Deadlines, Health, reason_of
from longwire.client.traffic import Recorder, Traffic
from longwire.errors import ConnectionLost, LongwireError, ProtocolError, RemoteFailure
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import Dialect
from longwire.wire.lx import MAX_ANSWER, LxStartAnswer

__all__ = ["Connection"]

_log = logging.getLogger("longwire.client")

T = TypeVar("T")

_open: tuple[weakref.ref[Connection], ...] = ()
"""Replaced, never changed: each step looks through it, and takes no lock for that."""

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
        self._stream = stream
        stream.be_eager(answers_only=True)
        self.lock = threading.RLock()
        """Held for all that is queued, sent and received."""
        self._reason: LongwireError | None = None
        """Of a failure that is about to be latched."""
        self._cork = Cork()
        self._reads: list[Read] = []
        """In the order in which they were queued."""
        self._owed = 0
        """How many of them have been sent: the first ones."""
        self._at_work = False
        """Something was sent since an answer was last waited for."""
        answer_s = (deadlines or Deadlines()).answer_s
        self._answers = Answers(endpoint, stream, answer_s, self.traffic)
        _register(self)

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
            if size >= BULK:
                self._cork.put(command, size)
                self._send(pieces)
            elif self._cork.put(command, size, pieces) or self._should_start(command):
                self._send()
        finally:
            self.lock.release()

    def _should_start(self, command: Command) -> bool:
        """Whether what was just queued had better leave.

        A server of llama.cpp sleeps until a step's first bytes come, and is late to
        wake up; it takes in the inputs, each by itself, while the others are made.
        Never once it has worked together with another server: it may be waiting for
        that one, whose half is held back.
        """
        if self.dialect.lx or self._reads or self._cork.halves:
            return False
        return not self._at_work or command in GRAPHS

    def write_prepared(self, number: int, data: bytes) -> None:
        """Queue a prepared write; those in a row leave as one message.

        Raises:
            LongwireError: the latched failure.
        """
        self._claim(NUMBER_SIZE + len(data))
        try:
            if self._cork.write(number, data):
                self._send()
        finally:
            self.lock.release()

    def make_room(self, size: int) -> None:
        """Send or receive what it takes for `has_room`; another thread may be quicker.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        self._claim(size)
        try:
            self._cork.fold()
            if self._cork.size + size > CORK_LIMIT:
                self._send()
        finally:
            self.lock.release()

    def has_room(self, size: int) -> bool:
        """Whether so much, headers included, can be `put`. Called with the lock held.

        Raises:
            LongwireError: the latched failure.
        """
        if self.failure is not None:
            self._raise_failure()
        self._cork.fold()
        limit = BEHIND_READ if self._reads else CORK_LIMIT
        return self._cork.size + size <= limit

    def put(self, command: Command, body: m.Bytes) -> None:
        """Queue a command that `has_room`, and nothing else. Called with the lock
        held."""
        self._cork.put(command, len(body), (body,))

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
        read = Read(command, memoryview(bytearray()), limit=limit)
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

    def queue_read(
        self,
        command: Command,
        body: m.Bytes,
        target: memoryview,
        whole: memoryview | None = None,
    ) -> None:
        """Queue a command whose answer goes to `target`, by `synchronize` at latest.

        `whole` is what the target is a part of: of that nothing is left if the read
        fails.

        Raises:
            LongwireError: the latched failure.
        """
        self._queue(Read(command, target, whole=whole), body)

    def _queue(self, read: Read, body: m.Bytes) -> None:
        self._claim(len(body))
        try:
            # However much it is: it leaves once its answer is waited for.
            self._cork.put(read.command, len(body), (body,))
            self._reads.append(read)
        finally:
            self.lock.release()

    def begin(self, command: Command, body: m.Bytes, target: memoryview) -> None:
        """Send a command whose answer goes to `target`, by `synchronize`.

        For what is not answered before another server is at work, too: nobody can
        wait for the answer while the command is still here.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        while True:
            self.synchronize()
            halves = self._cork.halves
            flush_all(but=self)
            with self.lock:
                self._raise_failure()
                if not self._reads and self._cork.halves == halves:
                    self._cork.put(command, len(body), (body,))
                    self._reads.append(Read(command, target))
                    self._send()
                    return

    def synchronize(self) -> None:
        """Send what a graph waits for, and receive all queued reads.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        while True:
            halves, waits = self._cork.halves, bool(self._reads)
            if waits:
                flush_all(but=self)
            with self.lock:
                self._raise_failure()
                if not self._reads:
                    if self._cork.holds_graph:
                        self._send()
                    return
                # Another thread's came in between: the other halves may be here.
                if waits and self._cork.halves == halves:
                    if self._cork.corked:
                        self._send()
                    self._receive()
                    return

    def flush(self) -> None:
        """Send everything held back; answers stay owed.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        with self.lock:
            self._raise_failure()
            if self._cork.size:
                self._cork.fold()
                self._send()

    def start(self) -> None:
        """Send everything held back, unless there are reads to be answered first.

        Raises:
            LongwireError: the latched failure, or a new one.
        """
        with self.lock:
            if not self._reads:
                self.flush()

    def fail(self, error: BaseException, command: str) -> LongwireError:
        """Latch a failure, unless there is one, and return the latched one."""
        if not isinstance(error, LongwireError):
            lost = ConnectionLost(str(self.endpoint), command, reason_of(error))
            lost.__cause__ = error
            error = lost
        if not self.lock.acquire(blocking=False):
            # Whoever holds it may be sending to a peer that takes nothing in; what
            # that comes to is of no interest beside this.
            self._reason = self._reason or error
            self._stream.hang_up()
            self.lock.acquire()
        try:
            if self.failure is None:
                self.failure = self._reason or error
                self._stream.close()
                self._cork = Cork()
                for read in self._reads:
                    read.void()
                self._reads.clear()
                self._owed = 0
            return self.failure
        finally:
            self.lock.release()

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
        if self.failure is None and self.lock.acquire(blocking=False):
            # Not kept while asking: that waits for other connections' locks.
            self.lock.release()
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
        with self.lock:
            self._raise_failure()
            assert not self._reads and not self._cork.size
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
        while True:
            halves = self._cork.halves
            heavy = size >= BULK or self._cork.size + size > CORK_LIMIT
            if heavy:
                flush_all(but=self)
            self.lock.acquire()
            if self.failure is not None:
                self.lock.release()
                self._raise_failure()
            if self._reads and self._cork.size + size > BEHIND_READ:
                self.lock.release()
                self.synchronize()
            elif heavy and self._cork.halves != halves:
                self.lock.release()
            else:
                return

    def _raise_failure(self) -> None:
        if self.failure is not None:
            if isinstance(self.failure.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from self.failure
            # Raised over and over: each time would add to the traceback.
            raise self.failure.with_traceback(None)

    def _send(self, pieces: Sequence[m.Bytes] = ()) -> None:
        """Write what is corked, then `pieces`. Called with the lock held."""
        if self._owed:
            self._receive()
        corked = self._cork.take()
        started = time.perf_counter()
        try:
            self._stream.send([corked, *pieces])
        except BaseException as error:
            self.fail(error, self._cork.last.name)
        self._raise_failure()
        ended = time.perf_counter()
        size = len(corked) + sum(map(len, pieces))
        self.traffic.send_s += ended - started
        self.traffic.bytes_sent += size
        if self.recorder is not None:
            self.recorder("send", started, ended, size)
        self._owed = len(self._reads)
        self._at_work = True

    def _receive(self) -> None:
        """Take every answer that is owed. Called with the lock held."""
        self.traffic.round_trips += 1
        self._at_work = False
        refusal: RemoteFailure | None = None
        while self._owed:
            read = self._reads[0]
            try:
                refused = self._answers.take(read, self.dialect, self.recorder)
            except BaseException as error:
                self.fail(error, read.command.name)
            self._raise_failure()
            refusal = refusal or refused
            self._reads.pop(0)
            self._owed -= 1
        if refusal is not None:
            self.refusal = self.refusal or refusal
            self.refusals += 1
            raise refusal


def flush_all(but: Connection | None = None) -> None:
    """Send the graphs that any connection holds back, before somebody waits."""
    for reference in _open:
        connection = reference()
        if connection is None or connection is but:
            continue
        if connection._cork.holds_graph:
            try:
                connection.flush()
            except LongwireError:
                # Latched there; whoever uses that connection will be told.
                continue


def _register(connection: Connection) -> None:
    global _open
    with _open_lock:
        others = (other for other in _open if other() is not None)
        _open = (*others, weakref.ref(connection))
