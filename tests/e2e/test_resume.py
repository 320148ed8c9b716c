"""A generation outlives its workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from longwire.errors import UsageError
from longwire.host.engine import Engine
from longwire.host.sampling import Sampling
from longwire.host.workers import LocalWorker
from longwire.native.model import NativeModel
from support.models import GREEDY, PROMPT, exact_engine

LONG = 40


def _kill(worker: LocalWorker) -> None:
    os.killpg(worker.process.pid, signal.SIGKILL)


def _tokens(engine: Engine, sampling: Sampling, *doomed: LocalWorker) -> list[int]:
    """Generate, killing a worker after every tenth token."""
    left = list(doomed)
    tokens = []
    for token in engine.generate(PROMPT, LONG, sampling, stop_at_end=False):
        tokens.append(token.id)
        if left and len(tokens) % 10 == 0:
            _kill(left.pop())
    assert not left
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=11)])
def test_the_text_goes_on_over_what_is_left(model: Path, sampling: Sampling) -> None:
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        with LocalWorker("-t", "1") as spare:
            rpc = f"{a.endpoint},{b.endpoint}"
            with exact_engine(model, "xllamacpp", rpc) as engine:
                undisturbed = _tokens(engine, sampling)
            with exact_engine(
                model,
                "xllamacpp",
                rpc,
                spares=spare.endpoint,
                on_failure="resume",
            ) as engine:
                # First one worker dies, then the other; the spare finishes.
                assert _tokens(engine, sampling, a, b) == undisturbed
                left = [str(device.endpoint) for device in engine.remote_devices]
                assert left == [spare.endpoint]


def test_with_no_worker_left_this_machine_goes_on(model: Path) -> None:
    with exact_engine(model, "xllamacpp") as engine:
        expected = _tokens(engine, GREEDY)
    with (
        LocalWorker("-t", "1") as only,
        exact_engine(model, "xllamacpp", only.endpoint, on_failure="resume") as engine,
    ):
        assert _tokens(engine, GREEDY, only) == expected
        assert engine.remote_devices == []


def test_a_session_that_is_killed_finds_its_worker_again(model: Path) -> None:
    with LocalWorker("-t", "1") as worker:
        with exact_engine(model, "xllamacpp", worker.endpoint) as engine:
            expected = _tokens(engine, GREEDY)
        with exact_engine(
            model, "xllamacpp", worker.endpoint, on_failure="resume"
        ) as engine:
            tokens = []
            for token in engine.generate(PROMPT, LONG, GREEDY, stop_at_end=False):
                tokens.append(token.id)
                if len(tokens) == 5:
                    engine.remote_devices[0].connection.close()
            assert tokens == expected


def test_a_spare_takes_a_named_devices_place(model: Path) -> None:
    with (
        LocalWorker("-t", "1") as a,
        LocalWorker("-t", "1") as b,
        LocalWorker("-t", "1") as spare,
    ):
        with exact_engine(model, "xllamacpp", f"{a.endpoint},{b.endpoint}") as engine:
            names = [device.name for device in engine.remote_devices]
            undisturbed = _tokens(engine, GREEDY)
        with exact_engine(
            model,
            "xllamacpp",
            f"{a.endpoint},{b.endpoint}",
            devices=names,
            tensor_split=[3, 1],
            spares=spare.endpoint,
            on_failure="resume",
        ) as engine:
            assert _tokens(engine, GREEDY, a) == undisturbed


def test_a_second_loss_while_laying_out_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        rpc = f"{a.endpoint},{b.endpoint}"
        with exact_engine(model, "xllamacpp", rpc, on_failure="resume") as engine:
            undisturbed = _tokens(engine, GREEDY)
            load = NativeModel.__init__
            doomed = [b]

            def losing(self: NativeModel, *args: Any, **settings: Any) -> None:
                if doomed:
                    _kill(doomed.pop())
                load(self, *args, **settings)

            monkeypatch.setattr(NativeModel, "__init__", losing)
            assert _tokens(engine, GREEDY, a) == undisturbed
            assert engine.remote_devices == []


def test_run_says_what_happened(model: Path) -> None:
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        command = [sys.executable, "-m", "longwire", "run", "-m", str(model)]
        command += ["--rpc", f"{a.endpoint},{b.endpoint}", "-p", PROMPT, "-n", "60"]
        command += ["--temp", "0", "--on-failure", "resume", "-t", "1"]
        process = subprocess.Popen(
            [*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        process.stdout.read(20)
        _kill(a)
        _, errors = process.communicate()
        watchdog.cancel()
        said = errors.decode()
        assert process.returncode == 0, said
        assert f"laid out again over {b.endpoint} in" in said
        assert a.endpoint in said and "replayed" in said


def test_an_unknown_policy_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="on_failure"):
        Engine(model, on_failure="hope")
