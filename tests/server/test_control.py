"""A session and its supervisor, where one of them is not there."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from longwire.server import control as module
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


class TestStreams:
    """Questions that are answered with a descriptor, or take long."""

    def test_a_stream_comes_with_the_answer(
        self, ends: tuple[Control, socket.socket]
    ) -> None:
        control, supervisor = ends
        a, b = socket.socketpair()
        with a, b:
            tell(supervisor, {"refusal": None, "peer": "gpu:1"}, b.fileno())
            stream, peer = control.dial("gpu", 1, 5.0, lambda: False)
            with stream:
                a.sendall(b"x")
                assert (stream.recv(1), peer) == (b"x", "gpu:1")
        question = json.loads(supervisor.recv(200))
        assert question["event"] == "dial"
        assert (question["host"], question["port"]) == ("gpu", 1)

    def test_none_comes(self, ends: tuple[Control, socket.socket]) -> None:
        control, supervisor = ends
        tell(supervisor, {"refusal": "Connection refused"})
        with pytest.raises(ConnectionError, match="^Connection refused$"):
            control.pair(5.0, lambda: False)
        assert not control.forsaken

    def test_the_client_leaves_meanwhile(
        self, ends: tuple[Control, socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_LOOK_MS", 10)
        control, _ = ends
        with pytest.raises(ConnectionError, match="the client left"):
            control.accept(bytes(16), 60.0, lambda: True)
        # The answer may come yet: this session can hear of nothing else.
        assert control.forsaken and control.next_client() is None

    def test_the_supervisor_gets_the_time_it_was_given(
        self, ends: tuple[Control, socket.socket]
    ) -> None:
        control, supervisor = ends
        # Four times what a plain question is given.
        timer = threading.Timer(
            4 * PATIENCE_S, tell, (supervisor, {"refusal": "nobody"})
        )
        timer.start()
        with pytest.raises(ConnectionError, match="nobody"):
            control.accept(bytes(16), 60.0, lambda: False)
        timer.join()


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
