"""`bench server`: what our server costs where no device computes."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from longwire.bench.children import run_job
from longwire.bench.client import Job
from longwire.bench.models import LlamaShape, make_llama
from longwire.bench.report import Spread
from longwire.errors import CallFailed, NativeError
from longwire.host.workers import ListeningProcess, LocalWorker
from longwire.native.cpp_rpc import CPP_ENGINE
from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.transport.stream import tune
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import DIALECTS, Dialect
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER

__all__ = ["FIGURES", "Figure", "ServerReport", "measure_server"]


class Figure(NamedTuple):
    """One thing that is measured."""

    name: str
    what: str
    unit: str
    per_s: float
    """Units in a second."""
    most: float | None = None
    """What is demanded: no more than this."""


FIGURES = (
    Figure("build", "new graph of {tensors} tensors, verified", "ms", 1e3, 3.0),
    Figure("rerun", "known graph run again", "us", 1e6, 50.0),
    Figure("step", "CPU time of a decode step", "us", 1e6),
    Figure("hello", "HELLO answered by a warm spare", "ms", 1e3, 50.0),
)
"""The first three without the device's own time, the last from connect on."""

_DEEP = LlamaShape(38, 64, 4, 4, 128, 128)
"""Its graphs have some 1,500 tensors."""

_STEPS = 200
_TIMEOUT_S = 300.0


@dataclass(slots=True)
class ServerReport:
    """Samples of each figure in its unit, one per run."""

    engine: str
    protocol: int
    runs: int
    tensors: int = 0
    """Of the graph that was built."""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, figure: Figure, seconds: float) -> None:
        """Append a run's sample."""
        self.samples.setdefault(figure.name, []).append(seconds * figure.per_s)

    def spread(self, figure: Figure) -> Spread:
        """Of the samples."""
        return Spread.of_all(self.samples[figure.name])

    def as_json(self) -> dict[str, Any]:
        """The whole report, for `json.dumps`."""
        return {
            "bench": "server",
            "engine": self.engine,
            "protocol": DIALECTS[self.protocol].version,
            "runs": self.runs,
            "tensors": self.tensors,
            "results": {
                figure.name: {
                    "what": figure.what.format(tensors=self.tensors),
                    "unit": figure.unit,
                    "samples": self.samples[figure.name],
                    "median": self.spread(figure).median,
                    "at_most": figure.most,
                }
                for figure in FIGURES
            },
        }


def measure_server(
    engine: str,
    *,
    runs: int = 5,
    settle_s: float = 1.0,
    shape: LlamaShape | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ServerReport:
    """Measure each figure once per run.

    Raises:
        UsageError: the gguf package is missing.
        NativeError: a process of the bench failed; says which.
    """
    say = on_progress or (lambda text: None)
    protocol = 7 if engine == CPP_ENGINE else 8
    report = ServerReport(engine, protocol, runs)
    with tempfile.TemporaryDirectory(prefix="longwire-bench-") as name:
        folder = Path(name)
        model = folder / "deep.gguf"
        make_llama(model, shape or _DEEP)
        options = ("--engine", engine, "--protocol", str(protocol))
        with LocalWorker(*options) as worker:
            for run in range(runs):
                label = f"run {run + 1} of {runs}"
                say(f"{label}, graphs and steps")
                costs = _costs(folder, model, options, settle_s)
                report.tensors = costs["tensors"]
                for figure in FIGURES[:-1]:
                    report.add(figure, costs[f"{figure.name}_s"])
                say(f"{label}, HELLO")
                # The last client's spare is started anew.
                time.sleep(settle_s)
                hello_s = _hello(parse_endpoint(worker.endpoint), DIALECTS[protocol])
                report.add(FIGURES[-1], hello_s)
    return report


def _costs(
    folder: Path, model: Path, options: Sequence[str], settle_s: float
) -> dict[str, Any]:
    """What a session whose device computes nothing says that it took."""
    out, log = folder / "costs.json", folder / "idle.log"
    out.unlink(missing_ok=True)
    module = "longwire.bench.idle_server"
    with log.open("w") as stderr:
        process = ListeningProcess(module, "--out", str(out), *options, stderr=stderr)
    with process:
        job = Job(
            bench="decode",
            client="longwire",
            endpoints=[process.endpoint],
            model=str(model),
            engine=options[1],
            threads=1,
            n_prompt=16,
            n_tokens=_STEPS,
            ubatch=128,
            settle_s=settle_s,
        )
        run_job(job, folder, _TIMEOUT_S)
        deadline = time.monotonic() + _TIMEOUT_S
        # It writes when the client has left.
        while not out.exists() and time.monotonic() < deadline:
            if process.process.poll() is not None:
                raise CallFailed(module, log.read_text().strip())
            time.sleep(0.01)
    found: dict[str, Any] = json.loads(out.read_text())
    if found["step_s"] is None:
        raise NativeError(f"{module}: no graph was run twice in a row")
    return found


def _hello(endpoint: Endpoint, dialect: Dialect) -> float:
    """Seconds from the first packet to the answer."""
    body = m.Hello().encode()
    question = REQUEST_HEADER.pack(Command.HELLO, len(body)) + body
    answer_size = ANSWER_HEADER.size + len(
        m.HelloAnswer(dialect.major, dialect.minor, dialect.patch).encode()
    )
    started = time.perf_counter()
    address = (endpoint.host, endpoint.port)
    with socket.create_connection(address, _TIMEOUT_S) as client:
        tune(client)
        client.sendall(question)
        left = answer_size
        while left:
            data = client.recv(left)
            if not data:
                raise CallFailed("HELLO", "the server closed the connection")
            left -= len(data)
        return time.perf_counter() - started
