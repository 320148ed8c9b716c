"""`largest`, against a sort of everything."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from longwire.server.top import largest


def sorted_out(values: np.ndarray, k: int) -> list[int]:
    comparable = np.where(np.isnan(values), np.inf, values)
    return np.argsort(-comparable, kind="stable")[:k].tolist()


@given(
    arrays.arrays(
        np.float32,
        st.integers(1, 2000),
        # Few different ones, so that there are equals.
        elements=st.sampled_from([-np.inf, -1.5, 0.0, 0.25, 3.0, 7.0]),
    ),
    st.integers(1, 60),
)
def test_equals_come_in_order(values: np.ndarray, k: int) -> None:
    found = largest(values, k)
    assert found["index"].tolist() == sorted_out(values, k)
    assert found["value"].tolist() == values[found["index"]].tolist()


@pytest.mark.parametrize("k", [1, 2, 40, 41, 1024, 4096])
@pytest.mark.parametrize("n", [1, 7, 4095, 32_000, 262_144, 262_147])
def test_vocabularies(n: int, k: int) -> None:
    values = np.random.default_rng(n + k).standard_normal(n).astype(np.float32)
    assert largest(values, k)["index"].tolist() == sorted_out(values, k)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_nan_comes_first(k: int) -> None:
    values = np.arange(20_000, dtype=np.float32)
    values[77] = np.nan
    assert largest(values, k)["index"].tolist() == [77, 19_999, 19_998][:k]


def test_a_nan_comes_before_infinity() -> None:
    values = np.zeros(20_000, dtype=np.float32)
    values[3], values[77] = np.inf, np.nan
    assert largest(values, 3)["index"].tolist() == [77, 3, 0]
