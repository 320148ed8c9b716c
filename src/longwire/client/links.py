"""Links: byte streams from server to server, which this client only arranges.

One server listens, the other connects, and a ticket that this client carries from
one to the other makes sure that both are who they should be. What the two may ask of
a link is in `collectives.py` and `buffer.py`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import threading
from collections.abc import MutableMapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from longwire.client.connection import Connection
from longwire.errors import LongwireError, RemoteError, RemoteFailure
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import MAX_CERTIFICATE, MAX_HOST
from longwire.wire.links import LinkAccept, LinkConnect, Listening

__all__ = ["Link", "NoLink", "close_end", "has_peer_port", "open_link"]
__all__ += ["refusable", "route"]

_PATIENCE_MS = 5_000
"""For the two to find each other. Between machines of one network that takes
milliseconds; a firewall that drops packets costs this much, twice."""

_log = logging.getLogger("longwire.client")


class NoLink(LongwireError):
    """Two servers cannot reach each other; the sentence says why."""


class Link(NamedTuple):
    """One stream, by the number that each end knows it by."""

    first: int
    second: int


def has_peer_port(connection: Connection) -> bool:
    """Whether other servers can connect to this one."""
    server = connection.server
    return server is not None and server.has_peers


def open_link(first: Connection, second: Connection) -> Link:
    """Have two servers connect to each other.

    Raises:
        NoLink: they do not reach each other, whichever of the two listens.
        RemoteError: a connection failed.
    """
    try:
        return _open(first, second)
    except NoLink:
        # Copies need not try again, nor say it a second time.
        refusals = first.refusals, second.refusals
        with _lock:
            ways = _routes.setdefault(first, WeakKeyDictionary())
            ways.setdefault(second, _Route(None, refusals))
        raise


def _open(first: Connection, second: Connection) -> Link:
    for connection in (first, second):
        if connection.server is None:
            raise NoLink(f"{connection.endpoint} knows no links to other servers")
    ways = [(first, second), (second, first)]
    ways = [way for way in ways if has_peer_port(way[0])]
    if not ways:
        raise NoLink(f"neither {first.endpoint} nor {second.endpoint} has a peer port")
    # The name of a loopback address means something else elsewhere.
    ways.sort(key=lambda way: _is_loopback(way[0].endpoint.host))
    reasons: list[str] = []
    for listener, connector in ways:
        try:
            accepted, connected = _try(listener, connector)
        except NoLink as error:
            reasons.append(str(error))
            continue
        if listener is first:
            return Link(accepted, connected)
        return Link(connected, accepted)
    raise NoLink("; ".join(dict.fromkeys(reasons)))


def _try(listener: Connection, connector: Connection) -> tuple[int, int]:
    """One way; returns the link's numbers at the listener and at the connector."""
    host, certificate = listener.endpoint.host, listener.certificate or b""
    if len(host.encode()) > MAX_HOST:
        raise NoLink(f"the name of {listener.endpoint} is too long")
    if len(certificate) > MAX_CERTIFICATE:
        raise NoLink(f"the certificate of {listener.endpoint} is too large")
    # What was queued before has its own time, and its own failures.
    for connection in (listener, connector):
        connection.ask(Command.LX_PING, b"")
    with refusable(listener):
        listening = Listening.decode(listener.ask(Command.LX_LISTEN, b""))
    accept = LinkAccept(listening.ticket, _PATIENCE_MS).encode()
    connect = LinkConnect(
        listening.ticket, _PATIENCE_MS, listening.port, host, certificate
    ).encode()
    answers = [memoryview(bytearray(4)) for _ in range(2)]
    try:
        # Neither answers before the other is at work.
        listener.begin(Command.LX_ACCEPT, accept, answers[0])
        connector.begin(Command.LX_CONNECT, connect, answers[1])
        for connection in (connector, listener):
            with refusable(connection):
                connection.synchronize()
    except BaseException:
        for connection, answer in zip((listener, connector), answers, strict=True):
            _abandon(connection, answer)
        raise
    numbers = [int(m.U32.unpack(answer)[0]) for answer in answers]
    return numbers[0], numbers[1]


def _abandon(connection: Connection, answer: memoryview) -> None:
    """Have no end of a link left over, nor the answer that tells of it."""
    if not connection.healthy:
        return
    with contextlib.suppress(NoLink, RemoteError), refusable(connection):
        connection.synchronize()
    (number,) = m.U32.unpack(answer)
    # Who has a link that the other has not is to forget it.
    if number:
        close_end(connection, number)


_End = tuple[Connection, int]


class _Route(NamedTuple):
    """What is known of the way from one server to another."""

    link: Link | None
    """None: there is no way."""
    refusals: tuple[int, int]
    """Of both connections, when the link was made."""


_routes: MutableMapping[Connection, MutableMapping[Connection, _Route]]
_routes = WeakKeyDictionary()
"""For copies, from and to."""

_making: set[tuple[Connection, Connection]] = set()
"""From and to, of the routes that are being made."""

_lock = threading.Lock()
"""Held for both of these, and never while a server is asked for anything."""


def route(source: Connection, target: Connection) -> Link | None:
    """The link by which copies go from one server to another, made at first use.

    None where there can be none; the first time, a log line says why. None, too,
    while another thread makes it.

    Raises:
        RemoteError: a connection failed.
    """
    refusals = source.refusals, target.refusals
    ends = source, target
    with _lock:
        known = _routes.get(source, {}).get(target)
        if known is not None and (known.link is None or known.refusals == refusals):
            return known.link
        if ends in _making:
            return None
        _making.add(ends)
        outdated = _take_outdated(*ends)
        back = _routes.get(target, {}).get(source)
    try:
        for connection, number in outdated:
            close_end(connection, number)
        # What fails one way has tried the other as well.
        blocked = back is not None and back.link is None
        link = None if blocked else _open_route(source, target)
        with _lock:
            routes = _routes.setdefault(source, WeakKeyDictionary())
            routes[target] = _Route(link, (source.refusals, target.refusals))
        return link
    finally:
        with _lock:
            _making.remove(ends)


def _take_outdated(source: Connection, target: Connection) -> list[_End]:
    """Forget the route from one to the other, and all those of servers that are gone.

    Called with the lock held; the ends are for the caller to close.
    """
    ends: list[_End] = []
    for a, routes in list(_routes.items()):
        for b, known in list(routes.items()):
            if a.healthy and b.healthy and (a, b) != (source, target):
                continue
            del routes[b]
            if known.link is not None:
                ends += [(a, known.link.first), (b, known.link.second)]
    return ends


def _open_route(source: Connection, target: Connection) -> Link | None:
    try:
        link = open_link(source, target)
    except NoLink as reason:
        words = "%s to %s: copies go through this machine: %s"
        _log.warning(words, source.endpoint, target.endpoint, reason)
        return None
    _log.info("%s to %s: copies go directly", source.endpoint, target.endpoint)
    return link


class refusable(contextlib.AbstractContextManager[None]):
    """Turns a server's refusal into `NoLink`: the connection is well."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, RemoteFailure) and self._connection.refusal is error:
            self._connection.refusal = None
            # The name of the server's error says nothing beside its sentence.
            reason = error.cause.partition(": ")[2] or error.cause
            raise NoLink(f"{error.endpoint}: {reason}") from error


def close_end(connection: Connection, number: int) -> None:
    """Have a server close its end of a link, unless it is gone itself."""
    with contextlib.suppress(RemoteError):
        connection.post(Command.LX_UNLINK, m.U32.pack(number))


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host.rstrip(".") == "localhost"
