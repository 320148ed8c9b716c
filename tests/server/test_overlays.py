from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from longwire.native.compute import NativeBuffer
from longwire.server.overlays import TORN, Overlay, Overlays

SIZE = 64


def overlay(start: int, stop: int) -> Overlay:
    return Overlay(start, stop, NativeBuffer(start + 1, start + 2, stop - start, None))


@pytest.fixture(params=range(20))
def overlays(request: pytest.FixtureRequest) -> Overlays:
    """Some ranges that do not touch each other, added in any order."""
    choose = random.Random(request.param)
    cuts = sorted(choose.sample(range(SIZE + 1), 2 * (request.param // 3)))
    items = [overlay(*pair) for i, pair in enumerate(pairwise(cuts)) if i % 3 != 1]
    choose.shuffle(items)
    found = Overlays()
    for item in items:
        found.add(item)
    return found


def holders(overlays: Overlays, start: int, size: int) -> list[Overlay]:
    """The overlays that share a byte with a range, found byte by byte."""
    return [
        item
        for item in overlays.all()
        if any(item.start <= at < item.stop for at in range(start, start + size))
    ]


def test_every_range(overlays: Overlays) -> None:
    ranges = [(a, b - a) for a in range(SIZE + 1) for b in range(a, SIZE + 1)]
    starts = np.array([start for start, _ in ranges], np.uint64)
    sizes = np.array([size for _, size in ranges], np.uint64)
    located = overlays.locate(starts, sizes).tolist()
    for (start, size), at in zip(ranges, located, strict=True):
        touched = holders(overlays, start, size)
        whole = [o for o in touched if o.start <= start and start + size <= o.stop]
        assert overlays.touching(start, size) == touched
        assert overlays.around(start, size) == (whole[0] if whole else None)
        assert overlays.torn(start, size) == [o for o in touched if o not in whole]
        if whole:
            assert overlays.all()[at] is whole[0]
        else:
            assert at == (TORN if touched else -1)


def test_columns_follow_what_is_added_and_removed() -> None:
    overlays = Overlays()
    first, second = overlay(8, 16), overlay(32, 40)
    overlays.add(second)
    assert [column.tolist() for column in overlays.columns()] == [
        [32],
        [40],
        [33],
        [34],
    ]
    overlays.add(first)
    starts, stops, addresses, bases = overlays.columns()
    assert starts.tolist() == [8, 32] and stops.tolist() == [16, 40]
    assert addresses.tolist() == [9, 33] and bases.tolist() == [10, 34]
    overlays.remove(second)
    assert overlays.columns()[0].tolist() == [8] and len(overlays) == 1
    overlays.remove(first)
    assert overlays.columns()[0].tolist() == []
    assert overlays.locate(*[np.array([3], np.uint64)] * 2).tolist() == [-1]
