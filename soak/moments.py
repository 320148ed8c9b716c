"""Kill, freeze or reset at random moments: `python -m soak.moments --runs N`.

Each run is a number: `--seed S --first K --runs 1` plays one of them again. A host
that resumes has to end with the tokens of the undisturbed run, whatever is done to a
worker; what is done to a host has to leave nothing behind on the workers.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from longwire.cli.demo import demo_model
from soak.blows import AFTERMATHS, KINDS, ON_HOST
from soak.host import PHASES
from soak.play import Moment, Outcome, ground
from support.tiny import make_moe

__all__ = ["main"]

_REAL = 10
"""One of so many runs is with a real model."""


def moment(seed: int, number: int) -> Moment:
    """The moment of that number: the kinds take turns, in each of the phases."""
    draw = random.Random(f"{seed}/{number}")
    kinds = list(KINDS)
    turn, at = divmod(number, len(kinds))
    random.Random(f"{seed}/{turn}").shuffle(kinds)
    kind = kinds[at]
    twice = kind not in ON_HOST and draw.random() < 0.15
    return Moment(
        number=number,
        kind=kind,
        again_s=draw.uniform(0, 2) if twice else None,
        phase=PHASES[(number + turn) % len(PHASES)],
        share=draw.random(),
        victim=draw.randrange(2),
        aftermath=draw.choice(AFTERMATHS),
        on_failure="fail" if draw.random() < 0.15 else "resume",
        seed=draw.choice((0, 0, 7)),
        model="real" if number % _REAL == _REAL - 1 else "tiny",
    )


class Runs:
    """Outcomes as they come; told by several threads."""

    def __init__(self, console: Console) -> None:
        self.outcomes: list[Outcome] = []
        self._console = console
        self._lock = threading.Lock()

    def add(self, outcome: Outcome) -> None:
        """Tell of one."""
        with self._lock:
            self.outcomes.append(outcome)
            self._console.print(str(outcome), markup=False, highlight=False)
            if outcome.wrong:
                self._console.print(outcome.said, markup=False, highlight=False)


class _Numbers(Iterator[int]):
    """Numbers of runs, for whoever has time."""

    def __init__(self, first: int, count: int) -> None:
        self._left = iter(range(first, first + count))
        self._lock = threading.Lock()

    def __next__(self) -> int:
        with self._lock:
            return next(self._left)


def _play(
    numbers: Iterator[int], options: argparse.Namespace, at: int, runs: Runs
) -> None:
    with ground(at, options.models) as place:
        for number in numbers:
            runs.add(place.play(replace(moment(options.seed, number), **options.given)))


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(
        title="blows by the phase that they struck; how the host ended, the longest "
        "time it took to, and the longest until workers held nothing"
    )
    for column in ("kind", *PHASES, "ends", "host, s", "workers, s"):
        table.add_column(column)
    for kind in KINDS:
        mine = [o for o in outcomes if o.moment.kind == kind]
        struck = Counter(o.struck for o in mine)
        ends = Counter(o.end for o in mine)
        table.add_row(
            kind,
            *(str(struck[phase] or "") for phase in PHASES),
            ", ".join(f"{n} {end}" for end, n in ends.most_common()),
            f"{max((o.seconds for o in mine), default=0):.1f}",
            f"{max((o.settled_s for o in mine), default=0):.1f}",
        )
    return table


def main() -> int:
    """Play; the exit code is 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--at-once", type=int, default=2, help="runs at the same time")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    parser.add_argument("--phase", choices=PHASES, help="only in this one")
    options = parser.parse_args()
    given = {"kind": options.kind, "phase": options.phase}
    options.given = {name: value for name, value in given.items() if value}
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        tiny = Path(folder, "tiny.gguf")
        make_moe(tiny)
        options.models = {"tiny": tiny, "real": demo_model(console)}
        runs = Runs(console)
        numbers = _Numbers(options.first, options.runs)
        with ThreadPoolExecutor(options.at_once) as pool:
            played = [
                pool.submit(_play, numbers, options, at, runs)
                for at in range(options.at_once)
            ]
            for future in played:
                future.result()
    console.print(_table(runs.outcomes))
    wrong = sum(1 for outcome in runs.outcomes if outcome.wrong)
    console.print(f"{len(runs.outcomes)} runs of seed {options.seed}, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
