"""The sum of arrays of several servers, by frames that each sends to each.

PROTOCOL.md, "Communicators". Whatever the way, each number is summed in the order
of ranks, ((s0 + s1) + s2) and so on: all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.server.exchange import Flow
from longwire.server.members import raw
from longwire.server.rounding import Rounding

__all__ = ["ROUND", "Reducer", "part_of"]

Floats = npt.NDArray[Any]

ROUND = 1 << 18
"""Numbers summed at a time: what a session needs for it is bounded by that."""

_ONE_SHOT = 16 * 1024
"""Up to so many all goes to everybody at once: it saves a second way to the peers."""

_BLOCK = 32 * 1024
"""Numbers summed while the next ones are still on their way."""

Swap = Callable[[Sequence[Flow], Callable[[], None] | None], None]
"""Has all flows send and receive what they were told, and calls the second between."""


class Reducer:
    """Sums of one communicator. Not locked; memory grows to what was needed once."""

    def __init__(self, own: int, flows: Sequence[Flow | None], swap: Swap) -> None:
        """`flows` are by rank, None at `own`."""
        self._own = own
        self._size = len(flows)
        self._others = [(q, flow) for q, flow in enumerate(flows) if flow is not None]
        self._flows = [flow for _, flow in self._others]
        self._swap = swap
        self._incoming = np.empty(0, np.float32)
        self._outgoing = np.empty(0, np.uint16)
        self._wide = np.empty((2, 0), np.float32)

    def reduce(self, numbers: Floats, rounding: Rounding | None) -> None:
        """Have `numbers` become the sum of all servers'. At most `ROUND` of them.

        Raises:
            RemoteFailure: a peer failed, and with it the communicator.
        """
        n = len(numbers)
        if not self._others:
            return
        if self._size == 2 or n <= _ONE_SHOT:
            self._at_once(numbers, rounding)
        else:
            self._in_parts(numbers, rounding)

    def _at_once(self, numbers: Floats, rounding: Rounding | None) -> None:
        leaving = numbers if rounding is None else self._narrowed(numbers, rounding)
        parts = self._room(len(numbers), leaving)
        bytes_ = raw(leaving)
        for q, flow in self._others:
            flow.send([bytes_])
            flow.receive(raw(parts[q]))
        parts[self._own] = leaving
        # What is not narrow is summed in place, and must have left before.
        self._swap_and_sum(parts, numbers, rounding, wait_to_leave=rounding is None)

    def _in_parts(self, numbers: Floats, rounding: Rounding | None) -> None:
        """Each sums a part for all, which sums sooner and sends less."""
        leaving = numbers if rounding is None else self._narrowed(numbers, rounding)
        own = part_of(len(numbers), self._size, self._own)
        parts = self._room(own.stop - own.start, leaving)
        for q, flow in self._others:
            flow.send([raw(leaving[part_of(len(numbers), self._size, q)])])
            flow.receive(raw(parts[q]))
        parts[self._own] = leaving[own]
        self._swap_and_sum(parts, numbers[own], rounding, wait_to_leave=False)
        if rounding is not None:
            rounding.narrow(numbers[own], leaving[own])
        # All has left, so there is room for the parts that others have summed.
        for q, flow in self._others:
            flow.send([raw(leaving[own])])
            flow.receive(raw(leaving[part_of(len(numbers), self._size, q)]))
        self._swap(self._flows, None)
        if rounding is not None:
            rounding.widen(leaving, numbers)

    def _room(self, n: int, like: Floats) -> list[Floats]:
        """An array per rank for `n` numbers, in one memory; the own one to be put."""
        if len(self._incoming) < n * len(self._others):
            self._incoming = np.empty(n * len(self._others), np.float32)
        room = self._incoming.view(like.dtype)
        arrays = [room[k * n : (k + 1) * n] for k in range(len(self._others))]
        arrays.insert(self._own, room[:0])
        return arrays

    def _narrowed(self, numbers: Floats, rounding: Rounding) -> Floats:
        if len(self._outgoing) < len(numbers):
            self._outgoing = np.empty(len(numbers), np.uint16)
        narrow = self._outgoing[: len(numbers)]
        rounding.narrow(numbers, narrow)
        return narrow

    def _swap_and_sum(
        self,
        parts: list[Floats],
        out: Floats,
        rounding: Rounding | None,
        wait_to_leave: bool,
    ) -> None:
        n, done = len(out), 0
        if n <= _BLOCK:
            self._swap(self._flows, None)
            self._sum(parts, out, rounding)
            return
        flows, width = self._flows, parts[self._own].itemsize

        def step() -> None:
            nonlocal done
            left = max(flow.awaited for flow in flows)
            if wait_to_leave:
                left = max(left, *(flow.unsent for flow in flows))
            # A header that is still to come counts as bytes of the last number.
            ready = n - min(n, -(-left // width))
            while ready - done >= _BLOCK or (ready == n and done < n):
                block = slice(done, min(done + _BLOCK, n))
                self._sum([part[block] for part in parts], out[block], rounding)
                done = block.stop

        self._swap(flows, step)

    def _sum(self, parts: list[Floats], out: Floats, rounding: Rounding | None) -> None:
        """Sum the arrays into `out`, which may be one of them; the first is used up."""
        if rounding is not None:
            self._sum_narrow(parts, out, rounding)
            return
        total = parts[0]
        for part in parts[1:-1]:
            np.add(total, part, out=total)
        np.add(total, parts[-1], out=out)

    def _sum_narrow(self, parts: list[Floats], out: Floats, rounding: Rounding) -> None:
        if not self._wide.shape[1]:
            self._wide = np.empty((2, _BLOCK), np.float32)
        n = len(out)
        total, wide = self._wide[0, :n], self._wide[1, :n]
        rounding.widen(parts[0], total)
        for part in parts[1:-1]:
            rounding.widen(part, wide)
            np.add(total, wide, out=total)
        rounding.widen(parts[-1], wide)
        np.add(total, wide, out=out)


def part_of(n: int, size: int, rank: int) -> slice:
    """Which of `n` numbers the server of that rank sums for all `size` of them."""
    least, more = divmod(n, size)
    start = rank * least + min(rank, more)
    return slice(start, start + least + (rank < more))
