from __future__ import annotations

import threading
from pathlib import Path

import pytest

from longwire.server import keeper as module
from longwire.server.cache import WeightCache
from longwire.server.keeper import Keeper


class SlowCache(WeightCache):
    """A cache that stores when it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Semaphore(0)
        self.stored: list[tuple[bytes, bool]] = []

    def store(self, data: memoryview, by_hash: bool = True) -> None:
        assert self.gate.acquire(timeout=10)
        self.stored.append((bytes(data), by_hash))


@pytest.fixture
def cache(tmp_path: Path) -> SlowCache:
    return SlowCache(tmp_path)


def test_everything_is_stored_in_order_at_the_end(cache: SlowCache) -> None:
    keeper = Keeper(cache)
    expected = [(bytes([n]) * 100, n % 2 == 0) for n in range(20)]
    for data, by_hash in expected:
        keeper.put(memoryview(data), by_hash)
    assert keeper.pending == 20 and cache.stored == []
    cache.gate.release(20)
    keeper.close()
    assert cache.stored == expected and keeper.pending == 0
    keeper.close()


def test_settling_waits(cache: SlowCache) -> None:
    keeper = Keeper(cache)
    keeper.settle()
    keeper.put(memoryview(b"x"), False)
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (keeper.settle(), done.set()))
    waiter.start()
    assert not done.wait(0.05)
    cache.gate.release()
    assert done.wait(10)
    waiter.join(10)
    keeper.close()
    assert cache.stored == [(b"x", False)]


def test_what_waits_has_a_limit(
    cache: SlowCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 100)
    keeper = Keeper(cache)
    # The first may be as large as it wants.
    keeper.put(memoryview(bytes(1000)), False)
    entered = threading.Event()
    writer = threading.Thread(
        target=lambda: (keeper.put(memoryview(bytes(60)), False), entered.set())
    )
    writer.start()
    assert not entered.wait(0.05)
    cache.gate.release()
    assert entered.wait(10)
    keeper.put(memoryview(bytes(40)), False)
    assert keeper.pending == 2
    cache.gate.release(2)
    writer.join(10)
    keeper.close()
    assert [len(data) for data, _ in cache.stored] == [1000, 60, 40]


def test_a_failure_is_not_kept_secret(
    cache: SlowCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cache, "store", fail)
    keeper = Keeper(cache)
    keeper.put(memoryview(b"x"), True)
    with pytest.raises(MemoryError):
        keeper.settle()
    with pytest.raises(MemoryError):
        keeper.put(memoryview(b"y"), True)
    keeper.close()


def test_without_work_there_is_no_thread(cache: SlowCache) -> None:
    before = threading.active_count()
    keeper = Keeper(cache)
    assert threading.active_count() == before
    keeper.close()
