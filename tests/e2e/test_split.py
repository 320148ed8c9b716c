"""Tensor split: a model's every matrix cut over all workers."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longwire.bench.models import EXPERTS, SPLIT, SPLIT_THIRDS, LlamaShape, make_llama
from longwire.client import remote
from longwire.client.device import RemoteDevice
from longwire.errors import RemoteFailure, UsageError
from longwire.host.engine import Engine
from longwire.host.workers import LocalWorker
from longwire.native.model import NativeContext, NativeModel
from support.models import GREEDY, PROMPT, exact_engine

Worker = Callable[..., str]

STEPS = 128
SHAPES = {"split": SPLIT, "thirds": SPLIT_THIRDS, "experts": EXPERTS}
# Rows of f16 in the KV cache: what one rounding of a value may change.
CLOSE = 1e-3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`made("split")` is the file of that model."""
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    folder = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            make_llama(path, SHAPES[name])
        return path

    return make


@pytest.fixture
def direct(caplog: pytest.LogCaptureFixture) -> Callable[[], list[int]]:
    """`direct()`: how many ranks have summed among themselves, each time that some
    have found each other; none may have summed in another way."""
    caplog.set_level(logging.INFO, "longwire.client")

    def found() -> list[int]:
        lines = [r.getMessage() for r in caplog.records if ": sums go " in r.message]
        assert all(line.endswith("from server to server") for line in lines), lines
        return [line.count("RPC") for line in lines]

    return found


def _split(path: Path, rpc: str | Sequence[RemoteDevice], **settings: Any) -> Engine:
    return exact_engine(
        path, "xllamacpp", rpc, n_ctx=512, split_mode="tensor", **settings
    )


def _local(path: Path) -> Engine:
    return exact_engine(path, "xllamacpp", n_ctx=512, flash_attention="on")


def _steps(engine: Engine, tokens: Sequence[int] = ()) -> npt.NDArray[np.float32]:
    """The logits of a prompt and of each token after it: those given, or greedy."""
    rows = [engine.eval(engine.tokenize(PROMPT)).copy()]
    for i in range(STEPS):
        token = tokens[i] if len(tokens) else int(rows[-1].argmax())
        rows.append(engine.eval([token]).copy())
    return np.array(rows)


@pytest.mark.parametrize("name", SHAPES)
def test_the_models_decide_clearly(name: str, made: Callable[[str], Path]) -> None:
    with _local(made(name)) as engine:
        rows = _steps(engine)
    assert np.isfinite(rows).all()
    best = np.sort(rows, axis=1)[:, -2:]
    assert ((best[:, 1] - best[:, 0]) > 2e-3 * rows.std()).all()
    assert len(set(rows.argmax(axis=1).tolist())) > STEPS // 2


def test_a_split_model_with_experts_says_the_same(
    made: Callable[[str], Path], worker: Worker, direct: Callable[[], list[int]]
) -> None:
    """The others, over more ranks: `test_collectives`."""
    with _local(made("experts")) as engine:
        expected = _steps(engine)
    rpc = ",".join(worker(number=n) for n in range(2))
    tokens = expected.argmax(axis=1)
    with _split(made("experts"), rpc) as engine:
        found = _steps(engine, tokens)
    assert direct() == [2]
    assert (found.argmax(axis=1) == tokens).all()
    worst = np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert worst.max() < CLOSE


@pytest.mark.parametrize("shares", [[3, 1], [1, 2]])
def test_shares_may_be_uneven(
    shares: list[float], made: Callable[[str], Path], worker: Worker
) -> None:
    with _local(made("split")) as engine:
        expected = engine.generate(PROMPT, 24, GREEDY).finish().tokens
    rpc = ",".join(worker(number=n) for n in range(2))
    with _split(made("split"), rpc, tensor_split=shares) as engine:
        assert engine.generate(PROMPT, 24, GREEDY).finish().tokens == expected
        a, b = (report.memory for report in engine.report()[:2])
        assert (a > b) == (shares[0] > shares[1])


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longwire", "run", "-p", PROMPT, "-n", "4"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_run_refuses_before_it_loads(model: Path, worker: Worker) -> None:
    """gemma has one KV head: ggml would end the process."""
    rpc = ",".join(worker(number=n) for n in range(2))
    done = _run("-m", str(model), "--rpc", rpc, "--split-mode", "tensor")
    assert done.returncode == 2 and done.stdout == ""
    assert "cannot be split by tensors: it has one KV head for 2 devices" in done.stderr
    assert "Traceback" not in done.stderr


