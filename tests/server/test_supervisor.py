"""Clients side by side, sessions that die, and how a server starts and ends."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from longwire.native.profiles import DEFAULT_ENGINE
from longwire.server import pool
from longwire.server import supervisor as module
from longwire.server.config import SessionConfig
from longwire.server.limits import Limits
from longwire.server.pool import Session
from longwire.server.supervisor import Supervisor
from longwire.transport.endpoint import Endpoint
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.messages import AllocBuffer, BufferClear
from support.client import RawClient
from support.tensors import Sum, graph, tensor
from support.worker import PROC, Worker, alive, running_worker, serve_command, until

needs_proc = pytest.mark.skipif(
    not (PROC / "self/maps").exists(), reason="needs Linux's /proc"
)
pytestmark = needs_proc

MUL_MAT = 29
GET_ROWS = 40
I32 = 26
SOON_S = 3.0
"""A second would do on a machine that has nothing else to do."""

Connect = Callable[[], RawClient]
SPARES, MAX_SPARES = Limits().spares, Limits().most_spares


@pytest.fixture(params=[V8], ids=["8.0.0"])
def dialect(request: pytest.FixtureRequest) -> Any:
    """The supervisor knows of no dialect."""
    return request.param


def endless(client: RawClient) -> None:
    """Start a graph that keeps a session busy for longer than any test."""
    size = 1024
    buffer = client.alloc(3 * 4 * size * size)
    a = tensor(1, buffer, 0, ne=(size, size))
    products = [
        tensor(2 + i, buffer, 4 * size * size, (size, size), 0, MUL_MAT, [a, a])
        for i in range(5000)
    ]
    client.compute(graph(products, [a]))


class TestSideBySide:
    def test_two_at_once(self, connect: Connect) -> None:
        one, two = Sum(connect()), Sum(connect())
        two.client.write(two.a, bytes(32))
        two.expected = bytes(32) + two.expected[32:64] * 2
        for again in (False, True, True):
            one.check(again)
            two.check(again)

    def test_answered_while_another_computes(
        self, worker: Worker, connect: Connect
    ) -> None:
        busy = connect()
        endless(busy)
        busy.post(Command.DEVICE_COUNT)
        started = time.monotonic()
        Sum(connect()).check()
        assert time.monotonic() - started < SOON_S
        readable, _, _ = select.select([busy.socket], [], [], 0)
        assert not readable
        os.kill(worker.session_of(busy.name), signal.SIGKILL)

    def test_the_idle_disturb_nobody(self, worker: Worker, connect: Connect) -> None:
        before = len(worker.sessions())
        with ExitStack() as stack:
            for _ in range(64):
                silent = (worker.endpoint.host, worker.endpoint.port)
                stack.enter_context(socket.create_connection(silent, 5))
            for _ in range(3):
                connect()
            started = time.monotonic()
            Sum(connect()).check()
            assert time.monotonic() - started < SOON_S
            # Silence costs no process.
            assert len(worker.sessions()) <= before + 4 + SPARES

    def test_the_silent_may_speak_late(self, worker: Worker, connect: Connect) -> None:
        with RawClient(worker.endpoint, V8) as late:
            Sum(connect()).check()
            late.hello()
            Sum(late).check()

    def test_a_rush_leaves_few_processes(
        self, worker: Worker, connect: Connect
    ) -> None:
        clients = [connect() for _ in range(10)]
        assert len(worker.sessions()) >= 10
        for client in clients:
            client.close()
        until(lambda: len(worker.sessions()) <= MAX_SPARES, 15)
        Sum(connect()).check()

    def test_a_half_sent_request(self, worker: Worker, connect: Connect) -> None:
        client = connect()
        client.send(b"\x0f\x00")
        Sum(connect()).check()
        client.close()
        assert "the client left" in worker.end_of(client.name)


class TestReuse:
    def test_a_session_that_held_nothing_serves_again(self) -> None:
        served = []
        with running_worker() as worker:
            for _ in range(3):
                with RawClient(worker.endpoint, V8) as client:
                    client.hello()
                    served.append(worker.session_of(client.name))
                assert "the client left" in worker.end_of(client.name)
        assert len(set(served)) == 1

    def test_a_session_that_held_a_buffer_ends(
        self, worker: Worker, connect: Connect
    ) -> None:
        with connect() as client:
            pid = worker.session_of(client.name)
            client.free(client.alloc(64))
            assert client.device_count() == 1
        until(lambda: not alive(pid))
        with connect() as client:
            assert worker.session_of(client.name) != pid

    def test_memory_comes_back(self, worker: Worker, connect: Connect) -> None:
        until(lambda: len(worker.sessions()) <= MAX_SPARES, 15)
        before = worker.resident()
        size = 500 << 20
        with connect() as client:
            buffer = client.alloc(size)
            client.post(Command.BUFFER_CLEAR, BufferClear(buffer.handle, 1).encode())
            assert client.read(tensor(1, buffer, size - 32), 0, 32) == b"\1" * 32
            assert worker.resident() > before + size - (50 << 20)
        until(lambda: worker.resident() < before + (100 << 20))


class TestDeath:
    """One session's end is nobody else's."""

    @pytest.fixture
    def neighbour(self, connect: Connect) -> Sum:
        total = Sum(connect())
        total.check()
        return total

    def after(self, worker: Worker, client: RawClient, pid: int) -> None:
        client.expect_closed()
        until(lambda: not alive(pid))
        with RawClient(worker.endpoint, V8) as another:
            another.hello()
            Sum(another).check()
        until(lambda: len(worker.sessions()) >= SPARES)

    def test_killed(self, worker: Worker, connect: Connect, neighbour: Sum) -> None:
        client = connect()
        pid = worker.session_of(client.name)
        os.kill(pid, signal.SIGKILL)
        self.after(worker, client, pid)
        assert "died: SIGKILL" in worker.end_of(client.name)
        neighbour.check(again=True)

    def test_killed_while_spare(self, worker: Worker, connect: Connect) -> None:
        client = connect()
        served = set(map(int, re.findall(r"\(pid (\d+)\) serves", worker.log)))
        os.kill(max(set(worker.sessions()) - served), signal.SIGKILL)
        worker.logged(r"session \d+ died: SIGKILL")
        assert client.device_count() == 1
        Sum(connect()).check()

    def test_aborted(self, worker: Worker, connect: Connect, neighbour: Sum) -> None:
        client = connect()
        pid = worker.session_of(client.name)
        buffer = client.alloc(1 << 12)
        # Every record is in order; that there is no row 99 is for the kernel to see.
        table = tensor(1, buffer, 0, ne=(16, 4))
        ids = tensor(2, buffer, 1024, ne=(1,), type_number=I32)
        rows = tensor(3, buffer, 2048, ne=(16, 1), op=GET_ROWS, src=[table, ids])
        client.write(ids, struct.pack("<i", 99))
        client.compute(graph([rows], [table, ids]))
        self.after(worker, client, pid)
        assert "ggml aborted: " in worker.end_of(client.name)
        worker.logged("GGML_ASSERT")
        worker.logged("in graph_compute")
        worker.logged(f"{re.escape(client.name)} died: SIGABRT")
        neighbour.check(again=True)

    def test_crashed(self, worker: Worker, connect: Connect, neighbour: Sum) -> None:
        client = connect()
        pid = worker.session_of(client.name)
        os.kill(pid, signal.SIGSEGV)
        self.after(worker, client, pid)
        assert "died: SIGSEGV" in worker.end_of(client.name)
        # The log says where the session was.
        worker.logged("Fatal Python error: Segmentation fault")
        neighbour.check(again=True)


class TestTheEnd:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signals(self, number: signal.Signals) -> None:
        with running_worker() as worker, ExitStack() as stack:
            silent, holder, busy = (
                stack.enter_context(RawClient(worker.endpoint, V8)) for _ in range(3)
            )
            holder.hello()
            Sum(holder).check()
            busy.hello()
            endless(busy)
            # The terminal's Ctrl-C goes to every process of the group.
            if number == signal.SIGINT:
                os.killpg(worker.process.pid, number)
            else:
                worker.process.send_signal(number)
            assert worker.ended() == 0
            for client in (silent, holder, busy):
                client.expect_closed()

    def test_at_once(self) -> None:
        process = subprocess.Popen(
            serve_command(), stderr=subprocess.PIPE, start_new_session=True
        )
        until(lambda: Worker(process, Endpoint("", 1), PROC).sessions())
        process.terminate()
        _, errors = process.communicate(timeout=6)
        assert (process.returncode, errors) == (0, b"")

    def test_no_session_outlives_the_supervisor(self) -> None:
        with running_worker(exit_code=-signal.SIGKILL) as worker:
            with RawClient(worker.endpoint, V8) as client:
                client.hello()
                sessions = worker.sessions()
                worker.process.kill()
                worker.process.wait()
                assert client.device_count() == 1
            until(lambda: not any(map(alive, sessions)))

    def failure(self, *options: str) -> str:
        done = subprocess.run(
            serve_command(*options), capture_output=True, text=True, timeout=20
        )
        assert done.returncode == 2
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        return lines[0]

    def test_no_such_device(self) -> None:
        line = self.failure("--device", "CPU,NOPE")
        assert re.search(r"no device named 'NOPE'; this engine has: CPU\b", line)

    def test_no_such_engine(self) -> None:
        assert "engine 'nope' cannot be loaded" in self.failure("--engine", "nope")

    def test_port_in_use(self, worker: Worker, connect: Connect) -> None:
        line = self.failure("--port", str(worker.endpoint.port))
        assert f"cannot bind {worker.endpoint}: Address already in use" in line
        assert connect().device_count() == 1


def test_the_supervisor_never_loads_the_engine(
    worker: Worker, connect: Connect
) -> None:
    client = connect()
    Sum(client).check()

    def maps(pid: int) -> str:
        return (PROC / str(pid) / "maps").read_text()

    assert "xllamacpp" in maps(worker.session_of(client.name))
    assert "xllamacpp" not in maps(worker.process.pid)


class TestInside:
    """A supervisor in this process, where limits and sessions can be changed."""

    @contextmanager
    def supervisor(
        self, grace_s: float = 10, limits: Limits | None = None
    ) -> Iterator[Endpoint]:
        ready = threading.Event()
        config = SessionConfig(DEFAULT_ENGINE, n_threads=1, grace_s=grace_s)
        server = Supervisor("127.0.0.1", 0, config, lambda *_: ready.set(), limits)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert ready.wait(10)
            yield Endpoint(*server.address)
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()
        server.stop()

    @pytest.mark.parametrize(
        "report", ['{"event": "claim", "size": Infinity}', "[" * 60_000]
    )
    def test_a_session_that_talks_nonsense(
        self,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        report: str,
    ) -> None:
        hear, mad = Session.hear, list[Session]()

        def mishear(session: Session) -> list[dict[str, Any]] | None:
            if session.peer is not None and not mad:
                mad.append(session)
                session.received += report.encode() + b"\n"
            return hear(session)

        monkeypatch.setattr(Session, "hear", mishear)
        with self.supervisor() as endpoint:
            with RawClient(endpoint, V8) as client:
                client.hello()
                client.post(Command.ALLOC_BUFFER, AllocBuffer(0, 64).encode())
                assert client.socket.recv(1) == b""
            with RawClient(endpoint, V8) as client:
                client.hello()
        assert "reports nonsense, killed" in caplog.text

    def test_more_clients_than_sessions_wait(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        limits = Limits(clients=2)
        with self.supervisor(limits=limits) as endpoint, ExitStack() as stack:

            def connect() -> RawClient:
                return stack.enter_context(RawClient(endpoint, V8))

            served = [connect(), connect()]
            for client in served:
                client.hello()
            waiting = [connect() for _ in range(20)]
            for client in waiting:
                client.post(Command.HELLO, bytes(24))
            sockets = [client.socket for client in waiting]
            # Long enough for the spare sessions to be ready.
            assert select.select(sockets, [], [], 0.8)[0] == []
            for client in served:
                Sum(client).check()
                client.close()
            answered: set[RawClient] = set()
            deadline = time.monotonic() + 20
            while len(answered) < len(waiting):
                assert time.monotonic() < deadline
                for client in set(waiting) - answered:
                    if select.select([client.socket], [], [], 0.01)[0]:
                        assert len(client.answer()) == 28
                        client.close()
                        answered.add(client)
        assert caplog.text.count("all 2 places are taken") == 1

    def test_the_oldest_silent_client_goes(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        limits = Limits(silent=3)
        with self.supervisor(limits=limits) as endpoint, ExitStack() as stack:
            clients = [stack.enter_context(RawClient(endpoint, V8)) for _ in range(4)]
            clients[0].expect_closed()
            for client in clients[1:]:
                assert client.hello().major == 8
        assert f"{clients[0].name} never spoke, closed" in caplog.text

    def test_no_process_to_be_had(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        spawn, refusals = subprocess.Popen, 2
        monkeypatch.setattr(module, "_RETRY_S", 0.05)

        def popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            nonlocal refusals
            if ready and refusals:
                refusals -= 1
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return spawn(*arguments, **options)

        ready = False
        monkeypatch.setattr(subprocess, "Popen", popen)
        with self.supervisor() as endpoint:
            ready = True
            for _ in range(4):
                with RawClient(endpoint, V8) as client:
                    client.hello()
                    Sum(client).check()
        assert refusals == 0
        assert "cannot start a session: " in caplog.text

    def first_session(self, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
        """Have a script that goes on after this in place of the first session."""
        script = f"""
