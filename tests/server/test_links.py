"""Links between sessions: how they are made, what they carry, and how they break."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from longwire.server.handshake import introduce
from longwire.transport.tls import client_context
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.links import (
    MAX_PATIENCE_MS,
    SIGN_OF_LIFE,
    LinkAccept,
    Listening,
    Ticket,
)
from longwire.wire.lx import LxStart, LxStartAnswer
from support.client import RawClient
from support.keys import Keys
from support.links import Rank, link
from support.worker import Worker, running_worker, until

C = Command
Ranks = Callable[..., list[Rank]]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running_worker("--protocol", "8", "--metrics-port", "0") as worker:
        yield worker


@pytest.fixture(scope="module")
def secured(keys: Keys) -> Iterator[Worker]:
    options = keys.ours.serving(token=False)
    with running_worker("--protocol", "8", *options) as worker:
        yield worker


@pytest.fixture
def ranks(worker: Worker) -> Iterator[Ranks]:
    """Opens clients that speak LX; all leave when the test ends."""
    with ExitStack() as stack:

        def opened(count: int, where: Worker = worker) -> list[Rank]:
            found = [stack.enter_context(Rank(where.endpoint)) for _ in range(count)]
            for rank in found:
                rank.hello()
                rank.start()
            return found

        yield opened


def counting(count: int) -> np.ndarray:
    return np.arange(count, dtype="<f4")


def closed(sock: socket.socket) -> bool:
    """Wait for the end of a stream; what was not read makes it a reset."""
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


class TestTransfers:
    @pytest.mark.parametrize("count", [1, 2048, 4 << 20])
    def test_a_tensor_travels(self, ranks: Ranks, count: int) -> None:
        a, b = ranks(2)
        there, here = link(a, b)
        source, target = a.numbers(counting(count)), b.numbers(np.zeros(count))
        a.pass_on(C.LX_SEND, there, source, 4 * count)
        b.pass_on(C.LX_RECEIVE, here, target, 4 * count)
        assert np.array_equal(b.values(target), counting(count))

    def test_both_ways_in_parts(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        there, here = link(a, b)
        placed_a, placed_b = a.numbers(counting(8)), b.numbers(np.zeros(8))
        a.pass_on(C.LX_SEND, there, placed_a, 12, offset=4)
        a.pass_on(C.LX_SEND, there, placed_a, 0, offset=32)
        a.pass_on(C.LX_RECEIVE, there, placed_a, 4, offset=28)
        b.pass_on(C.LX_RECEIVE, here, placed_b, 12)
        b.pass_on(C.LX_RECEIVE, here, placed_b, 0)
        b.pass_on(C.LX_SEND, here, placed_b, 4, offset=8)
        assert b.values(placed_b).tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
        assert a.values(placed_a).tolist() == [0, 1, 2, 3, 4, 5, 6, 3]

    def test_another_size_breaks_the_link(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        there, here = link(a, b)
        source, target = a.numbers(counting(8)), b.numbers(counting(8))
        a.pass_on(C.LX_SEND, there, source, 16)
        b.pass_on(C.LX_RECEIVE, here, target, 32)
        b.post(C.DEVICE_COUNT)
        assert "it sent 16 bytes where 32 were awaited" in b.error()
        # What came is not in the tensor, and the sessions live on.
        assert np.array_equal(b.values(target), counting(8))
        assert a.device_count() == 1
        a.pass_on(C.LX_RECEIVE, there, source, 4)
        a.post(C.DEVICE_COUNT)
        assert "LX_RECEIVE" in a.error()
        b.pass_on(C.LX_SEND, here, target, 4)
        b.post(C.DEVICE_COUNT)
        assert "the link broke: it sent 16 bytes" in b.error()

    def test_a_range_outside_of_the_tensor(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        there, _ = link(a, b)
        a.pass_on(C.LX_SEND, there, a.numbers(counting(8)), 32, offset=4)
        a.post(C.DEVICE_COUNT)
        assert "32 bytes at 4 in a tensor of 32" in a.error()

    @pytest.mark.parametrize("command", [C.LX_SEND, C.LX_RECEIVE])
    def test_no_such_link(self, ranks: Ranks, command: Command) -> None:
        (a,) = ranks(1)
        a.pass_on(command, 1, a.numbers(counting(8)), 4)
        a.post(C.DEVICE_COUNT)
        assert f"{command.name}: there is no link 1" in a.error()

    def test_numbers_are_not_used_again(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        assert link(a, b) == (1, 1)
        for rank in (a, b):
            rank.post(C.LX_UNLINK, m.U32.pack(1))
        assert link(a, b) == (2, 2)
        a.post(C.LX_UNLINK, m.U32.pack(1))
        a.post(C.DEVICE_COUNT)
        assert "there is no link 1" in a.error()


class TestBreaking:
    """Who waits hears of it, soon and with the peer's name."""

    def waiting(self, ranks: Ranks) -> tuple[Rank, Rank, int]:
        a, b = ranks(2)
        there, here = link(a, b)
        b.pass_on(C.LX_RECEIVE, here, b.numbers(counting(8)), 32)
        b.post(C.DEVICE_COUNT)
        return a, b, there

    def test_unlink(self, ranks: Ranks) -> None:
        a, b, there = self.waiting(ranks)
        a.post(C.LX_UNLINK, m.U32.pack(there))
        assert re.search(r"127\.0\.0\.1:\d+: LX_RECEIVE: it closed", b.error())
        assert b.device_count() == 1

    def test_the_peer_is_killed(self, ranks: Ranks, worker: Worker) -> None:
        a, b, _ = self.waiting(ranks)
        os.kill(worker.session_of(a.name), signal.SIGKILL)
        assert "LX_RECEIVE" in b.error()

    def test_the_peers_client_leaves(self, ranks: Ranks) -> None:
        a, b, _ = self.waiting(ranks)
        a.close()
        assert "it closed the connection" in b.error()

    def test_an_earlier_command_failed_there(self, ranks: Ranks) -> None:
        a, b, there = self.waiting(ranks)
        source = a.numbers(counting(8))
        a.post(C.LX_UNLINK, m.U32.pack(99))
        # Not done any more, and the other end is not to wait for it.
        a.pass_on(C.LX_SEND, there, source, 32)
        assert "it closed the connection" in b.error()
        a.post(C.DEVICE_COUNT)
        assert "there is no link 99" in a.error()

    def test_what_is_freed_after_a_failure_is_gone(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        there, _ = link(a, b)
        a.post(C.LX_UNLINK, m.U32.pack(99))
        a.post(C.LX_UNLINK, m.U32.pack(there))
        a.post(C.DEVICE_COUNT)
        assert "there is no link 99" in a.error()
        a.post(C.LX_UNLINK, m.U32.pack(there))
        a.post(C.DEVICE_COUNT)
        assert f"there is no link {there}" in a.error()

    def test_a_session_without_work_gives_signs_of_life(self, ranks: Ranks) -> None:
        """Its client may be late, after the peer was told to wait."""
        (a,) = ranks(1)
        heard = a.listen()
        a.accept(heard)
        sock = socket.create_connection(("127.0.0.1", heard.port), 5)
        duplex = introduce(sock, heard.ticket, b"")
        a.linked()
        assert select.select([duplex], [], [], 5)[0]
        sign = bytearray(len(SIGN_OF_LIFE))
        assert duplex.receive_some(memoryview(sign)) == len(sign)
        assert sign == SIGN_OF_LIFE
        duplex.close()

    def test_who_waits_may_leave(self, ranks: Ranks, worker: Worker) -> None:
        _, b, _ = self.waiting(ranks)
        pid = worker.session_of(b.name)
        b.close()
        assert "the client left" in worker.end_of(b.name)
        until(lambda: pid not in worker.sessions())


class TestTickets:
    def heard(self, rank: Rank) -> tuple[socket.socket, Listening]:
        """A stream of no server to the peer port, and what it needs to know."""
        heard = rank.listen()
        sock = socket.create_connection(("127.0.0.1", heard.port), 5)
        return sock, heard

    def test_a_server_says_that_it_has_peers(self, worker: Worker) -> None:
        with RawClient(worker.endpoint, V8) as client:
            client.hello()
            answer = client.ask(C.LX_START, LxStart(1).encode())
            assert LxStartAnswer.decode(answer).has_peers

    def test_who_comes_first_is_kept(self, ranks: Ranks) -> None:
        """LX_CONNECT may arrive before LX_ACCEPT does."""
        a, b = ranks(2)
        heard = b.listen()
        a.connect(b, heard)
        with socket.create_connection(("127.0.0.1", heard.port), 5) as other:
            # Once this was looked at, so was that.
            other.sendall(b"x" * 16)
            assert closed(other)
        b.accept(heard)
        assert (a.linked(), b.linked()) == (1, 1)

    def test_another_secret(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        heard = b.listen()
        forged = heard._replace(ticket=Ticket(heard.ticket.id, bytes(32)))
        a.connect(b, forged)
        b.accept(heard)
        assert "does not know the secret" in b.error()
        assert "it closed the connection" in a.error()

    def test_a_listener_without_the_secret(self, ranks: Ranks) -> None:
        (a,) = ranks(1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            heard = Listening(listener.getsockname()[1], Ticket(b"i" * 16, b"s" * 32))
            a.connect(a, heard)
            stream, _ = listener.accept()
            with stream:
                assert stream.recv(48, socket.MSG_WAITALL)[:16] == b"i" * 16
                stream.sendall(bytes(32))
                assert "does not know the secret" in a.error()

    def test_a_ticket_serves_once(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        heard = b.listen()
        a.connect(b, heard)
        b.accept(heard)
        assert (a.linked(), b.linked()) == (1, 1)
        a.connect(b, heard)
        assert "LX_CONNECT" in a.error()
        b.accept(heard)
        assert "not a ticket of this session, or used before" in b.error()

    def test_two_streams_with_one_ticket(self, ranks: Ranks) -> None:
        (a,) = ranks(1)
        first, heard = self.heard(a)
        with first, socket.create_connection(("127.0.0.1", heard.port), 5) as second:
            first.sendall(heard.ticket.id)
            # Until it was looked at, it may be the second one that is kept.
            a.ask(C.LX_PING)
            second.sendall(heard.ticket.id)
            assert select.select([first, second], [], [], 5)[0] == [second]
            assert closed(second)

    def test_the_ticket_of_another_session(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        a.accept(b.listen())
        assert "not a ticket of this session" in a.error()

    def test_nobody_comes(self, ranks: Ranks) -> None:
        (a,) = ranks(1)
        a.accept(a.listen(), patience_ms=50)
        assert "nobody came in time" in a.error()
        assert a.device_count() == 1

    def test_nobody_is_there(self, ranks: Ranks) -> None:
        (a,) = ranks(1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        a.connect(a, Listening(port, Ticket(bytes(16), bytes(32))))
        assert f"127.0.0.1:{port}: LX_CONNECT: Connection refused" in a.error()

    @pytest.mark.parametrize("host", ["", "no.such.name.invalid", "a\0b", "h" * 255])
    def test_a_host_that_is_none(self, ranks: Ranks, host: str) -> None:
        (a,) = ranks(1)
        a.connect(a, Listening(1, Ticket(bytes(16), bytes(32))), host=host)
        assert "LX_CONNECT" in a.error()
        assert a.device_count() == 1

    def test_too_much_patience(self, ranks: Ranks) -> None:
        (a,) = ranks(1)
        body = LinkAccept(a.listen().ticket, MAX_PATIENCE_MS + 1).encode()
        a.post(C.LX_ACCEPT, body)
        assert "patience of 60001 ms" in a.error()

    def test_too_many_tickets(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        for _ in range(64):
            a.listen()
        a.post(C.LX_LISTEN)
        assert "it has 64 tickets already" in a.error()
        b.listen()

    def test_tickets_die_with_their_client(self, ranks: Ranks, worker: Worker) -> None:
        (a,) = ranks(1)
        stream, heard = self.heard(a)
        a.close()
        worker.end_of(a.name)
        with stream:
            stream.sendall(heard.ticket.id)
            assert closed(stream)

    @pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"short"])
    def test_strangers_are_closed(
        self, ranks: Ranks, worker: Worker, data: bytes
    ) -> None:
        (a,) = ranks(1)
        stream, _ = self.heard(a)
        with stream:
            name = "{}:{}".format(*stream.getsockname())
            stream.sendall(data)
            # By then the server may have closed it, with some of the data unread.
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_WR)
            assert closed(stream)
        worker.logged(rf"peer {re.escape(name)} .*, closed")


class TestTls:
    @pytest.fixture
    def pair(
        self, ranks: Ranks, secured: Worker, keys: Keys
    ) -> Iterator[tuple[Rank, Rank]]:
        """Clients of a server without TLS and of one with it."""
        (a,) = ranks(1)
        with Rank(secured.endpoint, tls=client_context(keys.ours.client)) as b:
            b.hello()
            b.start()
            yield a, b

    def test_a_link_to_a_server_with_tls(self, pair: tuple[Rank, Rank]) -> None:
        a, b = pair
        there, here = link(a, b)
        source, target = a.numbers(counting(1 << 20)), b.numbers(np.zeros(1 << 20))
        a.pass_on(C.LX_SEND, there, source, 4 << 20)
        b.pass_on(C.LX_RECEIVE, here, target, 4 << 20)
        assert np.array_equal(b.values(target), counting(1 << 20))
        b.pass_on(C.LX_SEND, here, target, 8, offset=8)
        a.pass_on(C.LX_RECEIVE, there, source, 8)
        assert a.values(source)[:4].tolist() == [2, 3, 2, 3]

    def test_another_certificate(self, pair: tuple[Rank, Rank], keys: Keys) -> None:
        a, b = pair
        pem = Path(keys.others.path("server.pem")).read_text()
        heard = b.listen()
        other = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN") :])
        a.connect(b, heard, certificate=other)
        b.accept(heard)
        assert "its certificate is not the expected one" in a.error()
        assert "LX_ACCEPT" in b.error()

    def test_without_tls(self, pair: tuple[Rank, Rank]) -> None:
        a, b = pair
        heard = b.listen()
        a.connect(b, heard, certificate=b"")
        b.accept(heard)
        assert "speak TLS" in b.error()
        assert "LX_CONNECT" in a.error()


class TestPort:
    def test_off(self, ranks: Ranks) -> None:
        with running_worker("--protocol", "8", "--peer-port", "off") as alone:
            a, b = *ranks(1, alone), *ranks(1)
            a.post(C.LX_LISTEN)
            assert "it has no peer port" in a.error()
            # It may still connect to others.
            assert link(a, b) == (1, 1)
            with RawClient(alone.endpoint, V8) as client:
                client.hello()
                answer = client.ask(C.LX_START, LxStart(1).encode())
                assert not LxStartAnswer.decode(answer).has_peers

    def test_in_use(self, ranks: Ranks) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            options = ("--protocol", "8", "--peer-port", str(port))
            with running_worker(*options) as worker:
                assert worker.log.count(f"no peer port {port}") == 1
                (a,) = ranks(1, worker)
                assert a.device_count() == 1

    def test_allow(self) -> None:
        options = ("--protocol", "8", "--allow", "127.0.0.1")
        with running_worker(*options) as worker, ExitStack() as stack:
            client = RawClient(worker.endpoint, V8, source="127.0.0.1")
            client = stack.enter_context(client)
            client.hello()
            client.ask(C.LX_START, LxStart(1).encode())
            heard = Listening.decode(client.ask(C.LX_LISTEN))
            there = ("127.0.0.1", heard.port)
            source = ("127.0.0.7", 0)
            with socket.create_connection(there, 5, source) as stream:
                assert closed(stream)
            worker.logged(r"peer 127\.0\.0\.7:\d+ is not in --allow, closed")
