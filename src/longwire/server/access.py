"""Who may use this server: addresses, certificates, tokens."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from longwire.errors import UsageError
from longwire.transport.stream import Stream
from longwire.transport.tls import TlsFiles, TlsStream, server_context
from longwire.transport.tokens import read_tokens

__all__ = ["Access", "AllowList"]

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Access:
    """What a session asks of its clients."""

    tokens: Sequence[bytes] = field(default=(), repr=False)
    tls: ssl.SSLContext | None = None
    links: ssl.SSLContext | None = None
    """The same certificate for other servers, who show a ticket instead of theirs."""

    @classmethod
    def load(cls, token_file: str | None, tls: TlsFiles | None) -> Access:
        """Read the files.

        Raises:
            UsageError: one is missing, or not what it should be.
        """
        return cls(
            () if token_file is None else tuple(read_tokens(token_file)),
            None if tls is None else server_context(tls),
            None if tls is None else server_context(replace(tls, ca=None)),
        )

    def stream(self, client: socket.socket) -> Stream:
        """A client's bytes; with TLS its handshake is part of the first read.

        Raises:
            OSError: the client has left.
        """
        if self.tls is None:
            return Stream(client)
        return TlsStream(client, self.tls, None)


class AllowList:
    """Networks whose addresses may connect; with none given, all may."""

    def __init__(self, networks: Sequence[str] = ()) -> None:
        """Read networks: 192.168.1.0/24, fd00::/8, or a single address.

        Raises:
            UsageError: one of them is none.
        """
        try:
            self._networks = [ipaddress.ip_network(n) for n in networks]
        except ValueError as error:
            raise UsageError(f"--allow: {error}") from error

    def __bool__(self) -> bool:
        return bool(self._networks)

    def admits(self, address: str) -> bool:
        """Whether a peer of this address may connect."""
        if not self._networks:
            return True
        # A link-local IPv6 address comes with its interface behind a "%".
        ip = ipaddress.ip_address(address.partition("%")[0])
        # What a socket for both families calls an IPv4 peer.
        mapped = getattr(ip, "ipv4_mapped", None)
        return any((mapped or ip) in network for network in self._networks)
