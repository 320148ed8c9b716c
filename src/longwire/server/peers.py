"""The peer port: streams between this server's sessions and other servers.

PROTOCOL.md, "Links" and "Collectives". Sessions may neither listen nor connect; they
ask, and get descriptors. Not a byte is taken here of what comes to the port: its
first 16 are looked at, and say which session it is for.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longwire.server.access import AllowList
from longwire.server.dialer import NO_ANSWER, Call, Dialer
from longwire.server.metrics import Metrics
from longwire.server.pool import Session
from longwire.transport.endpoint import Endpoint
from longwire.wire.links import MAX_PATIENCE_MS, MAX_TICKETS, TICKET_ID_SIZE

__all__ = ["Peers", "listen_for_peers"]

_log = logging.getLogger("longwire.serve")

_TICKET_S = MAX_PATIENCE_MS / 1000
"""From its making until somebody comes with it."""

_SHOW_S = 5.0
"""For a new stream to show what it is for."""

_STREAMS = 64
"""New ones, and such as nobody has asked for yet; the oldest goes, of those without a
ticket first."""

_UNASKED_S = 10.0
"""How long a rank 1 of protocol 8 that comes first waits for its rank 0."""

_PAIR_ID = bytes(TICKET_ID_SIZE)
"""What a rank 1 of protocol 8 begins with: capabilities, of which it has none."""

_RETRY_S = 1.0
"""Pause after the system refused a descriptor."""


def listen_for_peers(host: str, port: int, spare: bool = False) -> socket.socket | None:
    """The socket of a peer port; None, and a warning, where it cannot be bound.

    `spare`: any free port will do, if this is not one.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=64)
    except (OSError, OverflowError) as error:
        # A port over 65535 is an OverflowError.
        if spare:
            return listen_for_peers(host, 0)
        _log.warning("no peer port %d, other servers cannot connect: %s", port, error)
        return None
    listener.setblocking(False)
    return listener


