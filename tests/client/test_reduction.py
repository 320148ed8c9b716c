"""Rows of logits that come as their largest entries."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from longwire.client.reduction import MOST_ENTRIES, Reduction, current, reduced
from longwire.wire.lx import TOP_ENTRY, TOP_MOST

N_VOCAB = 32_000
NAME = b"result_output"


def answered(
    k: int, values: list[float], fetched: list[str] | None = None
) -> Reduction:
    """A reduction to `k` entries whose answer has these values."""
    log = [] if fetched is None else fetched
    reduction = Reduction(N_VOCAB, k)
    target = reduction.expect(lambda: log.append("row"))
    entries = np.zeros(k + 1, TOP_ENTRY)
    entries["index"], entries["value"] = np.arange(k + 1) + 50, values
    target[:] = entries.tobytes()
    return reduction


def test_one_more_than_wanted_is_asked_for() -> None:
    top = answered(3, [4, 3, 2, 1]).top(distinct=True)
    assert top is not None
    assert top["index"].tolist() == [50, 51, 52]
    assert MOST_ENTRIES + 1 == TOP_MOST


@pytest.mark.parametrize("values", [[3, 3, 2], [3, 2, 2], [np.nan, 2, 1]])
def test_equals_bring_the_row(values: list[float]) -> None:
    """The last one may be as good as one that was not asked for."""
    fetched: list[str] = []
    reduction = answered(2, values, fetched)
    assert reduction.top(distinct=True) is None
    assert reduction.top(distinct=True) is None
    assert fetched == ["row"]


def test_the_first_of_equals_is_the_greedy_one() -> None:
    fetched: list[str] = []
    top = answered(1, [3, 3], fetched).top(distinct=False)
    assert top is not None and top["index"].tolist() == [50]
    assert not fetched


def test_no_answer_is_a_whole_row() -> None:
    reduction = Reduction(N_VOCAB, 1)
    assert reduction.top(distinct=True) is None
    reduction.whole()


@pytest.mark.parametrize(
    ("n_vocab", "k", "name", "size", "covered"),
    [
        (N_VOCAB, 40, NAME, 4 * N_VOCAB, True),
        (N_VOCAB, 40, NAME, 8 * N_VOCAB, False),
        (N_VOCAB, 40, b"result_norm", 4 * N_VOCAB, False),
        # As much as the row itself, or next to nothing.
        (N_VOCAB, 16_000, NAME, 4 * N_VOCAB, False),
        (1000, 1, NAME, 4000, False),
    ],
)
def test_which_reads(
    n_vocab: int, k: int, name: bytes, size: int, covered: bool
) -> None:
    assert Reduction(n_vocab, k).covers(name, size) is covered


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


def test_an_index_that_is_no_token_brings_the_row() -> None:
    fetched: list[str] = []
    reduction = answered(1, [3, 2], fetched)
    reduction._row = 4 * 51
    assert reduction.top(distinct=False) is None
    assert fetched == ["row"]
