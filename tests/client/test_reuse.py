"""The rule of graph reuse against a literal copy of what C++ servers do."""

from __future__ import annotations

from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.client import reuse as module
from longwire.client.reuse import GraphReuse
from longwire.wire.constants import GRAPH_CACHE_MAX
from longwire.wire.dialects import V7, V8, Dialect


class Store(Protocol):
    """A server's kept graphs."""

    def compute(self, device: int, uid: int) -> None: ...
    def has(self, device: int, uid: int) -> bool: ...
    def free(self) -> None: ...


class Store7:
    """Protocol 7: the last graph of each device, dropped on any free."""

    def __init__(self, _most: int) -> None:
        self.last: dict[int, int | None] = {}

    def compute(self, device: int, uid: int) -> None:
        self.last[device] = uid

    def has(self, device: int, uid: int) -> bool:
        # The server runs whatever it has: the client must mean that one.
        return self.last.get(device) == uid

    def free(self) -> None:
        self.last = dict.fromkeys(self.last)


class Store8:
    """Protocol 8: graphs by uid; a free nulls them and leaves the entries."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.by_device: dict[int, dict[int, bool]] = {}

    def compute(self, device: int, uid: int) -> None:
        graphs = self.by_device.setdefault(device, {})
        if uid == 0:
            return
        if len(graphs) >= self.most:
            graphs.clear()
        graphs[uid] = True

    def has(self, device: int, uid: int) -> bool:
        return self.by_device.get(device, {}).get(uid, False)

    def free(self) -> None:
        for graphs in self.by_device.values():
            graphs.update(dict.fromkeys(graphs, False))


def run(reuse: GraphReuse, store: Store, device: int, uid: int) -> bool:
    """One `graph_compute`: whether the client recomputes."""
    if reuse.may_recompute(device, uid):
        assert uid != 0
        assert store.has(device, uid), "recomputes what the server does not have"
        return True
    reuse.sent(device, uid)
    store.compute(device, uid)
    return False


GRAPH = st.tuples(st.integers(0, 2), st.integers(0, 9))
FREE = st.none()
MOST = 4
"""In place of 1,024, so that short sequences get there."""


@pytest.mark.parametrize(("dialect", "kind"), [(V7, Store7), (V8, Store8)])
@settings(max_examples=300)
@given(st.lists(st.one_of(GRAPH, GRAPH, GRAPH, FREE), max_size=60))
def test_never_recomputes_what_is_gone(
    dialect: Dialect, kind: type[Store7 | Store8], steps: list[tuple[int, int] | None]
) -> None:
    reuse, store = GraphReuse(dialect), kind(MOST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRAPH_CACHE_MAX", MOST)
        for step in steps:
            if step is None:
                reuse.freed()
                store.free()
            else:
                run(reuse, store, *step)


@pytest.mark.parametrize(("dialect", "kind"), [(V7, Store7), (V8, Store8)])
@settings(max_examples=200)
@given(st.lists(GRAPH, max_size=60))
def test_without_frees_it_recomputes_whatever_is_there(
    dialect: Dialect, kind: type[Store7 | Store8], steps: list[tuple[int, int]]
) -> None:
    reuse, store = GraphReuse(dialect), kind(MOST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GRAPH_CACHE_MAX", MOST)
        for device, uid in steps:
            there = uid != 0 and store.has(device, uid)
            assert run(reuse, store, device, uid) is there


def test_the_1024_rule() -> None:
    reuse, store = GraphReuse(V8), Store8(GRAPH_CACHE_MAX)
    for uid in range(1, 1025):
        assert not run(reuse, store, 0, uid)
    assert run(reuse, store, 0, 1)
    assert run(reuse, store, 0, 1024)
    assert not run(reuse, store, 1, 1)
    assert not run(reuse, store, 0, 1025)
    assert not run(reuse, store, 0, 1)
    assert run(reuse, store, 0, 1025)
    assert run(reuse, store, 1, 1)


def test_freed_graphs_count_towards_1024() -> None:
    reuse, store = GraphReuse(V8), Store8(GRAPH_CACHE_MAX)
    for uid in range(1, 1024):
        run(reuse, store, 0, uid)
    reuse.freed()
    store.free()
    assert not run(reuse, store, 0, 5)
    assert not run(reuse, store, 0, 9000)
    # 1,024 entries: the next graph clears them, although most are dead.
    assert run(reuse, store, 0, 5)
    assert not run(reuse, store, 0, 9001)
    assert not run(reuse, store, 0, 5)


def test_a_dead_graph_that_comes_back_clears_a_full_store() -> None:
    """The count is taken first, although this graph has its entry already."""
    reuse, store = GraphReuse(V8), Store8(GRAPH_CACHE_MAX)
    for uid in range(1, 1025):
        run(reuse, store, 0, uid)
    reuse.freed()
    store.free()
    assert not run(reuse, store, 0, 5)
    for uid in range(2001, 3024):
        assert not run(reuse, store, 0, uid)
        assert run(reuse, store, 0, 5)
    assert not run(reuse, store, 0, 4000)
    assert not run(reuse, store, 0, 5)


def test_uid_0_counts_for_nothing_in_protocol_8() -> None:
    reuse = GraphReuse(V8)
    reuse.sent(0, 7)
    for _ in range(2000):
        assert not reuse.may_recompute(0, 0)
        reuse.sent(0, 0)
    assert reuse.may_recompute(0, 7)


@pytest.mark.parametrize("other", [0, 8])
def test_any_other_graph_replaces_it_in_protocol_7(other: int) -> None:
    reuse = GraphReuse(V7)
    reuse.sent(0, 7)
    reuse.sent(1, other)
    assert reuse.may_recompute(0, 7)
    reuse.sent(0, other)
    assert not reuse.may_recompute(0, 7)
    assert reuse.may_recompute(0, other) is (other != 0)
