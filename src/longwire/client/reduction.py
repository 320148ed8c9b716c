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

__all__ = ["MOST_ENTRIES", "Reduction", "current", "reduced"]

MOST_ENTRIES = TOP_MOST - 1
"""One more is asked for, to know of equals."""

_LOGITS = b"result_output"
"""llama.cpp's name for the tensor of logits (`llama-graph.cpp`)."""

_LEAST_ROW = 4096
"""Bytes; a shorter row may come whole."""


class Reduction:
    """What is wanted of the next row, and what came."""

    def __init__(self, n_vocab: int, k: int) -> None:
        self._row = 4 * n_vocab
        self.k = k + 1
        self._entries: npt.NDArray[Any] | None = None
        self._fetch: Callable[[], None] | None = None

    def covers(self, name: bytes, size: int) -> bool:
        """Whether a read of so many bytes is the one to reduce."""
        return size == self._row > max(_LEAST_ROW, 8 * self.k) and name == _LOGITS

    def expect(self, fetch: Callable[[], None]) -> memoryview:
        """Where the entries are to go; `fetch` reads the row itself."""
        self._fetch = fetch
        # A failure leaves zeros: the host looks for one before it samples.
        buffer = bytearray(self.k * TOP_ENTRY.itemsize)
        self._entries = np.frombuffer(buffer, TOP_ENTRY)
        return memoryview(buffer)

    def top(self, distinct: bool) -> npt.NDArray[Any] | None:
        """The largest entries in order; None if llama.cpp has the whole row.

        Equal ones come in the row's order. Where they have to be `distinct` and
        are not, the row is fetched, for llama.cpp to choose in its own way. So it is
        if an index is no token's: llama.cpp would abort on that.
        """
        entries = self._entries
        if entries is None:
            return None
        values, n_vocab = entries["value"], self._row // 4
        unordered = distinct and not (values[1:] < values[:-1]).all()
        if unordered or (entries["index"] >= n_vocab).any():
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
        self._entries = self._fetch = None


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
