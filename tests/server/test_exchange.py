"""Exchanges between two ends in this process: deadlock, silence, signs of life."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from longwire.errors import RemoteFailure
from longwire.server import exchange as module
from longwire.server.exchange import Flow, exchange
from longwire.server.links import Link
from longwire.transport.duplex import Duplex
from longwire.wire.links import FRAME_HEADER, SIGN_OF_LIFE

LARGE = 4 << 20


def ours() -> bool:
    """Nobody has left."""
    return False


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    for sock in (a, b):
        # Far less than what is sent.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with a, b:
        yield a, b


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little patience."""
    monkeypatch.setattr(Link, "patience_s", 0.1)
    monkeypatch.setattr(module, "_LOOK_S", 0.02)


Sockets = tuple[socket.socket, socket.socket]


@pytest.mark.parametrize("kind", [Flow, Link])
@pytest.mark.parametrize("size", [0, 1, 70_000, LARGE])
def test_both_send_first(sockets: Sockets, kind: type, size: int) -> None:
    def flow(sock: socket.socket) -> Flow:
        arguments = (Duplex(sock), "peer")
        return Link(1, *arguments) if kind is Link else Flow(*arguments)

    def run(end: Flow, data: bytes) -> bytes:
        target = bytearray(size)
        for _ in range(3):
            end.send([memoryview(data)[: size // 2], memoryview(data)[size // 2 :]])
            end.receive(memoryview(target))
            exchange([end], "test", ours)
        return bytes(target)

    ends = [flow(sock) for sock in sockets]
    data = [bytes([i]) * size for i in (1, 2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, ends, data))
    assert found == data[::-1]


def test_frames_in_pieces_and_signs_between(sockets: Sockets) -> None:
    a, b = sockets
    link = Link(1, Duplex(b), "peer")
    stream = SIGN_OF_LIFE * 2 + FRAME_HEADER.pack(3) + b"abc" + SIGN_OF_LIFE
    stream += FRAME_HEADER.pack(0) + FRAME_HEADER.pack(2) + b"de"

    def dribble() -> None:
        for i in range(len(stream)):
            a.sendall(stream[i : i + 1])

    thread = threading.Thread(target=dribble)
    thread.start()
    found = []
    for size in (3, 0, 2):
        target = bytearray(size)
        link.receive(memoryview(target))
        exchange([link], "test", ours)
        found.append(bytes(target))
    thread.join()
    assert found == [b"abc", b"", b"de"]


def test_signs_that_nobody_awaits_do_not_pile_up(sockets: Sockets) -> None:
    a, b = Link(1, Duplex(sockets[0]), "b"), Link(1, Duplex(sockets[1]), "a")
    for _ in range(100_000):
        a.offer()
    b.send([memoryview(b"x")])
    exchange([b], "test", ours)
    # What did not leave was not begun: the next frame stands where it should.
    target = bytearray(2)
    with ThreadPoolExecutor(1) as pool:
        a.send([memoryview(b"yz")])
        done = pool.submit(exchange, [a], "test", ours)
        b.receive(memoryview(target))
        exchange([b], "test", ours)
        done.result()
    assert target == b"yz"


def test_no_sign_between_the_bytes_of_a_frame(sockets: Sockets) -> None:
    a = Link(1, Duplex(sockets[0]), "b")
    data = bytes(range(256)) * 4096

    def read() -> bytes:
        found = b""
        while part := sockets[1].recv(1 << 16):
            found += part
        return found

    with ThreadPoolExecutor(1) as pool:
        a.send([memoryview(data)])
        a.push()
        assert a.unsent
        reading = pool.submit(read)
        while a.unsent:
            a.push()
            if a.unsent:
                a.offer()
        while not select.select([], [sockets[0]], [], 5)[1]:
            pass
        a.offer()
        a.close("the end")
        found = reading.result()
    assert found == FRAME_HEADER.pack(len(data)) + data + SIGN_OF_LIFE


@pytest.mark.usefixtures("quick")
class TestSilence:
    def test_who_says_nothing_is_gone(self, sockets: Sockets) -> None:
        link = Link(1, Duplex(sockets[1]), "gpu:51052")
        link.receive(memoryview(bytearray(1)))
        with pytest.raises(RemoteFailure, match="gpu:51052: X: no sign of life for"):
            exchange([link], "X", ours)
        assert link.failure is not None

    def test_who_takes_nothing_in_is_gone(self, sockets: Sockets) -> None:
        link = Link(1, Duplex(sockets[1]), "gpu:51052")
        link.send([memoryview(bytes(LARGE))])
        with pytest.raises(RemoteFailure, match="no sign of life"):
            exchange([link], "X", ours)
        # A frame that never ended keeps nobody waiting.
        link.offer()

    @pytest.mark.parametrize("sends", [True, False])
    def test_who_gives_signs_of_life_is_waited_for(
        self, sockets: Sockets, sends: bool
    ) -> None:
        a = Link(1, Duplex(sockets[0]), "b")
        b = Link(1, Duplex(sockets[1]), "a")
        awake = threading.Event()
        got = bytearray(LARGE)

        def work() -> None:
            # Far longer than b's patience.
            for _ in range(30):
                a.offer()
                awake.wait(0.02)
            if sends:
                a.receive(memoryview(got))
            else:
                a.send([memoryview(bytes(LARGE))])
            exchange([a], "X", ours)

        thread = threading.Thread(target=work)
        thread.start()
        if sends:
            b.send([memoryview(bytes(LARGE))])
        else:
            b.receive(memoryview(got))
        exchange([b], "X", ours)
        thread.join()
        assert b.failure is None

    def test_signs_alone_are_not_enough(
        self, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LONGEST_S", 0.3)
        a = Link(1, Duplex(sockets[0]), "b")
        b = Link(1, Duplex(sockets[1]), "a")
        done = threading.Event()

        def work() -> None:
            while not done.wait(0.02):
                a.offer()

        thread = threading.Thread(target=work)
        thread.start()
        b.receive(memoryview(bytearray(1)))
        with pytest.raises(RemoteFailure, match="nothing came in 0.3 s but signs"):
            exchange([b], "X", ours)
        done.set()
        thread.join()

    def test_nobody_waits_for_a_client_that_left(self, sockets: Sockets) -> None:
        flow = Flow(Duplex(sockets[1]), "peer")
        flow.receive(memoryview(bytearray(1)))
        with pytest.raises(RemoteFailure, match="the client left"):
            exchange([flow], "X", lambda: True)
