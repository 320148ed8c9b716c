"""Running a server for years: stop, reload, be watched, and say what happens."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from longwire.server.metrics import Metrics, MetricsPage
from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from support.client import RawClient
from support.tensors import Sum, tensor
from support.worker import PROC, Worker, alive, running_worker, serve_command, until

pytestmark = pytest.mark.skipif(
    not (PROC / "self/maps").exists(), reason="needs Linux's /proc"
)

SOON_S = 3.0
"""Half a second would do on a machine that has nothing else to do."""


def greeted(worker: Worker, stack: ExitStack) -> RawClient:
    client = stack.enter_context(RawClient(worker.endpoint, V8))
    client.hello()
    return client


def refused(worker: Worker) -> bool:
    try:
        RawClient(worker.endpoint, V8).close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        # Connected just before the server closed its door.
        return False
    return False


class TestDrain:
    def test_who_computes_may_finish(self) -> None:
        with (
            running_worker("--drain-timeout", "30") as worker,
            ExitStack() as stack,
        ):
            running, done = (Sum(greeted(worker, stack)) for _ in range(2))
            silent = stack.enter_context(RawClient(worker.endpoint, V8))
            running.check()
            done.check()
            worker.process.terminate()
            until(lambda: refused(worker))
            silent.expect_closed()
            # Only they are left, without a spare.
            until(lambda: len(worker.sessions()) == 2)
            worker.logged("draining: 2 clients have 30 s to finish")
            done.client.close()
            for _ in range(5):
                running.check(again=True)
            assert alive(worker.process.pid)
            running.client.close()
            started = time.monotonic()
            assert worker.ended() == 0
            assert time.monotonic() - started < SOON_S

    def test_a_session_that_held_nothing(self) -> None:
        with running_worker("--drain-timeout", "30") as worker, ExitStack() as stack:
            client = greeted(worker, stack)
            worker.process.terminate()
            until(lambda: refused(worker))
            assert client.device_count() == 1
            client.close()
            assert worker.ended(SOON_S) == 0

    def test_nobody_there(self) -> None:
        with running_worker("--drain-timeout", "30") as worker:
            worker.process.terminate()
            assert worker.ended(SOON_S) == 0

    def test_time_is_up(self) -> None:
        with running_worker("--drain-timeout", "0.5") as worker, ExitStack() as stack:
            client = greeted(worker, stack)
            worker.process.terminate()
            until(lambda: refused(worker))
            assert client.device_count() == 1
            assert worker.ended(0.5 + SOON_S) == 0
            worker.logged("1 clients did not finish in time")
            client.expect_closed()

    @pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
    def test_impatience(self, second: signal.Signals) -> None:
        with running_worker("--drain-timeout", "30") as worker, ExitStack() as stack:
            client = greeted(worker, stack)
            worker.process.terminate()
            until(lambda: refused(worker))
            worker.process.send_signal(second)
            assert worker.ended(SOON_S) == 0
            client.expect_closed()


class TestReload:
    def test_new_spares_and_the_old_clients(self) -> None:
        with running_worker() as worker, ExitStack() as stack:
            client = greeted(worker, stack)
            serving = worker.session_of(client.name)
            until(lambda: len(worker.sessions()) == 3)
            before = set(worker.sessions())
            worker.process.send_signal(signal.SIGHUP)

            def renewed() -> bool:
                now = set(worker.sessions())
                return len(now) == 3 and now & before == {serving}

            until(renewed)
            worker.logged("SIGHUP: 2 warm sessions start anew")
            assert client.device_count() == 1
            client.close()
            # It is as good as new, but not of the new ones.
            until(lambda: not alive(serving))
            Sum(greeted(worker, stack)).check()

    @contextmanager
    def started(
        self, prelude: str, **options: Any
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A server whose process runs `prelude` first, once it listens."""
        script = f"""
import fcntl, signal, sys, termios
{prelude}
from longwire.cli.main import main
sys.exit(main(["serve", "-p", "0", "-v"]))
"""
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **options,
        )
        try:
            assert process.stdout is not None
            assert any(line.startswith(b"listening") for line in process.stdout)
            yield process
        finally:
            process.kill()
            process.communicate()

    def test_a_terminal_that_goes_takes_the_server_along(self) -> None:
        ours, theirs = os.openpty()
        prelude = "fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
        with self.started(prelude, stdin=theirs) as process:
            os.close(theirs)
            os.close(ours)
            assert process.wait(SOON_S) == 0

    def test_but_not_under_nohup(self) -> None:
        prelude = "signal.signal(signal.SIGHUP, signal.SIG_IGN)"
        with self.started(prelude, stdin=subprocess.DEVNULL) as process:
            worker = Worker(process, Endpoint("", 1), PROC)
            until(lambda: len(worker.sessions()) == 2)
            before = worker.sessions()
            os.killpg(process.pid, signal.SIGHUP)
            assert all(map(alive, before))
            process.terminate()
            assert process.wait(SOON_S) == 0
            assert not any(map(alive, before))


