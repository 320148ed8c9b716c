"""Links between servers: what clients say of them, and what travels on one.

PROTOCOL.md, "Links". A ticket lets one server connect to another one's peer port;
it was given to a client, who brings it there.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.constants import U64_MAX
from longwire.wire.dialects import MAX_CERTIFICATE, MAX_HOST, TICKET_SIZE
from longwire.wire.messages import Bytes
from longwire.wire.tensors import TENSOR_SIZE

__all__ = [
    "CONNECT_HEAD",
    "FRAME_HEADER",
    "LINK_PROOF_SIZE",
    "MAX_PATIENCE_MS",
    "MAX_TICKETS",
    "SIGN_OF_LIFE",
    "TICKET_ID_SIZE",
    "LinkAccept",
    "LinkConnect",
    "LinkPart",
    "Listening",
    "Ticket",
]

FRAME_HEADER = struct.Struct("<Q")
"""How many bytes follow."""

SIGN_OF_LIFE = FRAME_HEADER.pack(U64_MAX)
"""In place of a frame: its server is at work, the next frame is still to come."""

TICKET_ID_SIZE = 16
"""What a connection shows of its ticket, in plain."""

LINK_PROOF_SIZE = 32
"""HMAC-SHA256."""

MAX_PATIENCE_MS = 60_000
"""As long as a ticket lives."""

MAX_TICKETS = 64
"""Of one session at a time."""

_LISTENING = struct.Struct(f"<H{TICKET_SIZE}s")
_CONNECT = struct.Struct(f"<{TICKET_SIZE}sIHHH")
_ACCEPT = struct.Struct(f"<{TICKET_SIZE}sI")
_PART = struct.Struct(f"<I{TENSOR_SIZE}sQQ")

CONNECT_HEAD = _CONNECT.size


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to one link with the session that gave it."""

    id: bytes
    secret: bytes = field(repr=False)

    def encode(self) -> bytes:
        return self.id + self.secret

    @classmethod
    def decode(cls, data: Bytes) -> Ticket:
        return cls(bytes(data[:TICKET_ID_SIZE]), bytes(data[TICKET_ID_SIZE:]))

    def connector_proof(self) -> bytes:
        """What the end that connects has to say."""
        return hmac.digest(self.secret, b"longwire connects", "sha256")

    def acceptor_proof(self) -> bytes:
        """What the end that listens answers to that."""
        return hmac.digest(self.secret, b"longwire accepts", "sha256")


class Listening(NamedTuple):
    """Answer to LX_LISTEN: where another server may connect, with what."""

    port: int
    ticket: Ticket

    def encode(self) -> bytes:
        return _LISTENING.pack(self.port, self.ticket.encode())

    @classmethod
    def decode(cls, body: Bytes) -> Listening:
        port, ticket = _LISTENING.unpack(body)
        return cls(port, Ticket.decode(ticket))


class LinkConnect(NamedTuple):
    """Connect to another server, who gave this ticket; the answer is a link."""

    ticket: Ticket
    patience_ms: int
    port: int
    host: str
    """Of the other server's peer port."""
    certificate: bytes = b""
    """What that server's certificate has to be, in DER; none: it has no TLS."""

    def encode(self) -> bytes:
        host = self.host.encode()
        head = _CONNECT.pack(
            self.ticket.encode(),
            self.patience_ms,
            self.port,
            len(host),
            len(self.certificate),
        )
        return head + host + self.certificate

    @classmethod
    def decode(cls, body: Bytes) -> LinkConnect:
        """Raises: BadFrame, LimitExceeded: not what the lengths say."""
        name = "LX_CONNECT"
        ticket, patience_ms, port, host, certificate = _CONNECT.unpack_from(body)
        if host > MAX_HOST:
            raise LimitExceeded(name, "bytes of host", host, MAX_HOST)
        if certificate > MAX_CERTIFICATE:
            what = "bytes of certificate"
            raise LimitExceeded(name, what, certificate, MAX_CERTIFICATE)
        if len(body) != CONNECT_HEAD + host + certificate:
            expected = f"{CONNECT_HEAD + host + certificate}"
            raise BadFrame(name, len(body), expected)
        at = CONNECT_HEAD + host
        text = bytes(body[CONNECT_HEAD:at]).decode("utf-8", "replace")
        ticket = Ticket.decode(ticket)
        return cls(ticket, patience_ms, port, text, bytes(body[at:]))


class LinkAccept(NamedTuple):
    """Wait for who was given this session's ticket; the answer is a link."""

    ticket: Ticket
    patience_ms: int

    def encode(self) -> bytes:
        return _ACCEPT.pack(self.ticket.encode(), self.patience_ms)

    @classmethod
    def decode(cls, body: Bytes) -> LinkAccept:
        ticket, patience_ms = _ACCEPT.unpack(body)
        return cls(Ticket.decode(ticket), patience_ms)


class LinkPart(NamedTuple):
    """Part of a tensor that is to leave on a link (LX_SEND), or to come from it
    (LX_RECEIVE)."""

    link: int
    tensor: bytes
    offset: int
    size: int
    """Bytes."""

    def encode(self) -> bytes:
        return _PART.pack(*self)

    @classmethod
    def decode(cls, body: Bytes) -> LinkPart:
        return cls(*_PART.unpack(body))
