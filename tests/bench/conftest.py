"""The tiny random model that all benches here run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from longwire.bench.models import TINY, make_llama
from longwire.native.cpp_rpc import find_cpp_rpc


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_llama(path, TINY)
    return path


@pytest.fixture
def peers() -> None:
    """Skip where there is nothing to measure against."""
    if find_cpp_rpc() is None:
        pytest.skip("peer missing: llama_cpp built with GGML_RPC=ON (protocol 7.0.0)")
