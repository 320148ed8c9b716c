"""Two streams tied together: every byte comes through, and ends are noticed."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from longwire.transport.splice import splice
from longwire.transport.stream import Stream
from longwire.transport.tls import TlsStream, client_context, server_context
from support.keys import Keys

MIB = 1 << 20
PATIENCE_S = 20.0


class Spliced:
    """Two plain sockets, and a splice between their other ends in a thread."""

    def __init__(self, a: Stream, b: Stream) -> None:
        self._pool = ThreadPoolExecutor()
        self._done = self._pool.submit(splice, a, b)

    def end(self) -> type[BaseException] | None:
        error = self._done.exception(PATIENCE_S)
        return error and type(error)

    def run(self, *arguments: Any) -> Any:
        return self._pool.submit(*arguments)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(params=["plain", "tls"])
def ends(
    request: pytest.FixtureRequest, keys: Keys
) -> Iterator[tuple[Stream, Stream, Spliced]]:
    """The outer ends of two connections that are spliced in the middle."""
    with ExitStack() as stack:
        sockets = [*socket.socketpair(), *socket.socketpair()]
        for sock in sockets:
            sock.settimeout(PATIENCE_S)
        outer_a, inner_a, inner_b, outer_b = sockets
        streams = [Stream(outer_a), Stream(inner_a)]
        if request.param == "plain":
            streams += [Stream(inner_b), Stream(outer_b)]
        else:
            streams += tls(keys, inner_b, outer_b)
        spliced = Spliced(streams[1], streams[2])
        stack.callback(spliced.close)
        for stream in streams:
            stack.callback(stream.close)
        yield streams[0], streams[3], spliced


def tls(keys: Keys, client: socket.socket, server: socket.socket) -> list[Stream]:
    with ThreadPoolExecutor() as pool:
        far = TlsStream(server, server_context(keys.ours.server), None)
        said = pool.submit(lambda: bytes(far.take(1)))
        near = TlsStream(client, client_context(keys.ours.client), "localhost")
        near.send([b"!"])
        assert said.result(PATIENCE_S) == b"!"
    return [near, far]


Ends = tuple[Stream, Stream, Spliced]


@pytest.mark.parametrize("size", [1, 5000, 3 * MIB + 1])
@pytest.mark.parametrize("back", [False, True])
def test_bytes_come_through(ends: Ends, size: int, back: bool) -> None:
    a, b, spliced = ends
    if back:
        a, b = b, a
    data = random.Random(size).randbytes(size)
    sent = spliced.run(a.send, [data])
    assert b.take(size) == data
    sent.result(PATIENCE_S)


def test_question_and_answer(ends: Ends) -> None:
    a, b, _ = ends
    for i in range(50):
        a.send([bytes([i]) * (i * 100 + 1)])
        assert b.take(i * 100 + 1)[-1] == i
        b.send([bytes([i]) * 8, b"and a body"])
        assert a.take(18) == bytes([i]) * 8 + b"and a body"


@pytest.mark.parametrize("first", [0, 1])
def test_either_end_may_leave(ends: Ends, first: int) -> None:
    spliced = ends[2]
    ends[1 - first].send([b"last words"])
    assert ends[first].take(10) == b"last words"
    ends[first].close()
    assert spliced.end() is EOFError


def test_the_end_comes_behind_the_last_bytes(ends: Ends) -> None:
    a, b, spliced = ends
    data = random.Random(7).randbytes(MIB)
    sent = spliced.run(lambda: (a.send([data]), a.close()))
    assert b.take(MIB) == data
    sent.result(PATIENCE_S)
    assert spliced.end() is EOFError


def test_what_has_been_read_ahead_is_carried_first(keys: Keys) -> None:
    """No descriptor tells of bytes that are in a stream's buffer already."""
    a, inner_a = map(Stream, socket.socketpair())
    inner_b, b = map(Stream, socket.socketpair())
    with ExitStack() as stack:
        for stream in (a, inner_a, inner_b, b):
            stream.set_deadline(PATIENCE_S)
        a.send([b"HELLO and what is behind it"])
        assert inner_a.take(5) == b"HELLO"
        assert inner_a.holds
        spliced = Spliced(inner_a, inner_b)
        stack.callback(spliced.close)
        for stream in (a, inner_a, inner_b, b):
            stack.callback(stream.close)
        assert b.take(22) == b" and what is behind it"
        a.close()
        assert spliced.end() is EOFError


def test_who_takes_nothing_in_ends_it() -> None:
    a, inner_a = map(Stream, socket.socketpair())
    inner_b, b = map(Stream, socket.socketpair())
    with ExitStack() as stack:
        spliced = Spliced(inner_a, inner_b)
        stack.callback(spliced.close)
        for stream in (a, inner_a, inner_b, b):
            stack.callback(stream.close)
        a.set_deadline(PATIENCE_S)
        inner_b.set_deadline(0.2)
        sent = spliced.run(a.send, [bytes(64 * MIB)])
        assert spliced.end() is TimeoutError
        a.hang_up()
        assert sent.exception(PATIENCE_S) is not None
