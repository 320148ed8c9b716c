"""Commands that servers do together: queued at once, and none is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from longwire.client import connection as module
from longwire.client.connection import Connection
from longwire.client.corking import BEHIND_READ, BULK, CORK_LIMIT
from longwire.client.together import Post, post_together
from longwire.errors import ConnectionLost
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.tensors import TENSOR_SIZE
from support.scripted import PATIENCE_S, Scripted

Start = Callable[..., Scripted]

HALF = Command.LX_ALLREDUCE
BODY = bytes(300)


@pytest.fixture
def pairs(scripted: Start) -> list[Scripted]:
    return [scripted({}, V8, lx_flags=0) for _ in range(3)]


def halves(*pairs: Scripted, body: bytes = BODY) -> list[Post]:
    return [Post(pair.connection, HALF, body) for pair in pairs]


def sent(pair: Scripted) -> list[str]:
    return [request.command.name for send in pair.stream.sends for request in send]


class Noted:
    """A lock that tells when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.waiting = threading.Event()
        self.release = self._lock.release

    def acquire(self, blocking: bool = True) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if blocking:
            self.waiting.set()
            return self._lock.acquire()
        return False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


def test_all_are_queued_and_none_is_sent(pairs: list[Scripted]) -> None:
    post_together([])
    post_together(halves(*pairs))
    assert [sent(pair) for pair in pairs] == [[]] * 3
    pairs[0].connection.ask(Command.LX_PING, b"")
    assert [sent(pair) for pair in pairs] == [["LX_ALLREDUCE", "LX_PING"]] + [
        ["LX_ALLREDUCE"]
    ] * 2


def test_all_or_none(pairs: list[Scripted]) -> None:
    pairs[1].connection.close()
    with pytest.raises(ConnectionLost):
        post_together(halves(*pairs))
    for pair in (pairs[0], pairs[2]):
        pair.connection.flush()
        assert sent(pair) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_who_waits_for_one_holds_up_no_other(
    pairs: list[Scripted], order: tuple[int, int]
) -> None:
    free, busy, third = pairs
    lock: Any = Noted()
    busy.connection.lock = lock
    lock.acquire()
    posts = halves(free, busy)
    waiter = threading.Thread(target=post_together, args=([posts[i] for i in order],))
    waiter.start()
    try:
        assert lock.waiting.wait(PATIENCE_S)
        assert free.connection.lock.acquire(timeout=PATIENCE_S)
        free.connection.lock.release()
        post_together(halves(free, third))
    finally:
        lock.release()
        waiter.join()
    for pair, count in ((free, 2), (busy, 1), (third, 1)):
        pair.connection.flush()
        assert sent(pair) == ["LX_ALLREDUCE"] * count


def test_what_is_owed_is_waited_for_without_a_lock(
    scripted: Start, pairs: list[Scripted]
) -> None:
    other = pairs[0]
    free: list[bool] = []

    def answer(body: bytes) -> bytes:
        free.append(other.connection.lock.acquire(blocking=False))
        other.connection.lock.release()
        return bytes(8)

    one = scripted({Command.GET_TENSOR: answer}, V8, lx_flags=0)
    read = m.GetTensor(bytes(TENSOR_SIZE), 0, 8).encode()
    one.connection.queue_read(Command.GET_TENSOR, read, memoryview(bytearray(8)))
    # Halves that would not fit behind the read.
    post_together(halves(other, one, body=bytes(BEHIND_READ)))
    assert free == [True]
    assert sent(one) == ["GET_TENSOR"]


def test_they_do_not_pile_up(pairs: list[Scripted]) -> None:
    one, other, _ = pairs
    for _ in range(10):
        post_together(halves(one, other, body=bytes(CORK_LIMIT // 4)))
    assert sent(one) == sent(other) != []


@pytest.mark.parametrize(
    "act",
    [
        lambda c: c.ask(Command.LX_PING, b""),
        lambda c: c.begin(Command.LX_PING, b"", memoryview(bytearray())),
        lambda c: c.post(Command.SET_TENSOR, bytes(400), bytes(BULK)),
    ],
    ids=["ask", "begin", "bulk"],
)
def test_nobody_sends_one_half_while_the_other_stays(
    pairs: list[Scripted],
    act: Callable[[Connection], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if they come right after all others were flushed: a server that waits for
    another one's may take nothing in, and its client would wait for ever."""
    one, other, _ = pairs
    flush_all, posts = module.flush_all, halves(one, other)

    def late(but: Connection | None = None) -> None:
        flush_all(but)
        if posts:
            post_together(posts)
            posts.clear()

    monkeypatch.setattr(module, "flush_all", late)
    act(one.connection)
    assert "LX_ALLREDUCE" in sent(one) and sent(other) == ["LX_ALLREDUCE"]
    one.connection.synchronize()
