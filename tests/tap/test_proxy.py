"""The tap in between: it carries all, changes nothing, and tells of it."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from longwire.client.credentials import Credentials
from longwire.client.greeting import open_connection
from longwire.client.health import Deadlines
from longwire.tap.proxy import Tap
from longwire.tap.views import Closed, Opened, Shown, Source
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream, connect
from longwire.transport.tls import server_context
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.tensors import NULL_TENSOR
from longwire.wire.trace import Answer, Request, Undecoded
from support.client import RawClient
from support.keys import Keys
from support.scripted import PATIENCE_S, Instead, Listener, content, lx_server
from support.worker import until

MIB = 1 << 20
DEADLINES = Deadlines(PATIENCE_S, PATIENCE_S, PATIENCE_S)


class Running:
    """A tap that runs in a thread, and all that it told."""

    def __init__(self, upstream: Endpoint, credentials: Credentials) -> None:
        self.told: list[tuple[Source, Shown]] = []

        def reach() -> Stream:
            return credentials.stream(connect(upstream, PATIENCE_S), upstream)

        self.tap = Tap("127.0.0.1", 0, reach, lambda *told: self.told.append(told))
        self._thread = threading.Thread(target=self.tap.run)
        self._thread.start()
        self.endpoint = self.tap.address

    def of(self, number: int = 1) -> list[Shown]:
        return [event for source, event in self.told if source.number == number]

    def commands(self, number: int = 1) -> list[str]:
        """Requests; those that were answered with a mark."""
        asked = [e for e in self.of(number) if isinstance(e, Request)]
        done = [e.request for e in self.of(number) if isinstance(e, Answer)]
        return [f"{e.name}{'!' if e in done else ''}" for e in asked]

    def closed(self, number: int = 1) -> Closed:
        """How a connection ended; waits for it."""
        return until(
            lambda: next((e for e in self.of(number) if isinstance(e, Closed)), None)
        )

    def close(self) -> None:
        self.tap.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self.tap.close()


Run = Callable[..., Running]
Listen = Callable[..., Listener]


@pytest.fixture
def listener() -> Iterator[Listen]:
    with ExitStack() as stack:

        def start(*arguments: object) -> Listener:
            port = Listener(*arguments)  # type: ignore[arg-type]
            stack.callback(port.close)
            return port

        yield start


@pytest.fixture
def run() -> Iterator[Run]:
    """`run(endpoint)` is a tap to a server."""
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def start(
            upstream: Endpoint, credentials: Credentials | None = None
        ) -> Running:
            running = Running(upstream, credentials or Credentials())
            stack.callback(running.close)
            return running

        yield start
    until(lambda: not [t for t in set(threading.enumerate()) - before if not t.daemon])


def client_of(running: Running, dialect: Dialect = V8) -> RawClient:
    return RawClient(running.endpoint, dialect)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_all_passes_unchanged(
    keys: Keys, listener: Listen, run: Run, secured: bool
) -> None:
    tls = server_context(keys.ours.server) if secured else None
    port = listener(lx_server(keys.ours.token), V8, tls)
    running = run(port.endpoint, keys.ours.credentials() if secured else None)
    data = random.Random(1).randbytes(5 * MIB + 1)
    head = m.SetTensor(NULL_TENSOR, 0, 7).encode()
    with client_of(running) as client:
        assert client.hello().padding == 1
        client.prove(keys.ours.token)
        client.post(Command.SET_TENSOR, [head, data])
        read = m.GetTensor(NULL_TENSOR, 9, 3_000_001).encode()
        assert client.ask(Command.GET_TENSOR, read) == content(9, 3_000_001)
    assert running.closed().owed == ()
    (server,) = port.servers
    assert server.stop()[-2].body == head + data
    assert running.commands() == [
        "HELLO!",
        "LX_AUTH!",
        "LX_PROVE!",
        "SET_TENSOR",
        "GET_TENSOR!",
    ]
    sent = next(e for e in running.of() if isinstance(e, Request) and e.size > MIB)
    assert (sent.size, sent.details["size"]) == (9 + 305 + len(data), len(data))
    assert sent.begun_s < sent.ended_s
    keys.check_unspoken(repr(running.told))


@pytest.mark.parametrize("dialect", [V7, V8], ids=lambda d: d.version)
def test_a_client_of_ours(listener: Listen, run: Run, dialect: Dialect) -> None:
    running = run(listener(lx_server(None, dialect), dialect).endpoint)
    connection = open_connection(running.endpoint, DEADLINES)
    assert connection.dialect.lx and connection.health().ok
    connection.close()
    running.closed()
    assert running.commands() == ["HELLO!", "LX_START!", "LX_PING!"]
    (hello, start, _) = [e for e in running.of() if isinstance(e, Answer)]
    assert hello.details == {"protocol": dialect.version, "lx": True}
    assert start.details["engine"] == "scripted"


def test_several_at_once(listener: Listen, run: Run) -> None:
    running = run(listener(lx_server()).endpoint)
    with ExitStack() as stack:
        clients = [stack.enter_context(client_of(running)) for _ in range(4)]
        for client in clients:
            client.hello()
        for client in reversed(clients):
            assert client.device_count() == 1
    for number in range(1, 5):
        running.closed(number)
        assert running.commands(number) == ["HELLO!", "DEVICE_COUNT!"]
    assert {source.peer for source, _ in running.told} == {c.name for c in clients}


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)
        yield listening


def address(server: socket.socket) -> Endpoint:
    return Endpoint(*server.getsockname()[:2])


def accepted(server: socket.socket) -> socket.socket:
    sock, _ = server.accept()
    sock.settimeout(PATIENCE_S)
    return sock


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, data
        data += piece
    return data


def test_a_part_of_a_message_passes_at_once(server: socket.socket, run: Run) -> None:
    running = run(address(server))
    with client_of(running) as client, accepted(server) as far:
        header = REQUEST_HEADER.pack(Command.HELLO, 24)
        for piece in (header[:1], header[1:], bytes(1), bytes(23)):
            client.send(piece)
            assert exactly(far, len(piece)) == piece
        far.sendall(b"\x1c\0\0")
        assert exactly(client.socket, 3) == b"\x1c\0\0"


def test_another_protocol_passes_undecoded(
    server: socket.socket, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    running = run(address(server))
    with client_of(running) as client, accepted(server) as far:
        for _ in range(3):
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            assert exactly(far, 18) == b"GET / HTTP/1.1\r\n\r\n"
            far.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            assert exactly(client.socket, 19) == b"HTTP/1.1 200 OK\r\n\r\n"
    running.closed()
    opened, undecoded, closed = running.of()
    assert isinstance(opened, Opened) and isinstance(closed, Closed)
    assert isinstance(undecoded, Undecoded)
    assert caplog.text.count("passed on undecoded from here: command 0x47") == 1


@pytest.mark.parametrize("how", [Instead.CLOSE, Instead.RESET])
def test_the_server_dies(listener: Listen, run: Run, how: Instead) -> None:
    running = run(listener({**lx_server(), Command.DEVICE_COUNT: how}).endpoint)
    for number in (1, 2):
        with client_of(running) as client:
            client.hello()
            client.post(Command.DEVICE_COUNT)
            client.expect_closed()
        assert running.closed(number).owed == ("DEVICE_COUNT",)


def test_the_client_dies(server: socket.socket, run: Run) -> None:
    running = run(address(server))
    with client_of(running) as client, accepted(server) as far:
        client.send(REQUEST_HEADER.pack(Command.SET_TENSOR, MIB) + bytes(1000))
        exactly(far, 1009)
        client.close()
        assert far.recv(1) == b""
    assert running.closed().reason == "one end has left"


def test_there_is_no_server(
    listener: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    port = listener()
    port.close()
    running = run(port.endpoint)
    with client_of(running) as client:
        client.expect_closed()
        assert f"{client.name}: the server cannot be reached: Connection" in caplog.text
    assert not running.told


def test_a_stop_ends_all(
    listener: Listen, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "longwire.tap")
    silent = {**lx_server(), Command.DEVICE_COUNT: Instead.SILENCE}
    running = run(listener(silent).endpoint)
    with client_of(running) as asking, client_of(running) as idle:
        asking.hello()
        asking.post(Command.DEVICE_COUNT)
        idle.hello()
        until(lambda: "DEVICE_COUNT" in running.commands(1) + running.commands(2))
        started = time.monotonic()
        running.close()
        assert time.monotonic() - started < 2
        asking.expect_closed()
        idle.expect_closed()
    assert sum(isinstance(event, Closed) for _, event in running.told) == 2
    host, port = running.endpoint.host, running.endpoint.port
    with socket.create_server((host, port)):
        pass
