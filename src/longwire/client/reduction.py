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

from longwire.client.records import name_of
from longwire.wire.lx import TOP_ENTRY, TOP_INDEX

__all__ = ["Reduction", "current", "reduced"]

_LOGITS = b"result_output"
"""llama.cpp's name for the tensor of logits (`llama-graph.cpp`)."""

_LEAST_ROW = 4096
"""Bytes; a shorter row may come whole."""


class Reduction:
    """What is wanted of the next row, and what came."""

    def __init__(self, n_vocab: int, k: int) -> None:
        """Ask for the `k` largest: for `best` 1, for `top` one more than wanted."""
        self._row = 4 * n_vocab
        self.k = k
        self._answer: bytearray | None = None
        self._fetch: Callable[[], None] | None = None

    def covers(self, tensor: int, size: int) -> bool:
        """Whether a read of so many bytes of a tensor is the one to reduce."""
        if size != self._row or size <= max(_LEAST_ROW, TOP_ENTRY.itemsize * self.k):
            return False
        return name_of(tensor) == _LOGITS

    def expect(self, fetch: Callable[[], None]) -> memoryview:
        """Where the entries are to go; `fetch` reads the row itself."""
        self._fetch = fetch
        # A failure leaves zeros: the host looks for one before it samples.
        self._answer = bytearray(self.k * TOP_ENTRY.itemsize)
        return memoryview(self._answer)

    def best(self) -> int | None:
        """The token of the largest entry, the first of equals.

        None if llama.cpp has the whole row. If the index is no token's, the row is
        fetched.

        Raises:
            RemoteError: it cannot be read any more.
        """
        if self._answer is None:
            return None
        (token,) = TOP_INDEX.unpack_from(self._answer)
        if token < self._row // 4:
            return int(token)
        self.whole()
        return None

    def top(self) -> npt.NDArray[Any] | None:
        """The largest entries in order, all but the last.

        None if llama.cpp has the whole row. Where two are equal it is fetched, for
        llama.cpp to choose in its own way. So it is if an index is no token's:
        llama.cpp would abort on that.

        Raises:
            RemoteError: the row cannot be read any more.
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
