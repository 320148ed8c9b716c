"""Feeding one connection with weights, in a thread of its own.

Writes leave in the order they came. Whoever has another command for a buffer waits
for the writes to it first (`wait_for`, `forget`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.client.writes import (
    Source,
    Weight,
    Write,
    deliver,
    keeps_data,
    known_digests,
    weight_write,
)
from longwire.errors import RemoteFailure
from longwire.transport.endpoint import Endpoint
from longwire.wire.constants import Command

__all__ = ["Delivery", "Uploader"]

_log = logging.getLogger("longwire.client")

_MOST_COPIED = 64 << 20
"""Bytes of copies that may wait for one worker: they are memory of ours."""

_GRACE_S = 5.0
"""For a message that is being sent when a load is given up."""


class Delivery(NamedTuple):
    """How much of a model one worker has, in bytes."""

    endpoint: Endpoint
    done: int
    """Sent, or filled in by the worker itself."""
    total: int
    """What llama.cpp has given this worker so far."""
    from_store: int
    """Of `done`: the worker had it, and it was not sent."""


class _Entry(NamedTuple):
    buffer: int
    """Its handle."""
    write: Write


class Uploader:
    """Feeds one connection. Whoever starts it has to `close` it."""

    def __init__(self, connection: Connection, sources: Mapping[bytes, Source]) -> None:
        """`sources` are the tensors of the model file by name.

        A server that keeps data is asked at once which of them it has.
        """
        self.connection = connection
        self.error: BaseException | None = None
        """What ended the thread early."""
        self._sources = sources
        self._surprised = False
        self._change = threading.Condition()
        """Held for all that follows, and told of every change to it."""
        self._queue: deque[_Entry] = deque()
        self._waiting: Counter[int] = Counter()
        """Writes that are not done, by buffer."""
        self._copied = self._total = self._done = self._from_store = 0
        self._complete = self._stopped = False
        self._sent: list[Write] | None = []
        """Writes since the first one without data, should that be refused. None
        where copies are among them: keeping those would take too much memory."""
        name = f"upload to {connection.endpoint}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether something may still be under way."""
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, so long at most."""
        self._thread.join(timeout_s)

    @property
    def delivery(self) -> Delivery:
        """How far it has come."""
        with self._change:
            endpoint = self.connection.endpoint
            return Delivery(endpoint, self._done, self._total, self._from_store)

    def take(self, buffer: int, weight: Weight) -> None:
        """Queue a weight, from the model file if that holds the same."""
        source = self._sources.get(weight.name)
        if source is not None and source.is_of(weight):
            self.put(buffer, weight_write(self.connection, weight, source))
            return
        if not self._surprised:
            self._surprised = True
            name = weight.name.decode(errors="replace")
            _log.info("%s is not loaded as the model file holds it", name)
        copy = weight._replace(content=memoryview(bytes(weight.content)))
        write = weight_write(self.connection, copy)
        self.put(buffer, write._replace(copied=True))

    def put(self, buffer: int, write: Write) -> None:
        """Queue a write. Waits while there are many with copied data."""
        size = len(write.data)
        with self._change:
            if write.copied:
                self._change.wait_for(lambda: self._ended or self._has_room(size))
            # Of a load that has failed nothing is wanted any more.
            if self._ended:
                return
            if write.copied:
                self._sent = None
                self._copied += size
            self._queue.append(_Entry(buffer, write))
            self._waiting[buffer] += 1
            self._total += size
            self._change.notify_all()

    def _has_room(self, size: int) -> bool:
        return not self._copied or self._copied + size <= _MOST_COPIED

    @property
    def _ended(self) -> bool:
        return self._stopped or self.error is not None

    def wait_for(self, buffer: int) -> None:
        """Return once no write to this buffer is under way."""
        with self._change:
            self._change.wait_for(lambda: not self._waiting[buffer])

    def forget(self, buffer: int) -> None:
        """The same, but writes that have not begun are dropped."""
        with self._change:
            kept = deque(entry for entry in self._queue if entry.buffer != buffer)
            self._waiting[buffer] -= len(self._queue) - len(kept)
            self._queue = kept
        self.wait_for(buffer)

    def complete(self) -> None:
        """Let the thread end once everything has been delivered."""
        with self._change:
            self._complete = True
            self._change.notify_all()

    def stop(self) -> None:
        """Let the thread end after the message that it is sending."""
        with self._change:
            self._stopped = True
            self._drop()

    def close(self) -> None:
        """End the thread, at the cost of the connection if need be; idempotent."""
        self.stop()
        if self.alive:
            self.join(_GRACE_S)
        if self.alive:
            self.connection.abandon()
            self.join(_GRACE_S)

    def _drop(self) -> None:
        for entry in self._queue:
            self._waiting[entry.buffer] -= 1
        self._queue.clear()
        self._change.notify_all()

    def _run(self) -> None:
        try:
            self._upload()
        # Of any kind: the owner raises it in its own thread.
        except BaseException as error:
            if self.connection.refusal is error:
                self.connection.refusal = None
            self.error = error
        finally:
            with self._change:
                self._drop()
                # Slices of a file, which keep it mapped.
                self._sent = None

    def _upload(self) -> None:
        known = self._ask()
        for entry in self._entries():
            try:
                had = entry.write.digest in known
                saved = deliver(self.connection, entry.write, had)
                self._note(entry, saved, had)
            finally:
                self._settle(entry)
        if not self._stopped:
            self._confirm()

    def _ask(self) -> set[bytes]:
        """The digests of what the server has."""
        if not keeps_data(self.connection):
            return set()
        sources = self._sources.values()
        digests = {s.digest: None for s in sources if s.digest is not None}
        return known_digests(self.connection, list(digests))

    def _entries(self) -> Iterator[_Entry]:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: self._queue or self._complete or self._stopped
                )
                if not self._queue:
                    return
                entry = self._queue.popleft()
            yield entry

    def _note(self, entry: _Entry, saved: bool, had: bool) -> None:
        size = len(entry.write.data)
        with self._change:
            self._done += size
            self._from_store += size * saved
            if self._sent is not None and (self._sent or (saved and had)):
                self._sent.append(entry.write)

    def _settle(self, entry: _Entry) -> None:
        with self._change:
            self._waiting[entry.buffer] -= 1
            self._copied -= len(entry.write.data) * entry.write.copied
            self._change.notify_all()

    def _confirm(self) -> None:
        """Have the server say that all is done.

        Raises:
            RemoteError: it says something else, or nothing.
        """
        connection = self.connection
        if not connection.dialect.lx:
            connection.flush()
            return
        try:
            connection.ask(Command.LX_PING, b"")
        except RemoteFailure as error:
            if not self._sent or Command.LX_SET_DIGEST.name not in error.cause:
                raise
            _log.warning("%s; sending the data instead", error)
            connection.refusal = None
            self._send_again(self._sent)
            connection.ask(Command.LX_PING, b"")

    def _send_again(self, writes: Sequence[Write]) -> None:
        """Send what was not done since a write without data was refused."""
        with self._change:
            self.connection.traffic.bytes_saved -= self._from_store
            self._from_store = 0
        for write in writes:
            if self._stopped:
                return
            deliver(self.connection, write, had=False)
