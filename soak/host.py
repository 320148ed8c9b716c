"""A host that does all a host does, and says when: `python -m soak.host`.

It loads, prefills, decodes, saves its state, goes on, restores the state and goes on
from there. Each line of its output is a phase's name and the moment at which it
began; the last one is an object with all its tokens. Exit code 1 and one line on
stderr tell of a failure that it could do nothing about.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from longwire.cli.options import log_to_stderr
from longwire.client.health import Deadlines
from longwire.errors import ConnectionLost, LongwireError, RemoteError
from longwire.host.engine import ON_FAILURE, Engine
from longwire.host.sampling import Sampling

__all__ = ["PHASES", "main"]

PHASES = ("connect", "load", "prefill", "decode", "save", "more", "restore", "again")
"""In this order; `close` and `end` follow."""

_SAVES, _RESTORES = 8, 40
"""How often: once is too fast, with a tiny model, to be struck."""

_RECOVERIES = 8
"""Failures in a row after which a step is given up."""

T = TypeVar("T")


class Host:
    """One engine, and what it has said so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._phase = ""
        self._prompt = [2 + i % 500 for i in range(options.prompt)]
        self._past: list[int] = []
        """Tokens in the context, those of the prompt aside."""
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def run(self) -> list[int]:
        """Go through all phases; returns every token that was chosen.

        Raises:
            LongwireError: what could not be mended.
        """
        options = self._options
        self._mark("connect")
        self._engine = Engine(
            options.model,
            rpc=options.rpc,
            spares=options.spares,
            on_failure=options.on_failure,
            n_ctx=1024,
            n_ubatch=128,
            n_threads=1,
            exact=True,
            deadlines=Deadlines(options.connect_s, silence_s=options.silence_s),
            on_progress=lambda share: self._mark("load"),
        )
        with self._engine:
            try:
                return self._live()
            except ConnectionLost as error:
                self._expect_bad_health(error)
                raise

    def _live(self) -> list[int]:
        spoken = self._generate()
        self._mark("save")
        state = b""
        for _ in range(_SAVES):
            state = self._steadily(self.engine.save_state)
        past = list(self._past)
        self._mark("more")
        first = self._go_on(spoken[-1])
        self._mark("restore")
        for _ in range(_RESTORES):
            self._restore(state, past)
        self._mark("again")
        second = self._go_on(spoken[-1])
        if first != second:
            raise AssertionError(f"{first}, and from the saved state {second}")
        # Whatever it finds: it has to come back.
        self.engine.health()
        self._mark("close")
        return [*spoken, *first]

    def _generate(self) -> list[int]:
        options, tokens = self._options, list[int]()
        sampling = Sampling(temperature=0)
        if options.seed:
            sampling = Sampling(temperature=1.0, seed=options.seed)
        self._mark("prefill")
        for token in self.engine.generate(
            self._prompt, options.predict, sampling, stop_at_end=False
        ):
            self._mark("decode")
            tokens.append(token.id)
        # The last one was chosen, and not yet put into the context.
        self._past = tokens[:-1]
        return tokens

    def _go_on(self, token: int) -> list[int]:
        """Some greedy tokens more, one step at a time."""
        tokens = []
        for _ in range(self._options.more):
            token = self._steadily(partial(self._step, token))
            tokens.append(token)
        return tokens

    def _step(self, last: int) -> int:
        self.engine.advance([last], 1)
        token = self.engine.choose()
        self._past.append(last)
        return token

    def _restore(self, state: bytes, past: list[int]) -> None:
        self._steadily(partial(self.engine.load_state, state), replay=False)
        self._past = list(past)

    def _steadily(self, step: Callable[[], T], replay: bool = True) -> T:
        """Do a step; where a worker fails, over those that are left."""
        failure: RemoteError | None = None
        for _ in range(_RECOVERIES):
            try:
                if failure is not None:
                    self.engine.recover(failure)
                    if replay:
                        self._replay()
                return step()
            except RemoteError as error:
                if error is failure:
                    raise
                failure = error
                self._expect_bad_health(error)
        assert failure is not None
        raise failure

    def _replay(self) -> None:
        self.engine.advance(self._prompt, 1)
        for token in self._past:
            self.engine.advance([token], 1)

    def _expect_bad_health(self, error: RemoteError) -> None:
        healths = self.engine.health()
        if isinstance(error, ConnectionLost) and all(health.ok for health in healths):
            raise AssertionError("health is good") from error

    def _mark(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            print(f"{phase} {time.monotonic():.6f}", flush=True)


def main() -> int:
    """Entry point; the exit code is 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rpc", required=True)
    parser.add_argument("--spares", default="")
    parser.add_argument("--on-failure", choices=ON_FAILURE, default=ON_FAILURE[0])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of it")
    parser.add_argument("--predict", type=int, default=40, help="tokens to generate")
    parser.add_argument("--more", type=int, default=8, help="tokens after a state")
    parser.add_argument("--seed", type=int, default=0, help="of sampling; 0 is greedy")
    parser.add_argument("--connect-s", type=float, default=5.0)
    parser.add_argument("--silence-s", type=float, default=3.0)
    host = Host(parser.parse_args())
    log_to_stderr(0)
    # To be asked where it hangs.
    faulthandler.register(signal.SIGUSR1)
    try:
        tokens = host.run()
    except LongwireError as error:
        print(f"soak.host: {error}", file=sys.stderr)
        return 1
    print(f"end {time.monotonic():.6f}")
    print(json.dumps({"tokens": tokens}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
