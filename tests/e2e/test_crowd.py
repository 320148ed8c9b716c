"""64 clients at once, half of them hostile: those who generate do not notice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from longwire.wire.dialects import V8
from support.client import RawClient
from support.crowd import KINDS, Crowd
from support.models import GREEDY, exact_engine
from support.tensors import Sum
from support.tiny import make_moe
from support.worker import PROC, Worker, running_worker, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROC.exists(), reason="needs Linux's /proc"),
]

ROOT = Path(__file__).parents[2]

GENERATING, HOLDING, EACH = 8, 24, 4
PLACES, SPARES = 40, 2
"""Fewer places than clients: those that hold no memory have to wait for each other."""

PROMPT = list(range(2, 130))
SPOKEN, MORE = 40, 8
HELD = 1 << 20
GROWTH = 16 << 20
"""Bytes that a supervisor may grow by; what sessions took is gone with them."""


class Census:
    """Counts a worker's processes, over and over, until the end of a `with`."""

    def __init__(self, worker: Worker) -> None:
        self.counts: list[int] = []
        self._worker = worker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="census")

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self.counts.append(1 + len(self._worker.sessions()))


def test_a_crowd_does_not_disturb_who_generates(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    make_moe(model)
    expected = local_tokens(model)
    with running_worker(
        *("--max-clients", str(PLACES), "--spares", str(SPARES)),
        *("--handshake-timeout", "2", "--stall-timeout", "2"),
    ) as worker:
        until(lambda: len(worker.sessions()) == SPARES, 30)
        greet(worker)
        before = worker.resident()
        with ExitStack() as stack, Census(worker) as census:
            holding = [stack.enter_context(holder(worker)) for _ in range(HOLDING)]
            crowd = Crowd(worker.endpoint, holding[0].buffer, EACH)
            assert GENERATING + HOLDING + len(crowd) == 64
            with crowd:
                until(lambda: len(crowd.visits) == len(KINDS) or crowd.failures, 60)
                assert generated(worker, model) == [expected] * GENERATING
                for total in holding:
                    total.check(again=True)
        assert max(census.counts) <= PLACES + SPARES + 1
        assert len(census.counts) > 20
        # All is as it was before.
        until(lambda: len(worker.sessions()) <= 2 * SPARES, 30)
        until(lambda: worker.resident() < before * (2 * SPARES + 1) / SPARES, 5)
        assert min(greet(worker) for _ in range(3)) < 1.0


def local_tokens(model: Path) -> list[int]:
    with exact_engine(model, "xllamacpp", n_ctx=1024) as engine:
        generation = engine.generate(PROMPT, SPOKEN + MORE, GREEDY, stop_at_end=False)
        return generation.finish().tokens


@contextmanager
def holder(worker: Worker) -> Iterator[Sum]:
    """A client that holds memory, and has something to look after."""
    with RawClient(worker.endpoint, V8, timeout_s=60) as client:
        client.hello()
        assert client.alloc(HELD).handle
        total = Sum(client)
        total.check()
        yield total


def greet(worker: Worker) -> float:
    """Seconds until a new client is served."""
    begun = time.monotonic()
    with RawClient(worker.endpoint, V8) as client:
        client.hello()
        assert client.device_count() == 1
        return time.monotonic() - begun


def generated(worker: Worker, model: Path) -> list[list[int]]:
    """What hosts generate that all run at the same time."""
    command = [sys.executable, "-m", "soak.host", "--model", str(model)]
    command += ["--rpc", str(worker.endpoint), "--prompt", str(len(PROMPT))]
    command += ["--predict", str(SPOKEN), "--more", str(MORE)]
    # They wait in line, behind clients that take all the time they may.
    command += ["--connect-s", "60", "--silence-s", "30"]
    hosts = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(GENERATING)
    ]
    try:
        outputs = [host.communicate(timeout=120)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [host.returncode for host in hosts] == [0] * GENERATING
    return [json.loads(output.splitlines()[-1])["tokens"] for output in outputs]
