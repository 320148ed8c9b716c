"""Ranges of a buffer whose bytes lie in mapped files instead.

A weight that is on file here need not be copied: its range of the buffer gets an
overlay, a private mapping of the file. Pages of a file and of a buffer are cut at
different places, so the mapping lies elsewhere, and every use of a virtual address
looks for it here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longwire.native.compute import NativeBuffer

__all__ = ["TORN", "Overlay", "Overlays"]

TORN = -2
"""Of a range that an overlay holds a part of."""

Columns = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """One range: offsets in its buffer, and the memory that stands in for it."""

    start: int
    stop: int
    memory: NativeBuffer


class Overlays:
    """The overlays of one buffer. No two touch the same byte."""

    def __init__(self) -> None:
        self._items: list[Overlay] = []
        self._starts: list[int] = []
        self._columns: tuple[Columns, ...] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def all(self) -> list[Overlay]:
        """All of them, by where they start."""
        return list(self._items)

    def touching(self, start: int, size: int) -> list[Overlay]:
        """Those that share a byte with a range."""
        if not self._items or not size:
            return []
        # One that starts before the range may still reach into it.
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, start + size)
        return [item for item in self._items[first:last] if item.stop > start]

    def around(self, start: int, size: int) -> Overlay | None:
        """The one that holds all bytes of a range."""
        found = self.touching(start, size)
        whole = len(found) == 1 and _holds(found[0], start, size)
        return found[0] if whole else None

    def torn(self, start: int, size: int) -> list[Overlay]:
        """Those that hold some bytes of a range, but not all."""
        found = self.touching(start, size)
        return [item for item in found if not _holds(item, start, size)]

    def add(self, overlay: Overlay) -> None:
        """Lay one over a range that none touches."""
        at = bisect_right(self._starts, overlay.start)
        self._items.insert(at, overlay)
        self._starts.insert(at, overlay.start)
        self._columns = None

    def remove(self, overlay: Overlay) -> None:
        """Take one away."""
        at = self._items.index(overlay)
        del self._items[at], self._starts[at]
        self._columns = None

    def columns(self) -> tuple[Columns, ...]:
        """Per overlay: start, stop, address of its buffer, real base; by start."""
        if self._columns is None:
            rows = [
                (o.start, o.stop, o.memory.address, o.memory.base) for o in self._items
            ]
            self._columns = tuple(np.array(rows, np.uint64).reshape(-1, 4).T)
        return self._columns

    def locate(self, starts: Columns, sizes: Columns) -> npt.NDArray[np.int64]:
        """Per range the index of the overlay around it, -1 for none, or `TORN`."""
        begins, ends, _, _ = self.columns()
        # The first one that ends behind the range's start is the only candidate.
        at = np.searchsorted(ends, starts, side="right")
        none = np.uint64(0)
        begin = np.append(begins, none)[at]
        end = np.append(ends, none)[at]
        stops = starts + sizes
        touches = (at < len(ends)) & (begin < stops) & (sizes > 0)
        whole = (begin <= starts) & (stops <= end)
        found: npt.NDArray[np.int64] = np.where(
            touches, np.where(whole, at, TORN), -1
        ).astype(np.int64)
        return found


def _holds(overlay: Overlay, start: int, size: int) -> bool:
    return overlay.start <= start and start + size <= overlay.stop
