"""Legal graphs with a field or two changed: no session crashes, nobody is hurt.

A changed graph may be refused, be computed, or end its session by one of ggml's own
assertions. It may not end it by a bad access, and not change a byte of another
buffer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longwire.wire.dialects import V8, Dialect
from longwire.wire.graphs import Graph
from longwire.wire.types import TYPES
from support.client import Buffer, RawClient
from support.ggml import ENGINES, open_ggml
from support.op_cases import CASES
from support.ops import Case, built
from support.spoil import Change, spoilt
from support.tensors import Sum, tensor
from support.worker import Worker

BUDGET_S = 6.0
"""Examples that start later pass unseen."""

who = st.sampled_from(["dst", 0, 1, 2, 3])
sizes = st.sampled_from(
    [0, 1, 2, 3, 4, 7, 8, 9, 32, 64, 256, 1 << 16, 1 << 31, (1 << 32) - 1]
)
numbers = st.sampled_from([-(1 << 31), -8, -1, 0, 1, 2, 3, 4, 9, 64, (1 << 31) - 1])
changes = st.one_of(
    st.builds(Change, who, st.just("ne"), st.integers(0, 3), sizes),
    st.builds(Change, who, st.just("nb"), st.integers(0, 3), sizes),
    st.builds(Change, who, st.just("type"), st.none(), st.sampled_from(list(TYPES))),
    st.builds(
        Change, st.just("dst"), st.just("op_params"), st.integers(0, 11), numbers
    ),
    st.builds(Change, st.just("dst"), st.just("op"), st.none(), st.integers(0, 100)),
    st.builds(Change, st.just("dst"), st.just("src"), st.integers(0, 6), st.just(0)),
)


class Place(NamedTuple):
    """A client with two buffers: one for a graph, one that no graph may touch."""

    client: RawClient
    buffer: Buffer
    other: Buffer

    SIZE = 1 << 18

    @classmethod
    def open(cls, worker: Worker) -> Place:
        client = RawClient(worker.endpoint, V8)
        client.hello()
        place = cls(client, client.alloc(cls.SIZE), client.alloc(4096))
        client.write(tensor(1, place.other, ne=(1024,)), b"\x5a" * 4096)
        return place

    def run(self, message: Graph, before: bytes) -> bool:
        """Whether the session lives on."""
        whole = tensor(2, self.buffer, ne=(len(before) // 4,))
        try:
            self.client.write(whole, before)
            self.client.compute(message)
            other = self.client.read(tensor(1, self.other, ne=(1024,)))
        except (ConnectionError, EOFError):
            return False
        assert other == b"\x5a" * 4096
        return True


class Outcomes:
    """One session after the other, until each has ended."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.place: Place | None = None
        self.ends: list[str] = []

    def run(self, message_of: Callable[[Buffer], Graph], before: bytes) -> None:
        if self.place is None:
            self.place = Place.open(self.worker)
        if not self.place.run(message_of(self.place.buffer), before):
            name = self.place.client.name
            self.close()
            self.ends.append(self.worker.end_of(name))

    def close(self) -> None:
        if self.place:
            with suppress(OSError):
                self.place.client.close()
        self.place = None


def test_a_changed_graph_never_crashes_a_session(
    workers: Callable[[Dialect], Worker], neighbours: Callable[[Dialect], Sum]
) -> None:
    ggml = open_ggml(ENGINES[0])
    neighbour = neighbours(V8)
    outcomes = Outcomes(workers(V8))
    deadline = time.monotonic() + BUDGET_S

    @settings(
        max_examples=400,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(CASES), st.lists(changes, min_size=1, max_size=2))
    def change(case: Case, made: list[Any]) -> None:
        if time.monotonic() > deadline:
            return
        with built(ggml, case, Place.SIZE) as graph:

            def message(buffer: Buffer) -> Graph:
                legal = graph.message(buffer.handle, buffer.base)
                n = sum(source != 0 for source in legal.tensors["src"][-1].tolist())
                fitting = [c for c in made if c.who == "dst" or int(c.who) < n]
                return spoilt(legal, *fitting)

            outcomes.run(message, graph.before)
        if outcomes.ends:
            end = outcomes.ends[-1]
            assert re.search("refused: GRAPH_COMPUTE|ggml aborted: ", end), end

    change()
    outcomes.close()
    neighbour.check(again=True)
    assert outcomes.ends
