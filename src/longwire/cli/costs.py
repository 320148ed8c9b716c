"""`longwire bench allreduce` and `longwire bench server`: Longwire by itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from longwire.bench import allreduce, serving
from longwire.bench.report import Spread
from longwire.native.profiles import DEFAULT_ENGINE

__all__ = ["COSTS", "figure", "ranged", "run_costs"]

COSTS: Mapping[str, str] = {
    "allreduce": "sums from server to server, beside a bare swap of as many bytes",
    "server": "what a server costs where no device computes",
}
"""Benches without the C++ peers, and without a model of the user's."""


def run_costs(arguments: argparse.Namespace, stderr: Console) -> int:
    """Measure one of `COSTS`, and print it."""
    engine = arguments.engine or DEFAULT_ENGINE
    with stderr.status("starting") as status:
        found, table = _RUNS[arguments.bench](arguments, engine, status.update)
    if arguments.json:
        print(json.dumps(found))
        return 0
    console = Console(highlight=False)
    console.print(
        f"{arguments.bench}: {COSTS[arguments.bench]}; engine {engine}, "
        f"medians of {arguments.runs} runs",
        soft_wrap=True,
    )
    console.print(table)
    return 0


def _allreduce(
    arguments: argparse.Namespace, engine: str, say: Callable[[str], None]
) -> tuple[dict[str, Any], Table]:
    report = allreduce.measure_allreduce(
        engine,
        threads=arguments.threads,
        runs=arguments.runs,
        counts=[arguments.workers] if arguments.workers else allreduce.COUNTS,
        on_progress=say,
    )
    table = _table("servers", "KiB", "us", "min .. max", "MB/s")
    for column in ("floor", "ratio", "min .. max", "most"):
        table.add_column(column, justify="right", no_wrap=True)
    for count, size in report.sums:
        seconds = report.seconds(count, size)
        table.add_row(
            str(count),
            str(size >> 10),
            *ranged(_times(seconds, 1e6)),
            figure(size / 1e6 / seconds.median),
            figure(report.floor(count, size).median * 1e6),
            *ranged(report.ratios(count, size)),
            figure(allreduce.DEMANDED) if count == 2 else "",
        )
    return report.as_json(), table


def _server(
    arguments: argparse.Namespace, engine: str, say: Callable[[str], None]
) -> tuple[dict[str, Any], Table]:
    report = serving.measure_server(
        engine, runs=arguments.runs, settle_s=arguments.settle, on_progress=say
    )
    table = _table("", "median", "min .. max", "most")
    for each in serving.FIGURES:
        what = each.what.format(tensors=report.tensors)
        most = "" if each.most is None else figure(each.most)
        table.add_row(f"{what}, {each.unit}", *ranged(report.spread(each)), most)
    return report.as_json(), table


_RUNS = {"allreduce": _allreduce, "server": _server}


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(names):
        table.add_column(name, no_wrap=True, justify="right" if i else "left")
    return table


def _times(spread: Spread, factor: float) -> Spread:
    return Spread(spread.median * factor, spread.least * factor, spread.most * factor)


def ranged(spread: Spread) -> list[str]:
    """Median and range."""
    return [
        figure(spread.median),
        f"{figure(spread.least)} .. {figure(spread.most)}",
    ]


def figure(value: float) -> str:
    """Three significant digits, never in scientific notation."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
