"""The largest of many numbers, so that a client need not take them all.

A vocabulary's logits are hundreds of kilobytes per token, of which a sampler
looks at a few.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.wire.lx import TOP_ENTRY

__all__ = ["largest"]

_ROWS_PER_ENTRY = 8
"""More rows find fewer candidates, and take longer to look through."""


def largest(values: npt.NDArray[Any], k: int) -> npt.NDArray[Any]:
    """The `k` largest f32 in order, the first of equals first, as `TOP_ENTRY`s.

    A NaN counts as larger than any number. With fewer than `k` values, all of them.
    """
    if k == 1:
        indices = np.argmax(values, keepdims=True)
    else:
        indices = _candidates(values, k)
        found = values[indices]
        order = np.lexsort((indices, -_comparable(found), ~np.isnan(found)))
        indices = indices[order[:k]]
    entries = np.empty(len(indices), TOP_ENTRY)
    entries["index"] = indices
    entries["value"] = values[indices]
    return entries


def _candidates(values: npt.NDArray[Any], k: int) -> npt.NDArray[Any]:
    """Indices of the `k` largest and of few others.

    Of rows of values, the `k` best have a maximum each: as many values are at
    least as large as the smallest of those.
    """
    n_rows = _ROWS_PER_ENTRY * k
    row = len(values) // n_rows
    if row < 2:
        return np.arange(len(values))
    maxima = _comparable(values[: n_rows * row].reshape(n_rows, row).max(axis=1))
    least = np.partition(maxima, n_rows - k)[n_rows - k]
    # Written this way round, a NaN is one of them.
    return np.flatnonzero(~(values < least))


def _comparable(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.where(np.isnan(values), np.float32(np.inf), values)
