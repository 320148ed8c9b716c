"""Real servers with tokens, TLS and address lists, and who gets something of them."""

from __future__ import annotations

import http.client
import os
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from longwire.client.connection import Connection
from longwire.client.credentials import Credentials
from longwire.client.greeting import open_connection
from longwire.client.health import Deadlines
from longwire.errors import AuthenticationFailed, ConnectionLost, RemoteFailure
from longwire.host.workers import ListeningProcess, LocalWorker
from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.transport.tls import TlsFiles, client_context
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.proof import client_proof
from support.client import ConnectionClient, RawClient
from support.keys import Keys
from support.models import GREEDY, N_TOKENS, PROMPT, exact_engine
from support.tensors import Sum, graph, tensor
from support.worker import PROC, Worker, running_worker, until

pytestmark = pytest.mark.skipif(
    not (PROC / "self/maps").exists(), reason="needs Linux's /proc"
)

SOON_S = 4.0
"""Half a second would do on a machine that has nothing else to do."""
PATIENCE_S = 20.0
MIB = 1 << 20
MUL_MAT = 29
SECOND = "a second token, for the time of a change"


def figure(worker: Worker, name: str) -> float:
    """A line of the worker's metrics page."""
    output = worker.log_file.with_name("stdout").read_text()
    found = re.search(r"^metrics on (.+):(\d+)$", output, re.MULTILINE)
    assert found, output
    page = http.client.HTTPConnection(found[1], int(found[2]), timeout=5)
    with closing(page):
        page.request("GET", "/metrics")
        text = page.getresponse().read().decode()
    line = re.search(rf"^longwire_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert line, text
    return float(line[1])


@contextmanager
def refusing(worker: Worker, reason: str) -> Iterator[None]:
    """The body makes the worker refuse exactly one client, for that reason."""
    name = f'refusals_total{{reason="{reason}"}}'
    before = figure(worker, name)
    yield
    until(lambda: figure(worker, name) > before)
    assert figure(worker, name) == before + 1


@pytest.fixture(scope="module")
def guarded(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker that asks for a token: that of our team, or a second one."""
    file = tmp_path_factory.mktemp("guarded") / "tokens"
    file.write_text(f"# two of them\n{keys.ours.token.decode()}\n{SECOND}\n")
    file.chmod(0o600)
    options = ("-vv", "--metrics-port", "0", "--token-file", str(file))
    with running_worker(*options) as worker:
        yield worker
        keys.check_unspoken(worker.log)
        assert SECOND not in worker.log


@pytest.fixture(scope="module")
def encrypted(keys: Keys) -> Iterator[Worker]:
    """A worker with mutual TLS and a token, and little patience."""
    options = ["-vv", "--metrics-port", "0", *keys.ours.serving()]
    options += ["--handshake-timeout", "2", "--stall-timeout", "1.5"]
    with running_worker(*options) as worker:
        yield worker
        keys.check_unspoken(worker.log)


@pytest.fixture(scope="module")
def listed() -> Iterator[Worker]:
    """A worker on all addresses of this machine, for some of its clients."""
    allow = ("--allow", "10.0.0.0/8,127.5.0.0/16,127.0.0.1")
    with running_worker("--metrics-port", "0", "-H", "0.0.0.0", *allow) as worker:
        yield worker


def check(connection: Connection) -> None:
    """It computes, and is closed."""
    with closing(connection):
        Sum(ConnectionClient(connection)).check()


def reach(worker: Worker) -> Endpoint:
    return Endpoint("127.0.0.1", worker.endpoint.port)


class TestToken:
    def test_each_of_them_computes(self, keys: Keys, guarded: Worker) -> None:
        for token in (keys.ours.token, SECOND.encode()):
            credentials = Credentials(token=token)
            check(open_connection(guarded.endpoint, None, credentials))

    def test_without_lx_as_well(self, keys: Keys, guarded: Worker) -> None:
        """As it is behind a tunnel."""
        with RawClient(guarded.endpoint, V8) as client:
            client.hello()
            client.prove(keys.ours.token)
            Sum(client).check()

    def test_a_client_of_llama_cpp_gets_nothing(self, guarded: Worker) -> None:
        with refusing(guarded, "authentication"):
            with RawClient(guarded.endpoint, V8) as client:
                client.hello()
                client.post(Command.DEVICE_COUNT)
                client.expect_closed()
        words = guarded.end_of(client.name)
        assert "refused: DEVICE_COUNT: " in words
        assert "a token is needed first (llama.cpp: through longwire tunnel)" in words

    def test_nor_does_one_of_ours_without_a_token(self, guarded: Worker) -> None:
        with refusing(guarded, "authentication"):
            with pytest.raises(AuthenticationFailed, match="LX_START: .*token"):
                open_connection(guarded.endpoint)

    def test_nor_one_with_another_token(self, keys: Keys, guarded: Worker) -> None:
        credentials = Credentials(token=keys.others.token)
        with refusing(guarded, "authentication"):
            with pytest.raises(AuthenticationFailed, match="not the token of this"):
                open_connection(guarded.endpoint, None, credentials)

    def test_a_proof_heard_elsewhere(self, keys: Keys, guarded: Worker) -> None:
        with RawClient(guarded.endpoint, V8) as first:
            first.hello()
            nonces = first.auth()
            proof = client_proof(keys.ours.token, *nonces)
            first.ask(Command.LX_PROVE, proof)
        with refusing(guarded, "authentication"):
            with RawClient(guarded.endpoint, V8) as second:
                second.hello()
                second.ask(Command.LX_AUTH, nonces[0])
                second.post(Command.LX_PROVE, proof)
                assert "not the token" in second.refusal().sentence
                second.expect_closed()
        assert "not the token of this server" in guarded.end_of(second.name)

    def test_a_server_without_one_is_not_trusted(
        self, keys: Keys, listed: Worker
    ) -> None:
        credentials = Credentials(token=keys.ours.token)
        with pytest.raises(AuthenticationFailed, match="server has no token"):
            open_connection(reach(listed), None, credentials)


class TestChange:
    def test_of_the_token(self, keys: Keys, tmp_path: Path) -> None:
        old, new = keys.ours.token, keys.others.token
        file = tmp_path / "token"

        def write(*tokens: bytes) -> None:
            file.write_bytes(b"\n".join(tokens))
            file.chmod(0o600)

        def reload(worker: Worker, words: str) -> None:
            count = worker.log.count("SIGHUP: ")
            worker.process.send_signal(signal.SIGHUP)
            until(lambda: worker.log.count("SIGHUP: ") > count)
            assert words in worker.log

        def opens(worker: Worker, token: bytes) -> bool:
            try:
                credentials = Credentials(token=token)
                # The new sessions may have to start first.
                deadlines = Deadlines(connect_s=PATIENCE_S)
                check(open_connection(worker.endpoint, deadlines, credentials))
            except AuthenticationFailed:
                return False
            return True

        def warm(worker: Worker) -> bool:
            return figure(worker, 'sessions{state="spare"}') == 2

        write(old)
        options = ("--metrics-port", "0", "--token-file", str(file))
        with running_worker(*options) as worker, ExitStack() as stack:
            client = stack.enter_context(RawClient(worker.endpoint, V8))
            client.hello()
            client.prove(old)
            total = Sum(client)
            total.check()
            write(new, old)
            reload(worker, "warm sessions start anew")
            assert opens(worker, new) and opens(worker, old)
            write(new)
            reload(worker, "warm sessions start anew")
            assert opens(worker, new) and not opens(worker, old)
            until(lambda: warm(worker), PATIENCE_S)
            # A file that cannot be used changes nothing.
            write(b"short")
            spares = set(worker.sessions())
            reload(worker, "SIGHUP: nothing is reloaded: token file")
            # Some that were dismissed before may still be on the way out.
            assert set(worker.sessions()) <= spares
            # One of them takes this client: others cannot start any more.
            with RawClient(worker.endpoint, V8) as another:
                another.hello()
                another.prove(new)
                assert another.device_count() == 1
            write(new)
            total.check(again=True)
            for token in (b"short", old, new):
                assert token.decode() not in worker.log


class TestTls:
    def greeted(self, keys: Keys, worker: Worker) -> RawClient:
        context = client_context(keys.ours.client)
        client = RawClient(worker.endpoint, V8, tls=context)
        client.hello()
        client.prove(keys.ours.token)
        return client

    def test_it_computes(self, keys: Keys, encrypted: Worker) -> None:
        credentials = keys.ours.credentials()
        check(open_connection(encrypted.endpoint, None, credentials))
        with self.greeted(keys, encrypted) as client:
            Sum(client).check()

    @pytest.mark.parametrize("size", [MIB + 3, 40 * MIB])
    def test_tensors_arrive_whole(
        self, keys: Keys, encrypted: Worker, size: int
    ) -> None:
        credentials = keys.ours.credentials()
        connection = open_connection(encrypted.endpoint, None, credentials)
        with closing(connection):
            client = ConnectionClient(connection)
            # I8, since not every size is one of whole floats.
            t = tensor(1, client.alloc(size), ne=(size,), type_number=24)
            data = bytearray(random.Random(size).randbytes(size))
            head = m.SetTensor(t.encode(), 0, 0).encode()
            connection.post(Command.SET_TENSOR, head, data)
            assert client.read(t) == data
            part = random.Random(1).randbytes(1000)
            for at in range(0, size - 1000, size // 300):
                client.write(t, part, at)
                data[at : at + 1000] = part
            assert client.read(t) == data

    def test_a_plain_client(self, keys: Keys, encrypted: Worker) -> None:
        credentials = Credentials(token=keys.ours.token)
        started = time.monotonic()
        with refusing(encrypted, "tls"):
            with pytest.raises(ConnectionLost, match="HELLO: .* wants --tls-ca"):
                open_connection(encrypted.endpoint, None, credentials)
        encrypted.logged("TLS: the other end does not speak TLS")
        with refusing(encrypted, "tls"):
            with RawClient(encrypted.endpoint, V8) as client:
                client.post(Command.HELLO, bytes(24))
                # An alert, which nobody could take for an answer.
                assert len(client.socket.recv(99)) < 8
        assert time.monotonic() - started < SOON_S

    def test_a_plain_server(self, keys: Keys, guarded: Worker) -> None:
        started = time.monotonic()
        with refusing(guarded, "protocol"):
            with pytest.raises(ConnectionLost, match="TLS handshake: "):
                open_connection(guarded.endpoint, None, keys.ours.credentials())
        assert time.monotonic() - started < SOON_S

    def test_an_old_version(self, keys: Keys, encrypted: Worker) -> None:
        context = client_context(keys.ours.client)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with refusing(encrypted, "tls"), pytest.raises(ssl.SSLError):
            RawClient(encrypted.endpoint, V8, tls=context)
        encrypted.logged("TLS: the other end does not speak TLS 1.3")

    @pytest.mark.parametrize(
        ("who", "client_says", "server_says"),
        [
            ("nobody", "wants a client certificate", "no client certificate"),
            ("others", "does not know the CA", "certificate is not accepted"),
            ("server", "not made for what", "certificate is not accepted: .*purpose"),
        ],
    )
    def test_a_client_of_no_team(
        self,
        keys: Keys,
        encrypted: Worker,
        who: str,
        client_says: str,
        server_says: str,
    ) -> None:
        ours, others = keys.ours.client, keys.others.client
        files = {
            "nobody": TlsFiles(ca=ours.ca),
            "others": TlsFiles(others.cert, others.key, ours.ca),
            "server": keys.ours.server,
        }[who]
        credentials = Credentials(keys.ours.token, client_context(files))
        with refusing(encrypted, "tls"):
            with pytest.raises(AuthenticationFailed, match=client_says):
                open_connection(encrypted.endpoint, None, credentials)
        encrypted.logged(f"TLS: .*{server_says}")

    def test_a_server_of_another_team(self, keys: Keys, encrypted: Worker) -> None:
        credentials = keys.others.credentials()
        with refusing(encrypted, "tls"):
            with pytest.raises(AuthenticationFailed, match="is not accepted"):
                open_connection(encrypted.endpoint, None, credentials)
        encrypted.logged("TLS: the other end does not know the CA of this end's")

    @pytest.mark.parametrize("size", [1, 5, 100])
    def test_half_a_handshake(self, encrypted: Worker, size: int) -> None:
        hello, said = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context()
        tls = context.wrap_bio(hello, said, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            tls.do_handshake()
        with refusing(encrypted, "handshake"):
            with RawClient(encrypted.endpoint, V8) as client:
                client.send(said.read()[:size])
                started = time.monotonic()
                client.expect_closed(PATIENCE_S)
                assert time.monotonic() - started > 1.2
        assert "no complete handshake in time" in encrypted.end_of(client.name)

    def test_silence_after_it(self, keys: Keys, encrypted: Worker) -> None:
        """Each part of a greeting counts against the same deadline."""
        context = client_context(keys.ours.client)
        with refusing(encrypted, "handshake"), ExitStack() as stack:
            client = RawClient(encrypted.endpoint, V8, tls=context)
            stack.enter_context(client)
            client.hello()
            client.auth()
            client.expect_closed(PATIENCE_S)
        assert "no complete handshake in time" in encrypted.end_of(client.name)

    def test_who_takes_no_answer(self, keys: Keys, encrypted: Worker) -> None:
        with refusing(encrypted, "stalled"), ExitStack() as stack:
            client = stack.enter_context(self.greeted(keys, encrypted))
            size = 64 * MIB
            t = tensor(1, client.alloc(size), ne=(size // 4,))
            client.post(Command.GET_TENSOR, m.GetTensor(t.encode(), 0, size).encode())
            encrypted.logged("does not take the answer of GET_TENSOR", PATIENCE_S)

    def test_who_stops_in_a_message(self, keys: Keys, encrypted: Worker) -> None:
        with refusing(encrypted, "stalled"), ExitStack() as stack:
            client = stack.enter_context(self.greeted(keys, encrypted))
            client.send(b"\x06\x40")
            client.expect_closed(PATIENCE_S)
        assert "a header stalled" in encrypted.end_of(client.name)


class TestAddresses:
    def test_who_is_on_the_list(self, listed: Worker) -> None:
        for source in ("127.0.0.1", "127.5.0.1", "127.5.255.254"):
            with RawClient(reach(listed), V8, source=source) as client:
                client.hello()
                Sum(client).check()

    @pytest.mark.parametrize("source", ["127.0.0.2", "127.4.255.255", "127.6.0.0"])
    def test_who_is_not(self, listed: Worker, source: str) -> None:
        with refusing(listed, "address"):
            with RawClient(reach(listed), V8, source=source) as client:
                client.expect_closed()
        listed.logged(rf"WARNING .*{client.name} is not in --allow, closed")

    def test_nor_costs_it_a_session(self, listed: Worker) -> None:
        before = figure(listed, "clients_total")
        refused = 'refusals_total{reason="address"}'
        all_refused = figure(listed, refused) + 20
        for _ in range(20):
            with RawClient(reach(listed), V8, source="127.6.0.1") as client:
                client.expect_closed()
        until(lambda: figure(listed, refused) >= all_refused)
        assert figure(listed, "clients_total") == before


def endless(client: RawClient) -> None:
    """Start a graph that keeps a session busy for longer than any test."""
    compute(client, 5000)


def compute(client: RawClient, n: int, size: int = 1024) -> None:
    """Start a graph of `n` large products."""
    buffer = client.alloc(3 * 4 * size * size)
    a = tensor(1, buffer, 0, ne=(size, size))
    at = 4 * size * size
    products = [
        tensor(2 + i, buffer, at, (size, size), 0, MUL_MAT, [a, a]) for i in range(n)
    ]
    client.compute(graph(products, [a]))


class Waiting:
    """A call in a thread, and when and how it ended."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.ended: float | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = error
        self.ended = time.monotonic()

    def join(self) -> float:
        self._thread.join(PATIENCE_S)
        assert self.ended is not None, "it goes on"
        return self.ended


class TestSignsOfLife:
    """A busy server is waited for; a frozen one is not."""

    SILENCE_S = 2.5
    DEADLINES = Deadlines(silence_s=SILENCE_S)

    def session(self, worker: Worker, connection: Connection) -> int:
        host, port = connection._stream._sock.getsockname()
        return worker.session_of(f"{host}:{port}")

    def test_a_long_graph_is_no_silence(self, keys: Keys, guarded: Worker) -> None:
        credentials = Credentials(token=keys.ours.token)
        opened = open_connection(guarded.endpoint, self.DEADLINES, credentials)
        with closing(opened) as connection:
            client = ConnectionClient(connection)
            products, spent = 4, 0.0
            while spent < self.SILENCE_S + 0.5:
                if spent:
                    products = int(products * 1.2 * (self.SILENCE_S + 1) / spent)
                started = time.monotonic()
                compute(client, products)
                assert client.device_count() == 1
                spent = time.monotonic() - started
            Sum(client).check()

    @pytest.mark.slow
    def test_waiting_for_what_is_busy_and_then_frozen(
        self, keys: Keys, guarded: Worker, encrypted: Worker
    ) -> None:
        """All at once, since each of them takes its time."""
        token = Credentials(token=keys.ours.token)
        with ExitStack() as stack:
            # llama.cpp's kind: it must not see a keep-alive.
            plain = stack.enter_context(RawClient(guarded.endpoint, V8))
            plain.hello()
            plain.prove(keys.ours.token)
            endless(plain)
            plain.post(Command.DEVICE_COUNT)
            pids = [guarded.session_of(plain.name)]
            waiting: list[Waiting] = []
            limits: list[float] = []
            for worker, credentials in (
                (guarded, token),
                (encrypted, keys.ours.credentials()),
            ):
                for sends in (False, True):
                    connection = open_connection(
                        worker.endpoint, self.DEADLINES, credentials
                    )
                    stack.callback(connection.close)
                    pids.append(self.session(worker, connection))
                    waiting.append(Waiting(self.busy(connection, sends)))
                    # A send hears of the last sign of life only at its deadline.
                    limits.append(self.SILENCE_S * (1 + sends) + 2)
            stack.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in pids])
            threading.Event().wait(2.5 * self.SILENCE_S)
            assert [call.ended for call in waiting] == [None] * 4
            assert not plain_has_heard(plain)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            frozen = time.monotonic()
            for call, limit in zip(waiting, limits, strict=True):
                assert call.join() - frozen < limit
                assert isinstance(call.error, ConnectionLost)
                assert call.error.cause == "no answer before the deadline"

    def busy(self, connection: Connection, sends: bool) -> Callable[[], None]:
        client = ConnectionClient(connection)
        size = 64 * MIB
        t = tensor(9, client.alloc(size), ne=(size // 4,))
        head = m.SetTensor(t.encode(), 0, 0).encode()

        def call() -> None:
            endless(client)
            if sends:
                connection.post(Command.SET_TENSOR, head, bytes(size))
            connection.ask(Command.DEVICE_COUNT, b"")

        return call

    def test_health(self, keys: Keys, guarded: Worker) -> None:
        credentials = Credentials(token=keys.ours.token)
        deadlines = Deadlines(silence_s=1)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            connection = open_connection(guarded.endpoint, deadlines, credentials)
            with closing(connection):
                health = connection.health()
                assert health.ok and health.round_trip_s is not None
                assert health.round_trip_s < 1
                pid = self.session(guarded, connection)
                os.kill(pid, number)
                started = time.monotonic()
                health = connection.health()
                assert time.monotonic() - started < 1 + 2
                assert isinstance(health.failure, ConnectionLost)
                started = time.monotonic()
                assert connection.health() == health
                assert time.monotonic() - started < 0.5
                if number == signal.SIGSTOP:
                    os.kill(pid, signal.SIGKILL)

    def test_health_of_an_engine(
        self, keys: Keys, encrypted: Worker, model: Path, reference: Any
    ) -> None:
        """Also that a model over TLS and a token says what it says at home."""
        rpc, credentials = str(encrypted.endpoint), keys.ours.credentials()
        with exact_engine(model, "xllamacpp", rpc, credentials=credentials) as engine:
            generation = engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
            steps = iter(generation)
            next(steps)
            (health,) = engine.health()
            assert health.ok and health.endpoint == encrypted.endpoint
            assert health.round_trip_s is not None
            for _ in steps:
                continue
            assert generation.tokens == reference("xllamacpp")
            (connection,) = {d.connection for d in engine.remote_devices}
            os.kill(self.session(encrypted, connection), signal.SIGKILL)
            (health,) = engine.health()
            assert not health.ok


def plain_has_heard(client: RawClient) -> bool:
    client.socket.setblocking(False)
    try:
        return bool(client.socket.recv(1))
    except BlockingIOError:
        return False


def tunnel_command(remote: object, *options: str) -> list[str]:
    command = [sys.executable, "-m", "longwire", "tunnel", str(remote), "-p", "0"]
    return [*command, *options]


@pytest.fixture
def tunnel(keys: Keys, tmp_path: Path) -> Iterator[Callable[..., ListeningProcess]]:
    """`tunnel(endpoint, ...)` is a tunnel to it, with our team's credentials."""
    log = tmp_path / "tunnel.log"
    with ExitStack() as stack, log.open("w") as file:

        def start(remote: object, *options: str) -> ListeningProcess:
            options = options or tuple(keys.ours.connecting())
            arguments = ("tunnel", str(remote), "-p", "0", "-vv", *options)
            process = ListeningProcess("longwire", *arguments, stderr=file)
            return stack.enter_context(process)

        yield start
        stack.close()
        assert "Traceback" not in log.read_text()
        keys.check_unspoken(log.read_text())


class TestTunnel:
    def test_a_client_of_llama_cpp(
        self, encrypted: Worker, tunnel: Callable[..., ListeningProcess]
    ) -> None:
        inside = parse_endpoint(tunnel(encrypted.endpoint).endpoint)
        with RawClient(inside, V8) as one, RawClient(inside, V8) as two:
            for client in (one, two):
                client.hello()
                Sum(client).check()
            size = 5 * MIB
            t = tensor(1, one.alloc(size), ne=(size // 4,))
            data = random.Random(3).randbytes(size)
            one.write(t, data)
            assert one.read(t) == data
            one.post(Command.BUFFER_GET_BASE, m.U64.pack(12345))
            one.expect_closed()
            assert two.device_count() == 1

    def test_a_client_of_ours(
        self, encrypted: Worker, tunnel: Callable[..., ListeningProcess]
    ) -> None:
        inside = parse_endpoint(tunnel(encrypted.endpoint).endpoint)
        with closing(open_connection(inside)) as connection:
            assert connection.dialect.lx
            Sum(ConnectionClient(connection)).check()
            with pytest.raises(RemoteFailure):
                connection.ask(Command.BUFFER_GET_BASE, m.U64.pack(12345))
            assert connection.health().ok

    @pytest.mark.parametrize("who", ["token", "certificate", "nothing"])
    def test_one_without_rights_does_not_start(
        self, keys: Keys, encrypted: Worker, who: str
    ) -> None:
        options = {
            "token": keys.ours.connecting(token=False)
            + ["--token-file", keys.others.token_file],
            "certificate": keys.others.connecting(),
            "nothing": [],
        }[who]
        done = subprocess.run(
            tunnel_command(encrypted.endpoint, *options),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        words = {
            "token": "LX_PROVE: Unauthenticated: not the token of this server",
            "certificate": "TLS handshake: its certificate is not accepted",
            "nothing": "a server with TLS wants --tls-ca or --tls",
        }[who]
        assert f"longwire: {encrypted.endpoint}: " in done.stderr
        assert words in done.stderr
        keys.check_unspoken(done.stderr)

    def test_it_outlives_the_server(
        self, keys: Keys, tunnel: Callable[..., ListeningProcess]
    ) -> None:
        options = ("-t", "1", *keys.ours.serving())
        with LocalWorker(*options) as worker:
            remote = worker.endpoint
            inside = parse_endpoint(tunnel(remote).endpoint)
            with RawClient(inside, V8) as client:
                client.hello()
                Sum(client).check()
                os.killpg(worker.process.pid, signal.SIGKILL)
                client.expect_closed()
        with RawClient(inside, V8) as client:
            client.post(Command.HELLO, bytes(24))
            client.expect_closed()
        with LocalWorker(*options, "-p", remote.rpartition(":")[2]):
            with RawClient(inside, V8) as client:
                client.hello()
                Sum(client).check()

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_it_ends_when_it_is_told_to(
        self,
        encrypted: Worker,
        tunnel: Callable[..., ListeningProcess],
        number: signal.Signals,
    ) -> None:
        running = tunnel(encrypted.endpoint)
        inside = parse_endpoint(running.endpoint)
        with RawClient(inside, V8) as client, RawClient(inside, V8):
            client.hello()
            running.process.send_signal(number)
            assert running.process.wait(SOON_S) == 0
            client.expect_closed()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((inside.host, inside.port), SOON_S)
