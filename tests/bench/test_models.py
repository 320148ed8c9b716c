from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longwire.bench.models import BILLION, EXPERTS, TINY, LlamaShape, main, make_llama
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


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_quantised_weights_are_as_the_others(weights: str, tmp_path: Path) -> None:
    """Of the same deviation, around 0; and the scale is read as it is written."""
    gguf = pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path / "model.gguf"
    made = replace(BILLION, n_layer=1, n_embd=256, n_head=4, n_head_kv=4, n_ff=512)
    make_llama(path, replace(made, n_vocab=512, weights=weights))
    reader = gguf.GGUFReader(path)
    for tensor in reader.tensors:
        if "norm" in tensor.name or tensor.name in (
            "token_embd.weight",
            "output.weight",
        ):
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert values.std() == pytest.approx(values.shape[-1] ** -0.5, rel=0.02)
        assert abs(values.mean()) < 0.02 * values.std()


def test_each_token_has_a_successor_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path / "model.gguf"
    made = replace(BILLION, n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=256)
    make_llama(path, replace(made, n_vocab=512))
    with Engine(path, n_ctx=256, n_threads=1) as engine:
        tokens = [engine.tokenize("a")[0]]
        for _ in range(48):
            logits = engine.eval(tokens[-1:])
            best = np.sort(logits)[-2:]
            # A step that rounds to 4 bits moves them by a hundredth of this.
            assert best[1] - best[0] > logits.std()
            tokens.append(int(logits.argmax()))
    assert len(set(tokens)) == len(tokens)


def test_a_vocabulary_has_all_bytes(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path / "model.gguf"
    make_llama(path, EXPERTS)
    text = "naïve 東京"
    with Engine(path, n_ctx=256, n_threads=1) as engine:
        tokens = engine.tokenize(text)
        pieces = b"".join(map(engine.model.piece, tokens)).decode()
        # SentencePiece's space, which is no token of its own here.
        assert pieces.replace("▁", " ").strip() == text
        assert engine.eval(tokens).shape == (EXPERTS.n_vocab,)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"weights": "q5_0"}, "weights are"),
        ({"n_head": 5}, "heads do not divide"),
        ({"n_head_kv": 3}, "heads do not divide"),
        ({"weights": "q8_0", "n_ff": 100}, "a multiple of 32"),
        ({"vocabulary": True, "n_vocab": 200}, "too few for all bytes"),
    ],
)
def test_shapes_that_cannot_be(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        replace(SHAPE, **changed)


def test_the_command_writes_a_named_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    path = tmp_path / "made.gguf"
    monkeypatch.setattr(sys, "argv", ["models", "tiny", str(path)])
    assert main() == 0
    make_llama(tmp_path / "expected.gguf", TINY)
    assert path.read_bytes() == (tmp_path / "expected.gguf").read_bytes()
    monkeypatch.setattr(sys, "argv", ["models", "tiny", str(tmp_path / "no" / "x")])
    assert main() == 1
    assert "No such file" in capsys.readouterr().err
