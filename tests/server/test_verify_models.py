"""Whatever llama.cpp builds for real models passes the check, unchanged in result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longwire.bench.models import TINY, make_llama
from longwire.native.engine import load_engine
from longwire.native.profiles import DEFAULT_ENGINE
from support.models import exact_engine
from support.tiny import VOCAB, make_mamba, make_moe
from support.worker import Worker, running_worker

STEPS = 4
Q8_0 = 8

MODELS: dict[str, Callable[[Path], None]] = {
    "llama": lambda path: make_llama(path, TINY),
    "moe": make_moe,
    "mamba": make_mamba,
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with running_worker() as worker:
        yield worker


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    pytest.importorskip("gguf", reason="the gguf package is missing")
    folder = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            MODELS[name](path)
        return path

    return made


@pytest.fixture
def packed_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts keep K and V as q8_0."""
    library = load_engine(DEFAULT_ENGINE).library
    plain = library.llama_context_default_params

    def params() -> Any:
        found = plain()
        found.type_k = found.type_v = Q8_0
        return found

    monkeypatch.setitem(library.__dict__, "llama_context_default_params", params)


def run(path: Path, rpc: str, **options: Any) -> list[bytes]:
    """Logits of a prompt and some steps, exactly."""
    options = {"n_ctx": 512, "n_ubatch": 32, **options}
    with exact_engine(path, DEFAULT_ENGINE, rpc, **options) as engine:
        rows = []
        logits = engine.eval([1 + 7 * i % (VOCAB - 1) for i in range(70)])
        for _ in range(STEPS):
            rows.append(logits.tobytes())
            logits = engine.eval([int(np.argmax(logits))])
        return rows


def check(path: Path, worker: Worker, **options: Any) -> None:
    expected = run(path, "", **options)
    found = run(path, f"127.0.0.1:{worker.endpoint.port}", **options)
    assert found == expected


@pytest.mark.parametrize("attention", ["on", "off"])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_attention(
    name: str, attention: str, model: Callable[[str], Path], worker: Worker
) -> None:
    check(model(name), worker, flash_attention=attention)


@pytest.mark.usefixtures("packed_kv")
def test_quantised_kv(model: Callable[[str], Path], worker: Worker) -> None:
    check(model("llama"), worker, flash_attention="on")


def test_recurrent(model: Callable[[str], Path], worker: Worker) -> None:
    check(model("mamba"), worker)
