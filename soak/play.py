"""One moment played: a host, a blow, and what came of it."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soak.blows import FROZEN, send, strike
from soak.host import PHASES
from soak.process import HostProcess, Usual
from soak.station import Station, station
from support.worker import alive

__all__ = ["Ground", "Moment", "Outcome", "ground"]

SILENCE_S = 3.0
"""After so long a host takes a frozen worker for dead."""

_SOON_S, _LATER_S = 1.0, SILENCE_S + 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """When to strike, and how."""

    kind: str
    phase: str
    share: float
    """Of the phase's usual time."""
    number: int = 0
    victim: int = 0
    """Which of the two workers."""
    aftermath: str = "goes on later"
    on_failure: str = "resume"
    seed: int = 0
    """Of the sampling; 0 is greedy."""
    model: str = "tiny"
    again_s: float | None = None
    """After so long the other worker is struck in the same way."""


@dataclass(slots=True)
class Outcome:
    """What a host, and the workers, made of a moment."""

    moment: Moment
    struck: str = ""
    """The phase that the host really was in."""
    end: str = ""
    seconds: float = 0.0
    """From the blow to the host's end."""
    settled_s: float = 0.0
    """From there until the workers held nothing any more."""
    wrong: list[str] = field(default_factory=list)
    said: str = ""
    """By the host, on stderr."""

    def __str__(self) -> str:
        m = self.moment
        frozen = f" ({m.aftermath})" if m.kind in FROZEN else ""
        again = "" if m.again_s is None else f", {m.again_s:.2f} s later the other"
        line = (
            f"{m.number}: {m.kind}{frozen} in {self.struck}, worker {m.victim}{again}, "
            f"{m.model} model, seed {m.seed}, {m.on_failure}: {self.end} "
            f"after {self.seconds:.1f} s, settled in {self.settled_s:.1f} s"
        )
        return "\n    WRONG: ".join([line, *self.wrong])


class Ground:
    """Workers that stay from moment to moment, and runs to compare with."""

    def __init__(
        self,
        stations: list[Station],
        spare: Station,
        models: dict[str, Path],
        folder: Path,
    ) -> None:
        self._stations = stations
        self._spare = spare
        self._models = models
        self._folder = folder
        self._usual: dict[tuple[str, int], Usual] = {}

    def play(self, moment: Moment) -> Outcome:
        """Have a host run into a moment."""
        usual = self._undisturbed(moment.model, moment.seed)
        outcome = Outcome(moment)
        with self._host(moment.model, moment.seed, moment.on_failure) as host:
            host.reach(moment.phase)
            time.sleep(moment.share * usual.lasts(moment.phase))
            station = self._stations[moment.victim]
            struck = time.monotonic()
            frozen = strike(moment.kind, station, host.process.pid)
            if moment.again_s is not None:
                time.sleep(moment.again_s)
                other = self._stations[1 - moment.victim]
                frozen += strike(moment.kind, other, host.process.pid)
            dropped = self._thaw(moment, frozen) if frozen else False
            code = host.end()
            outcome.seconds = time.monotonic() - struck
            outcome.struck = host.phase_at(struck)
            # One that was about to end had said good-bye before.
            if dropped and outcome.struck in PHASES:
                outcome.wrong.append("a worker has dropped a host that was frozen")
            outcome.said = host.said
            _judge(outcome, host, code, usual)
            if frozen and moment.aftermath == "is killed":
                send(signal.SIGKILL, frozen)
            send(signal.SIGCONT, frozen)
        for station in (*self._stations, self._spare):
            outcome.wrong += station.settle()
            outcome.settled_s = max(outcome.settled_s, station.settled_s)
        return outcome

    def _thaw(self, moment: Moment, frozen: list[int]) -> bool:
        """Let a frozen process go on, or not, while the host is at work.

        Returns whether a worker has dropped its host because that was frozen.
        """
        serving = [s for station in self._stations if (s := station.serving())]
        if moment.aftermath == "goes on soon":
            time.sleep(_SOON_S)
        elif moment.kind == "stop-host":
            time.sleep(_LATER_S)
        else:
            # After the host has ended without it.
            return False
        dropped = moment.kind == "stop-host" and not all(map(alive, serving))
        if moment.kind == "stop-host" and moment.aftermath == "is killed":
            send(signal.SIGKILL, frozen)
        send(signal.SIGCONT, frozen)
        return dropped

    def _host(self, model: str, seed: int, on_failure: str = "resume") -> HostProcess:
        return HostProcess(
            self._folder,
            *("--model", str(self._models[model]), "--seed", str(seed)),
            *("--rpc", ",".join(str(station.endpoint) for station in self._stations)),
            *("--on-failure", on_failure, "--silence-s", str(SILENCE_S)),
            *(("--spares", str(self._spare.endpoint)) if on_failure != "fail" else ()),
        )

    def _undisturbed(self, model: str, seed: int) -> Usual:
        key = (model, seed)
        if key not in self._usual:
            with self._host(model, seed) as host:
                code = host.end()
                assert code == 0 and host.tokens, host.said
                self._usual[key] = Usual(host.tokens, host.marks)
        return self._usual[key]


@contextmanager
def ground(number: int, models: dict[str, Path]) -> Iterator[Ground]:
    """Two workers and a spare one."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stations = [
            stack.enter_context(station(f"{name}{number}", folder)) for name in "abs"
        ]
        yield Ground(stations[:2], stations[2], models, folder)
        for made in stations:
            if wrong := made.close():
                raise AssertionError(wrong)


def _judge(outcome: Outcome, host: HostProcess, code: int | None, usual: Usual) -> None:
    """Fill in how the host ended, and whether it may have ended so."""
    moment, said = outcome.moment, outcome.said
    if "Traceback" in said:
        outcome.wrong.append("a traceback")
    if code is None:
        outcome.end = f"hung in {host.marks[-1][0]}"
        outcome.wrong.append("it did not end")
    elif code < 0:
        outcome.end = signal.Signals(-code).name
        own = moment.kind == "kill-host" or (
            moment.kind == "stop-host" and moment.aftermath == "is killed"
        )
        if not own or code != -signal.SIGKILL:
            outcome.wrong.append(f"it died of {outcome.end}")
    elif code == 0:
        outcome.end = "resumed" if "laid out again" in said else "unhurt"
        if host.tokens != usual.tokens:
            outcome.wrong.append(f"{host.tokens}, not {usual.tokens}")
    else:
        _judge_error(outcome, code)


def _judge_error(outcome: Outcome, code: int) -> None:
    lines = outcome.said.splitlines()
    errors = [line for line in lines if line.startswith("soak.host: ")]
    outcome.end = "error"
    may_fail = outcome.moment.on_failure == "fail" or outcome.struck == PHASES[0]
    if code != 1 or len(errors) != 1 or "127.0.0.1:" not in errors[0]:
        outcome.wrong.append(f"exit code {code} without one clear line")
    elif not may_fail:
        outcome.wrong.append(f"it gave up: {errors[0]}")
