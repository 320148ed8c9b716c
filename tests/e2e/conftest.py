"""The real model, workers that live as long as a module, and exact references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from longwire.cli.demo import demo_model
from longwire.host.workers import LocalWorker
from support.models import greedy_tokens


@pytest.fixture(scope="session")
def model() -> Path:
    return demo_model(Console(quiet=True))


@pytest.fixture(scope="module")
def worker() -> Iterator[Callable[..., str]]:
    """`worker("--protocol", "7")` is the endpoint of such a worker."""
    started: dict[tuple[str, ...], str] = {}
    with ExitStack() as stack:

        def start(*options: str, number: int = 0) -> str:
            key = (*options, str(number))
            if key not in started:
                process = LocalWorker("-t", "1", *options, stderr=None)
                started[key] = stack.enter_context(process).endpoint
            return started[key]

        yield start


@pytest.fixture(scope="session")
def reference(model: Path) -> Callable[[str], list[int]]:
    """Tokens of the exact local run, by engine."""
    known: dict[str, list[int]] = {}

    def tokens(engine: str) -> list[int]:
        if engine == "llama-cpp-python":
            pytest.importorskip(
                "llama_cpp", reason="engine missing: llama-cpp-python 0.3.36"
            )
        if engine not in known:
            known[engine] = greedy_tokens(model, engine)
        return known[engine]

    return tokens
