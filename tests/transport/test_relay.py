"""A port with a thread for each client, on its own; `client.tunnel` has the rest."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from longwire.transport.relay import PortServer
from longwire.transport.stream import Stream

PATIENCE_S = 10.0


@contextmanager
def running(port: PortServer) -> Iterator[None]:
    thread = threading.Thread(target=port.run)
    thread.start()
    try:
        yield
    finally:
        port.stop()
        thread.join(PATIENCE_S)
        port.close()
    assert not thread.is_alive()
    assert not [t for t in threading.enumerate() if t.name.endswith("(_serve)")]


def dial(port: PortServer) -> socket.socket:
    address = (port.address.host, port.address.port)
    return socket.create_connection(address, PATIENCE_S)


def test_streams_close_with_their_client() -> None:
    owned: list[Stream] = []
    names: list[str] = []

    def serve(client: Stream, peer: str) -> None:
        names.append(peer)
        owned.extend(map(Stream, socket.socketpair()))
        for stream in owned:
            port.own(stream)
        client.send([client.take(3)])

    port = PortServer("127.0.0.1", 0, serve, 4)
    with running(port), dial(port) as sock:
        sock.sendall(b"abc")
        assert sock.recv(4) == b"abc"
        assert sock.recv(1) == b""
        host, number = sock.getsockname()
        assert names == [f"{host}:{number}"]
    assert [stream.fileno() for stream in owned] == [-1, -1]


def test_what_is_owned_after_a_stop_ends_at_once() -> None:
    inside, ended = threading.Event(), threading.Event()

    def serve(client: Stream, peer: str) -> None:
        inside.set()
        assert stopped.wait(PATIENCE_S)
        near, far = map(Stream, socket.socketpair())
        port.own(near)
        port.own(far)
        try:
            near.take(1)
        except EOFError:
            ended.set()

    stopped = threading.Event()
    port = PortServer("127.0.0.1", 0, serve, 4)
    with running(port), dial(port):
        assert inside.wait(PATIENCE_S)
        port.stop()
        stopped.set()
        assert ended.wait(PATIENCE_S)


def test_ipv6() -> None:
    port = PortServer("::1", 0, lambda client, peer: client.send([b"x"]), 4)
    with running(port), dial(port) as sock:
        assert str(port.address).startswith("[::1]:")
        assert sock.recv(1) == b"x"
