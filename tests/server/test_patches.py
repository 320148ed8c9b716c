"""Graphs sent as what differs from one before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from longwire.wire.constants import Command
from longwire.wire.dialects import Dialect
from longwire.wire.graphs import Graph
from longwire.wire.patches import Bases, GraphPatch
from support.lx import WideClient, wide_graph
from support.tensors import ADD, tensor
from support.worker import Worker

MUL = 7


class Scene:
    """c = a op b, and what both ends keep of its graphs."""

    def __init__(self, client: WideClient) -> None:
        self.client = client
        self.buffer = buffer = client.alloc(96)
        self.a, self.b = tensor(1, buffer), tensor(2, buffer, 32)
        self.c = tensor(3, buffer, 64, op=ADD, src=[self.a, self.b])
        self.bases: Bases[None] = Bases()
        client.write(self.a, np.arange(8, dtype="<f4").tobytes())
        client.write(self.b, np.full(8, 3, "<f4").tobytes())

    def whole(self) -> None:
        graph = wide_graph(self.c, self.a, self.b)
        self.client.compute(graph)
        self.bases.add(0, graph.words(), None)

    def words(self, **changes: object) -> np.ndarray:
        graph: Graph = wide_graph(self.c._replace(**changes), self.a, self.b)
        return graph.words()

    def patch(self, words: np.ndarray, uid: int = 0) -> GraphPatch:
        found = self.bases.patch(0, uid, words)
        assert found is not None
        self.bases.add(0, words, None)
        return found

    def post(self, patch: GraphPatch) -> None:
        self.client.post(Command.LX_GRAPH_PATCH, patch.encode())

    def result(self) -> list[float]:
        found: list[float] = np.frombuffer(self.client.read(self.c), "<f4").tolist()
        return found


SUM = [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
PRODUCT = [0.0, 3.0, 6.0, 9.0, 12.0, 15.0, 18.0, 21.0]


@pytest.fixture
def scene(worker: Worker, dialect: Dialect) -> Iterator[Scene]:
    with WideClient(worker.endpoint, dialect) as client:
        client.hello()
        client.start()
        yield Scene(client)


def test_another_op_and_back(scene: Scene) -> None:
    scene.whole()
    assert scene.result() == SUM
    patch = scene.patch(scene.words(op=MUL))
    assert len(patch.positions) == 1
    scene.post(patch)
    assert scene.result() == PRODUCT
    back = scene.patch(scene.words())
    assert (back.base, len(back.positions)) == (1, 0)
    scene.post(back)
    assert scene.result() == SUM


def test_it_is_kept_by_its_uid(scene: Scene, dialect: Dialect) -> None:
    uid = 99 if dialect.graph_uid else 0
    scene.whole()
    scene.post(scene.patch(scene.words(op=MUL), uid))
    scene.post(scene.patch(scene.words(), uid and uid + 1))
    if uid:
        scene.client.recompute(uid)
        assert scene.result() == PRODUCT
    else:
        scene.client.recompute(0)
        assert scene.result() == SUM


def test_what_is_checked_of_a_whole_graph_is_checked_of_this(scene: Scene) -> None:
    scene.whole()
    scene.post(scene.patch(scene.words(data=scene.c.data + 4096)))
    scene.client.post(Command.DEVICE_COUNT)
    assert "outside" in scene.client.error()
    # A refusal makes both ends forget.
    scene.bases.clear()
    scene.post(GraphPatch(0, 0, 0, *np.zeros((2, 0), np.uint32)))
    scene.client.post(Command.DEVICE_COUNT)
    assert "no graph 0 of 0 to start from" in scene.client.error()
    scene.whole()
    assert scene.result() == SUM


def test_a_position_outside(scene: Scene) -> None:
    scene.whole()
    far = np.array([1 << 20], np.uint32)
    scene.post(GraphPatch(0, 0, 0, far, far))
    scene.client.post(Command.DEVICE_COUNT)
    assert "outside of the graph" in scene.client.error()


def test_a_graph_whose_buffer_is_gone_does_not_run(scene: Scene) -> None:
    scene.whole()
    scene.client.free(scene.buffer)
    scene.post(scene.patch(scene.words()))
    scene.client.post(Command.DEVICE_COUNT)
    assert "without a live buffer" in scene.client.error()
