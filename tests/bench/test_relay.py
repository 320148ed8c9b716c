from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from longwire.bench import relay as relays
from longwire.bench.relay import Relay
from longwire.transport.endpoint import Endpoint

Serve = Callable[[socket.socket], None]
Opener = Callable[..., socket.socket]

TIMEOUT_S = 20.0


def echo(connection: socket.socket) -> None:
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (part := connection.recv(1 << 20)):
        data += part
    return bytes(data)


def random_bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def through() -> Iterator[Opener]:
    """`through(serve, delay_s, bytes_per_s)`: a client of `serve` behind a relay."""
    with ExitStack() as stack:

        def run(serve: Serve, listener: socket.socket) -> None:
            # The listener is closed under us at the end of the test.
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                connection.settimeout(TIMEOUT_S)
                with connection:
                    serve(connection)

        def start(
            serve: Serve, delay_s: float = 0.0, bytes_per_s: float | None = None
        ) -> socket.socket:
            listener = socket.create_server(("127.0.0.1", 0))
            stack.callback(listener.close)
            threading.Thread(target=run, args=(serve, listener), daemon=True).start()
            target = Endpoint(*listener.getsockname())
            return stack.enter_context(connect(stack, target, delay_s, bytes_per_s))

        yield start


def connect(
    stack: ExitStack,
    target: Endpoint,
    delay_s: float = 0.0,
    bytes_per_s: float | None = None,
) -> socket.socket:
    relay = Relay(target, delay_s, bytes_per_s)
    stack.callback(relay.close)
    threading.Thread(target=relay.serve, daemon=True).start()
    endpoint = relay.endpoint
    return socket.create_connection((endpoint.host, endpoint.port), TIMEOUT_S)


def test_a_round_trip_takes_the_delay_twice(through: Opener) -> None:
    client = through(echo, 0.005)
    for _ in range(5):
        started = time.monotonic()
        client.sendall(b"ping")
        assert receive(client, 4) == b"ping"
        assert time.monotonic() - started >= 0.010


def test_bytes_arrive_intact_both_ways_at_once(through: Opener) -> None:
    there, back = random_bytes(3_000_001, 1), random_bytes(2_000_003, 2)
    seen: list[bytes] = []

    def both(connection: socket.socket) -> None:
        sender = threading.Thread(target=connection.sendall, args=(back,))
        sender.start()
        seen.append(receive(connection, len(there)))
        sender.join()

    client = through(both, 0.002)
    sender = threading.Thread(target=client.sendall, args=(there,))
    sender.start()
    assert receive(client, len(back)) == back
    # The far end closes once it has all.
    assert client.recv(1) == b""
    sender.join()
    assert seen == [there]


def test_a_half_close_passes_through(through: Opener) -> None:
    def answer_at_the_end(connection: socket.socket) -> None:
        size = len(receive(connection, 1 << 30))
        connection.sendall(f"{size} bytes".encode())

    client = through(answer_at_the_end, 0.002)
    client.sendall(bytes(100_000))
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 1 << 20) == b"100000 bytes"


def test_the_rate_is_not_exceeded(through: Opener) -> None:
    size, rate = 200_000, 1_000_000
    client = through(echo, 0.0, rate)
    started = time.monotonic()
    client.sendall(bytes(size))
    receive(client, size)
    assert time.monotonic() - started >= size / rate


def test_the_delay_does_not_limit_the_throughput(through: Opener) -> None:
    size, delay_s = 32 << 20, 0.1

    def count(connection: socket.socket) -> None:
        receive(connection, size)
        connection.sendall(b"all")

    client = through(count, delay_s)
    started = time.monotonic()
    client.sendall(bytes(size))
    assert receive(client, 3) == b"all"
    pieces = size // (256 * 1024)
    # A quarter of what one piece at a time would take.
    assert 2 * delay_s <= time.monotonic() - started < pieces * delay_s / 4


def test_memory_is_bounded_when_nobody_reads(
    through: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "MAX_HELD", 1 << 20)
    release = threading.Event()

    def read_nothing(connection: socket.socket) -> None:
        release.wait(TIMEOUT_S)

    client = through(read_nothing)
    client.settimeout(0.5)
    sent, most = 0, 256 << 20
    with contextlib.suppress(TimeoutError):
        while sent < most:
            sent += client.send(bytes(1 << 20))
    release.set()
    # The rest of what left is in the kernel's socket buffers.
    assert sent < 64 << 20


def test_many_connections_at_once() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(
                        target=echo, args=(connection,), daemon=True
                    ).start()

        threading.Thread(target=accept, daemon=True).start()
        first = connect(stack, Endpoint(*listener.getsockname()), 0.001)
        clients = [stack.enter_context(first)]
        for _ in range(29):
            other = socket.create_connection(first.getpeername(), TIMEOUT_S)
            clients.append(stack.enter_context(other))
        for i, client in enumerate(clients):
            client.sendall(random_bytes(5000, i))
        for i, client in enumerate(clients):
            assert receive(client, 5000) == random_bytes(5000, i)


def test_a_dead_target_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = Endpoint(*listener.getsockname())
    with ExitStack() as stack:
        client = stack.enter_context(connect(stack, target))
        assert client.recv(1) == b""


def test_a_reset_on_one_side_ends_the_other(through: Opener) -> None:
    ended = threading.Event()

    def until_the_end(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while connection.recv(1 << 16):
                continue
        ended.set()

    client = through(until_the_end)
    client.sendall(b"hello")
    # To linger for 0 s is to close with a reset.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert ended.wait(TIMEOUT_S)
