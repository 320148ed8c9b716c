"""What can be measured, and between whom."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longwire.errors import UsageError
from longwire.native.cpp_rpc import CPP_ENGINE, find_cpp_rpc
from longwire.native.model import SPLIT_MODES
from longwire.native.profiles import DEFAULT_ENGINE

__all__ = ["BENCHES", "FALLBACK", "PAIRS", "REFERENCE", "SPLITS", "VARIANTS"]
__all__ += ["Bench", "Pair", "Plan", "Settings"]


@dataclass(frozen=True, slots=True)
class Bench:
    """One question that can be asked."""

    summary: str
    unit: str
    n_prompt: int
    n_tokens: int
    """Decode steps after the prompt."""
    wire_per: str = "token"
    lower_is_better: bool = False


BENCHES: Mapping[str, Bench] = {
    "decode": Bench("tokens per second, one by one", "tok/s", 16, 64),
    "prefill": Bench("tokens per second of a long prompt", "tok/s", 1024, 0),
    "load": Bench("model bytes per second, until ready", "MB/s", 16, 0, "load"),
    # Prompt and steps stay below 256 tokens, where llama.cpp rebuilds the graph.
    "hop": Bench(
        "what the wire adds to a token", "us/token", 16, 200, lower_is_better=True
    ),
}


SPLITS = tuple(mode for mode in SPLIT_MODES if mode != "none")
"""How a model may be cut over the servers."""

FALLBACK = "fallback"
"""The client's own servers, with communicators off: ggml sums through the client."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Whose client talks to whose servers: "longwire" or "cpp"."""

    client: str
    server: str
    """Or what is special about them."""
    workers: int | None = None
    """How many servers; None is as many as the bench has."""

    def __str__(self) -> str:
        name = f"{self.client}-{self.server}"
        return name if self.workers is None else f"{name}@{self.workers}"

    @property
    def servers(self) -> str:
        """The kind of server processes that it takes."""
        return self.client if self.server == FALLBACK else self.server

    def over(self, workers: int | None) -> Pair:
        """The same over so many servers."""
        return replace(self, workers=workers)


PAIRS = (
    Pair("longwire", "longwire"),
    Pair("cpp", "cpp"),
    Pair("longwire", "cpp"),
    Pair("cpp", "longwire"),
)

_ALONE = Pair("longwire", "longwire")

VARIANTS = (
    Pair("longwire", "tls"),
    Pair("longwire", "unverified"),
    Pair("longwire", FALLBACK),
    Pair("cpp", FALLBACK),
)
"""Servers of ours with TLS, and without a check of graphs: what these cost. And
a tensor split without sums from server to server. Measured only when named."""

REFERENCE = Pair("cpp", "cpp")
"""What ratios are taken against; without it, our own plain pair."""


_COUNT = re.compile(r"[1-9][0-9]?")


