"""`measure`: one bench, all pairings, interleaved.

A machine's mood changes by the minute, so every run measures every pairing
once, each run in another order, and what counts are ratios within a run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from longwire.bench.children import Worker, Workers, run_job
from longwire.bench.client import Job, Measurement
from longwire.bench.models import TINY, make_llama
from longwire.bench.report import LOCAL, Report
from longwire.bench.settings import Pair, Plan, Settings
from longwire.errors import LongwireError

__all__ = ["measure"]

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
    # Sessions of a server write no file here, but may outlive it for a moment.
    with tempfile.TemporaryDirectory(
        prefix="longwire-bench-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        model = _model(settings, folder)
        report = Report(settings, plan, model.name, model.stat().st_size)
        with Workers(settings, plan, folder) as workers:
            bench = _Bench(settings, plan, folder, model, workers, report)
            bench.run(on_progress or (lambda text: None))
    return report


def _model(settings: Settings, folder: Path) -> Path:
    if settings.model is None:
        path = folder / "tiny.gguf"
        make_llama(path, TINY)
        return path
    path = Path(settings.model).absolute()
    if settings.bench == "load":
        # The first load would pay for the disk, and it alone.
        with path.open("rb", buffering=0) as file:
            while file.read(_BLOCK):
                pass
    return path


class _Bench:
    """A bench under way."""

    def __init__(
        self,
        settings: Settings,
        plan: Plan,
        folder: Path,
        model: Path,
        workers: Workers,
        report: Report,
    ) -> None:
        self._settings = settings
        self._plan = plan
        self._folder = folder
        self._model = model
        self._workers = workers
        self._report = report

    def run(self, say: Callable[[str], None]) -> None:
        pairs = list(self._plan.pairs)
        if self._settings.cache:
            for pair in pairs:
                say(f"filling the cache: {pair}")
                self._attempt(pair)
        runs = self._settings.runs
        for number in range(runs):
            if self._settings.bench == "hop":
                say(f"run {number + 1} of {runs}: local")
                self._report.add(LOCAL, self._local())
            for pair in _rotated(pairs, number):
                say(f"run {number + 1} of {runs}: {pair}")
                self._report.add(str(pair), self._attempt(pair))

    def _attempt(self, pair: Pair) -> Measurement | LongwireError:
        workers: list[Worker] = []
        try:
            workers = self._workers.of(pair.server)
            job = self._job(pair.client, [worker.endpoint for worker in workers])
            return run_job(job, self._folder, self._settings.timeout_s)
        except LongwireError as error:
            deaths = [death for w in workers if (death := w.obituary())]
            return type_of(error, deaths)

    def _local(self) -> Measurement | LongwireError:
        try:
            return run_job(
                self._job("local", []), self._folder, self._settings.timeout_s
            )
        except LongwireError as error:
            return error

    def _job(self, client: str, endpoints: Sequence[str]) -> Job:
        settings = self._settings
        engine = self._plan.engine
        return Job(
            bench=settings.bench,
            client=client,
            endpoints=list(endpoints),
            model=str(self._model),
            engine=os.path.abspath(engine) if os.path.isdir(engine) else engine,
            threads=settings.threads,
            n_prompt=settings.prompt,
            n_tokens=settings.tokens,
            ubatch=settings.ubatch,
            settle_s=settings.settle_s,
        )


def _rotated(pairs: Sequence[Pair], by: int) -> list[Pair]:
    by %= len(pairs)
    return [*pairs[by:], *pairs[:by]]
