"""Rows of logits that come as their largest entries."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from longwire.client.reduction import MOST_ENTRIES, Reduction, current, reduced
from longwire.wire.lx import TOP_ENTRY, TOP_MOST

N_VOCAB = 32_000


def answered(
    k: int, values: list[float], fetched: list[str] | None = None
) -> Reduction:
    """A reduction to `k` entries whose answer has these values."""
    log = [] if fetched is None else fetched
    reduction = Reduction(N_VOCAB, k)
    target = reduction.expect(lambda: log.append("row"))
    entries = np.zeros(reduction.k, TOP_ENTRY)
    entries["index"], entries["value"] = np.arange(reduction.k) + 50, values
    target[:] = entries.tobytes()
    return reduction


def test_one_more_than_wanted_is_asked_for() -> None:
    top = answered(3, [4, 3, 2, 1]).top()
    assert top is not None
    assert top["index"].tolist() == [50, 51, 52]
    assert MOST_ENTRIES + 1 == TOP_MOST


@pytest.mark.parametrize("values", [[3, 3, 2], [3, 2, 2], [np.nan, 2, 1]])
def test_equals_bring_the_row(values: list[float]) -> None:
    """The last one may be as good as one that was not asked for."""
    fetched: list[str] = []
    reduction = answered(2, values, fetched)
    assert reduction.top() is None
    assert reduction.top() is None
    assert fetched == ["row"]


def test_the_greedy_one_is_all_that_is_asked_for() -> None:
    fetched: list[str] = []
    reduction = answered(1, [3], fetched)
    assert reduction.k == 1
    assert reduction.best() == 50
    assert not fetched


def test_a_sampler_cannot_do_with_the_greedy_one() -> None:
    fetched: list[str] = []
    assert answered(1, [3], fetched).top() is None
    assert fetched == ["row"]


def test_no_answer_is_a_whole_row() -> None:
    reduction = Reduction(N_VOCAB, 1)
    assert reduction.best() is None
    assert reduction.top() is None
    reduction.whole()


@pytest.mark.parametrize(
    ("n_vocab", "k", "size", "covered"),
    [
        (N_VOCAB, 40, 4 * N_VOCAB, True),
        (N_VOCAB, 40, 8 * N_VOCAB, False),
        # As much as the row itself, or next to nothing.
        (N_VOCAB, 16_000, 4 * N_VOCAB, False),
        (1000, 1, 4000, False),
    ],
)
def test_which_reads(n_vocab: int, k: int, size: int, covered: bool) -> None:
    assert Reduction(n_vocab, k).covers(size) is covered


def test_it_is_for_this_thread_and_this_body() -> None:
    seen: list[Reduction | None] = []
    mine = Reduction(N_VOCAB, 1)
    with reduced(mine):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        with reduced(None):
            seen.append(current())
        seen.append(current())
    assert seen == [None, None, mine]
    assert current() is None


@pytest.mark.parametrize("k", [1, 2])
def test_an_index_that_is_no_token_brings_the_row(k: int) -> None:
    fetched: list[str] = []
    reduction = answered(k, [3, 2, 1][: k + (k > 1)], fetched)
    reduction._row = 4 * 50
    assert (reduction.best() if k == 1 else reduction.top()) is None
    assert fetched == ["row"]
