"""Exact runs of a model, local or over workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longwire.client.device import RemoteDevice
from longwire.host.engine import Engine
from longwire.host.sampling import Sampling

GREEDY = Sampling(temperature=0)
PROMPT = "The capital of France is"
N_TOKENS = 24


def exact_engine(
    model: Path, engine: str, rpc: str | Sequence[RemoteDevice] = "", **settings: Any
) -> Engine:
    options: dict[str, Any] = {
        "n_ctx": 4096,
        "n_ubatch": 128,
        "n_threads": 1,
        **settings,
    }
    return Engine(model, rpc=rpc or (), engine=engine, exact=True, **options)


def greedy_tokens(
    model: Path, engine: str, rpc: str = "", n: int = N_TOKENS
) -> list[int]:
    with exact_engine(model, engine, rpc) as loaded:
        return loaded.generate(PROMPT, n, GREEDY, stop_at_end=False).finish().tokens