class TestServiceManager:
    @pytest.fixture(params=["path", "abstract"])
    def manager(
        self,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[socket.socket]:
        name = str(tmp_path / "notify")
        if request.param == "abstract":
            name = "@" + name
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.bind(name.replace("@", "\0"))
            sock.settimeout(10)
            monkeypatch.setenv("NOTIFY_SOCKET", name)
            yield sock

    def test_is_told(self, manager: socket.socket) -> None:
        with running_worker("--drain-timeout", "9") as worker, ExitStack() as stack:
            assert manager.recv(99) == b"READY=1"
            client = greeted(worker, stack)
            worker.process.terminate()
            assert manager.recv(99) == b"STOPPING=1"
            client.close()
            assert worker.ended(SOON_S) == 0
            manager.setblocking(False)
            with pytest.raises(BlockingIOError):
                manager.recv(99)

    def test_is_told_of_a_sudden_end(self, manager: socket.socket) -> None:
        with running_worker() as worker:
            assert manager.recv(99) == b"READY=1"
            worker.process.send_signal(signal.SIGINT)
            assert manager.recv(99) == b"STOPPING=1"

    def test_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/to/be/found")
        with running_worker() as worker, ExitStack() as stack:
            Sum(greeted(worker, stack)).check()

    def test_gets_the_exit_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
        with running_worker("--metrics-port", "0") as worker:
            _, port = _metrics_address(worker)
            busy = ("--metrics-port", str(port))
            for options in (busy, ("--metrics-port", "99999"), ("-d", "NOPE")):
                done = subprocess.run(
                    serve_command(*options), capture_output=True, timeout=20
                )
                assert done.returncode == 2, done.stderr


class TestLogs:
    def records(self, text: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in text.splitlines()]

    def test_json(self) -> None:
        options = ("-vv", "--log-format", "json", "--memory-limit", "1M")
        with running_worker(*options) as worker:
            with RawClient(worker.endpoint, V8) as client:
                client.hello()
                assert client.alloc(2 << 20).handle == 0
                client.post(0x77)
                client.expect_closed()
            worker.logged('"refused": "protocol"')
            worker.process.terminate()
            assert worker.ended() == 0
            records = self.records(worker.log)
        for record in records:
            moment = record["time"]
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", moment)
            assert record["level"] in ("DEBUG", "INFO", "WARNING", "ERROR")
            assert record["logger"].startswith("longwire.")
            assert record["message"]
        mine = [record for record in records if record.get("peer") == client.name]
        assert len({record["session"] for record in mine}) == 1
        assert len({record["pid"] for record in mine}) == 2
        (end,) = (record for record in mine if "commands" in record)
        assert end["refused"] == "protocol"
        assert "0x77" in end["reason"]
        assert end["commands"] == 2
        assert [r["message"] for r in mine if r["level"] == "DEBUG"] == [
            "HELLO, 24 bytes",
            "ALLOC_BUFFER, 12 bytes",
        ]
        (warning,) = (r for r in mine if "no room for" in r["message"])
        assert (warning["level"], warning["logger"]) == ("WARNING", "longwire.session")

    def test_text(self) -> None:
        with running_worker("-vv") as worker, ExitStack() as stack:
            client = greeted(worker, stack)
            worker.logged(r"\d INFO longwire.serve: session \d \(pid \d+\) serves ")
            worker.logged(r"\d DEBUG longwire.session: HELLO, 24 bytes\n")
            client.close()


def _metrics_address(worker: Worker) -> tuple[str, int]:
    output = worker.log_file.with_name("stdout").read_text()
    found = re.search(r"^metrics on (.+):(\d+)$", output, re.MULTILINE)
    assert found, output
    return found[1], int(found[2])


def get(address: tuple[str, int], path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection(*address, timeout=5)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


@contextmanager
def page(metrics: Metrics) -> Iterator[tuple[str, int]]:
    with closing(MetricsPage("127.0.0.1", 0, metrics)) as served:
        yield served.address


class TestMetrics:
    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        return tmp_path / "cache"

    @pytest.fixture
    def worker(self, cache: Path) -> Iterator[Worker]:
        options = ("--metrics-port", "0", "--memory-limit", "32M", "-c", str(cache))
        with running_worker(*options, "--handshake-timeout", "0.5") as worker:
            yield worker

    @pytest.fixture
    def figures(self, worker: Worker) -> Callable[[], dict[str, float]]:
        address = _metrics_address(worker)

        def read() -> dict[str, float]:
            status, text = get(address, "/metrics")
            assert status == 200
            lines = [line for line in text.splitlines() if line[:1] != "#"]
            pairs = [line.rpartition(" ")[::2] for line in lines]
            return {
                name.removeprefix("longwire_"): float(value)
                for name, value in pairs
                if "_created" not in name
            }

        return read

    def test_a_conversation(
        self, worker: Worker, figures: Callable[[], dict[str, float]]
    ) -> None:
        before = figures()
        assert before['refusals_total{reason="memory"}'] == 0
        with ExitStack() as stack:
            client = greeted(worker, stack)
            total = Sum(client)
            total.check()
            total.check(again=True)
            big = client.alloc(16 << 20)
            t = tensor(9, big, ne=(4 << 20,))
            ask = m.SetTensorHash(t.encode(), 0, 12345).encode()
            assert client.ask(Command.SET_TENSOR_HASH, ask) == b"\0"
            assert client.alloc(32 << 20).handle == 0
            held = figures()
            assert held["memory_bytes"] == pytest.approx(16 << 20, abs=8192)
            assert held['sessions{state="serving"}'] == 1
            # Reported while the client is still there.
            until(lambda: figures()["cache_misses_total"] == 1)
            live = figures()
            assert live["graphs_total"] == 2
            assert live["commands_total"] > 5
            assert live["graph_seconds_total"] > 0
        worker.end_of(client.name)
        until(lambda: figures()["memory_bytes"] == 0)
        found = re.search(
            r"'commands': (\d+).*'bytes_in': (\d+).*'bytes_out': (\d+)",
            worker.end_of(client.name),
        )
        assert found
        after = figures()
        assert after["commands_total"] == int(found[1]) == live["commands_total"]
        assert after['bytes_total{direction="in"}'] == int(found[2])
        assert after['bytes_total{direction="out"}'] == int(found[3])
        assert after["clients_total"] == 1
        assert after["graphs_total"] == 2
        assert after['refusals_total{reason="memory"}'] == 1

    def test_a_second_client_adds(
        self, worker: Worker, figures: Callable[[], dict[str, float]]
    ) -> None:
        for n in (1, 2, 3):
            with ExitStack() as stack:
                client = greeted(worker, stack)
                assert client.device_count() == 1
            worker.end_of(client.name)
            assert figures()["commands_total"] == 2 * n
            assert figures()["clients_total"] == n

    def test_refusals(
        self, worker: Worker, figures: Callable[[], dict[str, float]]
    ) -> None:
        with RawClient(worker.endpoint, V8) as client:
            client.post(0x77)
            client.expect_closed()
        with RawClient(worker.endpoint, V8) as client:
            client.expect_closed()
        with RawClient(worker.endpoint, V8) as client:
            client.send(b"\x0e")
            client.expect_closed()
        worker.end_of(client.name)
        after = figures()
        assert after['refusals_total{reason="protocol"}'] == 1
        assert after['refusals_total{reason="handshake"}'] == 2

    def test_a_killed_session_is_not_forgotten(
        self, worker: Worker, figures: Callable[[], dict[str, float]]
    ) -> None:
        with ExitStack() as stack:
            client = greeted(worker, stack)
            client.alloc(8 << 20)
            until(lambda: figures()["commands_total"] == 3)
            os.kill(worker.session_of(client.name), signal.SIGKILL)
            until(lambda: figures()["memory_bytes"] == 0)
            assert figures()["commands_total"] == 3

    def test_pages(self, worker: Worker) -> None:
        address = _metrics_address(worker)
        assert address[0] == "127.0.0.1"
        # Who says nothing keeps nobody waiting.
        with socket.create_connection(address), socket.create_connection(address):
            status, text = get(address, "/healthz")
            health = json.loads(text)
            assert (status, health["status"]) == (200, "ok")
            assert health["clients"] == 0 and health["spares"] > 0
            assert text.count("\n") == 1
            assert get(address, "/")[0] == 404

    def test_health(self) -> None:
        metrics = Metrics()
        with page(metrics) as address:
            for state, draining, status, word in (
                ({}, False, 503, "starting"),
                ({"starting": 2, "leaving": 1}, False, 503, "starting"),
                ({"spare": 1}, False, 200, "ok"),
                ({"serving": 1}, False, 200, "ok"),
                ({"serving": 1}, True, 200, "draining"),
                ({}, True, 503, "draining"),
            ):
                metrics.set_state(state, 0, draining)
                found, text = get(address, "/healthz")
                assert (found, json.loads(text)["status"]) == (status, word)

    def test_ends_with_readers_connected(self) -> None:
        with page(Metrics()) as address:
            reader = socket.create_connection(address)
            assert get(address, "/healthz")[0] == 503
        reader.close()
