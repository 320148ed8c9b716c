"""Sums while their numbers are on the way: what has not left may not be changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from longwire.server.exchange import Flow
from longwire.server.reduce import ROUND, Reducer
from longwire.server.rounding import rounding

COUNT = ROUND


class Slow:
    """A peer whose numbers come at once, and to whom ours leave late."""

    def __init__(self, arriving: bytes) -> None:
        self.arriving = arriving
        self.left = b""
        self.unsent = self.awaited = 0
        self._pieces: list[memoryview] = []

    def send(self, pieces: list[memoryview]) -> None:
        self._pieces = pieces
        self.unsent = sum(map(len, pieces))

    def receive(self, target: memoryview) -> None:
        target[:] = self.arriving[: len(target)]

    def leave(self, size: int) -> None:
        """This many more bytes are on their way."""
        at = len(self.left)
        self.left += b"".join(self._pieces)[at : at + size]
        self.unsent -= size


def swap(flows: Sequence[Flow], step: Callable[[], None] | None) -> None:
    for _ in range(4):
        for flow in cast("list[Slow]", flows):
            flow.leave(flow.unsent if _ == 3 else COUNT)
        if step is not None:
            step()


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("wire", [0, 1])
def test_numbers_leave_as_they_were(own: int, wire: int) -> None:
    ours = np.arange(COUNT, dtype=np.float32)
    theirs = np.full(COUNT, 2, np.float32)
    narrow = rounding(wire)
    arriving: Any = theirs
    if narrow is not None:
        arriving = np.empty(COUNT, np.uint16)
        narrow.narrow(theirs, arriving)
        sent = np.empty(COUNT, np.uint16)
        narrow.narrow(ours, sent)
    peer = Slow(arriving.tobytes())
    flows = [cast(Flow, peer), None] if own else [None, cast(Flow, peer)]
    numbers = ours.copy()
    Reducer(own, flows, swap).reduce(numbers, narrow)
    assert peer.left == (ours if narrow is None else sent).tobytes()
    if narrow is None:
        assert np.array_equal(numbers, ours + theirs)
