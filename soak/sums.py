"""All-reduces of any size, in any order of arrival: `python -m soak.sums --runs N`.

Then runs in which a rank is killed or frozen in the middle: all others have to report
it in time, and each server has to serve the next client.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from soak.bouts import ONE_SHOT, SIZES, bout, draw_plan
from soak.station import Station, station
from soak.strikes import BLOWS, Blow, Report, play

__all__ = ["main", "strikes", "sums"]

_BOUT = 200
"""Sums of one communicator."""


def sums(
    stations: list[Station], count: int, seed: int
) -> tuple[Counter[str], list[str]]:
    """Do so many sums, among 2, 3 and 4 servers in turns; returns how many there were
    of each kind, and what was wrong."""
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    for turn, at in enumerate(range(0, count, _BOUT)):
        size = SIZES[turn % len(SIZES)]
        plan = draw_plan(seed * 1000 + turn, size)
        # Each server has each rank in its turn.
        ranks = [stations[(turn + i) % len(stations)] for i in range(size)]
        endpoints = [each.worker.endpoint for each in ranks]
        counts, found = bout(endpoints, plan, min(_BOUT, count - at))
        wrong += [f"plan {plan.seed}, {size} servers: {words}" for words in found]
        kinds.update(f"{size} servers, {_way(n)}" for n in counts)
    for each in stations:
        wrong += each.settle()
    return kinds, wrong


def _way(count: int) -> str:
    if count <= 8192:
        return "up to 8,192 numbers"
    if count <= ONE_SHOT:
        return "up to 16,384"
    return "up to 262,144" if count <= 1 << 18 else "up to 400,000"


def strikes(
    stations: list[Station], count: int, seed: int, kinds: Sequence[str] = BLOWS
) -> list[Report]:
    """Strike a rank so many times, the kinds of blows in turns."""
    reports = []
    for turn in range(count):
        draw = random.Random(f"{seed}/{turn}")
        size = SIZES[turn // len(kinds) % len(SIZES)]
        plan = draw_plan(seed * 1000 + 500 + turn, size)
        ranks = draw.sample(stations, size)
        kind = kinds[turn % len(kinds)]
        blow = Blow(kind, draw.randrange(size), draw.uniform(0, 1))
        report = play(ranks, plan, blow)
        report.wrong = [f"plan {plan.seed}, {blow}: {w}" for w in report.wrong]
        reports.append(report)
    return reports


def _table(reports: list[Report]) -> Table:
    table = Table(title="what the other ranks made of a blow")
    for column in ("blow", "runs", "reports", "first, s", "last, s", "wrong"):
        table.add_column(column)
    for kind in BLOWS:
        mine = [report for report in reports if report.blow.kind == kind]
        took_s = [s for report in mine for s in report.took_s]
        said = Counter(words for report in mine for words in report.said)
        table.add_row(
            kind,
            str(len(mine)),
            ", ".join(f"{n} {words}" for words, n in said.most_common()),
            f"{min(took_s, default=0):.2f}",
            f"{max(took_s, default=0):.2f}",
            str(sum(len(report.wrong) for report in mine)),
        )
    return table


def main() -> int:
    """Play; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="sums")
    parser.add_argument("--strikes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=BLOWS, help="strike only in this way")
    options = parser.parse_args()
    console = Console(width=120)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stations = [
            stack.enter_context(station(f"rank{i}", folder)) for i in range(max(SIZES))
        ]
        began = time.monotonic()
        kinds, wrong = sums(stations, options.runs, options.seed)
        for kind, n in sorted(kinds.items()):
            console.print(f"{kind}: {n} sums")
        took_s = time.monotonic() - began
        console.print(f"{kinds.total()} sums in {took_s:.0f} s, {len(wrong)} wrong")
        blows = [options.kind] if options.kind else BLOWS
        reports = strikes(stations, options.strikes, options.seed, blows)
        console.print(_table(reports))
        wrong += [words for report in reports for words in report.wrong]
        for each in stations:
            wrong += each.close()
        for words in wrong:
            console.print(f"WRONG: {words}", markup=False, highlight=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
