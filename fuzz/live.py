"""Whole command sequences to a live server, a connection each, without end.

    python -m fuzz.live --count 100000 --server serve --server-protocol 8

Every sequence is a seed: `--seed N --count 1` plays one of them again. A finding
is written to corpus/live, where the tests play it from then on.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import queue
import sys
import threading
import time
from collections import Counter
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from fuzz.clients import Plan, client_process, recording_of, seed_of
from fuzz.health import Figures, Finding, figures, good_client, held_memory
from fuzz.opgraphs import op_graphs
from fuzz.server import KINDS, Server, serving
from longwire.wire.dialects import DIALECTS
from support.client import RawClient
from support.tensors import Sum
from support.worker import until

__all__ = ["main"]

CORPUS = Path(__file__).parent / "corpus" / "live"

WARM_UP_S = 20.0
"""After this the first figures are taken, which later ones are compared with."""

GROWTH = 48 << 20
"""Bytes that any one process may grow by after the warm-up: answers of one sequence
take up to 16 MiB, and the allocator need not give them back."""

MOST_PROCESSES = 40
MOST_DESCRIPTORS = 400
"""Of one process: a supervisor may keep 256 silent clients, and 8 in line."""

_NEWCOMER_S = 10.0
"""How often a good client comes anew; the one that stays computes each second."""


class Run:
    """One run of a plan against one server."""

    def __init__(self, server: Server, plan: Plan) -> None:
        self.server, self.plan = server, plan
        self.ends: Counter[str] = Counter()
        self.findings: list[Finding] = []
        self.warm: Figures | None = None
        self.most = Figures(0, 0, 0, 0)
        self.sums = 0
        self._staying: Sum | None = None
        self._newcomer_at = 0.0

    @property
    def played(self) -> int:
        """How many sequences have come to their end."""
        return self.ends.total() - self.ends["allocating"] - self.ends["LX"]

    def tick(self, elapsed_s: float) -> None:
        """Look at everything once; about once per second."""
        if self.server.process.poll() is not None:
            self.findings.append(Finding(None, "the server is gone"))
            return
        while self.server.log.findings:
            self.findings.append(self.server.log.findings.popleft())
        try:
            now = figures(self.server.process.pid)
        except OSError as error:
            self.findings.append(Finding(None, f"the server is gone: {error}"))
            return
        self.most = Figures(*map(max, zip(self.most, now, strict=True)))
        if self.warm is None and elapsed_s > WARM_UP_S:
            self.warm = self.most
        self._bounds(now)
        try:
            self._sum()
        except (AssertionError, OSError, EOFError) as error:
            words = f"a good client fails: {type(error).__name__} {error}"
            self.findings.append(Finding(None, words))

    def _bounds(self, now: Figures) -> None:
        warm = self.warm or now
        for what, found, bound in (
            ("processes", now.processes, MOST_PROCESSES),
            ("descriptors of a process", now.descriptors, MOST_DESCRIPTORS),
            ("bytes of the supervisor", now.first, warm.first + GROWTH),
            ("bytes of a session", now.largest, warm.largest + GROWTH),
        ):
            if found > bound:
                self.findings.append(Finding(None, f"{found} {what}, over {bound}"))

    def _sum(self) -> None:
        """A good client that stays, and now and then one that comes anew."""
        self.sums += 1
        if self.server.kind == "inline" or time.monotonic() > self._newcomer_at:
            self._newcomer_at = time.monotonic() + _NEWCOMER_S
            good_client(self.server.endpoint, self.plan.protocol)
        if self.server.kind == "inline":
            return
        if self._staying is None:
            dialect = DIALECTS[self.plan.protocol]
            client = RawClient(self.server.endpoint, dialect, timeout_s=30)
            client.hello()
            self._staying = Sum(client)
            self._staying.check()
        self._staying.check(again=True)

    def close(self) -> None:
        """Let the good client go, and see that nothing is held any more."""
        if self._staying is not None:
            self._staying.client.close()
        if self.server.metrics_port is None or self.server.process.poll() is not None:
            return
        port = self.server.metrics_port
        try:
            until(lambda: held_memory(port) == 0, 15.0)
        except (AssertionError, OSError) as error:
            words = f"memory is held, and nobody is there: {error}"
            self.findings.append(Finding(None, words))


def _run(options: argparse.Namespace, plan: Plan, server: Server) -> Run:
    graphs = op_graphs()
    run = Run(server, plan)
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    processes = min(options.processes, plan.count)
    clients = [
        context.Process(
            target=client_process,
            args=(plan, (k, processes), options.threads, graphs, stop, results),
        )
        for k in range(processes)
    ]
    for client in clients:
        client.start()
    begun = time.monotonic()
    ticker = threading.Thread(target=_tick, args=(run, begun, stop))
    ticker.start()
    try:
        _collect(run, options, begun, processes, results, stop)
    finally:
        stop.set()
        ticker.join()
        for client in clients:
            client.join()
    run.tick(time.monotonic() - begun)
    run.close()
    _show(run, time.monotonic() - begun)
    return run


def _collect(
    run: Run,
    options: argparse.Namespace,
    begun: float,
    left: int,
    results: Any,
    stop: Event,
) -> None:
    """Hear all client processes out; a finding stops them, and so does the time."""
    shown = begun
    while left:
        with contextlib.suppress(queue.Empty):
            match results.get(timeout=1.0):
                case ("done", ends):
                    run.ends.update(ends)
                case ("finding", seed, words):
                    run.findings.append(Finding(None, words, seed))
                case ("end",):
                    left -= 1
        elapsed = time.monotonic() - begun
        if run.findings or (options.seconds and elapsed > options.seconds):
            stop.set()
        if time.monotonic() > shown + options.every:
            shown = time.monotonic()
            _show(run, elapsed)


def _tick(run: Run, begun: float, stop: Event) -> None:
    while not stop.wait(1.0):
        run.tick(time.monotonic() - begun)


def _show(run: Run, elapsed_s: float) -> None:
    most = run.most
    print(
        f"{elapsed_s:.0f} s: {run.played} sequences, {run.played / elapsed_s:.0f}/s, "
        f"{dict(run.ends)}; {run.sums} sums; at most {most.processes} processes, "
        f"{most.first >> 20} MiB supervisor, {most.largest >> 20} MiB session, "
        f"{most.descriptors} descriptors",
        flush=True,
    )


def _save(run: Run, plan: Plan, finding: Finding) -> str:
    """Write a finding to the corpus, where its client is known."""
    seed = finding.seed
    if seed is None and finding.address:
        seed = seed_of(finding.address, plan)
    if seed is None:
        return f"finding: {finding.words}"
    name = f"{run.server.kind}-{plan.protocol}-{seed}"
    path = recording_of(plan, seed, op_graphs()).save(CORPUS, name, finding.words)
    return f"finding: seed {seed}: {finding.words}; see {path}"


def main() -> int:
    """Run; the exit code is 1 after a finding."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1 << 62, help="sequences to play")
    parser.add_argument("--seconds", type=float, help="time to take")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--server-protocol", type=int, choices=(7, 8), default=8)
    parser.add_argument("--server", choices=KINDS, default=KINDS[0])
    parser.add_argument("--processes", type=int, default=1, help="of clients")
    parser.add_argument("--threads", type=int, default=2, help="of each of them")
    parser.add_argument("--every", type=float, default=30.0, help="seconds per line")
    parser.add_argument(
        "--allocating", type=int, help="sequences of 1000 that hold memory"
    )
    options = parser.parse_args()
    allocating = options.allocating
    if allocating is None:
        allocating = 1 if options.server == "serve" else 1000
    with serving(options.server, options.server_protocol) as server:
        plan = Plan(
            server.endpoint,
            options.server_protocol,
            options.seed,
            options.count,
            allocating,
        )
        run = _run(options, plan, server)
    findings = [*run.findings, *server.log.findings]
    print("ends:", dict(server.log.tally.most_common()))
    print("ggml's aborts:", dict(server.log.aborts.most_common()))
    for finding in findings:
        print(_save(run, plan, finding))
    print(f"{run.played} sequences from seed {plan.first}, {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
