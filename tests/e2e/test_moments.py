"""Kill, freeze, reset: one fixed moment of each kind. `make soak` draws others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pytest

from longwire.client.reduction import Reduction
from longwire.host.sampling import Sampling
from longwire.host.workers import LocalWorker
from soak.play import Ground, Moment, ground
from support.models import PROMPT, exact_engine
from support.tiny import make_moe
from support.worker import PROC

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROC.exists(), reason="needs Linux's /proc"),
]

SEEDED = 7

MOMENTS = [
    (Moment(kind="kill-worker", phase="load", share=0.5), "resumed"),
    (Moment(kind="kill-session", phase="prefill", share=0.3), "resumed"),
    (Moment(kind="reset-both", phase="decode", share=0.5, seed=SEEDED), "resumed"),
    (Moment(kind="stop-session", phase="save", share=0.3), "resumed"),
    (Moment(kind="stop-supervisor", phase="load", share=0.2), None),
    (Moment(kind="kill-supervisor", phase="load", share=0.2), None),
    (Moment(kind="kill-host", phase="decode", share=0.3), "SIGKILL"),
    (
        Moment(kind="stop-host", phase="more", share=0.5, aftermath="goes on soon"),
        "unhurt",
    ),
    (
        Moment(kind="reset-worker", phase="decode", share=0.3, on_failure="fail"),
        "error",
    ),
]
"""With how the host ends; None where that depends on how far it has come. Whatever
it is, its tokens are those of an undisturbed run."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    model = tmp_path_factory.mktemp("model") / "tiny.gguf"
    make_moe(model)
    with ground(0, {"tiny": model}) as place:
        yield place


@pytest.mark.parametrize(
    ("moment", "end"), MOMENTS, ids=[f"{m.kind} in {m.phase}" for m, _ in MOMENTS]
)
def test_a_moment(moment: Moment, end: str | None, place: Ground) -> None:
    outcome = place.play(moment)
    assert not outcome.wrong, f"{outcome}\n{outcome.said}"
    assert end in (None, outcome.end), str(outcome)


def test_a_worker_lost_between_a_step_and_its_token(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that has to have the whole row after all, and nobody has it."""
    sampling = Sampling(temperature=1.0, seed=SEEDED)
    top = Reduction.top
    doomed: list[LocalWorker] = []
    calls: list[Reduction] = []

    def losing(self: Reduction) -> npt.NDArray[Any] | None:
        calls.append(self)
        if doomed and len(calls) == 5:
            os.killpg(doomed.pop().process.pid, signal.SIGKILL)
            self.whole()
        return top(self)

    def tokens(rpc: str) -> list[int]:
        with exact_engine(model, "xllamacpp", rpc, on_failure="resume") as engine:
            spoken = engine.generate(PROMPT, 12, sampling, stop_at_end=False)
            return spoken.finish().tokens

    monkeypatch.setattr(Reduction, "top", losing)
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        rpc = f"{a.endpoint},{b.endpoint}"
        undisturbed = tokens(rpc)
        calls.clear()
        # The last layers, and with them the logits, are the second one's.
        doomed.append(b)
        assert tokens(rpc) == undisturbed
        assert not doomed
