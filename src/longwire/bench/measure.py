"""`measure`: one bench, all pairings, interleaved.

A machine's mood changes by the minute, so every run measures every pairing
once, each run in another order, and what counts are ratios within a run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longwire.bench.children import Worker, Workers, run_job
from longwire.bench.client import Job, Measurement
from longwire.bench.models import TINY, make_llama
from longwire.bench.report import LOCAL, Report
from longwire.bench.settings import FALLBACK, Pair, Plan, Settings
from longwire.errors import LongwireError
from longwire.models.index import load_index
from longwire.native.engine import load_engine

__all__ = ["balanced_order", "measure"]

_BLOCK = 1 << 24


def measure(
    settings: Settings, on_progress: Callable[[str], None] | None = None
) -> Report:
    """Measure; a pairing that fails has its reason in the report, and others go on.

    `on_progress` is told what is being done.

    Raises:
        UsageError: nothing of what was asked for can be measured here.
    """
    plan = Plan.of(settings)
    with tempfile.TemporaryDirectory(prefix="longwire-bench-") as name:
        folder = Path(name)
        model = _model(settings, plan, folder)
        report = Report(settings, plan, model.name, model.stat().st_size)
        with Workers(settings, plan, folder) as workers:
            bench = _Bench(settings, plan, folder, model, workers)
            bench.run(report, on_progress or (lambda text: None))
    return report


def balanced_order(pairs: Sequence[Pair], run: int) -> list[Pair]:
    """The order of one run: a row of a Williams design.

    Within as many runs as there are pairs, of an odd number twice as many, each pair
    comes right after each other one as often. Who was served before is felt: what
    memory a server is given, some percent of a step, depends on it.
    """
    count = len(pairs)
    zigzag = [i // 2 if i % 2 == 0 else count - 1 - i // 2 for i in range(count)]
    order = [pairs[(i + run) % count] for i in zigzag]
    return order[::-1] if count % 2 and run // count % 2 else order


def _model(settings: Settings, plan: Plan, folder: Path) -> Path:
    if settings.model is None:
        path = folder / "tiny.gguf"
        make_llama(path, TINY)
        return path
    path = Path(settings.model)
    # The first load would pay for the disk, and it alone.
    with path.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            continue
    if settings.models:
        # The servers would make it at their leisure, beside what is measured.
        load_index(load_engine(plan.engine), path, fnv=True)
    return path


@dataclass(frozen=True, slots=True)
class _Bench:
    """A bench under way."""

    settings: Settings
    plan: Plan
    folder: Path
    model: Path
    workers: Workers

    def run(self, report: Report, say: Callable[[str], None]) -> None:
        pairs = self.plan.pairs
        if self.settings.cache:
            for pair in pairs:
                say(f"filling the cache, {pair}")
                # What fails here fails again below, and is reported there.
                self._pair(pair)
        for number in range(self.settings.runs):
            label = f"run {number + 1} of {self.settings.runs}"
            if self.settings.bench == "hop":
                say(f"{label}, {LOCAL}")
                report.add(LOCAL, self._job(LOCAL, ()))
            for pair in balanced_order(pairs, number):
                say(f"{label}, {pair}")
                report.add(str(pair), self._pair(pair))

    def _pair(self, pair: Pair) -> Measurement | str:
        try:
            count = pair.workers or self.settings.workers
            workers = self.workers.of(pair.servers, count)
        except LongwireError as error:
            return str(error)
        return self._job(pair.client, workers, pair.server == FALLBACK)

    def _job(
        self, client: str, workers: Sequence[Worker], fallback: bool = False
    ) -> Measurement | str:
        """A measurement, or why there is none."""
        settings = self.settings
        job = Job(
            bench=settings.bench,
            client=client,
            endpoints=[worker.endpoint for worker in workers],
            tls_ca=[str(w.keys / "ca.pem") for w in workers if w.keys],
            model=str(self.model),
            engine=self.plan.engine,
            threads=settings.threads,
            n_prompt=settings.prompt,
            n_tokens=settings.tokens,
            ubatch=settings.ubatch,
            settle_s=settings.settle_s,
            split_mode=settings.split_mode,
            fallback=fallback,
        )
        try:
            before = [worker.received() for worker in workers]
            measured = run_job(job, self.folder, settings.timeout_s)
            after = [worker.received() for worker in workers]
            return replace(measured, received=_grown(before, after))
        except LongwireError as error:
            conditions = [line for worker in workers for line in worker.condition()]
            return "; ".join([str(error), *conditions])


def _grown(before: Sequence[int | None], after: Sequence[int | None]) -> int | None:
    """What all counts together have grown by; None where one is missing."""
    grown = [
        b - a
        for a, b in zip(before, after, strict=True)
        if a is not None and b is not None
    ]
    return sum(grown) if grown and len(grown) == len(before) else None
