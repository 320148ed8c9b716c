"""Which models a tensor split takes, and over how many devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from longwire.bench.models import LlamaShape, make_llama
from longwire.errors import UsageError
from longwire.host.layout import LoadedModel
from longwire.host.split import Attention, SplitModel, check_split, split_model
from longwire.host.workers import local_workers
from longwire.models.gguf import GgufHead, gguf_head
from longwire.native.engine import load_engine
from longwire.native.gguf import HeadValue
from support.tiny import make_mamba

F32, Q8_0, Q4_K = 1, 32, 256


def model(*kinds: tuple[Attention, int], architecture: str = "llama") -> SplitModel:
    return SplitModel(architecture, dict(kinds))


def heads(n: int, kv: int, size: int = 64, block: int = F32) -> SplitModel:
    return model((Attention(n, kv, size, size, block), 3))


def refusal(model: SplitModel, devices: int, shares: Sequence[float] = ()) -> str:
    try:
        check_split(model, [f"RPC{i}" for i in range(devices)], shares)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "devices", "shares"),
    [
        (heads(16, 8), 2, ()),
        (heads(16, 8), 4, ()),
        (heads(16, 8), 8, ()),
        (heads(12, 6), 3, ()),
        # Some get one more than others.
        (heads(8, 8), 3, ()),
        (heads(8, 8), 5, ()),
        (heads(32, 8), 2, (3, 1)),
        (heads(8, 8), 3, (5, 2, 1)),
        # All shares 0 are none.
        (heads(8, 8), 2, (0, 0)),
        (heads(16, 8, 16, Q8_0), 8, ()),
        (heads(32, 8, 64, Q4_K), 8, ()),
        # Two heads of 32 in two blocks of 32; heads of 80 in none.
        (heads(8, 8, 80, F32), 8, ()),
        # Value heads of another size, cut where the key heads are.
        (model((Attention(4, 4, 64, 32, F32), 2)), 2, ()),
        (
            model((Attention(8, 4, 64, 64, F32), 1), (Attention(8, 8, 64, 64, 1), 1)),
            4,
            (),
        ),
        (heads(8, 1), 1, ()),
    ],
)
def test_fits(model: SplitModel, devices: int, shares: Sequence[float]) -> None:
    assert refusal(model, devices, shares) == ""


@pytest.mark.parametrize(
    ("model", "devices", "shares", "reason", "advice"),
    [
        (heads(4, 1), 2, (), "one KV head for 2 devices", "use split mode 'layer'"),
        (heads(1, 1), 2, (), "one attention head", "use split mode 'layer'"),
        (heads(8, 2), 4, (), "2 KV heads for 4 devices", "over 2 devices"),
        (heads(12, 6), 8, (), "6 KV heads for 8 devices", "over 2 to 6 devices"),
        (heads(32, 32), 17, (), "at most 16 devices, not 17", "over 2 to 16 devices"),
        (heads(8, 8), 0, (), "no device", "over 2 to 8 devices"),
        # 16 heads of 16 columns: a cut is at every second one.
        (heads(16, 16, 16, Q8_0), 16, (), "RPC0 would get none", "over 2 to 8"),
        # And of 64 columns at every fourth.
        (heads(8, 8, 64, Q4_K), 4, (), "RPC0 would get none", "over 2 devices"),
        (heads(8, 8), 2, (1, 0), "RPC1 would get none of 8", "with other shares"),
        (heads(8, 8), 2, (0, 1), "RPC0 would get none of 8", "with other shares"),
        (heads(8, 8), 2, (100, 1), "RPC1 would get none of 8", "with other shares"),
        # Only the second layer's cut leaves nothing for it.
        (heads(4, 4), 2, (5, 1.5), "RPC1 would get none of 4", "with other shares"),
        (heads(8, 8), 3, (1, 1), "there are 2 shares for 3", "with other shares"),
        (heads(8, 8), 2, (1,), "there is one share for 2", "with other shares"),
        (heads(7, 2), 2, (), "7 heads do not share 2 KV heads", "'layer'"),
        (model((Attention(4, 4, 64, 32, F32), 2)), 4, (), "64 and 32", "2 devices"),
        (model(architecture="mamba"), 2, (), "architecture 'mamba'", "'layer'"),
        (SplitModel("x", {}, "blk.0"), 2, (), "no rule for the att", "'layer'"),
        # One layer that does not fit is enough.
        (
            model((Attention(8, 8, 64, 64, F32), 9), (Attention(8, 2, 64, 64, F32), 1)),
            4,
            (),
            "2 KV heads for 4 devices",
            "over 2 devices",
        ),
    ],
)
def test_refuses(
    model: SplitModel,
    devices: int,
    shares: Sequence[float],
    reason: str,
    advice: str,
) -> None:
    said = refusal(model, devices, shares)
    assert said.startswith("the model cannot be split by tensors: ")
    assert reason in said and advice in said


def test_each_layer_of_a_kind_counts_from_where_it_is() -> None:
    """Cuts turn with all layers: the only one of its kind may come second."""
    types = {
        f"blk.{n}.attn_{part}.weight": 0 for n in (1, 2) for part in ("q", "output")
    }
    types |= {"blk.0.ssm_out.weight": 0, "blk.0.attn_q.weight": 0}
    values: dict[str, HeadValue] = {
        "general.architecture": "x",
        "x.embedding_length": 256,
        "x.attention.head_count": [8, 8, 4],
    }
    found = split_model([GgufHead(values, types)])
    # The first is recurrent, and counted apart.
    assert [(kind.heads, n) for kind, n in found.layers.items()] == [(8, 1), (4, 2)]
    assert "RPC1 would get none of 4" in refusal(found, 2, (5, 1.5))
    alone = SplitModel("x", {kind: 1 for kind in found.layers})
    assert refusal(alone, 2, (5, 1.5)) == ""


def shape(n_head: int, n_head_kv: int, weights: str = "f32") -> LlamaShape:
    return LlamaShape(2, 256, n_head, n_head_kv, 256, 128, weights=weights)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    return tmp_path / "model.gguf"


def test_a_file_says_what_decides(written: Path) -> None:
    make_llama(written, shape(16, 8, "q8_0"))
    found = split_model([gguf_head(load_engine("xllamacpp"), written)])
    assert found == SplitModel("llama", {Attention(16, 8, 16, 16, Q8_0): 2})


def test_a_model_without_attention_is_read_too(written: Path) -> None:
    make_mamba(written)
    found = split_model([gguf_head(load_engine("xllamacpp"), written)])
    assert found == SplitModel("mamba", {})


def _load(model: Path, endpoints: Sequence[str], *, unchecked: bool) -> tuple[int, str]:
    """Load in a process of its own, and compute; with the check or past it."""
    program = f"""
