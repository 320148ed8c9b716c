"""A local port without TLS or token, for llama.cpp programs, to a server with both.

For each client the tunnel greets the server and proves that it knows the token. The
server's HELLO answer is the client's; what follows passes as it is, both ways.
"""

from __future__ import annotations

import logging

from longwire.client.credentials import Credentials
from longwire.client.greeting import greet
from longwire.client.health import Deadlines, reason_of
from longwire.errors import (
    AuthenticationFailed,
    BadRequest,
    ConnectionLost,
    LongwireError,
)
from longwire.transport.endpoint import Endpoint
from longwire.transport.relay import PortServer
from longwire.transport.splice import splice
from longwire.transport.stream import Stream
from longwire.wire.constants import CAPS_SIZE, Command
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER

__all__ = ["Tunnel"]

_log = logging.getLogger("longwire.tunnel")

_MOST_CLIENTS = 64
"""At a time, with a thread each; a server of ours has as many places."""

_STALL_S = 60.0
"""How long a client may take nothing in. A server may compute for longer."""


class Tunnel(PortServer):
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
        self._remote = remote
        self._credentials = credentials
        self._deadlines = deadlines or Deadlines()
        super().__init__(host, port, self._tunnel, _MOST_CLIENTS)

    def try_remote(self) -> str:
        """Greet the server once; returns its protocol version.

        Raises:
            RemoteError: it cannot be reached, or one end does not accept the other.
            VersionMismatch: it speaks another protocol.
        """
        connection, _ = greet(self._remote, self._deadlines, self._credentials)
        try:
            # HELLO is free, also where a token is needed.
            connection.ask(Command.DEVICE_COUNT, b"")
        except ConnectionLost as error:
            if self._credentials.token is not None:
                raise
            reason = "the server closed the connection (does it want --token-file?)"
            lost = AuthenticationFailed(error.endpoint, "DEVICE_COUNT", reason)
            raise lost from error
        finally:
            connection.close()
        return connection.dialect.version

    def _tunnel(self, client: Stream, peer: str) -> None:
        try:
            self._carry(client)
        except EOFError:
            _log.info("%s: one end has left", peer)
        except OSError as error:
            _log.info("%s: %s", peer, reason_of(error))
        except LongwireError as error:
            _log.warning("%s: %s", peer, error)

    def _carry(self, client: Stream) -> None:
        client.set_deadline(self._deadlines.connect_s)
        head = REQUEST_HEADER.unpack(client.take(REQUEST_HEADER.size))
        if head != (Command.HELLO, CAPS_SIZE):
            raise BadRequest("HELLO", "the client does not begin with it")
        client.skip(CAPS_SIZE)
        connection, hello = greet(self._remote, self._deadlines, self._credentials)
        server = connection.detach()
        self.own(server)
        answer = hello.encode()
        client.send([ANSWER_HEADER.pack(len(answer)), answer])
        client.set_deadline(_STALL_S)
        server.set_deadline(self._deadlines.answer_s)
        splice(client, server)
