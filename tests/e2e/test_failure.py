"""A worker that is gone costs one request, not the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longwire.errors import ConnectionLost, UsageError
from longwire.host.workers import LocalWorker
from support.models import GREEDY, N_TOKENS, PROMPT, exact_engine


def _kill(worker: LocalWorker) -> None:
    """SIGKILL for the supervisor and every session of its group."""
    os.killpg(worker.process.pid, signal.SIGKILL)


def test_a_killed_worker_is_one_exception_and_the_process_goes_on(
    model: Path, reference: Callable[[str], list[int]]
) -> None:
    with LocalWorker("-t", "1") as doomed, LocalWorker("-t", "1") as other:
        rpc = f"{doomed.endpoint},{other.endpoint}"
        with exact_engine(model, "xllamacpp", rpc) as engine:
            tokens = iter(engine.generate(PROMPT, 1000, GREEDY, stop_at_end=False))
            for _ in range(5):
                next(tokens)
            _kill(doomed)
            killed = time.monotonic()
            with pytest.raises(ConnectionLost) as caught:
                for _ in tokens:
                    assert time.monotonic() - killed < 2
            assert time.monotonic() - killed < 2
            assert caught.value.endpoint == doomed.endpoint
            # It is not waited for in a step: what notices is the next command, or
            # the question that follows on what the other one says.
            assert caught.value.command in ("GRAPH_RECOMPUTE", "LX_PING")
            # Zeros are no logits.
            with pytest.raises(UsageError, match="advance first"):
                engine.choose()
            # The latch: the same failure at once, for every later call.
            with pytest.raises(ConnectionLost):
                engine.reset()
        with exact_engine(model, "xllamacpp", other.endpoint) as engine:
            generation = engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
            assert generation.finish().tokens == reference("xllamacpp")


def test_a_worker_killed_while_loading(model: Path) -> None:
    with LocalWorker("-t", "1") as doomed:
        killed: list[float] = []

        def kill_half_way(share: float) -> None:
            if share > 0.5 and not killed:
                killed.append(share)
                _kill(doomed)

        with pytest.raises(ConnectionLost, match=doomed.endpoint):
            exact_engine(model, "xllamacpp", doomed.endpoint, on_progress=kill_half_way)
        assert killed


def test_an_engine_that_resumes_loads_over_what_is_left(
    model: Path, reference: Callable[[str], list[int]]
) -> None:
    with LocalWorker("-t", "1") as doomed, LocalWorker("-t", "1") as other:
        killed: list[float] = []

        def kill_half_way(share: float) -> None:
            if share > 0.5 and not killed:
                killed.append(share)
                _kill(doomed)

        rpc = f"{doomed.endpoint},{other.endpoint}"
        with exact_engine(
            model, "xllamacpp", rpc, on_progress=kill_half_way, on_failure="resume"
        ) as engine:
            assert killed
            assert [str(d.endpoint) for d in engine.remote_devices] == [other.endpoint]
            generation = engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
            assert generation.finish().tokens == reference("xllamacpp")


def test_a_restarted_worker_is_used_again(
    model: Path, reference: Callable[[str], list[int]]
) -> None:
    with LocalWorker("-t", "1") as first:
        endpoint = first.endpoint
        with exact_engine(model, "xllamacpp", endpoint) as engine:
            names = [device.name for device in engine.remote_devices]
            engine.eval([2, 3])
            _kill(first)
            with pytest.raises(ConnectionLost):
                for _ in range(10):
                    engine.eval([4])
    with LocalWorker("-t", "1", "-p", endpoint.rpartition(":")[2]) as again:
        assert again.endpoint == endpoint
        with exact_engine(model, "xllamacpp", endpoint) as engine:
            # The name stays, since ggml never forgets a device.
            assert [device.name for device in engine.remote_devices] == names
            generation = engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
            assert generation.finish().tokens == reference("xllamacpp")


def test_two_engines_share_a_connection_and_part(
    model: Path, reference: Callable[[str], list[int]]
) -> None:
    with (
        LocalWorker("-t", "1") as worker,
        exact_engine(model, "xllamacpp", worker.endpoint) as staying,
    ):
        with exact_engine(model, "xllamacpp", worker.endpoint) as passing:
            passing.eval([2, 3])
        generation = staying.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
        assert generation.finish().tokens == reference("xllamacpp")


@pytest.mark.parametrize("rpc", [True, False])
def test_ctrl_c_while_loading_ends_the_load(model: Path, rpc: bool) -> None:
    with LocalWorker("-t", "1") as worker:
        pressed: list[float] = []

        def press(share: float) -> None:
            if share > 0.3 and not pressed:
                pressed.append(share)
                signal.raise_signal(signal.SIGINT)

        endpoint = worker.endpoint if rpc else ""
        with pytest.raises(KeyboardInterrupt):
            exact_engine(model, "xllamacpp", endpoint, on_progress=press)
        assert pressed


def test_a_refused_endpoint_names_itself(model: Path) -> None:
    with pytest.raises(ConnectionLost, match="127.0.0.1:9: connect: .*refused"):
        exact_engine(model, "xllamacpp", "127.0.0.1:9")
