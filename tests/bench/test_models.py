from __future__ import annotations

import sys
from pathlib import Path

import pytest

from longwire.bench.models import TINY, LlamaShape, make_llama
from longwire.errors import UsageError
from longwire.host.engine import Engine

SHAPE = LlamaShape(n_layer=3, n_embd=64, n_head=4, n_head_kv=2, n_ff=96, n_vocab=32)


def test_a_made_model_loads_and_computes(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path / "model.gguf"
    make_llama(path, SHAPE)
    with Engine(path, n_ctx=256, n_threads=1) as engine:
        assert engine.model.n_layer == SHAPE.n_layer
        assert engine.model.n_vocab == SHAPE.n_vocab
        assert not engine.model.has_vocabulary
        logits = engine.eval([1, 2, 3])
        assert logits.shape == (SHAPE.n_vocab,)
        assert 0 < abs(logits).max() < 100


def test_equal_seeds_give_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_llama(tmp_path / name, SHAPE, seed)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_without_gguf_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"pip install 'longwire\[bench\]'"):
        make_llama(tmp_path / "model.gguf", TINY)
