"""The tunnel: plain clients at one end, TLS and a token at the other."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from longwire.client import tunnel as module
from longwire.client.credentials import Credentials
from longwire.client.greeting import open_connection
from longwire.client.health import Deadlines
from longwire.client.tunnel import Tunnel
from longwire.errors import AuthenticationFailed, ConnectionLost, VersionMismatch
from longwire.transport.endpoint import Endpoint
from longwire.transport.tls import server_context
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.tensors import NULL_TENSOR
from support.client import RawClient
from support.keys import Keys
from support.scripted import PATIENCE_S, Instead, Listener, content, lx_server
from support.worker import until

Listen = Callable[..., Listener]

SHORT_S = 0.3
DEADLINES = Deadlines(PATIENCE_S, PATIENCE_S, PATIENCE_S)


class Running:
    """A tunnel whose `run` is in a thread."""

    def __init__(
        self, remote: Endpoint, credentials: Credentials, deadlines: Deadlines
    ) -> None:
        self.before = set(threading.enumerate())
        self.tunnel = Tunnel("127.0.0.1", 0, remote, credentials, deadlines)
        self._thread = threading.Thread(target=self.tunnel.run)
        self._thread.start()
        self.endpoint = self.tunnel.address

    def threads(self) -> int:
        """How many there are for clients."""
        return sum(t.name.endswith("(_serve)") for t in threading.enumerate())

    def close(self) -> None:
        self.tunnel.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.tunnel.close()
        assert self.threads() == 0


Run = Callable[..., Running]


@pytest.fixture
def run() -> Iterator[Run]:
    """`run(port, credentials)` is a tunnel to a scripted server."""
    with ExitStack() as stack:

        def start(
            remote: Listener | Endpoint,
            credentials: Credentials | None = None,
            deadlines: Deadlines = DEADLINES,
        ) -> Running:
            endpoint = remote.endpoint if isinstance(remote, Listener) else remote
            running = Running(endpoint, credentials or Credentials(), deadlines)
            stack.callback(running.close)
            return running

        yield start


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    until(lambda: not set(threading.enumerate()) - before)


def client_of(running: Running, dialect: Dialect = V8) -> RawClient:
    return RawClient(running.endpoint, dialect)


class TestCarries:
    @pytest.fixture(params=["plain", "tls"])
    def secured(
        self, request: pytest.FixtureRequest, keys: Keys, listener: Listen, run: Run
    ) -> tuple[Listener, Running]:
        tls = server_context(keys.ours.server) if request.param == "tls" else None
        port = listener(lx_server(keys.ours.token), V8, tls)
        credentials = keys.ours.credentials()
        if tls is None:
            credentials = Credentials(token=keys.ours.token)
        return port, run(port, credentials)

    def test_all_but_the_proof(self, secured: tuple[Listener, Running]) -> None:
        port, running = secured
        with client_of(running) as client:
            hello = client.hello()
            assert (hello.major, hello.padding) == (8, 1)
            assert client.device_count() == 1
            buffer = client.alloc(1000)
            assert (buffer.handle, buffer.base) == (1, 1 << 32)
            data = bytes(range(256)) * 20_000
            head = m.SetTensor(NULL_TENSOR, 0, 7).encode()
            client.post(Command.SET_TENSOR, [head, data])
            read = m.GetTensor(NULL_TENSOR, 9, 3_000_001).encode()
            assert client.ask(Command.GET_TENSOR, read) == content(9, 3_000_001)
        (server,) = port.servers
        assert server.stop()[-2].body == head + data
        assert server.commands[:4] == ["HELLO", "LX_AUTH", "LX_PROVE", "DEVICE_COUNT"]
        assert "LX_START" not in server.commands

    def test_several_at_once(self, secured: tuple[Listener, Running]) -> None:
        port, running = secured
        with ExitStack() as stack:
            clients = [stack.enter_context(client_of(running)) for _ in range(5)]
            for client in clients:
                client.hello()
            for client in clients:
                assert client.device_count() == 1
            assert running.threads() == 5
        until(lambda: running.threads() == 0)
        assert len(port.servers) == 5

    def test_lx(self, secured: tuple[Listener, Running]) -> None:
        """A client of ours has all of the server that it would have without."""
        _, running = secured
        opened = open_connection(running.endpoint, DEADLINES)
        with closing(opened) as connection:
            assert connection.dialect.lx
            assert connection.health().ok

    @pytest.mark.parametrize("dialect", [V7, V8], ids=lambda d: d.version)
    def test_the_dialect_is_the_servers(
        self, keys: Keys, listener: Listen, run: Run, dialect: Dialect
    ) -> None:
        running = run(listener(lx_server(keys.ours.token, dialect), dialect))
        with client_of(running, dialect) as client:
            assert client.hello().major == dialect.major


class TestEnds:
    def test_a_client_leaves(self, listener: Listen, run: Run) -> None:
        port = listener(lx_server())
        running = run(port)
        with client_of(running) as client:
            client.hello()
        until(lambda: len(port.servers) == 1)
        assert port.servers[0].stop() == [(Command.HELLO, bytes(24))]

    def test_the_server_closes(self, listener: Listen, run: Run) -> None:
        running = run(listener({**lx_server(), Command.DEVICE_COUNT: Instead.CLOSE}))
        for _ in range(2):
            with client_of(running) as client:
                client.hello()
                client.post(Command.DEVICE_COUNT)
                client.expect_closed()

    def test_there_is_no_server(
        self, listener: Listen, run: Run, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO, "longwire.tunnel")
        port = listener(lx_server())
        port.close()
        running = run(port)
        with client_of(running) as client:
            client.post(Command.HELLO, bytes(24))
            client.expect_closed()
        until(lambda: running.threads() == 0)
        assert f"{port.endpoint}: connect: Connection refused" in caplog.text

    def test_a_wrong_token(
        self,
        keys: Keys,
        listener: Listen,
        run: Run,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        port = listener(lx_server(keys.ours.token))
        running = run(port, Credentials(token=keys.others.token))
        with client_of(running) as client:
            client.post(Command.HELLO, bytes(24))
            client.expect_closed()
        until(lambda: running.threads() == 0)
        assert f"{port.endpoint}: LX_PROVE: Unauthenticated" in caplog.text
        keys.check_unspoken(caplog.text)

    @pytest.mark.parametrize("begun", [b"", b"\x0e", REQUEST_HEADER.pack(0x0E, 24)])
    def test_a_client_that_says_no_hello(
        self, listener: Listen, run: Run, begun: bytes
    ) -> None:
        port = listener(lx_server())
        running = run(port, deadlines=Deadlines(connect_s=SHORT_S))
        with client_of(running) as client:
            client.send(begun)
            started = time.monotonic()
            client.expect_closed()
            assert SHORT_S * 0.8 < time.monotonic() - started < SHORT_S + 2
        assert not port.servers

    @pytest.mark.parametrize(
        "begun", [REQUEST_HEADER.pack(0x0F, 0), REQUEST_HEADER.pack(0x0E, 1 << 40)]
    )
    def test_a_client_that_says_something_else(
        self, listener: Listen, run: Run, begun: bytes
    ) -> None:
        port = listener(lx_server())
        running = run(port)
        with client_of(running) as client:
            client.send(begun)
            client.expect_closed()
        assert not port.servers

    def test_more_than_there_are_places(
        self,
        listener: Listen,
        run: Run,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(module, "_MOST_CLIENTS", 2)
        running = run(listener(lx_server()))
        with ExitStack() as stack:
            clients = [stack.enter_context(client_of(running)) for _ in range(2)]
            for client in clients:
                client.hello()
            with client_of(running) as third:
                third.expect_closed()
            assert "closed, there are 2 clients" in caplog.text
            assert [client.device_count() for client in clients] == [1, 1]
            clients[0].close()
            until(lambda: running.threads() == 1)
            with client_of(running) as another:
                another.hello()
                assert another.device_count() == 1


class TestClose:
    def test_with_clients_inside(self, listener: Listen, run: Run) -> None:
        running = run(listener({**lx_server(), Command.DEVICE_COUNT: Instead.SILENCE}))
        with ExitStack() as stack:
            idle, asking, silent = (
                stack.enter_context(client_of(running)) for _ in range(3)
            )
            idle.hello()
            asking.hello()
            asking.post(Command.DEVICE_COUNT)
            until(lambda: running.threads() == 3)
            started = time.monotonic()
            running.close()
            assert time.monotonic() - started < 2
            for client in (idle, asking, silent):
                client.expect_closed()

    def test_twice_and_the_address_is_free(self, listener: Listen, run: Run) -> None:
        running = run(listener(lx_server()))
        host, port = running.endpoint.host, running.endpoint.port
        running.close()
        running.close()
        with socket.create_server((host, port)):
            pass

    def test_before_it_ran(self) -> None:
        tunnel = Tunnel("127.0.0.1", 0, Endpoint("127.0.0.1", 9), Credentials())
        tunnel.stop()
        tunnel.run()
        tunnel.close()
        tunnel.close()
        tunnel.stop()


class TestTry:
    def attempt(self, port: Listener, token: bytes | None = None) -> str:
        credentials = Credentials(token=token)
        tunnel = Tunnel("127.0.0.1", 0, port.endpoint, credentials, DEADLINES)
        with closing(tunnel):
            return tunnel.try_remote()

    @pytest.mark.parametrize("dialect", [V7, V8], ids=lambda d: d.version)
    def test_the_version(self, listener: Listen, dialect: Dialect) -> None:
        assert self.attempt(listener(lx_server(), dialect)) == "8.0.0"
        port = listener(lx_server(None, dialect), dialect)
        assert self.attempt(port) == dialect.version
        asked = [(Command.HELLO, bytes(24)), (Command.DEVICE_COUNT, b"")]
        assert port.servers[0].stop() == asked

    def test_what_is_wrong(self, keys: Keys, listener: Listen) -> None:
        port = listener(lx_server(keys.ours.token))
        with pytest.raises(AuthenticationFailed):
            self.attempt(port, keys.others.token)
        with pytest.raises(AuthenticationFailed):
            self.attempt(listener({}), keys.ours.token)
        old = listener({Command.HELLO: m.HelloAnswer(9, 0, 0).encode()})
        with pytest.raises(VersionMismatch):
            self.attempt(old)
        port.close()
        with pytest.raises(ConnectionLost, match="refused"):
            self.attempt(port)