@dataclass(frozen=True, slots=True)
class Settings:
    """One bench as asked for.

    Raises:
        UsageError: settings that cannot be.
    """

    bench: str
    model: str | None = None
    """A GGUF file; hop makes its own without."""
    workers: int = 1
    threads: int = 1
    """Of each worker, and of the host."""
    runs: int = 5
    n_prompt: int | None = None
    n_tokens: int | None = None
    """None is the bench's own number, for the prompt as well."""
    ubatch: int = 128
    split_mode: str = "layer"
    """How the model is cut over two or more servers."""
    cache: bool = False
    """Give each server a weight cache, and measure loads that find it full."""
    models: bool = False
    """Give servers of ours the model's folder: the first load finds it there."""
    huge_pages: bool = False
    """Have the C++ servers' memory in huge pages as well, which ours ask for. Without
    them a step is some percent faster or slower by what pages a server was given."""
    relay_delay_ms: float = 0.0
    """Added one way, in each direction."""
    relay_rate_mbit: float | None = None
    engine: str | None = None
    """None is the peers' engine, or the default one where there are no peers."""
    pairs: tuple[str, ...] = ()
    """Names of pairings; empty for all there can be."""
    settle_s: float = 1.0
    """Pause between load and measurement: a server that keeps spare sessions
    starts a new one when a client comes, and that is not a token's cost."""
    timeout_s: float = 900.0
    """For one measurement, the load included."""

    def __post_init__(self) -> None:
        if self.bench not in BENCHES:
            raise UsageError(
                f"there is no bench {self.bench!r}; there are {', '.join(BENCHES)}"
            )
        if self.model is None and self.bench != "hop":
            raise UsageError(f"{self.bench} needs a model; give one with --model")
        if self.model is not None and not Path(self.model).is_file():
            raise UsageError(f"there is no model file {self.model}")
        if self.split_mode not in SPLITS:
            raise UsageError(f"the split is {' or '.join(SPLITS)}")
        for name in ("cache", "models"):
            if getattr(self, name) and self.bench != "load":
                raise UsageError(f"--{name} changes loads; {self.bench} measures none")
        if min(self.workers, self.threads, self.runs, self.ubatch) < 1:
            raise UsageError("workers, threads, runs and ubatch start at 1")
        if self.prompt < 1 or self.tokens < (self.bench in ("decode", "hop")):
            raise UsageError("the prompt and the decode steps start at 1")
        if (
            self.relay_delay_ms < 0
            or self.relay_rate_mbit is not None
            and (self.relay_rate_mbit <= 0)
        ):
            raise UsageError("a relay's delay and rate are above 0")
        if self.relayed and self.split_mode == "tensor":
            raise UsageError("sums from server to server would pass no relay")
        known = [str(pair) for pair in (*PAIRS, *VARIANTS)]
        for name in self.pairs:
            base, at, count = name.partition("@")
            if base not in known or at and not _COUNT.fullmatch(count):
                raise UsageError(f"no pairing {name!r}; there are {', '.join(known)}")

    @property
    def kind(self) -> Bench:
        return BENCHES[self.bench]

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.kind.n_prompt if self.n_prompt is None else self.n_prompt

    @property
    def tokens(self) -> int:
        """Decode steps."""
        return self.kind.n_tokens if self.n_tokens is None else self.n_tokens

    @property
    def relayed(self) -> bool:
        return self.relay_delay_ms > 0 or self.relay_rate_mbit is not None


@dataclass(frozen=True, slots=True)
class Plan:
    """What this machine lets a bench do. `Plan.of` finds out."""

    engine: str
    protocol: int
    pairs: tuple[Pair, ...]
    note: str | None
    """Why some pairings are not there."""

    def reference(self, pair: Pair) -> Pair:
        """What the ratios of a pairing are taken against.

        Where numbers of servers are compared, itself over the least of them.
        """
        if pair.workers is None:
            return REFERENCE if REFERENCE in self.pairs else _ALONE
        alike = [p for p in self.pairs if p.over(None) == pair.over(None)]
        return min(alike, key=lambda p: p.workers or 0)

    @classmethod
    def of(cls, settings: Settings) -> Plan:
        """The pairings that can be measured, and on which engine.

        Raises:
            UsageError: none of the pairings asked for is possible.
        """
        note = None
        engine = settings.engine or CPP_ENGINE
        if find_cpp_rpc(engine) is None:
            note = (
                "Longwire alone: no C++ peers, because the llama_cpp package is "
                "missing or was built without GGML_RPC=ON"
            )
            if engine != CPP_ENGINE:
                note = (
                    f"Longwire alone: the C++ peers are on engine {CPP_ENGINE}, "
                    f"not on {engine}"
                )
        offered: tuple[Pair, ...] = (*PAIRS, *VARIANTS)
        if note is not None:
            offered = tuple(p for p in offered if "cpp" not in (p.client, p.servers))
        pairs = tuple(_chosen(offered, settings.pairs or list(map(str, PAIRS))))
        if not pairs:
            raise UsageError(f"nothing to measure. {note}")
        if settings.huge_pages and all(pair.servers != "cpp" for pair in pairs):
            raise UsageError("--huge-pages is for C++ servers; none is measured")
        if note is not None:
            engine = settings.engine or DEFAULT_ENGINE
        return cls(engine, 7 if engine == CPP_ENGINE else 8, pairs, note)


def _chosen(offered: Sequence[Pair], wanted: Sequence[str]) -> Iterator[Pair]:
    """Those of the offered pairings that are wanted, each over one or more servers."""
    for pair in offered:
        for name in wanted:
            base, at, count = name.partition("@")
            if base == str(pair):
                yield pair.over(int(count) if at else None)
