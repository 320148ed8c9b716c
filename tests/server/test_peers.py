"""The peer port by itself: whose time is up, and who is too much."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from longwire.server import dialer
from longwire.server import peers as module
from longwire.server.access import AllowList
from longwire.server.metrics import Metrics
from longwire.server.peers import Peers, listen_for_peers
from longwire.server.pool import Session
from support.worker import until


class FakeSession:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        self.streams: list[socket.socket] = []

    def answer(self, **facts: Any) -> None:
        self.answers.append(facts)

    def hand_over(self, stream: socket.socket, peer: str) -> None:
        self.streams.append(stream.dup())


class Rig:
    """A peer port with its loop, as the supervisor has it."""

    def __init__(self, allow: AllowList) -> None:
        self.selector = selectors.DefaultSelector()
        self.metrics = Metrics()
        self.woken = threading.Event()
        listener = listen_for_peers("127.0.0.1", 0)
        self.peers = Peers(listener, allow, self.metrics, self.selector, self.woken.set)
        self.session = FakeSession()

    def turn(self) -> None:
        for key, _ in self.selector.select(0.01):
            self.peers.spoke(cast(socket.socket, key.fileobj))
        self.peers.tend()

    def until(self, check: Callable[[], Any]) -> Any:
        def look() -> Any:
            self.turn()
            return check()

        return until(look)

    def ask(self, event: str, session: FakeSession | None = None, **facts: Any) -> None:
        asker = cast(Session, session or self.session)
        assert self.peers.ask(asker, event, facts)

    def ticket(self) -> str:
        self.ask("listen")
        found: str = self.session.answers.pop()["id"]
        return found

    def connect(self, shown: bytes = b"") -> socket.socket:
        assert self.peers.port is not None
        stream = socket.create_connection(("127.0.0.1", self.peers.port), 5)
        stream.sendall(shown)
        return stream

    def refused(self) -> int:
        page = self.metrics.page().decode()
        line = next(x for x in page.splitlines() if 'reason="peer"' in x)
        return int(float(line.split()[-1]))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(AllowList())
    yield rig
    rig.peers.close()
    rig.peers.close()
    assert not rig.selector.get_map()
    rig.selector.close()
    for stream in rig.session.streams:
        stream.close()


def test_a_ticket_expires(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICKET_S", 0.05)
    ticket = rig.ticket()
    assert rig.peers.deadline is not None
    rig.until(lambda: rig.peers.deadline is None)
    rig.ask("accept", id=ticket, patience_s=1)
    assert rig.session.answers == [{"refusal": "the ticket has expired"}]
    with rig.connect(bytes.fromhex(ticket)):
        rig.until(lambda: rig.refused() == 1)


def test_a_session_that_waits_outlives_the_ticket(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = rig.ticket()
    rig.ask("accept", id=ticket, patience_s=0.05)
    rig.until(lambda: rig.session.answers)
    assert rig.session.answers == [{"refusal": "nobody came in time"}]


def test_a_stream_goes_on_unread(rig: Rig) -> None:
    ticket = rig.ticket()
    with rig.connect(bytes.fromhex(ticket) + b"more") as stream:
        rig.ask("accept", id=ticket, patience_s=5)
        rig.until(lambda: rig.session.streams)
        (ours,) = rig.session.streams
        ours.setblocking(True)
        data = ours.recv(20, socket.MSG_WAITALL)
        assert data == bytes.fromhex(ticket) + b"more"
        # And in small pieces again.
        stream.sendall(b"x")
        assert ours.recv(10) == b"x"


def test_who_shows_nothing_is_closed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHOW_S", 0.05)
    with rig.connect() as silent, rig.connect(b"15 bytes of it.") as slow:
        rig.until(lambda: rig.refused() == 2)
        assert silent.recv(1) == b""
        with pytest.raises(ConnectionResetError):
            slow.recv(1)


def test_the_oldest_of_too_many_goes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STREAMS", 2)
    streams = [rig.connect() for _ in range(3)]
    rig.until(lambda: rig.refused() == 1)
    assert streams[0].recv(1) == b""
    for stream in streams:
        stream.close()


def test_but_not_one_with_a_ticket(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STREAMS", 2)
    ticket = rig.ticket()
    with rig.connect(bytes.fromhex(ticket)):
        rig.until(lambda: any(s.shown for s in rig.peers.streams))
        strangers = [rig.connect() for _ in range(3)]
        rig.until(lambda: rig.refused() == 2)
        rig.ask("accept", id=ticket, patience_s=5)
        assert len(rig.session.streams) == 1
        for stream in strangers:
            stream.close()


class TestPairs:
    def test_rank_1_comes_first(self, rig: Rig) -> None:
        with rig.connect(bytes(24)):
            # Whoever comes later was looked at later.
            with rig.connect(b"x" * 16):
                rig.until(rig.refused)
            rig.ask("pair", patience_s=5)
            assert len(rig.session.streams) == 1

    def test_who_waits_longest_is_served(self, rig: Rig) -> None:
        other = FakeSession()
        rig.ask("pair", patience_s=5)
        rig.ask("pair", other, patience_s=5)
        with rig.connect(bytes(24)):
            rig.until(lambda: rig.session.streams)
            assert not other.streams
        with rig.connect(bytes(24)):
            rig.until(lambda: other.streams)
        other.streams[0].close()

    def test_nobody_comes(self, rig: Rig) -> None:
        rig.ask("pair", patience_s=0.02)
        rig.until(lambda: rig.session.answers)
        assert rig.session.answers == [{"refusal": "no rank 1 came in time"}]

    def test_nobody_asks(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_UNASKED_S", 0.02)
        with rig.connect(bytes(24)):
            rig.until(lambda: rig.refused() == 1)


class TestForgotten:
    """A session whose client left is told nothing more."""

    def test_tickets_and_pairs(self, rig: Rig) -> None:
        ticket = rig.ticket()
        rig.ask("accept", id=ticket, patience_s=0.01)
        rig.ask("pair", patience_s=0.01)
        rig.peers.forget(cast(Session, rig.session))
        assert rig.peers.deadline is None
        with rig.connect(bytes.fromhex(ticket)):
            rig.until(lambda: rig.refused() == 1)
        assert not rig.session.answers

    def test_calls(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as there:
            port = there.getsockname()[1]
            rig.ask("dial", host="127.0.0.1", port=port, patience_s=5, again=False)
            stream, _ = there.accept()
            rig.peers.forget(cast(Session, rig.session))
            rig.until(rig.woken.is_set)
            rig.peers.tend()
            with stream:
                assert stream.recv(1) == b""
        assert not rig.session.streams

    def test_a_call_that_would_go_on_and_on(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        rig.ask("dial", host="127.0.0.1", port=port, patience_s=60, again=True)
        rig.peers.forget(cast(Session, rig.session))
        rig.until(rig.woken.is_set)
        assert rig.peers.deadline is None


class TestCalls:
    def dial(
        self, rig: Rig, port: int, session: FakeSession | None = None, **facts: Any
    ) -> None:
        facts = {"host": "127.0.0.1", "patience_s": 5, "again": False, **facts}
        rig.ask("dial", session, port=port, **facts)

    def test_again_until_somebody_listens(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        self.dial(rig, port, again=True)
        time.sleep(0.1)
        with socket.create_server(("127.0.0.1", port)):
            rig.until(lambda: rig.session.streams)

    def test_again_but_not_for_ever(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        self.dial(rig, port, again=True, patience_s=0.1)
        rig.until(lambda: rig.session.answers)
        assert rig.session.answers == [{"refusal": "Connection refused"}]

    def test_no_answer(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            # Nobody accepts, and one more than the backlog is not answered.
            port = full.getsockname()[1]
            crowd = []
            for _ in range(4):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", port))
                crowd.append(sock)
            self.dial(rig, port, patience_s=0.1)
            rig.until(lambda: rig.session.answers)
            for sock in crowd:
                sock.close()
        assert rig.session.answers == [{"refusal": "no answer in time"}]

    def test_a_name_that_takes_too_long(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answered = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as there:
            address = there.getsockname()
            found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address)]

            def look_up(*_: Any, **__: Any) -> list[Any]:
                answered.wait(10)
                return found

            monkeypatch.setattr(dialer.socket, "getaddrinfo", look_up)
            self.dial(rig, address[1], patience_s=0.05)
            rig.until(lambda: rig.session.answers)
            answered.set()
            rig.until(rig.woken.is_set)
            # Nobody connects for one who has given up.
            there.settimeout(0.05)
            with pytest.raises(TimeoutError):
                there.accept()
        rig.turn()
        assert rig.session.answers == [{"refusal": "no answer in time"}]

    def test_an_address_of_an_unknown_kind(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as there:
            address = there.getsockname()
            kinds = (socket.AF_X25, socket.AF_INET)
            found = [(kind, socket.SOCK_STREAM, 0, "", address) for kind in kinds]
            monkeypatch.setattr(dialer.socket, "getaddrinfo", lambda *_, **__: found)
            self.dial(rig, address[1])
            rig.until(lambda: rig.session.streams)

    def test_one_at_a_time(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        self.dial(rig, port, again=True)
        with pytest.raises(ValueError, match="waits for another call"):
            self.dial(rig, port)

    def test_too_many_at_once(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dialer, "_MOST", 1)
        other = FakeSession()
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        self.dial(rig, port, again=True)
        self.dial(rig, port, other)
        rig.until(lambda: other.answers)
        assert other.answers == [{"refusal": "too many calls are under way"}]

    def test_many_at_once(self, rig: Rig) -> None:
        with socket.create_server(("127.0.0.1", 0)) as there:
            port = there.getsockname()[1]
            sessions = [FakeSession() for _ in range(30)]
            for session in sessions:
                self.dial(rig, port, session)
            rig.until(lambda: all(session.streams for session in sessions))
            for session in sessions:
                session.streams[0].close()
        assert sum(t.name == "dialer" for t in threading.enumerate()) <= 8

    @pytest.mark.parametrize("port", [0, 65536, -1])
    def test_no_address(self, rig: Rig, port: int) -> None:
        self.dial(rig, port)
        assert rig.session.answers == [{"refusal": "it is no address"}]

    def test_allow_holds_for_calls_too(self) -> None:
        rig = Rig(AllowList(["10.0.0.0/8"]))
        with socket.create_server(("127.0.0.1", 0)) as there:
            self.dial(rig, there.getsockname()[1])
            rig.until(lambda: rig.session.answers)
        assert rig.session.answers == [{"refusal": "it is not in --allow"}]
        rig.peers.close()


def test_the_threads_end(rig: Rig) -> None:
    TestCalls().dial(rig, 1)
    rig.until(lambda: rig.session.answers)
    rig.peers.close()
    assert not [t for t in threading.enumerate() if t.name == "dialer"]


@pytest.mark.parametrize("facts", [{}, {"patience_s": "x"}, {"patience_s": None}])
def test_nonsense(rig: Rig, facts: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        rig.ask("pair", **facts)