import os, socket, sys, time
control = socket.socket(fileno=int(sys.argv[1]))
ready = b'{{"event": "ready", "devices": [], "gaps": [], '
ready += b'"engine": "", "protocol": ""}}\\n'
control.sendall(ready)
_, (client,), _, _ = socket.recv_fds(control, 1, 1)
{script}"""
        spawn, started = subprocess.Popen, []

        def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            started.append(command)
            if len(started) == 1:
                command = [command[0], "-c", script, *command[3:]]
            return spawn(command, **options)

        monkeypatch.setattr(subprocess, "Popen", popen)

    @pytest.mark.parametrize("words", ["nonsense\\n", "[]\\n", "{}\\n", "x" * 99999])
    def test_a_session_out_of_its_mind(
        self,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        words: str,
    ) -> None:
        script = f"control.sendall(b'{words}'); time.sleep(60)"
        self.first_session(monkeypatch, script)
        with self.supervisor() as endpoint:
            with RawClient(endpoint, V8) as client:
                client.post(Command.HELLO, bytes(24))
                client.expect_closed()
            with RawClient(endpoint, V8) as client:
                client.hello()
                Sum(client).check()
            until(lambda: "died: SIGKILL" in caplog.text)

    def test_a_session_that_does_not_exit(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(pool, "_STOP_S", SOON_S)
        script = "control.close(); os.close(client); time.sleep(60)"
        self.first_session(monkeypatch, script)
        with self.supervisor() as endpoint:
            with RawClient(endpoint, V8) as client:
                client.post(Command.HELLO, bytes(24))
                client.expect_closed()
            started = time.monotonic()
            with RawClient(endpoint, V8) as client:
                client.hello()
                Sum(client).check()
            assert time.monotonic() - started < SOON_S
            until(lambda: "died: SIGKILL" in caplog.text)

    def test_a_graph_that_outlives_its_client(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "longwire.serve")
        with self.supervisor(grace_s=0.2) as endpoint:
            with RawClient(endpoint, V8) as client:
                client.hello()
                endless(client)
            found = re.search(rf"\(pid (\d+)\) serves {client.name}\n", caplog.text)
            assert found
            until(lambda: not alive(int(found[1])))
            until(lambda: "its last command took over 0.2 s" in caplog.text)
