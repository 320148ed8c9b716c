"""`longwire devices`: what there is to compute on, here and there."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from longwire.cli.options import (
    add_credentials,
    add_engine,
    credentials,
    log_to_stderr,
    positive_seconds,
)
from longwire.client import remote
from longwire.client.device import RemoteDevice
from longwire.client.health import Deadlines
from longwire.errors import LongwireError
from longwire.native.abi import DeviceType
from longwire.native.compute import list_devices
from longwire.native.engine import load_engine

__all__ = ["add_parser"]

_PINGS = 5


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "devices",
        help="list local and remote devices",
        description="List this machine's devices and those of servers.",
    )
    parser.add_argument(
        "--rpc", default="", metavar="HOST:PORT[,HOST:PORT...]", help="servers to ask"
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=Deadlines().connect_s,
        metavar="SECONDS",
        help="for each step with a server; all are asked at once (%(default)s)",
    )
    add_engine(parser)
    add_credentials(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    parser.set_defaults(run=run)


@dataclass(slots=True)
class _Row:
    name: str
    type: str
    """CPU, GPU, ...; empty where a server cannot say."""
    description: str
    endpoint: str
    protocol: str
    free: int
    total: int
    round_trip_ms: float | None


def run(arguments: argparse.Namespace) -> int:
    """List; 1 when an endpoint did not answer."""
    log_to_stderr(0)
    rows = _local(arguments.engine)
    errors: dict[str, str] = {}
    if arguments.rpc:
        found = remote.try_connect(
            arguments.rpc,
            engine=arguments.engine,
            deadlines=Deadlines(arguments.timeout, answer_s=arguments.timeout),
            credentials=credentials(arguments),
        )
        for endpoint, devices in found.items():
            try:
                if isinstance(devices, LongwireError):
                    raise devices
                rows += [_remote(device) for device in devices]
            except LongwireError as error:
                errors[str(endpoint)] = str(error)
            else:
                remote.close(devices)
    if arguments.json:
        print(json.dumps({"devices": [asdict(row) for row in rows], "errors": errors}))
    else:
        _print(rows, errors)
    return 1 if errors else 0


def _local(engine: str) -> list[_Row]:
    native = load_engine(engine)
    speaks = native.profile.name
    return [
        _Row(d.name, d.type.name, d.description, "local", speaks, *d.memory(), None)
        for d in list_devices(native)
    ]


def _remote(device: RemoteDevice) -> _Row:
    times = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        free, total = device.memory()
        times.append(time.perf_counter() - started)
    return _Row(
        device.name,
        "" if device.info is None else DeviceType(device.info.type).name,
        device.description,
        str(device.endpoint),
        f"RPC {device.connection.dialect.version}",
        free,
        total,
        statistics.median(times) * 1e3,
    )


def _print(rows: list[_Row], errors: dict[str, str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("device", "type"):
        table.add_column(column, no_wrap=True)
    table.add_column("description", overflow="fold")
    table.add_column("speaks", no_wrap=True)
    for column in ("free", "total", "round trip"):
        table.add_column(column, justify="right", no_wrap=True)
    gib = 1 << 30
    for row in rows:
        table.add_row(
            row.name,
            row.type,
            row.description,
            row.protocol,
            f"{row.free / gib:.1f} GiB",
            f"{row.total / gib:.1f} GiB",
            "" if row.round_trip_ms is None else f"{row.round_trip_ms:.2f} ms",
        )
    Console().print(table)
    complaints = Console(stderr=True)
    for error in errors.values():
        complaints.print(error, style="red", highlight=False, soft_wrap=True)
