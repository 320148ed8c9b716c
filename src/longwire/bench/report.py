"""What a bench found: samples per run, medians, and ratios within each run."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from longwire.bench.client import Measurement
from longwire.bench.settings import Plan, Settings
from longwire.wire.dialects import DIALECTS

__all__ = ["LOCAL", "Report", "Spread"]

LOCAL = "local"
"""The name of hop's runs without a server."""

_COUNTED = (
    "round_trips",
    "bytes_sent",
    "bytes_received",
    "bytes_saved",
    "graphs",
    "recomputes",
)

_INDEX_S = 0.1
"""An index that took so long was made; one that is kept is read faster."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of the runs that succeeded."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, samples: Sequence[float | None]) -> Spread | None:
        """None if no run succeeded."""
        known = [sample for sample in samples if sample is not None]
        return cls.of_all(known) if known else None

    @classmethod
    def of_all(cls, samples: Sequence[float]) -> Spread:
        """Where every run has succeeded."""
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclass(slots=True)
class Report:
    """The results of one bench. Lists have an entry per run, None for a failed one."""

    settings: Settings
    plan: Plan
    model: str
    model_bytes: int
    results: dict[str, list[Measurement | str]] = field(default_factory=dict)
    """By pairing, and `LOCAL`; a string is the reason for a failed run."""

    def add(self, name: str, result: Measurement | str) -> None:
        """Append the next run's result."""
        self.results.setdefault(name, []).append(result)

    def measured(self, name: str) -> list[float | None]:
        """What each run measured, in the bench's unit."""
        results = self.results.get(name, [])
        return [r.value if isinstance(r, Measurement) else None for r in results]

    def samples(self, name: str) -> list[float | None]:
        """What each run says of a pairing: for hop what the wire added."""
        measured = self.measured(name)
        if self.settings.bench != "hop":
            return measured
        local = self.measured(LOCAL)
        return [
            None if whole is None or alone is None else whole - alone
            for whole, alone in zip(measured, local, strict=True)
        ]

    def ratios(self, name: str) -> list[float | None]:
        """Each run's ratio against the reference; above 1 is better than it."""
        reference = self.reference_of(name)
        if name not in self.results or reference not in self.results:
            return []
        pairs = zip(self.samples(name), self.samples(reference), strict=True)
        return [self._ratio(ours, theirs) for ours, theirs in pairs]

    def reference_of(self, name: str) -> str:
        """The pairing that another one's ratios are taken against."""
        return next(
            (str(self.plan.reference(p)) for p in self.plan.pairs if str(p) == name), ""
        )

    def _ratio(self, ours: float | None, theirs: float | None) -> float | None:
        # A hop's cost may come out below 0 in a noisy run; no ratio means much then.
        if ours is None or theirs is None or ours <= 0 or theirs <= 0:
            return None
        return theirs / ours if self.settings.kind.lower_is_better else ours / theirs

    def pair_names(self) -> list[str]:
        """The pairings of this report."""
        return [str(pair) for pair in self.plan.pairs]

    def errors(self) -> dict[str, list[str]]:
        """By pairing, the runs that failed and why."""
        found = {
            name: [
                f"run {number}: {result}"
                for number, result in enumerate(results, 1)
                if isinstance(result, str)
            ]
            for name, results in self.results.items()
        }
        return {name: reasons for name, reasons in found.items() if reasons}

    def engine(self) -> str:
        """The engine and its version, as far as any run came to know it."""
        results = (result for found in self.results.values() for result in found)
        labels = (r.engine for r in results if isinstance(r, Measurement))
        return next(labels, self.plan.engine)

    def tokens_equal(self) -> bool:
        """Whether all runs of all pairings came to the same tokens."""
        tokens = {
            tuple(result.tokens)
            for results in self.results.values()
            for result in results
            if isinstance(result, Measurement)
        }
        return len(tokens) <= 1

    def wire(self) -> dict[str, dict[str, float]]:
        """Median traffic of the pairings with Longwire's client."""
        traffic = {
            name: [r.wire for r in results if isinstance(r, Measurement) and r.wire]
            for name, results in self.results.items()
        }
        return {
            name: {key: statistics.median(w[key] for w in known) for key in _COUNTED}
            for name, known in traffic.items()
            if known
        }

    def indexed(self) -> dict[str, dict[int, float]]:
        """By pairing and number of the run, seconds that went into an index."""
        found = {
            name: {
                number: result.index_s
                for number, result in enumerate(results, 1)
                if isinstance(result, Measurement) and result.index_s >= _INDEX_S
            }
            for name, results in self.results.items()
        }
        return {name: runs for name, runs in found.items() if runs}

    def received(self) -> dict[str, float]:
        """By pairing, the median of the bytes that reached the servers."""
        counts = {
            name: [
                r.received
                for r in results
                if isinstance(r, Measurement) and r.received is not None
            ]
            for name, results in self.results.items()
        }
        return {name: statistics.median(c) for name, c in counts.items() if c}

    def as_json(self) -> dict[str, Any]:
        """The whole report, for `json.dumps`."""
        names = self.pair_names()
        others = [name for name in names if name != self.reference_of(name)]
        ratios = {
            name: ratio for name in others if (ratio := Spread.of(self.ratios(name)))
        }
        report: dict[str, Any] = {
            "bench": self.settings.bench,
            "unit": self.settings.kind.unit,
            "lower_is_better": self.settings.kind.lower_is_better,
            "settings": self._settings_json(),
            "pairs": {name: self.samples(name) for name in names},
            "ratio": {name: ratio.median for name, ratio in ratios.items()},
            "spread": _spreads({name: Spread.of(self.samples(name)) for name in names}),
            "ratio_spread": _spreads(ratios),
            "wire_per": self.settings.kind.wire_per,
            "wire": self.wire(),
            "received": self.received(),
            "index_s": self.indexed(),
            "tokens_equal": self.tokens_equal(),
            "errors": self.errors(),
            "note": self.plan.note,
        }
        if self.settings.bench == "hop":
            report["local"] = self.measured(LOCAL)
            report["total"] = {name: self.measured(name) for name in names}
        return report

    def _settings_json(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "model": self.model,
            "model_bytes": self.model_bytes,
            "workers": settings.workers,
            "threads": settings.threads,
            "runs": settings.runs,
            "prompt": settings.prompt,
            "tokens": settings.tokens,
            "ubatch": settings.ubatch,
            "split_mode": settings.split_mode,
            "cache": settings.cache,
            "huge_pages": settings.huge_pages,
            "models": settings.models,
            "relay_delay_ms": settings.relay_delay_ms,
            "relay_rate_mbit": settings.relay_rate_mbit,
            "settle_s": settings.settle_s,
            "engine": self.engine(),
            "protocol": DIALECTS[self.plan.protocol].version,
            "longwire": version("longwire"),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        }


def _spreads(spreads: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {"median": s.median, "min": s.least, "max": s.most}
        for name, s in spreads.items()
        if s is not None
    }
