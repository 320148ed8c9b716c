"""`longwire bench`: both clients, both servers, one machine, ratios."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from longwire.bench.measure import measure
from longwire.bench.report import LOCAL, Report, Spread
from longwire.bench.settings import BENCHES, PAIRS, SPLITS, VARIANTS, Settings
from longwire.cli.costs import COSTS, ranged, run_costs
from longwire.cli.demo import demo_model
from longwire.cli.options import log_to_stderr, names, positive, positives, seconds

__all__ = ["add_parser", "run"]


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure against llama.cpp's own RPC backend",
        description="Measure Longwire's and llama.cpp's C++ client and server in all "
        "four pairings, on the same engine, interleaved. Ratios are taken within a "
        "run, against the C++ pair; above 1 is better.",
        epilog="; ".join(f"{name}: {what}" for name, what in _summaries().items())
        + ". The last two measure Longwire by itself, and heed --runs, --engine, "
        "--settle and --json, allreduce --workers and --threads as well.",
    )
    parser.add_argument("bench", choices=list(_summaries()), help="what to measure")
    parser.add_argument(
        "-m", "--model", help="GGUF file (default: the demo's; hop makes a tiny one)"
    )
    _add_setup(parser)
    _add_network(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per line"
    )
    parser.set_defaults(run=run)


def _summaries() -> dict[str, str]:
    return {**{name: bench.summary for name, bench in BENCHES.items()}, **COSTS}


def _add_setup(parser: argparse.ArgumentParser) -> None:
    defaults = Settings("hop")
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help=f"servers of each kind ({defaults.workers}; allreduce: 2, 3 and 4)",
    )
    for option, value, what in (
        ("--threads", defaults.threads, "threads of each server and of the host"),
        ("--runs", defaults.runs, "times to measure each pairing"),
    ):
        parser.add_argument(
            option,
            type=positive,
            default=value,
            metavar="N",
            help=f"{what} (%(default)s)",
        )
    parser.add_argument(
        "--ubatch",
        type=positives,
        default=[defaults.ubatch],
        metavar="N[,N...]",
        help=f"most tokens computed at once ({defaults.ubatch}); with several the "
        "bench is done for each",
    )
    parser.add_argument(
        "--prompt", type=positive, metavar="N", help=f"prompt tokens ({_own('prompt')})"
    )
    parser.add_argument(
        "--tokens", type=positive, metavar="N", help=f"decode steps ({_own('tokens')})"
    )
    parser.add_argument(
        "--pairs",
        type=names,
        default=[],
        metavar="NAME[,NAME...]",
        help=f"pairings, client first ({', '.join(map(str, PAIRS))}; "
        f"{', '.join(map(str, VARIANTS))} only when named); with @N over N servers, "
        "and then against the same over the fewest",
    )
    parser.add_argument(
        "--cache",
        action="store_true",
        help="load: give each server a weight cache, and measure with it filled",
    )
    parser.add_argument(
        "--models",
        action="store_true",
        help="load: give our servers the model's folder, and measure loads from there",
    )
    parser.add_argument(
        "--huge-pages",
        action="store_true",
        help="give the C++ servers huge pages as well (glibc 2.35 and later): ours ask "
        "for them, and without them speed depends on what pages a server was given",
    )
    parser.add_argument(
        "-sm",
        "--split-mode",
        choices=SPLITS,
        default=defaults.split_mode,
        help="how the model is cut over two or more servers (%(default)s)",
    )
    parser.add_argument(
        "--engine",
        metavar="NAME|PATH",
        help="measure on this engine: Longwire alone, unless it is a folder of "
        "llama.cpp's libraries with its RPC backend among them",
    )
    parser.add_argument(
        "--settle",
        type=seconds,
        default=defaults.settle_s,
        metavar="SECONDS",
        help="pause between load and measurement (%(default)s)",
    )


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("network, in a relay between client and server")
    group.add_argument(
        "--relay-delay-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="delay added in each direction (%(default)s)",
    )
    group.add_argument(
        "--relay-rate-mbit", type=float, metavar="MBIT", help="rate in Mbit/s"
    )


def _own(number: str) -> str:
    """The benches' own numbers of prompt tokens or decode steps."""
    own = {name: getattr(bench, f"n_{number}") for name, bench in BENCHES.items()}
    return ", ".join(f"{name} {count}" for name, count in own.items() if count)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 when a run of any pairing failed."""
    log_to_stderr(0)
    stderr = Console(stderr=True, highlight=False)
    if arguments.bench in COSTS:
        return run_costs(arguments, stderr)
    settings = _settings(arguments, stderr)
    failed = False
    for ubatch in arguments.ubatch:
        with stderr.status("starting") as status:
            report = measure(replace(settings, ubatch=ubatch), status.update)
        if arguments.json:
            print(json.dumps(report.as_json()))
        else:
            _print(report)
        failed = failed or bool(report.errors()) or not report.tokens_equal()
    return 1 if failed else 0


def _settings(arguments: argparse.Namespace, stderr: Console) -> Settings:
    model = arguments.model
    if model is None and arguments.bench != "hop":
        model = str(demo_model(stderr))
    return Settings(
        bench=arguments.bench,
        model=model,
        workers=arguments.workers or Settings("hop").workers,
        threads=arguments.threads,
        runs=arguments.runs,
        n_prompt=arguments.prompt,
        n_tokens=arguments.tokens,
        ubatch=arguments.ubatch[0],
        split_mode=arguments.split_mode,
        cache=arguments.cache,
        models=arguments.models,
        huge_pages=arguments.huge_pages,
        relay_delay_ms=arguments.relay_delay_ms,
        relay_rate_mbit=arguments.relay_rate_mbit,
        engine=arguments.engine,
        pairs=tuple(arguments.pairs),
        settle_s=arguments.settle,
    )


def _print(report: Report) -> None:
    console = Console(highlight=False)
    kind = report.settings.kind
    console.print(
        f"{report.settings.bench}: {kind.summary}, {kind.unit}; {report.model}, "
        f"{report.engine()}",
        soft_wrap=True,
    )
    console.print(_table(report))
    for name, wire in report.wire().items():
        console.print(
            f"{name}, per {kind.wire_per}: round trips {wire['round_trips']:.3g}, "
            f"out {wire['bytes_sent']:.0f} B, in {wire['bytes_received']:.0f} B, "
            f"not sent {wire['bytes_saved']:.0f} B",
            style="dim",
            soft_wrap=True,
        )
    for name, received in report.received().items():
        share = received / report.model_bytes
        console.print(
            f"{name}, per {kind.wire_per}: {received:.0f} B reached the servers, "
            f"{share:.3%} of the model",
            style="dim",
            soft_wrap=True,
        )
    for name, runs in report.indexed().items() if kind.wire_per == "load" else ():
        made = ", ".join(f"{s:.1f} s of run {number}" for number, s in runs.items())
        console.print(f"{name}: {made} made the index", style="dim", soft_wrap=True)
    if report.plan.note:
        console.print(report.plan.note, soft_wrap=True)
    console.print(f"again: {_command(report.settings)}", style="dim", soft_wrap=True)
    _print_complaints(report)


def _print_complaints(report: Report) -> None:
    console = Console(stderr=True, style="red", highlight=False, soft_wrap=True)
    for name, reasons in report.errors().items():
        for reason in reasons:
            console.print(f"{name}: {reason}", markup=False)
    if not report.tokens_equal():
        console.print("the pairings did not come to the same tokens")


def _table(report: Report) -> Table:
    hop = report.settings.bench == "hop"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("client-server", no_wrap=True)
    columns = ["median", "min .. max", "ratio", "min .. max"]
    for column in ["total", *columns] if hop else columns:
        table.add_column(column, justify="right", no_wrap=True)
    if hop:
        table.add_row(LOCAL, *_cells(report.measured(LOCAL))[:1])
    for name in report.pair_names():
        total = _cells(report.measured(name))[:1] if hop else []
        ratios = ["1", ""]
        if name != report.reference_of(name):
            ratios = _cells(report.ratios(name))
        table.add_row(name, *total, *_cells(report.samples(name)), *ratios)
    return table


def _cells(samples: list[float | None]) -> list[str]:
    """Median and range."""
    spread = Spread.of(samples)
    return ["", ""] if spread is None else ranged(spread)


def _command(settings: Settings) -> str:
    """The command line that measures the same again, whatever the defaults."""
    options: dict[str, Any] = {
        "--model": settings.model,
        "--workers": settings.workers,
        "--threads": settings.threads,
        "--runs": settings.runs,
        "--prompt": settings.prompt,
        "--tokens": settings.tokens or None,
        "--ubatch": settings.ubatch,
        "--pairs": ",".join(settings.pairs) or None,
        "--split-mode": settings.split_mode if settings.split_mode != "layer" else None,
        "--engine": settings.engine,
        "--settle": settings.settle_s,
        "--relay-delay-ms": settings.relay_delay_ms or None,
        "--relay-rate-mbit": settings.relay_rate_mbit,
    }
    given = [(name, str(value)) for name, value in options.items() if value is not None]
    words = ["longwire", "bench", settings.bench, *(w for pair in given for w in pair)]
    switches = {
        "--cache": settings.cache,
        "--models": settings.models,
        "--huge-pages": settings.huge_pages,
    }
    return shlex.join([*words, *(name for name, on in switches.items() if on)])
