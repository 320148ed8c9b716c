"""Links that a client arranges between two scripted servers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from longwire.client.connection import Connection
from longwire.client.links import Link, NoLink, open_link, route
from longwire.errors import ConnectionLost, RemoteFailure
from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.links import LinkAccept, LinkConnect, Listening, Ticket
from longwire.wire.lx import HAS_PEERS, KEEPS_DATA
from support.scripted import PATIENCE_S, Instead, Scripted, refusal

Start = Callable[..., Scripted]

TICKET = Ticket(b"i" * 16, b"s" * 32)
NUMBERS = {Command.LX_ACCEPT: m.U32.pack(7), Command.LX_CONNECT: m.U32.pack(9)}
LISTENING = {Command.LX_LISTEN: Listening(51052, TICKET).encode()}
HERE, THERE = Endpoint("127.0.0.1", 50052), Endpoint("10.0.0.2", 50053)
GONE = refusal("RemoteFailure", "10.0.0.2:51052: no route to host")


@pytest.fixture
def server(scripted: Start) -> Start:
    """`server(endpoint, answers)`: one of ours, with a peer port."""

    def start(
        endpoint: Endpoint, answers: Any = None, lx_flags: int = HAS_PEERS
    ) -> Scripted:
        known = {**NUMBERS, **LISTENING, **(answers or {})}
        return scripted(known, V8, endpoint=endpoint, lx_flags=lx_flags)

    return start


def settled(pair: Scripted) -> list[str]:
    """Names of all requests so far, all of them arrived."""
    pair.connection.ask(Command.LX_PING, b"")
    return [name for name in pair.server.commands if name != "LX_PING"]


def test_one_listens_and_the_other_connects(server: Start) -> None:
    one, other = server(THERE), server(HERE)
    assert open_link(one.connection, other.connection) == Link(7, 9)
    assert settled(one) == ["LX_LISTEN", "LX_ACCEPT"]
    assert settled(other) == ["LX_CONNECT"]
    accept = LinkAccept.decode(one.server.of(Command.LX_ACCEPT)[0])
    connect = LinkConnect.decode(other.server.of(Command.LX_CONNECT)[0])
    assert accept.ticket == connect.ticket == TICKET
    assert 0 < accept.patience_ms == connect.patience_ms <= 60_000
    assert (connect.host, connect.port) == ("10.0.0.2", 51052)
    assert connect.certificate == b""


def test_both_are_at_work_before_either_answers(server: Start) -> None:
    asked = threading.Barrier(2)

    def together(number: int) -> Callable[[bytes], bytes]:
        def answer(body: bytes) -> bytes:
            asked.wait(PATIENCE_S)
            return m.U32.pack(number)

        return answer

    one = server(THERE, {Command.LX_ACCEPT: together(1)})
    other = server(HERE, {Command.LX_CONNECT: together(2)})
    assert open_link(one.connection, other.connection) == Link(1, 2)


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_loopback_address_is_for_nobody_else(server: Start, loopback: str) -> None:
    near, far = server(Endpoint(loopback, 50052)), server(THERE)
    assert open_link(near.connection, far.connection) == Link(9, 7)
    assert settled(near) == ["LX_CONNECT"]


def test_who_has_no_peer_port_connects(server: Start) -> None:
    one, other = server(THERE, lx_flags=KEEPS_DATA), server(HERE)
    assert open_link(one.connection, other.connection) == Link(9, 7)
    other = server(HERE, lx_flags=0)
    with pytest.raises(NoLink, match=r"10\.0\.0\.2:50053.* has a peer port"):
        open_link(one.connection, other.connection)


def test_a_server_of_others_has_no_links(server: Start, scripted: Start) -> None:
    one, other = server(THERE), scripted({}, V8, endpoint=HERE)
    for pair in ((one, other), (other, one)):
        with pytest.raises(NoLink, match=r"127\.0\.0\.1:50052 knows no links"):
            open_link(*(server.connection for server in pair))


def test_the_other_way_is_tried_too(server: Start) -> None:
    one, other = server(THERE), server(HERE, {Command.LX_CONNECT: GONE})
    assert open_link(one.connection, other.connection) == Link(9, 7)
    # Who has an end that nothing is behind closes it.
    assert settled(one) == ["LX_LISTEN", "LX_ACCEPT", "LX_UNLINK", "LX_CONNECT"]
    assert one.server.of(Command.LX_UNLINK) == [m.U32.pack(7)]
    assert settled(other) == ["LX_CONNECT", "LX_LISTEN", "LX_ACCEPT"]
    for pair in (one, other):
        pair.connection.check()


@pytest.mark.parametrize("command", [Command.LX_LISTEN, Command.LX_ACCEPT])
def test_every_refusal_is_one_way_less(server: Start, command: Command) -> None:
    full = refusal("LimitExceeded", "64 links")
    one, other = server(THERE, {command: full}), server(HERE)
    assert open_link(one.connection, other.connection) == Link(9, 7)


def test_no_way_names_the_reason(server: Start) -> None:
    one = server(THERE, {Command.LX_CONNECT: GONE})
    other = server(HERE, {Command.LX_CONNECT: GONE})
    with pytest.raises(NoLink) as caught:
        open_link(one.connection, other.connection)
    assert "no route to host" in str(caught.value)
    for pair in (one, other):
        pair.connection.check()
        assert pair.connection.healthy


def test_a_server_that_is_gone_is_no_refusal(server: Start) -> None:
    one = server(THERE)
    other = server(HERE, {Command.LX_CONNECT: Instead.CLOSE})
    with pytest.raises(ConnectionLost):
        open_link(one.connection, other.connection)


def test_the_end_of_one_leaves_no_answer_to_the_other(server: Start) -> None:
    one = server(THERE)
    other = server(HERE, {Command.LX_CONNECT: Instead.CLOSE})
    with pytest.raises(ConnectionLost):
        open_link(one.connection, other.connection)
    assert one.stream.owed == 0
    assert settled(one) == ["LX_LISTEN", "LX_ACCEPT", "LX_UNLINK"]
    one.connection.check()


@pytest.mark.parametrize("end", [0, 1])
def test_an_earlier_failure_is_not_taken_for_a_missing_way(
    server: Start, end: int
) -> None:
    failed = {Command.LX_PING: refusal("RemoteFailure", "GRAPH_COMPUTE: failed")}
    pairs = [server(THERE, {} if end else failed), server(HERE, failed if end else {})]
    with pytest.raises(RemoteFailure, match="GRAPH_COMPUTE"):
        open_link(*(pair.connection for pair in pairs))
    with pytest.raises(RemoteFailure, match="GRAPH_COMPUTE"):
        pairs[end].connection.check()


def test_nobody_is_waited_for_who_has_other_work(server: Start) -> None:
    """Patience is for the way between the two."""
    asked: list[list[str]] = []

    def busy(body: bytes) -> bytes:
        asked.append(one.server.commands)
        return b""

    one, other = server(THERE), server(HERE, {Command.LX_PING: busy})
    open_link(one.connection, other.connection)
    assert len(asked) == 1 and "LX_ACCEPT" not in asked[0]


def test_a_name_that_the_wire_cannot_carry(server: Start) -> None:
    one = server(Endpoint("h" * 256, 50052))
    other = server(HERE, lx_flags=0)
    with pytest.raises(NoLink, match="too long"):
        open_link(one.connection, other.connection)
    assert settled(one) == settled(other) == []


def test_a_certificate_that_the_wire_cannot_carry(
    server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Connection, "certificate", bytes(8193))
    one, other = server(THERE), server(HERE)
    with pytest.raises(NoLink, match="too large"):
        open_link(one.connection, other.connection)
    assert settled(one) == settled(other) == []


def test_a_route_that_is_being_made_holds_up_nobody(server: Start) -> None:
    meanwhile: list[Link | None] = []

    def connect(body: bytes) -> bytes:
        meanwhile.append(route(one.connection, other.connection))
        return m.U32.pack(9)

    one, other = server(THERE), server(HERE, {Command.LX_CONNECT: connect})
    assert route(one.connection, other.connection) == Link(7, 9)
    assert meanwhile == [None]
    assert route(one.connection, other.connection) == Link(7, 9)


def test_a_route_is_made_once(server: Start) -> None:
    one, other = server(THERE), server(HERE)
    for _ in range(3):
        assert route(one.connection, other.connection) == Link(7, 9)
    # The other direction has a link of its own.
    assert route(other.connection, one.connection) == Link(9, 7)
    assert settled(one) == ["LX_LISTEN", "LX_ACCEPT"] * 2


def test_no_route_is_said_once(server: Start, caplog: pytest.LogCaptureFixture) -> None:
    one, other = server(THERE, lx_flags=0), server(HERE, lx_flags=0)
    for _ in range(2):
        assert route(one.connection, other.connection) is None
        assert route(other.connection, one.connection) is None
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 1 and "has a peer port" in lines[0]


def test_a_link_that_may_have_failed_is_made_anew(server: Start) -> None:
    one, other = server(THERE), server(HERE)
    route(one.connection, other.connection)
    other.server.answers = {**other.server.answers, Command.LX_PING: GONE}
    with pytest.raises(Exception, match="no route"):
        other.connection.ask(Command.LX_PING, b"")
    other.server.answers = {**NUMBERS, **LISTENING}
    other.connection.refusal = None
    route(one.connection, other.connection)
    route(one.connection, other.connection)
    assert settled(one) == ["LX_LISTEN", "LX_ACCEPT", "LX_UNLINK"] + [
        "LX_LISTEN",
        "LX_ACCEPT",
    ]
    assert settled(other) == ["LX_CONNECT", "LX_UNLINK", "LX_CONNECT"]


def test_the_end_of_a_server_closes_its_routes(server: Start) -> None:
    one, other, third = server(THERE), server(HERE), server(Endpoint("10.0.0.3", 1))
    route(one.connection, other.connection)
    route(other.connection, one.connection)
    other.connection.close()
    route(one.connection, third.connection)
    assert settled(one).count("LX_UNLINK") == 2


def test_what_has_no_link_is_not_tried_again_for_copies(
    server: Start, caplog: pytest.LogCaptureFixture
) -> None:
    one = server(THERE, {Command.LX_CONNECT: GONE})
    other = server(HERE, {Command.LX_CONNECT: GONE})
    with pytest.raises(NoLink):
        open_link(one.connection, other.connection)
    asked = settled(one), settled(other)
    assert route(one.connection, other.connection) is None
    assert route(other.connection, one.connection) is None
    assert (settled(one), settled(other)) == asked
    assert caplog.text == ""
