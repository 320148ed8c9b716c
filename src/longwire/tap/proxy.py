"""The proxy: every byte passes as it is, and is looked at afterwards."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from longwire.tap.views import Closed, Opened, Source
from longwire.transport.relay import PortServer
from longwire.transport.splice import splice
from longwire.transport.stream import Stream
from longwire.transport.tls import explain
from longwire.wire.trace import Event, Trace, Undecoded

__all__ = ["Note", "Tap"]

_log = logging.getLogger("longwire.tap")

_MOST_CLIENTS = 64
"""At a time, with a thread each; a server of ours has as many places."""

_STALL_S = 1800.0
"""How long an end may take nothing in: as long as our client waits for an answer."""

Note = Callable[[Source, Event | Opened | Closed], None]
"""Told of everything that passes, by several threads; must return at once. Times are
of `time.perf_counter`."""


class Tap(PortServer):
    """Listens on a local address, and carries each client to a server of its own
    choosing; `run` serves until `stop`. Close it."""

    def __init__(
        self, host: str, port: int, connect: Callable[[], Stream], note: Note
    ) -> None:
        """Bind `host:port` (port 0: any free one); `connect` opens a connection to
        the server, and raises what `OSError` it likes.

        Raises:
            OSError: the address cannot be bound.
        """
        self._connect = connect
        self._note = note
        self._numbers = itertools.count(1)
        super().__init__(host, port, self._watch, _MOST_CLIENTS)

    def _watch(self, client: Stream, peer: str) -> None:
        try:
            server = self._connect()
        except OSError as error:
            _log.warning("%s: the server cannot be reached: %s", peer, explain(error))
            return
        self.own(server)
        client.set_deadline(_STALL_S)
        server.set_deadline(_STALL_S)
        source = Source(next(self._numbers), peer)
        self._note(source, Opened(time.perf_counter()))
        _log.info("%s: connection %d", peer, source.number)
        _Passing(source, client, server, self._note).carry()


class _Passing:
    """One connection, and what has been understood of it."""

    def __init__(
        self, source: Source, client: Stream, server: Stream, note: Note
    ) -> None:
        self._source = source
        self._client, self._server = client, server
        self._note = note
        self._trace = Trace()

    def carry(self) -> None:
        """Pass bytes until one end leaves."""
        try:
            splice(self._client, self._server, self._look)
        except EOFError:
            reason = "one end has left"
        except OSError as error:
            reason = explain(error)
        _log.info("%s: %s", self._source.peer, reason)
        owed = tuple(self._trace.owed)
        self._note(self._source, Closed(time.perf_counter(), reason, owed))

    def _look(self, origin: Stream, data: memoryview) -> None:
        """Bytes have passed."""
        now_s = time.perf_counter()
        put = self._trace.from_server
        if origin is self._client:
            put = self._trace.from_client
        for event in put(now_s, data):
            self._note(self._source, event)
            if isinstance(event, Undecoded):
                _log.warning(
                    "%s: passed on undecoded from here: %s",
                    self._source.peer,
                    event.reason,
                )
