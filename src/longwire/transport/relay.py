"""A local port with a thread for each client, and an end to all of them."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable

from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream, tune

__all__ = ["PortServer"]

_log = logging.getLogger("longwire.relay")


class PortServer:
    """Listens on a local address; `run` serves until `stop`. Close it.

    `serve` is called with each client and its name, in a thread of its own, and
    must raise nothing. Streams that it opens are for `own`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        serve: Callable[[Stream, str], None],
        most_clients: int,
    ) -> None:
        """Bind `host:port` (port 0: any free one).

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._handler = serve
        self._most = most_clients
        self._clients: dict[threading.Thread, list[Stream]] = {}
        """Those that have left stay until `_reap`."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()

    @property
    def address(self) -> Endpoint:
        """Where clients connect to."""
        return Endpoint(*self._listener.getsockname()[:2])

    def stop(self) -> None:
        """Ask `run` to return; safe from other threads and signal handlers."""
        self._stopping.set()
        # A full pipe wakes the loop just as well, and a closed one need not.
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def run(self) -> None:
        """Serve; returns after `stop`. `close` is still due."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            while not self._stopping.is_set():
                selector.select()
                if not self._stopping.is_set():
                    self._accept()

    def own(self, stream: Stream) -> None:
        """Have a stream closed with the calling client's thread, or by a stop."""
        with self._lock:
            self._clients[threading.current_thread()].append(stream)
        if self._stopping.is_set():
            stream.hang_up()

    def close(self) -> None:
        """Close the address and every client's connection; idempotent."""
        self._stopping.set()
        self._listener.close()
        with self._lock:
            for streams in self._clients.values():
                for stream in streams:
                    stream.hang_up()
        for thread in list(self._clients):
            thread.join()
        self._clients.clear()
        self._wake_in.close()
        self._wake_out.close()

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            _log.warning("accept: %s", error)
            # Without a pause, a lack of descriptors would keep the loop spinning.
            self._stopping.wait(1.0)
            return
        peer = str(Endpoint(*address[:2]))
        self._reap()
        if len(self._clients) >= self._most:
            _log.warning("%s: closed, there are %d clients", peer, self._most)
            sock.close()
            return
        tune(sock)
        thread = threading.Thread(target=self._serve, args=(Stream(sock), peer))
        with self._lock:
            self._clients[thread] = []
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("%s: closed: %s", peer, error)
            with self._lock:
                del self._clients[thread]
            sock.close()

    def _serve(self, client: Stream, peer: str) -> None:
        try:
            self.own(client)
            self._handler(client, peer)
        finally:
            with self._lock:
                streams = self._clients[threading.current_thread()]
                while streams:
                    streams.pop().close()

    def _reap(self) -> None:
        """Forget clients that have left."""
        with self._lock:
            for thread in list(self._clients):
                if not thread.is_alive():
                    del self._clients[thread]
