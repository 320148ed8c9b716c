"""Rows of logits that come as their largest entries."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from longwire.client.reduction import Reduction, current, reduced
from longwire.wire.lx import TOP_ENTRY
from support.ggml import Ggml, change

N_VOCAB = 32_000


def answered(values: list[float], fetched: list[str] | None = None) -> Reduction:
    """A reduction whose answer has these values, of tokens from 50 on."""
    log = [] if fetched is None else fetched
    reduction = Reduction(N_VOCAB, len(values))
    target = reduction.expect(lambda: log.append("row"))
    entries = np.zeros(len(values), TOP_ENTRY)
    entries["index"], entries["value"] = np.arange(len(values)) + 50, values
    target[:] = entries.tobytes()
    return reduction


def test_a_sampler_gets_all_but_the_last() -> None:
    top = answered([4, 3, 2, 1]).top()
    assert top is not None
    assert top["index"].tolist() == [50, 51, 52]


@pytest.mark.parametrize("values", [[3, 3, 2], [3, 2, 2], [np.nan, 2, 1]])
def test_equals_bring_the_row(values: list[float]) -> None:
    """The last one may be as good as one that was not asked for."""
    fetched: list[str] = []
    reduction = answered(values, fetched)
    assert reduction.top() is None
    assert reduction.top() is None
    assert fetched == ["row"]


def test_the_greedy_one_is_the_first() -> None:
    fetched: list[str] = []
    assert answered([3], fetched).best() == 50
    assert answered([3, 3], fetched).best() == 50
    assert not fetched


def test_a_sampler_cannot_do_with_the_greedy_one() -> None:
    fetched: list[str] = []
    assert answered([3], fetched).top() is None
    assert fetched == ["row"]


def test_no_answer_is_a_whole_row() -> None:
    reduction = Reduction(N_VOCAB, 1)
    assert reduction.best() is None
    assert reduction.top() is None
    reduction.whole()


@pytest.mark.parametrize(
    ("n_vocab", "k", "name", "size", "covered"),
    [
        (N_VOCAB, 41, "result_output", 4 * N_VOCAB, True),
        (N_VOCAB, 41, "result_output", 8 * N_VOCAB, False),
        (N_VOCAB, 41, "result_norm", 4 * N_VOCAB, False),
        (N_VOCAB, 41, "result_output.0", 4 * N_VOCAB, False),
        # As much as the row itself, or next to nothing.
        (N_VOCAB, 16_000, "result_output", 4 * N_VOCAB, False),
        (1000, 1, "result_output", 4000, False),
    ],
)
def test_which_reads(
    ggml: Ggml, n_vocab: int, k: int, name: str, size: int, covered: bool
) -> None:
    with ggml.context() as context:
        tensor = ggml.tensor(context, 4, name=name)
        assert Reduction(n_vocab, k).covers(tensor, size) is covered


def test_what_an_earlier_name_has_left_is_no_part_of_this_one(ggml: Ggml) -> None:
    with ggml.context() as context:
        tensor = ggml.tensor(context, 4)
        change(tensor, "name", b"result_output\0longer")
        assert Reduction(N_VOCAB, 1).covers(tensor, 4 * N_VOCAB)


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
    sampled, greedy = answered([3, 2, 1], fetched), answered([3], fetched)
    sampled._row = 4 * 52
    assert sampled.top() is None
    greedy._row = 4 * 50
    assert greedy.best() is None
    assert fetched == ["row", "row"]
