"""A session and its supervisor, where one of them is not there."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from longwire.server.control import Control, tell

PATIENCE_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[Control, socket.socket]]:
    """A session's end, and the supervisor's."""
    ours, theirs = socket.socketpair()
    control = Control(theirs.detach(), PATIENCE_S)
    with ours:
        yield control, ours
    control.close()


def test_a_claim_is_answered(ends: tuple[Control, socket.socket]) -> None:
    control, supervisor = ends
    tell(supervisor, {"refusal": "too much"})
    assert control.claim(7) == "too much"
    assert json.loads(supervisor.recv(100)) == {"event": "claim", "size": 7}


def test_a_frozen_supervisor_is_given_up(ends: tuple[Control, socket.socket]) -> None:
    control, supervisor = ends
    with pytest.raises(ConnectionError, match="does not answer"):
        control.claim(7)
    # An answer that comes late belongs to a question that nobody asks any more.
    tell(supervisor, {"refusal": None})
    with pytest.raises(ConnectionError, match="does not answer"):
        control.room()
    assert control.next_client() is None


def test_a_supervisor_that_is_gone(ends: tuple[Control, socket.socket]) -> None:
    control, supervisor = ends
    supervisor.close()
    with pytest.raises(ConnectionError, match="gone"):
        control.claim(7)
    assert control.next_client() is None


def test_a_report_that_nobody_reads_is_dropped(
    ends: tuple[Control, socket.socket],
) -> None:
    control, _ = ends
    for _ in range(1000):
        begun = time.monotonic()
        control.report("figures", text="x" * 4000)
        if time.monotonic() - begun > PATIENCE_S / 2:
            return
    pytest.fail("every report found room")
