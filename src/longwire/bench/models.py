"""Random models: right in shape, meaningless in words, small enough to be free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import UsageError

__all__ = ["TINY", "LlamaShape", "make_llama"]


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a llama-architecture model."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    n_ctx: int = 4096

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


TINY = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512, n_vocab=1024)
"""A token of it costs well under a millisecond, so that the wire shows."""


def make_llama(path: Path, shape: LlamaShape, seed: int = 0) -> None:
    """Write a model with random f32 weights and no vocabulary to `path`.

    Equal shapes and seeds give equal weights.

    Raises:
        UsageError: the gguf package is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            "making a model needs the gguf package: pip install 'longwire[bench]'"
        ) from error
    writer = gguf.GGUFWriter(path, "llama")
    _add_header(writer, shape)
    random = np.random.default_rng(seed)
    for name, dimensions in _tensors(shape).items():
        writer.add_tensor(name, _weights(random, dimensions))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_header(writer: Any, shape: LlamaShape) -> None:
    writer.add_name("random")
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")


def _tensors(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and dimensions, the longest stride first."""
    embd, ff = shape.n_embd, shape.n_ff
    kv = shape.n_head_kv * shape.head_size
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (shape.n_vocab, embd),
        "output_norm.weight": (embd,),
        "output.weight": (shape.n_vocab, embd),
    }
    for i in range(shape.n_layer):
        tensors |= {
            f"blk.{i}.attn_norm.weight": (embd,),
            f"blk.{i}.attn_q.weight": (embd, embd),
            f"blk.{i}.attn_k.weight": (kv, embd),
            f"blk.{i}.attn_v.weight": (kv, embd),
            f"blk.{i}.attn_output.weight": (embd, embd),
            f"blk.{i}.ffn_norm.weight": (embd,),
            f"blk.{i}.ffn_gate.weight": (ff, embd),
            f"blk.{i}.ffn_up.weight": (ff, embd),
            f"blk.{i}.ffn_down.weight": (embd, ff),
        }
    return tensors


def _weights(
    random: np.random.Generator, dimensions: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    if len(dimensions) == 1:
        return np.ones(dimensions, np.float32)
    # Scaled so that activations keep their size from layer to layer.
    weights = random.standard_normal(dimensions, np.float32)
    weights *= dimensions[-1] ** -0.5
    return weights