@dataclass(eq=False, slots=True)
class _Stream:
    """A connection to the peer port, and what is known of it."""

    socket: socket.socket
    peer: str
    deadline: float
    shown: bytes = b""
    """The id of its ticket, once it has shown that."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """What lets one stream through to a session."""

    session: Session
    deadline: float
    asked: bool = False
    """The session waits for it."""


class Peers:
    """The port, the tickets, and who waits for what. Not locked."""

    def __init__(
        self,
        listener: socket.socket | None,
        allow: AllowList,
        metrics: Metrics,
        selector: selectors.BaseSelector,
        wake: Callable[[], None],
    ) -> None:
        """`wake` has the loop of the selector call `tend`; any thread may call it."""
        self.port = None if listener is None else int(listener.getsockname()[1])
        self._listener = listener
        self._allow = allow
        self._metrics = metrics
        self._selector = selector
        self._streams: dict[socket.socket, _Stream] = {}
        """Those that still have to show something, and then to be asked for. In
        order of their coming."""
        self._tickets: dict[bytes, _Ticket] = {}
        self._pairs: dict[Session, float] = {}
        """Sessions that wait for a rank 1, until when; in order."""
        self._calls: dict[Call, Session] = {}
        """What sessions wait for. One that took too long may still be under way."""
        self._dialer = Dialer(allow, wake)
        self._resume_at: float | None = None
        if listener is not None:
            selector.register(listener, selectors.EVENT_READ)

    def __contains__(self, sock: object) -> bool:
        return sock in self._streams or (sock is self._listener and sock is not None)

    @property
    def streams(self) -> list[_Stream]:
        """Those that no session has yet."""
        return list(self._streams.values())

    @property
    def deadline(self) -> float | None:
        """When somebody's time is up."""
        due = [stream.deadline for stream in self._streams.values()]
        due += [ticket.deadline for ticket in self._tickets.values()]
        due += self._pairs.values()
        due += [call.deadline for call in self._calls]
        if self._resume_at is not None:
            due.append(self._resume_at)
        return min(due, default=None)

    def spoke(self, sock: socket.socket) -> None:
        """Something came to the port, or to a stream."""
        if sock is self._listener:
            self._accept()
        else:
            self._look(self._streams[sock])

    def tend(self) -> None:
        """Hand over connections that were made, and end what has taken too long."""
        now = time.monotonic()
        for call in self._dialer.done():
            self._deliver(call)
        for stream in self.streams:
            if stream.deadline <= now:
                words = "was not asked for" if stream.shown else "showed no ticket"
                self._refuse(stream, words)
        for ticket_id, ticket in list(self._tickets.items()):
            if ticket.deadline <= now:
                del self._tickets[ticket_id]
                if ticket.asked:
                    ticket.session.answer(refusal="nobody came in time")
        for session, deadline in list(self._pairs.items()):
            if deadline <= now:
                del self._pairs[session]
                session.answer(refusal="no rank 1 came in time")
        for call, session in list(self._calls.items()):
            # It may wait for a name, or for its turn, which ends with no deadline.
            if call.deadline <= now:
                self._cancel(call)
                session.answer(refusal=NO_ANSWER)
        if self._resume_at is not None and self._resume_at <= now:
            self._resume_at = None
            if self._listener is not None:
                self._selector.register(self._listener, selectors.EVENT_READ)

    # What sessions ask.

    def ask(self, session: Session, event: str, facts: dict[str, Any]) -> bool:
        """Take a session's question; False if it is none of these. A session waits
        for the answer before it asks again.

        Raises:
            ArithmeticError, KeyError, TypeError, ValueError: it makes no sense.
        """
        if event == "listen":
            self._give_ticket(session)
        elif event == "accept":
            patience_s = _patience(facts)
            self._await_ticket(session, bytes.fromhex(facts["id"]), patience_s)
        elif event == "pair":
            self._pairs[session] = time.monotonic() + _patience(facts)
            self._match_pairs()
        elif event == "dial":
            self._dial(session, facts)
        else:
            return False
        return True

    def forget(self, session: Session) -> None:
        """Its client has left, or it is gone."""
        self._pairs.pop(session, None)
        for call in [c for c, s in self._calls.items() if s is session]:
            self._cancel(call)
        for key in [k for k, t in self._tickets.items() if t.session is session]:
            del self._tickets[key]

    def close(self) -> None:
        """Close the port and all that came through it; idempotent."""
        if self._listener is not None:
            if self._resume_at is None:
                self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        for stream in self.streams:
            self._take(stream).close()
        self._dialer.close()

    def _give_ticket(self, session: Session) -> None:
        own = sum(1 for t in self._tickets.values() if t.session is session)
        if self._listener is None:
            session.answer(refusal="this server has no peer port")
        elif own >= MAX_TICKETS:
            session.answer(refusal=f"it has {MAX_TICKETS} tickets already")
        else:
            ticket_id = secrets.token_bytes(TICKET_ID_SIZE)
            deadline = time.monotonic() + _TICKET_S
            self._tickets[ticket_id] = _Ticket(session, deadline)
            session.answer(refusal=None, port=self.port, id=ticket_id.hex())

    def _await_ticket(
        self, session: Session, ticket_id: bytes, patience_s: float
    ) -> None:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.session is not session or ticket.asked:
            session.answer(refusal="the ticket has expired")
            return
        ticket.asked = True
        ticket.deadline = time.monotonic() + patience_s
        for stream in self._streams.values():
            if stream.shown == ticket_id:
                self._use(ticket_id, stream)
                return

    def _dial(self, session: Session, facts: dict[str, Any]) -> None:
        host, port = str(facts["host"]), int(facts["port"])
        deadline = time.monotonic() + _patience(facts)
        call = Call(host, port, deadline, bool(facts["again"]))
        if not host or not 0 < port < 1 << 16:
            session.answer(refusal="it is no address")
            return
        if session in self._calls.values():
            raise ValueError("it waits for another call")
        self._calls[call] = session
        self._dialer.dial(call)

    def _cancel(self, call: Call) -> None:
        del self._calls[call]
        call.cancelled = True

    def _deliver(self, call: Call) -> None:
        session = self._calls.pop(call, None)
        if session is not None and call.sock is None:
            session.answer(refusal=call.reason)
        elif session is not None and call.sock is not None:
            self._metrics.linked()
            session.hand_over(call.sock, call.where)
        if call.sock is not None:
            call.sock.close()

    # What comes to the port.

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Without a pause, a lack of descriptors would keep the loop spinning.
            _log.warning("accept of a peer: %s", error)
            self._selector.unregister(self._listener)
            self._resume_at = time.monotonic() + _RETRY_S
            return
        stream = _Stream(sock, str(Endpoint(*address[:2])), time.monotonic() + _SHOW_S)
        if not self._allow.admits(address[0]):
            sock.close()
            self._count_refused(stream, "is not in --allow")
            return
        if len(self._streams) >= _STREAMS:
            oldest = self._oldest()
            self._refuse(oldest, "was one of too many")
        # Readable when enough is here to look at, or the end.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TICKET_ID_SIZE)
        sock.setblocking(False)
        self._streams[sock] = stream
        self._selector.register(sock, selectors.EVENT_READ)

    def _oldest(self) -> _Stream:
        strangers = [s for s in self.streams if s.shown not in self._tickets]
        return (strangers or self.streams)[0]

    def _look(self, stream: _Stream) -> None:
        try:
            shown = stream.socket.recv(TICKET_ID_SIZE, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            shown = b""
        if len(shown) < TICKET_ID_SIZE:
            self._refuse(stream, "left without a ticket")
            return
        stream.shown = shown
        # It would be readable all the time.
        self._selector.unregister(stream.socket)
        if shown == _PAIR_ID:
            stream.deadline = time.monotonic() + _UNASKED_S
            self._match_pairs()
            return
        ticket = self._tickets.get(shown)
        if ticket is None:
            self._refuse(stream, "has no ticket of this server")
        elif any(s.shown == shown for s in self._streams.values() if s is not stream):
            self._refuse(stream, "has a ticket that was used before")
        elif ticket.asked:
            self._use(shown, stream)
        else:
            stream.deadline = ticket.deadline

    def _match_pairs(self) -> None:
        waiting = [s for s in self._streams.values() if s.shown == _PAIR_ID]
        for stream in waiting:
            if not self._pairs:
                return
            session = next(iter(self._pairs))
            del self._pairs[session]
            self._hand_over(stream, session)

    def _use(self, ticket_id: bytes, stream: _Stream) -> None:
        self._hand_over(stream, self._tickets.pop(ticket_id).session)

    def _hand_over(self, stream: _Stream, session: Session) -> None:
        with self._take(stream) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._metrics.linked()
            session.hand_over(sock, stream.peer)

    def _take(self, stream: _Stream) -> socket.socket:
        del self._streams[stream.socket]
        if not stream.shown:
            self._selector.unregister(stream.socket)
        return stream.socket

    def _refuse(self, stream: _Stream, words: str) -> None:
        self._take(stream).close()
        self._count_refused(stream, words)

    def _count_refused(self, stream: _Stream, words: str) -> None:
        self._metrics.refused("peer")
        fields = {"peer": stream.peer, "refused": "peer"}
        _log.warning("peer %s %s, closed", stream.peer, words, extra=fields)


def _patience(facts: dict[str, Any]) -> float:
    return min(max(0.0, float(facts["patience_s"])), _TICKET_S)
