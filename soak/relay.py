"""A way to a worker that can be cut with a reset, and led to another worker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from types import TracebackType

from longwire.transport.endpoint import Endpoint

__all__ = ["SIDES", "Relay"]

SIDES = ("host", "worker", "both")
"""Who sees a reset; the other sees the connection end."""

_PIECE = 1 << 18
_LINGER_NOT = struct.pack("ii", 1, 0)
_STOP_S = 10.0

Pair = tuple[asyncio.StreamWriter, asyncio.StreamWriter]
"""The ways to the host and to the worker."""


class Relay:
    """Passes bytes on between whoever connects to `endpoint`, and `target`.

    A thread of its own does that, until the end of a `with`.
    """

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        """For the connections to come."""
        self._pairs: set[Pair] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = Endpoint(*self._listener.getsockname())
        self._stopped = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def reset(self, side: str) -> int:
        """Cut all connections; returns how many there were."""

        async def cut() -> int:
            pairs = list(self._pairs)
            for host, worker in pairs:
                _cut([host], hard=side != "worker")
                _cut([worker], hard=side != "host")
            return len(pairs)

        return asyncio.run_coroutine_threadsafe(cut(), self._loop).result(_STOP_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._relay, sock=self._listener)
        await self._stopped.wait()
        server.close()
        for pair in list(self._pairs):
            _cut(pair, hard=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    async def _relay(
        self, reader: asyncio.StreamReader, host: asyncio.StreamWriter
    ) -> None:
        try:
            answers, worker = await asyncio.open_connection(
                self.target.host, self.target.port
            )
        except OSError:
            _cut([host], hard=True)
            return
        pair = (host, worker)
        self._pairs.add(pair)
        try:
            await asyncio.gather(_pump(reader, worker), _pump(answers, host))
            _cut(pair, hard=False)
        except OSError:
            # One end is gone: so is the other, and in the same way.
            _cut(pair, hard=True)
        finally:
            self._pairs.discard(pair)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()
    if not sink.is_closing():
        sink.write_eof()


def _cut(ways: Iterable[asyncio.StreamWriter], hard: bool) -> None:
    """Close at once, what is still to be sent included; `hard` is with a reset."""
    for way in ways:
        sock = way.get_extra_info("socket")
        # One that has been closed already has no options.
        with contextlib.suppress(OSError):
            if hard:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        way.transport.abort()
