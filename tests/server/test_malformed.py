"""What must come of a message that breaks PROTOCOL.md.

The session ends, the log says why, and nobody else notices. A case with a legal
twin first shows that the session takes the message without its fault.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from longwire.wire.constants import Command
from longwire.wire.dialects import ANY, Dialect
from longwire.wire.frames import REQUEST_HEADER
from support.client import RawClient
from support.malformed import CASES, Case
from support.requests import Request, Scene
from support.tensors import Sum
from support.worker import Worker, resident


def accept(client: RawClient, request: Request) -> None:
    """Send a legal request and see that the session takes it."""
    client.post(request.command, request.body)
    size = client.dialect.shapes[request.command].answer
    if size is not None:
        answer = client.answer()
        assert size in (len(answer), ANY), answer
    assert client.device_count() == 1


def refuse(client: RawClient, request: Request) -> None:
    """Send a request and see the connection end."""
    length = len(request.body) if request.length is None else request.length
    # The server may be gone before all of it has left.
    with suppress(ConnectionError):
        client.send(REQUEST_HEADER.pack(request.command, length) + request.body)
    client.expect_closed()


@pytest.mark.parametrize(
    ("case", "dialect"),
    [
        pytest.param(case, dialect, id=f"{case.name}-{dialect.version}")
        for case in CASES
        for dialect in case.dialects
    ],
    indirect=["dialect"],
)
def test_a_malformed_message_ends_its_session_only(
    case: Case,
    dialect: Dialect,
    worker: Worker,
    neighbours: Callable[[Dialect], Sum],
) -> None:
    neighbour = neighbours(dialect)
    with RawClient(worker.endpoint, dialect) as client:
        if case.greet:
            client.hello()
        scene = Scene(client, neighbour.buffer)
        if case.legal:
            accept(client, case.legal(scene))
        refuse(client, case.bad(scene))
        line = worker.end_of(client.name)
    assert re.search(f"refused: {case.reason}", line), line
    neighbour.check(again=True)
    with RawClient(worker.endpoint, dialect) as client:
        assert client.hello().major == dialect.major
        assert client.device_count() == 1


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("bits", [61, 62, 63])
def test_a_huge_length_costs_nothing_while_its_body_is_missing(
    bits: int,
    dialect: Dialect,
    worker: Worker,
    connect: Callable[[], RawClient],
    neighbours: Callable[[Dialect], Sum],
) -> None:
    client = connect()
    pid = worker.session_of(client.name)
    before = resident(pid)
    client.send(REQUEST_HEADER.pack(Command.SET_TENSOR, 1 << bits) + bytes(10))
    neighbours(dialect).check(again=True)
    assert resident(pid) - before < 1 << 20
    client.socket.shutdown(socket.SHUT_WR)
    client.expect_closed()
    assert "left in the middle of SET_TENSOR" in worker.end_of(client.name)