def _kill(worker: LocalWorker) -> None:
    os.killpg(worker.process.pid, signal.SIGKILL)


def _tokens(engine: Engine, doomed: LocalWorker | None = None) -> list[int]:
    """Generate; a worker dies after the tenth token."""
    tokens = []
    for token in engine.generate(PROMPT, 40, GREEDY, stop_at_end=False):
        tokens.append(token.id)
        if doomed is not None and len(tokens) == 10:
            _kill(doomed)
    return tokens


@pytest.mark.parametrize(
    ("workers", "spares", "left"), [(2, 1, 2), (3, 0, 2), (2, 0, 1), (1, 0, 0)]
)
def test_a_split_generation_outlives_a_worker(
    workers: int,
    spares: int,
    left: int,
    made: Callable[[str], Path],
    direct: Callable[[], list[int]],
) -> None:
    with _local(made("split")) as engine:
        expected = _tokens(engine)
    with ExitStack() as stack:
        started = [
            stack.enter_context(LocalWorker("-t", "1")) for _ in range(workers + spares)
        ]
        endpoints = [worker.endpoint for worker in started]
        with _split(
            made("split"),
            ",".join(endpoints[:workers]),
            spares=",".join(endpoints[workers:]),
            on_failure="resume",
        ) as engine:
            assert _tokens(engine, started[0]) == expected
            assert len(engine.remote_devices) == left
    assert direct() == [ranks for ranks in (workers, left) if ranks > 1]


def test_it_says_when_what_is_left_does_not_do(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path / "narrow.gguf"
    make_llama(path, LlamaShape(2, 256, 4, 2, 256, 512, vocabulary=True))
    with ExitStack() as stack:
        started = [stack.enter_context(LocalWorker("-t", "1")) for _ in range(4)]
        a, *others = (worker.endpoint for worker in started)
        with _split(
            path,
            f"{a},{others[0]}",
            spares=",".join(others[1:]),
            on_failure="resume",
        ) as engine:
            said = (
                f"{a}.*; and over what is left .* 2 KV heads for 3 devices; .* over 2"
            )
            with pytest.raises(UsageError, match=said):
                _tokens(engine, started[0])


@pytest.mark.parametrize("moment", [NativeModel, NativeContext])
def test_a_loss_while_loading_is_no_end_either(
    moment: type[Any],
    made: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ggml would end the process for want of a buffer."""
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        load = moment.__init__
        doomed = [b]

        def losing(self: Any, *args: Any, **settings: Any) -> None:
            if doomed:
                _kill(doomed.pop())
            load(self, *args, **settings)

        monkeypatch.setattr(moment, "__init__", losing)
        rpc = f"{a.endpoint},{b.endpoint}"
        with _split(made("split"), rpc, on_failure="resume") as engine:
            left = [str(device.endpoint) for device in engine.remote_devices]
            assert left == [a.endpoint]
            assert engine.generate(PROMPT, 4, GREEDY).finish().tokens


def test_a_load_without_room_leaves_others_alone(
    made: Callable[[str], Path], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = remote.connect(f"{worker()},{worker(number=1)}", engine="xllamacpp")
    plugins = [device.plugin for device in devices]
    settings = {"n_ctx": 512, "n_threads": 1, "engine": "xllamacpp"}
    try:
        with _split(made("split"), devices) as engine:
            tokens = engine.generate(PROMPT, 4, GREEDY).finish().tokens
            with monkeypatch.context() as patch:
                patch.setattr(devices[1], "alloc_buffer", lambda size: None)
                with pytest.raises(RemoteFailure, match=f"{devices[1].name} has no"):
                    _split(made("split"), devices)
            # Of those that come and go, none takes from the split what it needs.
            Engine(made("split"), rpc=devices, **settings).close()
            assert [plugin.demanding for plugin in plugins] == [1, 1]
            assert engine.generate(PROMPT, 4, GREEDY).finish().tokens == tokens
        assert [plugin.demanding for plugin in plugins] == [0, 0]
    finally:
        remote.close(devices)


@pytest.mark.parametrize("limit", ["1M", "18M"])
def test_a_worker_without_room_is_named(
    limit: str, made: Callable[[str], Path], worker: Worker
) -> None:
    """18 MB are enough for the weights, and not for what comes then."""
    rpc = f"{worker()},{worker('--client-memory-limit', limit)}"
    done = _run("-m", str(made("split")), "--rpc", rpc, "--split-mode", "tensor")
    assert done.returncode == 1
    assert "RPC1 has no room for" in done.stderr.splitlines()[-1]
