"""Our session with a device that computes nothing, so that its own cost is seen.

`python -m longwire.bench.idle_server --out FILE`: serves one client after the other,
and writes down what the last one cost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from longwire.native.abi import Status
from longwire.native.compute import ComputeDevice, select_devices
from longwire.native.engine import load_engine
from longwire.server import session
from longwire.server.graphs import build_graph
from longwire.server.handlers import HANDLERS
from longwire.server.state import Handler, Pieces, SessionState
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream, tune
from longwire.wire.constants import Command
from longwire.wire.dialects import DIALECTS
from longwire.wire.graphs import Graph

__all__ = ["Costs", "main"]

_ROUNDS = 21
_NS = 1e9


@dataclass(slots=True)
class Costs:
    """What serving one client has taken."""

    tensors: int = 0
    """Of the largest graph."""
    build_s: float = 0.0
    """To decode, check and build it, again and again: the median."""
    reruns_s: list[float] = field(default_factory=list)
    """To have a known graph computed again."""
    steps_s: list[float] = field(default_factory=list)
    """CPU time from one re-run to the next: all of a decode step, what the kernel
    does for it included."""

    def encode(self) -> str:
        return json.dumps(
            {
                "tensors": self.tensors,
                "build_s": self.build_s,
                "rerun_s": _median(self.reruns_s),
                "step_s": _median(self.steps_s),
            }
        )


def _median(samples: list[float]) -> float | None:
    return statistics.median(samples) if samples else None


class _Watched:
    """Costs as the handlers of one session come by."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._since_ns: int | None = None
        self._compute = HANDLERS[Command.GRAPH_COMPUTE]
        self._recompute = HANDLERS[Command.GRAPH_RECOMPUTE]

    def handlers(self) -> dict[int, Handler]:
        return {
            Command.GRAPH_COMPUTE: self._on_compute,
            Command.GRAPH_RECOMPUTE: self._on_recompute,
        }

    def _on_compute(self, s: SessionState, body: memoryview, length: int) -> Pieces:
        self._since_ns = None
        count = len(Graph.decode(s.dialect, body).tensors)
        if count > self.costs.tensors:
            times = []
            for _ in range(_ROUNDS):
                started_ns = time.perf_counter_ns()
                build_graph(Graph.decode(s.dialect, body), s.buffers)
                times.append((time.perf_counter_ns() - started_ns) / _NS)
            self.costs.tensors, self.costs.build_s = count, statistics.median(times)
        return self._compute(s, body, length)

    def _on_recompute(self, s: SessionState, body: memoryview, length: int) -> Pieces:
        now_ns = time.thread_time_ns()
        if self._since_ns is not None:
            self.costs.steps_s.append((now_ns - self._since_ns) / _NS)
        self._since_ns = now_ns
        started_ns = time.perf_counter_ns()
        answer = self._recompute(s, body, length)
        self.costs.reruns_s.append((time.perf_counter_ns() - started_ns) / _NS)
        return answer


class _Idle(ComputeDevice):
    """A device that has always computed already."""

    __slots__ = ()

    def compute(self, graph: int) -> Status:
        return Status.SUCCESS


def _idle(device: ComputeDevice) -> ComputeDevice:
    return _Idle(
        device.engine, device.address, device.name, device.description, device.type
    )


def main() -> int:
    """Serve on a free loopback port, and say which."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--protocol", type=int, required=True)
    arguments = parser.parse_args()
    engine = load_engine(arguments.engine)
    devices = [_idle(device) for device in select_devices(engine, [])]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"listening on {Endpoint(*listener.getsockname())}", flush=True)
        while True:
            client, _ = listener.accept()
            tune(client)
            _serve(client, devices, arguments.protocol, arguments.out)


def _serve(
    client: socket.socket, devices: list[ComputeDevice], protocol: int, out: Path
) -> None:
    stream = Stream(client)
    state = SessionState(
        dialect=DIALECTS[protocol],
        devices=devices,
        n_threads=1,
        cache=None,
        stream=stream,
    )
    watched = _Watched()
    table = cast("MutableMapping[int, Handler]", HANDLERS)
    kept = {number: table[number] for number in watched.handlers()}
    table.update(watched.handlers())
    try:
        reason = session.serve_client(state)
    finally:
        table.update(kept)
        state.finish()
        stream.close()
        state.close()
    if watched.costs.tensors:
        written = out.with_suffix(".new")
        written.write_text(watched.costs.encode())
        written.rename(out)
    print(reason, file=sys.stderr)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
