"""Which of several failures a caller hears of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from longwire.client.failures import check_all
from longwire.errors import ConnectionLost, RemoteFailure
from longwire.transport.endpoint import Endpoint
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from support.scripted import Instead, Scripted, refusal

Start = Callable[..., Scripted]

REFUSED = refusal("RemoteFailure", "10.0.0.1:51052: LX_RECEIVE: it closed")


def start(scripted: Start, port: int, answers: object = None) -> Scripted:
    return scripted(answers, V8, endpoint=Endpoint("worker", port), lx_flags=0)


def refuse(pair: Scripted) -> None:
    with pytest.raises(RemoteFailure):
        pair.connection.ask(Command.DEVICE_COUNT, b"")


def test_all_is_well(scripted: Start) -> None:
    pairs = [start(scripted, port) for port in (1, 2)]
    check_all(pair.connection for pair in pairs)
    assert all(pair.server.commands == [] for pair in pairs), "nobody is asked"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_server_comes_before_who_waited_for_it(
    scripted: Start, lost: int
) -> None:
    pairs = [
        start(scripted, 1, {Command.LX_PING: Instead.CLOSE}),
        start(scripted, 2, {Command.DEVICE_COUNT: REFUSED}),
    ]
    refuse(pairs[1])
    connections = [pair.connection for pair in pairs]
    with pytest.raises(ConnectionLost, match="worker:1"):
        check_all(connections if lost == 0 else connections[::-1])
    # What the other one refused came of that, and is no failure of its own.
    connections[1].check()


def test_a_refusal_is_told_if_all_are_there(scripted: Start) -> None:
    pairs = [start(scripted, 1), start(scripted, 2, {Command.DEVICE_COUNT: REFUSED})]
    refuse(pairs[1])
    with pytest.raises(RemoteFailure, match=r"worker:2.*it closed"):
        check_all(pair.connection for pair in pairs)
    check_all(pair.connection for pair in pairs)


def test_what_another_refused_unasked_comes_out(scripted: Start) -> None:
    """Commands without an answer tell of their failure with the next one."""
    wrong = refusal("RemoteFailure", "GRAPH_COMPUTE: no room")
    pairs = [
        start(scripted, 1, {Command.LX_PING: wrong}),
        start(scripted, 2, {Command.DEVICE_COUNT: REFUSED}),
    ]
    refuse(pairs[1])
    with pytest.raises(RemoteFailure, match=r"worker:1.*no room"):
        check_all(pair.connection for pair in pairs)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    "wrong",
    [
        refusal("RemoteFailure", "GRAPH_COMPUTE: no room"),
        refusal("BadRequest", "LX_ALLREDUCE: tensors of [8, 9] numbers"),
    ],
)
def test_who_refused_because_of_another_comes_last(
    scripted: Start, wrong: object, first: int
) -> None:
    pairs = [
        start(scripted, 1, {Command.LX_PING: REFUSED}),
        start(scripted, 2, {Command.DEVICE_COUNT: wrong}),
    ]
    refuse(pairs[1])
    connections = [pair.connection for pair in pairs]
    with pytest.raises(RemoteFailure, match="worker:2"):
        check_all(connections if first == 0 else connections[::-1])
    # One failure is told once, and of the next generation nothing is in the way.
    check_all(connections)


def test_one_alone_is_not_asked(scripted: Start) -> None:
    pair = start(scripted, 1, {Command.DEVICE_COUNT: REFUSED})
    refuse(pair)
    with pytest.raises(RemoteFailure):
        check_all([pair.connection, pair.connection])
    assert "LX_PING" not in pair.server.commands
