"""The first words on a stream between two servers, each under a deadline."""

from __future__ import annotations

import hmac
import socket
import ssl
import time
from collections.abc import Callable

from longwire.transport.duplex import Duplex, TlsDuplex
from longwire.transport.stream import tune
from longwire.transport.tls import pinning_context
from longwire.wire.constants import CAPS_SIZE
from longwire.wire.links import LINK_PROOF_SIZE, TICKET_ID_SIZE, Ticket

__all__ = ["admit", "introduce", "pair_up"]

_HANDSHAKE_S = 5.0
"""For a peer that is there to say something; for all of it, twice as long."""


def admit(sock: socket.socket, ticket: Ticket, tls: ssl.SSLContext | None) -> Duplex:
    """Have a stream at the end that listens become a link; it is closed otherwise.

    Raises:
        EOFError, OSError: the other end has not got the ticket, or is gone.
    """
    with _Handshake(sock) as shake:
        # The supervisor has only looked at it.
        shake.receive(TICKET_ID_SIZE)
        if tls is not None:
            shake.secure(lambda s: tls.wrap_socket(s, server_side=True))
        _expect(shake, ticket.connector_proof())
        shake.sock.sendall(ticket.acceptor_proof())
        return shake.done()


def introduce(sock: socket.socket, ticket: Ticket, certificate: bytes) -> Duplex:
    """The same at the end that connects.

    Raises:
        EOFError, OSError: as `admit`, or it shows another certificate.
    """
    with _Handshake(sock) as shake:
        shake.sock.sendall(ticket.id)
        if certificate:
            shown = shake.secure(pinning_context().wrap_socket)
            if shown.getpeercert(binary_form=True) != certificate:
                raise ConnectionError("its certificate is not the expected one")
        shake.sock.sendall(ticket.connector_proof())
        _expect(shake, ticket.acceptor_proof())
        return shake.done()


def pair_up(sock: socket.socket, rank: int) -> Duplex:
    """Exchange capabilities as two servers of protocol 8 do: none but plain TCP.

    Raises:
        EOFError, OSError: the other end is gone.
    """
    with _Handshake(sock) as shake:
        if rank == 1:
            shake.sock.sendall(bytes(CAPS_SIZE))
        shake.receive(CAPS_SIZE)
        if rank == 0:
            shake.sock.sendall(bytes(CAPS_SIZE))
        return shake.done()


def _expect(shake: _Handshake, proof: bytes) -> None:
    if not hmac.compare_digest(shake.receive(LINK_PROOF_SIZE), proof):
        raise ConnectionError("it does not know the secret of the ticket")


class _Handshake:
    """A socket with a deadline, that is closed if the body of a `with` fails."""

    def __init__(self, sock: socket.socket) -> None:
        tune(sock)
        self.sock = sock
        sock.settimeout(_HANDSHAKE_S)
        self._until = time.monotonic() + 2 * _HANDSHAKE_S

    def __enter__(self) -> _Handshake:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.sock.close()

    def secure(self, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> ssl.SSLSocket:
        self.sock = secured = wrap(self.sock)
        return secured

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            # Each byte has a deadline of its own, all of them have this one.
            if time.monotonic() > self._until:
                raise TimeoutError("it is too slow")
            part = self.sock.recv(size - len(data))
            if not part:
                raise EOFError("it closed the connection")
            data += part
        return data

    def done(self) -> Duplex:
        if isinstance(self.sock, ssl.SSLSocket):
            return TlsDuplex(self.sock)
        return Duplex(self.sock)
