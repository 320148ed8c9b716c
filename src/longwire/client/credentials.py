"""What a client shows to servers, and asks of them."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field

from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.transport.tls import TlsFiles, TlsStream, client_context
from longwire.transport.tokens import read_tokens, warn_if_exposed

__all__ = ["Credentials"]


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """A token, TLS, both or neither; the same for all servers of one `connect`."""

    token: bytes | None = None
    """Server and client prove to each other that they know it."""
    tls: ssl.SSLContext | None = field(default=None, compare=False)
    """Connect with TLS, and check servers' certificates and names."""
    files: TlsFiles | None = None
    """What `tls` was made of; tells two apart."""

    @classmethod
    def load(
        cls,
        *,
        token_file: str | None = None,
        tls: bool = False,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> Credentials:
        """Read them from files, as `longwire keygen` makes them.

        `tls` alone trusts the CAs of the system; any of the files implies it.

        Raises:
            UsageError: a file is missing, or not what it should be.
        """
        token = None
        if token_file is not None:
            token = read_tokens(token_file)[0]
            warn_if_exposed("token file", token_file)
        if tls_key is not None:
            warn_if_exposed("key file", tls_key)
        files = TlsFiles(tls_cert, tls_key, tls_ca)
        wanted = tls or files != TlsFiles()
        return cls(token, client_context(files), files) if wanted else cls(token)

    def stream(self, sock: socket.socket, endpoint: Endpoint) -> Stream:
        """A stream over a connected socket; with TLS, after its handshake.

        Raises:
            OSError: the handshake failed.
        """
        if self.tls is None:
            return Stream(sock)
        # Neither a zone nor a final dot is part of the name in a certificate.
        name = endpoint.host.partition("%")[0].rstrip(".")
        return TlsStream(sock, self.tls, name)
