"""A local port without TLS or token, for llama.cpp programs, to a server with both.

For each client the tunnel greets the server and proves that it knows the token. The
server's HELLO answer is the client's; what follows passes as it is, both ways.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading

from longwire.client.connection import Deadlines, reason_of
from longwire.client.credentials import Credentials
from longwire.client.greeting import greet
from longwire.errors import BadRequest, LongwireError
from longwire.transport.endpoint import Endpoint
from longwire.transport.splice import splice
from longwire.transport.stream import Stream, tune
from longwire.wire.constants import CAPS_SIZE, Command
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER

__all__ = ["Tunnel"]

_log = logging.getLogger("longwire.tunnel")

_MOST_CLIENTS = 64
"""At a time, with a thread each; a server of ours has as many places."""

_STALL_S = 60.0
"""How long a client may take nothing in. A server may compute for longer."""


class Tunnel:
    """Listens on a local address; `run` serves until `stop`. Close it."""

    def __init__(
        self,
        host: str,
        port: int,
        remote: Endpoint,
        credentials: Credentials,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Bind `host:port` (port 0: any free one).

        Raises:
            OSError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self._remote = remote
        self._credentials = credentials
        self._deadlines = deadlines or Deadlines()
        self._clients: dict[threading.Thread, list[Stream]] = {}
        """Those that have left stay until `_reap`."""
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._wake_in, self._wake_out = socket.socketpair()

    @property
    def address(self) -> Endpoint:
        """Where clients connect to."""
        return Endpoint(*self._listener.getsockname()[:2])

    def try_remote(self) -> str:
        """Greet the server once; returns its protocol version.

        Raises:
            RemoteError: it cannot be reached, or one end does not accept the other.
            VersionMismatch: it speaks another protocol.
        """
        connection, _ = greet(self._remote, self._deadlines, self._credentials)
        connection.close()
        return connection.dialect.version

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
        if len(self._clients) >= _MOST_CLIENTS:
            _log.warning("%s: closed, there are %d clients", peer, _MOST_CLIENTS)
            sock.close()
            return
        tune(sock)
        thread = threading.Thread(target=self._serve, args=(Stream(sock), peer))
        with self._lock:
            self._clients[thread] = []
        thread.start()

    def _serve(self, client: Stream, peer: str) -> None:
        try:
            self._carry(client)
        except EOFError:
            _log.info("%s: one end has left", peer)
        except OSError as error:
            _log.info("%s: %s", peer, reason_of(error))
        except LongwireError as error:
            _log.warning("%s: %s", peer, error)
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

    def _carry(self, client: Stream) -> None:
        self._own(client)
        client.set_deadline(self._deadlines.connect_s)
        head = REQUEST_HEADER.unpack(client.take(REQUEST_HEADER.size))
        if head != (Command.HELLO, CAPS_SIZE):
            raise BadRequest("HELLO", "the client does not begin with it")
        client.skip(CAPS_SIZE)
        connection, hello = greet(self._remote, self._deadlines, self._credentials)
        server = connection.detach()
        self._own(server)
        answer = hello.encode()
        client.send([ANSWER_HEADER.pack(len(answer)), answer])
        client.set_deadline(_STALL_S)
        server.set_deadline(self._deadlines.answer_s)
        splice(client, server)

    def _own(self, stream: Stream) -> None:
        """Have a stream closed with its client's thread, or by a stop."""
        with self._lock:
            self._clients[threading.current_thread()].append(stream)
        if self._stopping.is_set():
            stream.hang_up()
