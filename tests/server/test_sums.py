"""Some of what `make soak-sums` does: many sums in disorder, and ranks struck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from soak.bouts import SIZES
from soak.station import Station, station
from soak.sums import strikes, sums
from support.worker import PROC

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROC.exists(), reason="needs Linux's /proc"),
]


@pytest.fixture(scope="module")
def stations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Station]]:
    folder = tmp_path_factory.mktemp("stations")
    with ExitStack() as stack:
        yield [
            stack.enter_context(station(f"rank{i}", folder)) for i in range(max(SIZES))
        ]


def test_all_sums_are_right(stations: list[Station]) -> None:
    kinds, wrong = sums(stations, 450, seed=2)
    assert not wrong
    assert kinds.total() == 450
    assert {words.partition(" ")[0] for words in kinds} == {"2", "3", "4"}


def test_the_others_report_a_rank_that_is_killed(stations: list[Station]) -> None:
    reports = strikes(stations, 2, seed=3)
    assert [report.blow.kind for report in reports] == ["kill-session", "kill-worker"]
    assert [report.wrong for report in reports] == [[], []]
    assert all(report.took_s for report in reports)
