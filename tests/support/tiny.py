"""Tiny random models of architectures whose graphs differ from llama's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

__all__ = ["EMBD", "VOCAB", "make_mamba", "make_moe"]

EMBD, VOCAB, LAYERS = 256, 512, 2
_HEADS, _FF, _EXPERTS, _USED = 4, 128, 8, 2
_CONV, _STATE, _RANK = 4, 16, 16


def make_moe(path: Path) -> None:
    """A llama whose feed-forward parts are chosen among eight experts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (EMBD,),
            f"blk.{i}.attn_q.weight": (EMBD, EMBD),
            f"blk.{i}.attn_k.weight": (EMBD, EMBD),
            f"blk.{i}.attn_v.weight": (EMBD, EMBD),
            f"blk.{i}.attn_output.weight": (EMBD, EMBD),
            f"blk.{i}.ffn_norm.weight": (EMBD,),
            f"blk.{i}.ffn_gate_inp.weight": (_EXPERTS, EMBD),
            f"blk.{i}.ffn_gate_exps.weight": (_EXPERTS, _FF, EMBD),
            f"blk.{i}.ffn_up_exps.weight": (_EXPERTS, _FF, EMBD),
            f"blk.{i}.ffn_down_exps.weight": (_EXPERTS, EMBD, _FF),
        }

    def header(writer: Any) -> None:
        writer.add_feed_forward_length(_FF)
        writer.add_head_count(_HEADS)
        writer.add_head_count_kv(_HEADS)
        writer.add_rope_dimension_count(EMBD // _HEADS)
        writer.add_expert_count(_EXPERTS)
        writer.add_expert_used_count(_USED)

    _write(path, "llama", header, shapes)


def make_mamba(path: Path) -> None:
    """A state-space model: its states are rows chosen by ids."""
    inner = 2 * EMBD
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (EMBD,),
            f"blk.{i}.ssm_in.weight": (2 * inner, EMBD),
            f"blk.{i}.ssm_conv1d.weight": (inner, _CONV),
            f"blk.{i}.ssm_conv1d.bias": (inner,),
            f"blk.{i}.ssm_x.weight": (_RANK + 2 * _STATE, inner),
            f"blk.{i}.ssm_dt.weight": (inner, _RANK),
            f"blk.{i}.ssm_dt.bias": (inner,),
            f"blk.{i}.ssm_a": (inner, _STATE),
            f"blk.{i}.ssm_d": (inner,),
            f"blk.{i}.ssm_out.weight": (EMBD, inner),
        }

    def header(writer: Any) -> None:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(_CONV)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_state_size(_STATE)
        writer.add_ssm_time_step_rank(_RANK)

    _write(path, "mamba", header, shapes)


def _write(
    path: Path, architecture: str, header: Any, shapes: dict[str, tuple[int, ...]]
) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is missing")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("random")
    writer.add_context_length(512)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("no_vocab")
    header(writer)
    random = np.random.default_rng(3)
    shapes = {
        "token_embd.weight": (VOCAB, EMBD),
        "output_norm.weight": (EMBD,),
        "output.weight": (VOCAB, EMBD),
        **shapes,
    }
    for name, shape in shapes.items():
        if name.endswith("ssm_a"):
            weights = -np.tile(np.arange(1, _STATE + 1, dtype="<f4"), (shape[0], 1))
        elif len(shape) == 1:
            weights = np.ones(shape, np.float32)
        else:
            weights = random.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
