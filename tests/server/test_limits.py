"""What one client may take: memory, time, and a place."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from longwire.server.limits import Ledger, Limits
from longwire.server.watch import Deadlines, Sight
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.frames import REQUEST_HEADER
from support.client import RawClient
from support.tensors import Sum, graph, tensor
from support.worker import PROC, Worker, running_worker, until

needs_proc = pytest.mark.skipif(
    not (PROC / "self/maps").exists(), reason="needs Linux's /proc"
)

MIB = 1 << 20
MUL_MAT = 29
SOON_S = 4.0
"""One would do on a machine that has nothing else to do."""


class TestLedger:
    ledger = property(lambda self: Ledger(Limits(memory=100_000, client_memory=70_000)))

    def test_each_and_all(self) -> None:
        ledger = self.ledger
        assert ledger.claim("a", 60_000) is None
        refusal = ledger.claim("a", 20_000)
        assert refusal == "this client holds 60000 of 70000 bytes allowed"
        refusal = ledger.claim("b", 50_000)
        assert refusal == "all clients hold 60000 of 100000 bytes allowed"
        assert ledger.claim("b", 40_000) is None
        assert ledger.total == 100_000

    def test_what_is_freed_comes_back(self) -> None:
        ledger = self.ledger
        for _ in range(5):
            assert ledger.claim("a", 70_000) is None
            ledger.release("a", 70_000)
        assert ledger.total == 0

    def test_who_leaves_holds_nothing(self) -> None:
        ledger = self.ledger
        for _ in range(3):
            assert ledger.claim("a", 70_000) is None
            ledger.drop("a")
            ledger.drop("a")
        assert ledger.total == 0

    def test_nobody_frees_what_is_not_theirs(self) -> None:
        ledger = self.ledger
        assert ledger.claim("a", 70_000) is None
        ledger.release("b", 70_000)
        ledger.release("a", 90_000)
        ledger.release("a", 90_000)
        assert ledger.total == 0

    def test_small_buffers_count(self) -> None:
        ledger = self.ledger
        granted = sum(ledger.claim("a", i % 2) is None for i in range(100))
        assert granted == 70_000 // 4096

    def test_room(self) -> None:
        ledger = self.ledger
        assert ledger.room("a") == (70_000, 70_000)
        ledger.claim("b", 50_000)
        assert ledger.room("a") == (50_000, 70_000)
        assert ledger.room("b") == (20_000, 70_000)
        assert Ledger(Limits()).room("a") == (None, None)
        assert Ledger(Limits(memory=9)).room("a") == (9, 9)


class TestDeadlines:
    def verdict(
        self, deadlines: Deadlines, *sights: tuple[float, Sight]
    ) -> tuple[str, float] | None:
        for now, sight in sights:
            if (found := deadlines.judge(now, sight)) is not None:
                return found.cause, now
        return None

    def test_hello(self) -> None:
        # A byte per second is no HELLO.
        sights = [(t, Sight(0, t, True, False, "HELLO")) for t in range(1, 99)]
        assert self.verdict(Deadlines(10, 0, 60), *sights) == ("handshake", 11)
        assert self.verdict(Deadlines(0, 0, 60), *sights) == ("stalled", 61)
        assert self.verdict(Deadlines(0, 0, 0), *sights) is None

    def test_hello_is_not_all_of_a_handshake(self) -> None:
        """A token is to be proven in the same time, whatever was done before."""
        locked = [(t, Sight(t, 99 * t, True, False, None)) for t in range(1, 99)]
        assert self.verdict(Deadlines(10, 0, 60), *locked) == ("handshake", 11)
        # The server itself may take its time.
        busy = [(t, Sight(1, 99, False, False, "LX_PROVE")) for t in range(1, 99)]
        assert self.verdict(Deadlines(10, 0, 60), *busy) is None
        admitted = [(t, Sight(3, 99, True, True, None)) for t in range(1, 99)]
        assert self.verdict(Deadlines(10, 0, 60), *admitted) is None

    def test_idle(self) -> None:
        quiet = [(t, Sight(7, 0, True, True, None)) for t in range(50)]
        assert self.verdict(Deadlines(10, 20, 60), *quiet) == ("idle", 20)
        assert self.verdict(Deadlines(10, 0, 60), *quiet) is None
        busy = [(t, Sight(7 + t // 9, 0, True, True, None)) for t in range(50)]
        assert self.verdict(Deadlines(10, 20, 60), *busy) is None
        computing = [(t, Sight(7, 0, False, True, "GET_TENSOR")) for t in range(50)]
        assert self.verdict(Deadlines(10, 20, 60), *computing) is None
        after = [(50 + t, sight) for t, sight in quiet]
        both = [*computing, *after]
        assert self.verdict(Deadlines(10, 20, 60), *both) == ("idle", 70)

    def test_stalled(self) -> None:
        def upload(rate: int) -> list[tuple[float, Sight]]:
            return [
                (t, Sight(7, t * rate, True, True, "SET_TENSOR")) for t in range(200)
            ]

        deadlines = [Deadlines(10, 20, 60) for _ in range(3)]
        assert self.verdict(deadlines[0], *upload(0)) == ("stalled", 60)
        assert self.verdict(deadlines[1], *upload(100)) == ("stalled", 60)
        assert self.verdict(deadlines[2], *upload(2000)) is None

    def test_how_often(self) -> None:
        assert Deadlines(0, 0, 0).tick_s == 1
        assert Deadlines(10, 0, 60).tick_s == 1
        assert Deadlines(10, 2, 60).tick_s == 0.5
        assert Deadlines(10, 0.01, 60).tick_s == 0.02


def greeted(worker: Worker, stack: ExitStack) -> RawClient:
    client = stack.enter_context(RawClient(worker.endpoint, V8))
    client.hello()
    return client


def memory(client: RawClient) -> m.DeviceMemory:
    return m.DeviceMemory.decode(client.ask(Command.GET_DEVICE_MEMORY, m.U32.pack(0)))


@needs_proc
class TestMemory:
    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls) -> Iterator[Worker]:
        limits = ("--memory-limit", "64MiB", "--client-memory-limit", "40MiB")
        with running_worker(*limits) as worker:
            yield worker

    @pytest.fixture
    def clients(self, worker: Worker) -> Iterator[tuple[RawClient, RawClient]]:
        with ExitStack() as stack:
            yield greeted(worker, stack), greeted(worker, stack)

    def test_reported(self, clients: tuple[RawClient, RawClient]) -> None:
        one, two = clients
        # Sessions of the tests before have to be gone.
        until(lambda: memory(two).free == 40 * MIB)
        assert memory(one).total == 40 * MIB
        buffer = one.alloc(30 * MIB)
        assert (memory(one).free, memory(two).free) == (10 * MIB, 34 * MIB)
        one.free(buffer)
        assert memory(one).free == 40 * MIB
        until(lambda: memory(two).free == 40 * MIB)

    def test_of_one_client(
        self, worker: Worker, clients: tuple[RawClient, RawClient]
    ) -> None:
        one, _ = clients
        until(lambda: memory(one).free == 40 * MIB)
        assert one.alloc(41 * MIB) == (0, 0, 0)
        assert one.alloc(1 << 62) == (0, 0, 0)
        worker.logged(rf"no room for {41 * MIB} bytes: this client holds 0")
        assert one.alloc(40 * MIB).handle
        assert one.alloc(0) == (0, 0, 0)
        assert one.device_count() == 1

    def test_of_all_clients(
        self, worker: Worker, clients: tuple[RawClient, RawClient]
    ) -> None:
        one, two = clients
        until(lambda: memory(two).free == 40 * MIB)
        kept = one.alloc(40 * MIB)
        assert two.alloc(30 * MIB) == (0, 0, 0)
        worker.logged(r"bytes: all clients hold 41943040 of 67108864 bytes")
        assert two.alloc(20 * MIB).handle
        one.free(kept)
        assert one.device_count() == 1
        assert two.alloc(20 * MIB).handle

    def test_comes_back_from_the_dead(
        self, worker: Worker, clients: tuple[RawClient, RawClient]
    ) -> None:
        one, two = clients
        until(lambda: memory(two).free == 40 * MIB)
        assert one.alloc(40 * MIB).handle
        assert memory(two).free == 24 * MIB
        os.kill(worker.session_of(one.name), signal.SIGKILL)
        until(lambda: memory(two).free == 40 * MIB)
        assert two.alloc(40 * MIB).handle

    def test_comes_back_from_those_who_left(
        self, clients: tuple[RawClient, RawClient]
    ) -> None:
        one, two = clients
        until(lambda: memory(two).free == 40 * MIB)
        assert one.alloc(40 * MIB).handle
        one.close()
        until(lambda: memory(two).free == 40 * MIB)


@needs_proc
class TestPatience:
    """Who lacks it is cut at the deadline, while a neighbour is served."""

    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls) -> Iterator[Worker]:
        limits = {"handshake": "0.8", "idle": "1.6", "stall": "0.8"}
        options = [(f"--{name}-timeout", limit) for name, limit in limits.items()]
        with running_worker(*(word for option in options for word in option)) as worker:
            yield worker

    @pytest.fixture
    def neighbour(self, worker: Worker) -> Iterator[Sum]:
        with ExitStack() as stack:
            total = Sum(greeted(worker, stack))
            total.check()
            yield total

    def cut(self, client: RawClient, neighbour: Sum, keep: bytes = b"") -> float:
        """Wait for the end of a client; returns after how many seconds it came."""
        started = time.monotonic()
        while not select.select([client.socket], [], [], 0.1)[0]:
            assert time.monotonic() - started < 9
            try:
                client.send(keep)
            except ConnectionError:
                break
            neighbour.check(again=True)
        lasted = time.monotonic() - started
        client.expect_closed()
        neighbour.check(again=True)
        return lasted

    def test_silent(self, worker: Worker, neighbour: Sum) -> None:
        with RawClient(worker.endpoint, V8) as client:
            assert 0.5 < self.cut(client, neighbour) < SOON_S
            worker.logged(f"{client.name} said nothing for 0.8 s, closed")

    @pytest.mark.parametrize("begun", [b"\x0e", REQUEST_HEADER.pack(0x0E, 24)])
    def test_half_a_hello(self, worker: Worker, neighbour: Sum, begun: bytes) -> None:
        with RawClient(worker.endpoint, V8) as client:
            client.send(begun)
            assert 0.5 < self.cut(client, neighbour) < SOON_S
            assert "no complete handshake in time" in worker.end_of(client.name)

    def test_dribbled_hello(self, worker: Worker, neighbour: Sum) -> None:
        with RawClient(worker.endpoint, V8) as client:
            client.send(REQUEST_HEADER.pack(0x0E, 24))
            assert 0.5 < self.cut(client, neighbour, keep=b"\0") < SOON_S
            assert "no complete handshake in time" in worker.end_of(client.name)

    def test_idle(self, worker: Worker, neighbour: Sum) -> None:
        with ExitStack() as stack:
            client = greeted(worker, stack)
            assert 1.0 < self.cut(client, neighbour) < 6
            assert "no command for 1.6 s" in worker.end_of(client.name)

    @pytest.mark.parametrize(
        ("begun", "keep"), [(1, b""), (9, b"\0"), (40, b""), (40, b"\0")]
    )
    def test_in_a_message(
        self, worker: Worker, neighbour: Sum, begun: int, keep: bytes
    ) -> None:
        with ExitStack() as stack:
            client = greeted(worker, stack)
            buffer = client.alloc(1 << 20)
            body = m.SetTensor(tensor(1, buffer).encode(), 0, 0).encode()
            head = REQUEST_HEADER.pack(Command.SET_TENSOR, len(body) + 32)
            client.send((head + body)[:begun])
            assert 0.5 < self.cut(client, neighbour, keep) < SOON_S
            assert "stalled for 0.8 s" in worker.end_of(client.name)

    def test_in_bulk_data(self, worker: Worker, neighbour: Sum) -> None:
        with ExitStack() as stack:
            client = greeted(worker, stack)
            t = tensor(1, client.alloc(1 << 20), ne=(1 << 18,))
            head = m.SetTensor(t.encode(), 0, 0).encode()
            client.send(REQUEST_HEADER.pack(Command.SET_TENSOR, len(head) + (1 << 20)))
            client.send(head)
            # Slow, but at work: twice the time that a silence may last.
            for _ in range(16):
                client.send(bytes(4096))
                neighbour.check(again=True)
                assert not select.select([client.socket], [], [], 0.1)[0]
            assert 0.5 < self.cut(client, neighbour, keep=b"\0") < SOON_S
            assert "SET_TENSOR stalled" in worker.end_of(client.name)

    def test_who_takes_no_answer(self, worker: Worker, neighbour: Sum) -> None:
        with ExitStack() as stack:
            client = greeted(worker, stack)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            size = 64 << 20
            t = tensor(1, client.alloc(size), ne=(size // 4,))
            client.post(Command.GET_TENSOR, m.GetTensor(t.encode(), 0, size).encode())
            deadline = time.monotonic() + 6
            while "does not take the answer of GET_TENSOR" not in worker.log:
                assert time.monotonic() < deadline
                neighbour.check(again=True)
                time.sleep(0.05)

    def test_computing_is_not_idle(self, worker: Worker) -> None:
        with ExitStack() as stack:
            client = greeted(worker, stack)
            size = 512
            buffer = client.alloc(3 * 4 * size * size)
            a = tensor(1, buffer, 0, ne=(size, size))

            def products(n: int) -> float:
                at = 4 * size * size
                nodes = [
                    tensor(2 + i, buffer, at, (size, size), 0, MUL_MAT, [a, a])
                    for i in range(n)
                ]
                started = time.monotonic()
                client.compute(graph(nodes, [a]))
                assert client.device_count() == 1
                return time.monotonic() - started

            n = 20
            while products(n) < 2.2:
                n *= 2
                assert n < 20_000


@needs_proc
class TestPlaces:
    def test_the_line(self) -> None:
        with running_worker("--max-clients", "1") as worker, ExitStack() as stack:
            first = greeted(worker, stack)
            others = [RawClient(worker.endpoint, V8) for _ in range(3)]
            for other in others:
                stack.enter_context(other)
                other.post(Command.HELLO, bytes(24))
            assert not select.select([o.socket for o in others], [], [], 0.3)[0]
            assert first.device_count() == 1
            first.close()
            for other in others:
                assert len(other.answer()) == 28
                other.close()
            assert worker.log.count("all 1 places are taken") == 1

    def test_waiting_is_not_silence(self) -> None:
        options = ("--max-clients", "1", "--handshake-timeout", "0.4")
        with running_worker(*options) as worker, ExitStack() as stack:
            first = greeted(worker, stack)
            other = stack.enter_context(RawClient(worker.endpoint, V8))
            other.post(Command.HELLO, bytes(24))
            assert not select.select([other.socket], [], [], 1)[0]
            first.close()
            assert len(other.answer()) == 28

    @pytest.mark.parametrize("spares", [0, 3])
    def test_spares(self, spares: int) -> None:
        with running_worker("--spares", str(spares)) as worker, ExitStack() as stack:
            Sum(greeted(worker, stack)).check()
            until(lambda: len(worker.sessions()) == 1 + spares)
            Sum(greeted(worker, stack)).check()
            until(lambda: len(worker.sessions()) == 2 + spares)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--max-clients", "0"),
            ("--spares", "-1"),
            ("--idle-timeout", "-1"),
            ("--idle-timeout", "nan"),
            ("--memory-limit", "much"),
        ],
    )
    def test_nonsense(
        self, option: str, value: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from longwire.cli.main import main

        try:
            code = main(["serve", option, value])
        except SystemExit as exit:
            assert isinstance(exit.code, int)
            code = exit.code
        assert code == 2
        assert re.search(r"longwire.*: ", capsys.readouterr().err)
