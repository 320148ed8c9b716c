"""One generation: prefill, then token by token, with what it cost."""

from __future__ import annotations

import codecs
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longwire.client.connection import Connection
from longwire.client.traffic import Traffic
from longwire.errors import RemoteError
from longwire.host.sampling import Sampling
from longwire.native.model import NativeSampler

if TYPE_CHECKING:
    from longwire.host.engine import Engine

__all__ = ["Generation", "Phase", "Token"]

_log = logging.getLogger("longwire.host")

_RESUMES = 8
"""Replays in a row that may fail before a generation gives up."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, and the text that became complete with it."""

    id: int
    text: str
    """Empty while a character still lacks bytes."""


@dataclass(slots=True)
class Phase:
    """Cost of the prefill, or of the decode steps."""

    tokens: int = 0
    seconds: float = 0.0
    traffic: dict[str, Traffic] = field(default_factory=dict)
    """By endpoint."""

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def total(self) -> Traffic:
        """All endpoints together."""
        total = Traffic()
        for traffic in self.traffic.values():
            total = total.plus(traffic)
        return total


class Generation:
    """Iterate to generate; the costs are complete when it ends."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stop_at_end: bool,
    ) -> None:
        self.prompt = list(prompt)
        self.tokens: list[int] = []
        self.text = ""
        self.prefill = Phase()
        self.decode = Phase()
        self._engine = engine
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._stop_at_end = stop_at_end
        self._tokens = self._run()

    def __iter__(self) -> Iterator[Token]:
        return self._tokens

    def finish(self) -> Generation:
        """Run to the end, and return self."""
        for _ in self._tokens:
            continue
        return self

    def _run(self) -> Iterator[Token]:
        engine, sampling = self._engine, self._sampling
        sampler = None
        if not sampling.greedy:
            sampler = NativeSampler(
                engine.model.engine,
                sampling.top_k,
                sampling.top_p,
                sampling.temperature,
                sampling.seed,
            )
        text = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            self._advance(self.prefill, self.prompt)
            while len(self.tokens) < self._max_tokens:
                token = self._choose(sampler)
                if self._stop_at_end and engine.model.is_end(token):
                    break
                self.tokens.append(token)
                piece = engine.model.piece(token)
                done = (
                    len(self.tokens) == self._max_tokens
                    or engine.n_past >= engine.context.n_ctx
                )
                fresh = text.decode(piece, final=done)
                self.text += fresh
                yield Token(token, fresh)
                if done:
                    return
                self._advance(self.decode, [token])
            rest = text.decode(b"", final=True)
            if rest:
                self.text += rest
        finally:
            if sampler:
                sampler.close()

    def _choose(self, sampler: NativeSampler | None) -> int:
        """The next token. Equal logits make a sampler need a worker once more."""
        for _ in range(_RESUMES):
            try:
                return self._chosen(sampler)
            except RemoteError as error:
                # Nothing was drawn yet: the sampler is as it was.
                self._resume(error)
        return self._chosen(sampler)

    def _chosen(self, sampler: NativeSampler | None) -> int:
        started = time.perf_counter()
        token = self._engine.choose(sampler)
        if self._engine.tracing is not None:
            ended = time.perf_counter()
            self._engine.tracing.note("sample", started, ended, token=token)
        return token

    def _advance(self, phase: Phase, tokens: Sequence[int]) -> None:
        """Evaluate tokens; with an engine that resumes, over whoever is left."""
        try:
            if phase is self.prefill:
                self._engine.reset()
            self._measured(phase, tokens)
        except RemoteError as error:
            self._resume(error)

    def _resume(self, error: RemoteError) -> None:
        for _ in range(_RESUMES):
            try:
                self._engine.recover(error)
                started = time.perf_counter()
                self._replay()
            except RemoteError as another:
                if another is error:
                    raise
                error = another
                continue
            _log.warning(
                "replayed %d + %d tokens in %.1f s",
                len(self.prompt),
                len(self.tokens),
                time.perf_counter() - started,
            )
            return
        raise error

    def _replay(self) -> None:
        """Bring an empty context to where the lost one was.

        In the same steps: a batch sums in another order than single tokens, and
        the text must go on as if nothing had happened.
        """
        for tokens in (self.prompt, *([token] for token in self.tokens)):
            self._engine.advance(tokens, self._sampling.entries)

    def _measured(self, phase: Phase, tokens: Sequence[int]) -> None:
        connections = self._connections()
        tracing = self._engine.tracing
        if tracing is not None:
            tracing.follow(connections)
        before = [c.traffic.snapshot() for c in connections]
        started = time.perf_counter()
        self._engine.advance(tokens, self._sampling.entries)
        ended = time.perf_counter()
        phase.seconds += ended - started
        phase.tokens += len(tokens)
        for connection, earlier in zip(connections, before, strict=True):
            spent = connection.traffic.since(earlier)
            name = str(connection.endpoint)
            known = phase.traffic.get(name)
            phase.traffic[name] = spent.plus(known) if known else spent
        if tracing is not None:
            name = "prefill" if phase is self.prefill else "decode"
            tracing.note(name, started, ended, tokens=len(tokens))

    def _connections(self) -> list[Connection]:
        return list(dict.fromkeys(d.connection for d in self._engine.remote_devices))