import {LoadedModel.__module__} as layout
if {unchecked}:
    layout.check_split = lambda *_: None
from longwire.host.engine import Engine
rpc = {",".join(endpoints)!r}
settings = dict(n_ctx=256, n_threads=1, split_mode="tensor")
with Engine({str(model)!r}, rpc=rpc, **settings) as engine:
    engine.eval([1, 2, 3])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("made", "count"),
    [(shape(8, 8), 3), (shape(16, 8, "q8_0"), 2), (shape(4, 1), 1)],
)
def test_what_fits_loads_and_computes(
    made: LlamaShape, count: int, written: Path
) -> None:
    make_llama(written, made)
    with local_workers(count, ("-t", "1")) as endpoints:
        status, said = _load(written, endpoints, unchecked=False)
    assert status == 0, said


@pytest.mark.parametrize(
    ("made", "count"), [(shape(1, 1), 2), (shape(4, 2), 3), (shape(4, 1), 2)]
)
def test_what_is_refused_would_have_failed(
    made: LlamaShape, count: int, written: Path
) -> None:
    make_llama(written, made)
    with local_workers(count, ("-t", "1")) as endpoints:
        status, said = _load(written, endpoints, unchecked=False)
        assert status == 1 and "UsageError: the model cannot be split" in said
        status, said = _load(written, endpoints, unchecked=True)
    assert status != 0 and "cannot be split" not in said
