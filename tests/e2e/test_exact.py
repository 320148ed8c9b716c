"""Two workers give the local run's tokens, and its logits bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longwire.host.engine import Engine
from support.models import exact_engine

STEPS = 64
LENGTHS = (1, 7, 512, 1500)


def _prompt(length: int) -> list[int]:
    # Any tokens do; these repeat after a prime number.
    return [2, *(1000 + 37 * (i % 1009) for i in range(length - 1))]


def _run(engine: Engine, length: int) -> tuple[list[int], list[bytes]]:
    engine.reset()
    tokens, rows = [], []
    logits = engine.eval(_prompt(length))
    for _ in range(STEPS):
        rows.append(logits.tobytes())
        tokens.append(int(np.argmax(logits)))
        logits = engine.eval(tokens[-1:])
    return tokens, rows


@pytest.mark.parametrize("engine", ["xllamacpp", "llama-cpp-python"])
def test_two_workers_equal_the_local_run(
    model: Path, worker: Callable[..., str], engine: str
) -> None:
    if engine == "llama-cpp-python":
        pytest.importorskip("llama_cpp", reason="engine missing: llama-cpp-python")
    lengths = LENGTHS if engine == "xllamacpp" else LENGTHS[:2]
    with exact_engine(model, engine) as local:
        expected = {n: _run(local, n) for n in lengths}
    rpc = ",".join(worker("--engine", engine, number=n) for n in range(2))
    with exact_engine(model, engine, rpc) as far:
        layers = [report.layers for report in far.report()[:2]]
        assert min(layers) > 0 and sum(layers) == far.model.n_layer + 1
        for n in lengths:
            tokens, rows = _run(far, n)
            assert tokens == expected[n][0], f"prompt of {n} tokens"
            assert rows == expected[n][1], f"logits after a prompt of {n} tokens"
