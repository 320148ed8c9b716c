"""Graphs as what differs from one before: both ends come to the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longwire.errors import BadFrame, BadRequest
from longwire.wire.dialects import MAX_PATCH, V7, V8
from longwire.wire.graphs import Graph
from longwire.wire.patches import PATCH_HEAD, Bases, GraphPatch, applied
from longwire.wire.tensors import WIDE_TENSOR

U32 = np.uint32


def words_of(*values: int, length: int = 100) -> np.ndarray:
    words = np.zeros(length, U32)
    words[: len(values)] = values
    return words


def whole(patch: GraphPatch) -> bytes:
    return b"".join(map(bytes, patch.encode()))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.dictionaries(st.integers(0, 99), st.integers(0, 5))
        ),
        max_size=12,
    )
)
def test_a_row_of_graphs_arrives(steps: list[tuple[int, dict[int, int]]]) -> None:
    client, server = Bases[None](), Bases[None]()
    for device, changes in steps:
        words = words_of()
        for at, value in changes.items():
            words[at] = value
        patch = client.patch(device, 7, words)
        client.add(device, words, None)
        if patch is None:
            arrived = words
        else:
            got = GraphPatch.decode(memoryview(whole(patch)))
            assert (got.device, got.uid) == (device, 7)
            arrived = applied(server.find(device, got.base).words, got)
        server.add(device, arrived, None)
        assert arrived.tolist() == words.tolist()


def test_the_nearest_of_the_last_four_is_the_base() -> None:
    bases = Bases[None]()
    for i in range(6):
        bases.add(0, words_of(*range(i, i + 20)), None)
    patch = bases.patch(0, 0, words_of(*range(3, 23)))
    assert patch is not None and patch.base == 2 and len(patch.positions) == 0
    # The first two are gone.
    patch = bases.patch(0, 0, words_of(*range(1, 21)))
    assert patch is not None and patch.base == 0 and len(patch.positions) == 20
    with pytest.raises(BadRequest, match="no graph 4 of 4"):
        bases.find(0, 4)
    bases.clear()
    assert bases.patch(0, 0, words_of()) is None


def test_a_patch_has_to_be_worth_it() -> None:
    bases = Bases[None]()
    bases.add(0, words_of(), None)
    assert bases.patch(0, 0, words_of(*[1] * 25)) is not None
    assert bases.patch(0, 0, words_of(*[1] * 26)) is None
    assert bases.patch(0, 0, words_of(length=101)) is None
    assert bases.patch(1, 0, words_of()) is None


def test_a_large_graph_is_no_base() -> None:
    bases = Bases[None]()
    bases.add(0, words_of(length=(2 << 20) + 1), None)
    assert bases.patch(0, 0, words_of(length=(2 << 20) + 1)) is None
    # Whatever is a base has room in a patch.
    assert (2 << 20) // 4 <= MAX_PATCH


def test_what_lies() -> None:
    patch = GraphPatch(1, 2, 0, np.array([3], U32), np.array([4], U32))
    body = whole(patch)
    assert len(body) == PATCH_HEAD + 8
    for wrong in (body[:-1], body + b"\0", body[: PATCH_HEAD - 1]):
        with pytest.raises(BadFrame):
            GraphPatch.decode(memoryview(wrong))
    with pytest.raises(BadRequest, match="outside of the graph"):
        applied(words_of(length=3), patch)


@pytest.mark.parametrize("base", [V7, V8])
def test_words_are_the_body_behind_the_uid(base) -> None:  # type: ignore[no-untyped-def]
    dialect = base.with_lx()
    tensors = np.zeros(2, WIDE_TENSOR)
    tensors["id"] = [5, 6]
    uid = 9 if dialect.graph_uid else 0
    graph = Graph(1, uid, np.array([6], np.uint64), tensors)
    again = Graph.of_words(dialect, 1, uid, graph.words())
    assert again.nodes.tolist() == [6] and again.uid == uid
    assert again.tensors.tobytes() == tensors.tobytes()
    body = b"".join(map(bytes, graph.encode(dialect)))
    assert body.endswith(graph.words().tobytes())
