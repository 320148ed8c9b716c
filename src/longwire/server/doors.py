"""How a session comes to its links: tickets, handshakes, numbers.

PROTOCOL.md, "Links". A session may neither listen nor connect: its supervisor does,
and hands the streams over.
"""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from longwire.errors import BadRequest, RemoteFailure
from longwire.server.handshake import admit, introduce
from longwire.server.links import Link
from longwire.transport.duplex import Duplex
from longwire.transport.endpoint import Endpoint
from longwire.transport.tls import explain
from longwire.wire.dialects import TICKET_SIZE
from longwire.wire.links import (
    MAX_PATIENCE_MS,
    MAX_TICKETS,
    TICKET_ID_SIZE,
    LinkAccept,
    LinkConnect,
    Listening,
    Ticket,
)

__all__ = ["MAX_LINKS", "Doors", "LinkTable"]

MAX_LINKS = 64
"""Of one session; each may hold some megabytes of the kernel's."""

_SECRET_SIZE = TICKET_SIZE - TICKET_ID_SIZE


class Doors(Protocol):
    """Who listens and connects for a session. What they raise is an `OSError`."""

    def listen(self) -> tuple[int, bytes]:
        """Port and id of a new ticket."""

    def accept(
        self, ticket_id: bytes, patience_s: float, abandoned: Callable[[], bool]
    ) -> tuple[socket.socket, str]:
        """The stream that shows this id, and its peer."""

    def pair(
        self, patience_s: float, abandoned: Callable[[], bool]
    ) -> tuple[socket.socket, str]:
        """The stream of a rank 1 of protocol 8, and its peer."""

    def dial(
        self,
        host: str,
        port: int,
        patience_s: float,
        abandoned: Callable[[], bool],
        again: bool = False,
    ) -> tuple[socket.socket, str]:
        """A stream to there, and its peer."""


class LinkTable:
    """All links of one session. Not locked, but for `offer` and `abandon`."""

    def __init__(
        self,
        doors: Doors | None = None,
        peer_port: int | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`peer_port` is where other servers connect, and `tls` what they are shown
        there."""
        self.doors = doors
        self.peer_port = peer_port
        self.secured = tls is not None
        self._tls = tls
        self._tickets: dict[bytes, Ticket] = {}
        """By id; oldest first."""
        self._links: dict[int, Link] = {}
        self._last = 0
        self._left = False

    def abandon(self) -> None:
        """The client left: nobody waits for anything any more."""
        self._left = True

    def abandoned(self) -> bool:
        """Whether there is no use in waiting."""
        return self._left

    def listen(self) -> Listening:
        """Make a ticket.

        Raises:
            RemoteFailure: other servers cannot connect to this one.
        """
        name = "LX_LISTEN"
        if self.doors is None or self.peer_port is None:
            raise RemoteFailure("this server", name, "it has no peer port")
        try:
            port, ticket_id = self.doors.listen()
        except OSError as error:
            raise RemoteFailure("this server", name, str(error)) from error
        ticket = Ticket(ticket_id, secrets.token_bytes(_SECRET_SIZE))
        if len(self._tickets) >= MAX_TICKETS:
            # The supervisor counts those that live: this one does no more.
            self._tickets.pop(next(iter(self._tickets)))
        self._tickets[ticket_id] = ticket
        return Listening(port, ticket)

    def accept(self, request: LinkAccept) -> Link:
        """Wait for who was given a ticket of this session.

        Raises:
            BadRequest: no such ticket, or a limit.
            RemoteFailure: nobody came, or somebody else.
        """
        name = "LX_ACCEPT"
        doors, patience_s = self._ready(name, request.patience_ms)
        ticket = self._tickets.pop(request.ticket.id, None)
        if ticket is None or ticket != request.ticket:
            raise BadRequest(name, "not a ticket of this session, or used before")
        try:
            sock, peer = doors.accept(ticket.id, patience_s, self.abandoned)
        except OSError as error:
            raise RemoteFailure("the other server", name, str(error)) from error
        try:
            duplex = admit(sock, ticket, self._tls)
        except (EOFError, OSError) as error:
            raise RemoteFailure(peer, name, explain(error)) from error
        return self._add(duplex, peer)

    def connect(self, request: LinkConnect) -> Link:
        """Connect to another server with a ticket of that.

        Raises:
            BadRequest: a limit.
            RemoteFailure: it is not there, or is another one.
        """
        name = "LX_CONNECT"
        doors, patience_s = self._ready(name, request.patience_ms)
        where = str(Endpoint(request.host, request.port))
        try:
            sock, _ = doors.dial(request.host, request.port, patience_s, self.abandoned)
            duplex = introduce(sock, request.ticket, request.certificate)
        except (EOFError, OSError) as error:
            raise RemoteFailure(where, name, explain(error)) from error
        return self._add(duplex, where)

    def _ready(self, command: str, patience_ms: int) -> tuple[Doors, float]:
        if patience_ms > MAX_PATIENCE_MS:
            raise BadRequest(
                command, f"patience of {patience_ms} ms, not up to {MAX_PATIENCE_MS}"
            )
        if len(self._links) >= MAX_LINKS:
            raise BadRequest(command, f"there are {MAX_LINKS} links already")
        if self.doors is None:
            raise RemoteFailure("this server", command, "it makes no links")
        return self.doors, patience_ms / 1000

    def _add(self, duplex: Duplex, peer: str) -> Link:
        self._last += 1
        link = Link(self._last, duplex, peer)
        # A new dictionary: another thread may be going through the old one.
        self._links = {**self._links, link.number: link}
        return link

    def of(self, number: int, command: str) -> Link:
        """The link of that number, which no communicator has.

        Raises:
            BadRequest: there is none.
            RemoteFailure: it is broken.
        """
        link = self._free(number, command)
        if link.failure is not None:
            raise RemoteFailure(link.peer, command, f"the link broke: {link.failure}")
        return link

    def release(self, number: int, command: str) -> None:
        """Close a link that no communicator has.

        Raises:
            BadRequest: there is none.
        """
        self.drop(self._free(number, command), "the client closed it")

    def drop(self, link: Link, reason: str) -> None:
        """Close a link, whoever has it."""
        self._links = {n: x for n, x in self._links.items() if x is not link}
        link.close(reason)

    def _free(self, number: int, command: str) -> Link:
        link = self._links.get(number)
        if link is None:
            raise BadRequest(command, f"there is no link {number}")
        if link.owner is not None:
            reason = f"link {number} belongs to communicator {link.owner}"
            raise BadRequest(command, reason)
        return link

    def offer(self) -> None:
        """Give a sign of life on all links; any thread may."""
        for link in self._links.values():
            link.offer()

    def fail(self, reason: str) -> None:
        """Break all links: their peers would wait for what is not going to come."""
        for link in self._links.values():
            if link.failure is None:
                link.close(reason)

    def close(self) -> None:
        """Close all links; idempotent."""
        self._tickets.clear()
        for link in list(self._links.values()):
            self.drop(link, "the session ended")
