"""Reading what a sampler needs of a row of logits, instead of the row.

llama.cpp reads a whole row after each step. Inside of `reduced` that read asks an
LX server for its largest entries, and llama.cpp's memory for the row stays as it
was; `Reduction.whole` fetches the row after all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.wire.lx import TOP_ENTRY, TOP_MOST
from longwire.wire.messages import U32

__all__ = ["LOGITS", "MOST_ENTRIES", "Reduction", "current", "reduced"]

LOGITS = b"result_output"
"""llama.cpp's name for the tensor of logits (`llama-graph.cpp`)."""

MOST_ENTRIES = TOP_MOST - 1
"""One more is asked for, to know of equals."""

_LEAST_ROW = 4096
"""Bytes; a shorter row may come whole."""


class Reduction:
    """What is wanted of the next row, and what came."""

    def __init__(self, n_vocab: int, k: int) -> None:
        """`k` entries, of which a single one is for `best`."""
        self._row = 4 * n_vocab
        self.k = k if k == 1 else k + 1
        """How many are asked for: one more tells whether the last has an equal."""
        self._answer: bytearray | None = None
        self._fetch: Callable[[], None] | None = None

    def covers(self, size: int) -> bool:
        """Whether a read of so many bytes may be the one to reduce."""
        return size == self._row > max(_LEAST_ROW, 8 * self.k)

    def expect(self, fetch: Callable[[], None]) -> memoryview:
        """Where the entries are to go; `fetch` reads the row itself."""
        self._fetch = fetch
        # A failure leaves zeros: the host looks for one before it samples.
        self._answer = bytearray(self.k * TOP_ENTRY.itemsize)
        return memoryview(self._answer)

    def best(self) -> int | None:
        """The first of the largest; None if llama.cpp has the whole row, as it has
        if that is no token."""
        if self._answer is None:
            return None
        (index,) = U32.unpack_from(self._answer)
        if index < self._row // 4:
            return int(index)
        self.whole()
        return None

    def top(self) -> npt.NDArray[Any] | None:
        """The largest entries in order; None if llama.cpp has the whole row.

        Where two are equal the row is fetched, for llama.cpp to choose in its own
        way. So it is if an index is no token's: llama.cpp would abort on that.
        """
        if self._answer is None:
            return None
        entries = np.frombuffer(self._answer, TOP_ENTRY)
        values, n_vocab = entries["value"], self._row // 4
        ordered = len(entries) > 1 and (values[1:] < values[:-1]).all()
        if not ordered or (entries["index"] >= n_vocab).any():
            self.whole()
            return None
        return entries[:-1]

    def whole(self) -> None:
        """Have the row where llama.cpp wanted it; until the next step.

        Raises:
            RemoteError: it cannot be read any more.
        """
        if self._fetch is not None:
            self._fetch()
        self._answer = self._fetch = None


class _Current(threading.local):
    reduction: Reduction | None = None


_current = _Current()


def current() -> Reduction | None:
    """The reduction that this thread's reads are to obey."""
    return _current.reduction


@contextmanager
def reduced(reduction: Reduction | None) -> Iterator[None]:
    """Let the body's reads of logits be reduced, where a server can do that."""
    before, _current.reduction = _current.reduction, reduction
    try:
        yield
    finally:
        _current.reduction = before
