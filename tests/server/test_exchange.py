"""Exchanges between two ends in this process: deadlock, silence, signs of life."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from longwire.errors import RemoteFailure
from longwire.server import exchange as module
from longwire.server import transfers
from longwire.server.exchange import Flow, exchange
from longwire.server.links import Link
from longwire.server.tensors import CheckedTensor
from longwire.transport.duplex import Duplex, TlsDuplex
from longwire.transport.tls import TlsFiles, pinning_context, server_context
from longwire.wire.links import FRAME_HEADER, SIGN_OF_LIFE
from support.keys import Keys

LARGE = 4 << 20


def nobody_left() -> bool:
    """The client is there."""
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
            exchange([end], "test", nobody_left)
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
        exchange([link], "test", nobody_left)
        found.append(bytes(target))
    thread.join()
    assert found == [b"abc", b"", b"de"]


def test_signs_that_nobody_awaits_do_not_pile_up(sockets: Sockets) -> None:
    a, b = Link(1, Duplex(sockets[0]), "b"), Link(1, Duplex(sockets[1]), "a")
    for _ in range(100_000):
        a.offer()
    b.send([memoryview(b"x")])
    exchange([b], "test", nobody_left)
    # What did not leave was not begun: the next frame stands where it should.
    target = bytearray(2)
    with ThreadPoolExecutor(1) as pool:
        a.send([memoryview(b"yz")])
        done = pool.submit(exchange, [a], "test", nobody_left)
        b.receive(memoryview(target))
        exchange([b], "test", nobody_left)
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


def test_tls_sends_the_sign_that_it_has_begun(sockets: Sockets, keys: Keys) -> None:
    """OpenSSL would take the next frame's header for it."""
    files = TlsFiles(keys.ours.path("server.pem"), keys.ours.path("server.key"))
    with ThreadPoolExecutor(1) as pool:
        shaken = pool.submit(
            server_context(files).wrap_socket, sockets[1], server_side=True
        )
        ours = pinning_context().wrap_socket(sockets[0])
        a, b = Link(1, TlsDuplex(ours), "b"), Link(1, TlsDuplex(shaken.result()), "a")
        for _ in range(2000):
            a.offer()
        assert not select.select([], [ours], [], 0)[1]
        target = bytearray(3)
        a.send([memoryview(b"abc")])
        done = pool.submit(exchange, [a], "test", nobody_left)
        b.receive(memoryview(target))
        exchange([b], "test", nobody_left)
        done.result()
    assert target == b"abc"
    for link in (a, b):
        link.close("the end")


def test_who_is_gone_when_a_frame_begins_can_be_closed(sockets: Sockets) -> None:
    link = Link(1, Duplex(sockets[0]), "peer")
    sockets[1].close()
    frame = [memoryview(FRAME_HEADER.pack(1)), memoryview(b"x")]
    with pytest.raises(OSError):
        link.send_now(frame, FRAME_HEADER.size + 1)
    closing = threading.Thread(target=link.close, args=("it is gone",), daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive() and link.failure == "it is gone"


class Trickling(Duplex):
    """A peer of whom a byte comes whenever one looks."""

    def receive_some(self, target: memoryview) -> int:
        target[:1] = b"x"
        return 1


class Remote:
    """A tensor that the host cannot reach."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.largest = 0
        """Bytes copied at a time."""

    def bytes(self, offset: int, size: int) -> memoryview | None:
        return None

    def fetch(self, data: memoryview, offset: int) -> None:
        self.largest = max(self.largest, len(data))
        data[:] = self.data[offset : offset + len(data)]

    def store(self, data: memoryview, offset: int) -> None:
        self.largest = max(self.largest, len(data))
        self.data[offset : offset + len(data)] = data


@pytest.mark.parametrize("size", [0, 1, 131_072, 131_073, 300_001])
def test_what_a_device_keeps_travels_in_parts(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 1 << 17)
    data = bytes(range(251)) * (size // 251 + 3)
    here, there = Remote(data), Remote(bytes(len(data)))
    a, b = (Link(1, Duplex(sock), "peer") for sock in sockets)
    with ThreadPoolExecutor(1) as pool:
        for offset in (0, 7):
            a.offer()
            arguments = offset, size, nobody_left
            sending = pool.submit(
                transfers.send_part, a, cast(CheckedTensor, here), *arguments
            )
            transfers.receive_part(b, cast(CheckedTensor, there), *arguments)
            sending.result()
            part = slice(offset, offset + size)
            assert there.data[part] == here.data[part]
            assert not any(there.data[part.stop :])
    assert max(here.largest, there.largest) == min(size, 1 << 17)


@pytest.mark.usefixtures("quick")
class TestSilence:
    def test_who_says_nothing_is_gone(self, sockets: Sockets) -> None:
        link = Link(1, Duplex(sockets[1]), "gpu:51052")
        link.receive(memoryview(bytearray(1)))
        with pytest.raises(RemoteFailure, match="gpu:51052: X: no sign of life for"):
            exchange([link], "X", nobody_left)
        assert link.failure is not None

    def test_who_takes_nothing_in_is_gone(self, sockets: Sockets) -> None:
        link = Link(1, Duplex(sockets[1]), "gpu:51052")
        link.send([memoryview(bytes(LARGE))])
        with pytest.raises(RemoteFailure, match="no sign of life"):
            exchange([link], "X", nobody_left)
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
            exchange([a], "X", nobody_left)

        thread = threading.Thread(target=work)
        thread.start()
        if sends:
            b.send([memoryview(bytes(LARGE))])
        else:
            b.receive(memoryview(got))
        exchange([b], "X", nobody_left)
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
            exchange([b], "X", nobody_left)
        done.set()
        thread.join()

    def test_but_a_byte_now_and_then_is(
        self, sockets: Sockets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LONGEST_S", 0.3)
        monkeypatch.setattr(Link, "patience_s", 5.0)
        b = Link(1, Duplex(sockets[1]), "a")
        target = bytearray(8)

        def work() -> None:
            sockets[0].sendall(FRAME_HEADER.pack(8))
            for i in range(8):
                time.sleep(0.08)
                sockets[0].sendall(bytes([i]))

        thread = threading.Thread(target=work)
        thread.start()
        b.receive(memoryview(target))
        exchange([b], "X", nobody_left)
        thread.join()
        assert target == bytes(range(8))

    def test_nobody_waits_while_bytes_trickle(self, sockets: Sockets) -> None:
        """One after the other, so that there is never a reason to sleep."""
        flow = Flow(Trickling(sockets[1]), "peer")
        flow.receive(memoryview(bytearray(2 * LARGE)))
        with pytest.raises(RemoteFailure, match="the client left"):
            exchange([flow], "X", lambda: True)

    def test_nobody_waits_for_a_client_that_left(self, sockets: Sockets) -> None:
        flow = Flow(Duplex(sockets[1]), "peer")
        flow.receive(memoryview(bytearray(1)))
        with pytest.raises(RemoteFailure, match="the client left"):
            exchange([flow], "X", lambda: True)
