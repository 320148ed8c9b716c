"""Random models: right in shape, meaningless in words, small enough to be free.

`python -m longwire.bench.models NAME FILE` writes one of those that have a name.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import LongwireError, UsageError

__all__ = ["BILLION", "EXPERTS", "SPLIT", "SPLIT_THIRDS", "TINY"]
__all__ += ["WEIGHTS", "LlamaShape", "main", "make_llama"]

WEIGHTS = ("f32", "q8_0", "q4_0")
"""What the weights may be stored as."""

_BLOCK = 32
"""Weights in a block of the quantised types, behind a scale of 2 bytes."""

_DEVIATION = {"q8_0": (256**2 / 12) ** 0.5, "q4_0": (2 * 140 / 16) ** 0.5}
"""Of weights in units of their scale, drawn as `_drawn` does."""

# 0 stands for -8, which has no counterpart: without it the mean is 0, and a matrix
# does not favour one direction. It becomes 8, which stands for 0.
_BALANCED = np.array(
    [
        b | (0x08 if b & 0x0F == 0 else 0) | (0x80 if b < 0x10 else 0)
        for b in range(256)
    ],
    np.uint8,
)
"""Of each byte of two weights of q4_0."""

_BYTE_TOKENS = 256
_SPECIAL = (("<unk>", 2), ("<s>", 3), ("</s>", 3))
"""The first tokens of a vocabulary, and what llama.cpp takes them for."""

_PLAIN, _BYTE = 1, 6


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Sizes of a llama-architecture model."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    """Of the feed-forward part, or of each expert."""
    n_vocab: int
    n_ctx: int = 4096
    n_expert: int = 0
    n_expert_used: int = 0
    weights: str = "f32"
    vocabulary: bool = False
    """Bytes as tokens, so that any text has some; without, it knows numbers only."""
    succession: float = 0.0
    """How far each token's successor stands out from the other logits, in their
    deviations. 0 leaves all to the layers; at 3 they decide about every other token,
    and none hangs on the order of a sum; at 8 none hangs on quantised activations."""

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            known = " or ".join(WEIGHTS)
            raise UsageError(f"weights are {known}, not {self.weights!r}")
        if self.n_embd % self.n_head or self.n_head % self.n_head_kv:
            raise UsageError("the heads do not divide what they share")
        if self.weights != "f32" and (self.n_embd | self.n_ff) % _BLOCK:
            raise UsageError(f"{self.weights} needs rows of a multiple of {_BLOCK}")
        if self.vocabulary and self.n_vocab < len(_SPECIAL) + _BYTE_TOKENS:
            raise UsageError(f"{self.n_vocab} tokens are too few for all bytes")

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head


TINY = LlamaShape(n_layer=2, n_embd=256, n_head=4, n_head_kv=4, n_ff=512, n_vocab=1024)
"""A token of it costs well under a millisecond, so that the wire shows."""

SPLIT = LlamaShape(3, 512, 16, 8, 1024, 512, vocabulary=True, succession=3.0)
"""Tensor split over 2, 4 or 8 devices; 8 is what the KV heads allow."""

SPLIT_THIRDS = LlamaShape(3, 384, 12, 6, 768, 512, vocabulary=True, succession=3.0)
"""Tensor split over 2, 3 or 6 devices."""

EXPERTS = LlamaShape(
    2, 256, 8, 4, 512, 512, 4096, 8, 2, vocabulary=True, succession=3.0
)
"""Feed-forward parts chosen among eight; tensor split over 2 or 4 devices."""

BILLION = LlamaShape(
    16, 2048, 32, 8, 7168, 16384, weights="q4_0", vocabulary=True, succession=8.0
)
"""A billion weights, 0.53 GB: as heavy per token as a small real model."""

LARGE = LlamaShape(7, 2048, 16, 16, 8192, 16384)
"""2.1 GB to load, all but its norms in tensors of more than 10 MiB."""

_NAMED: Mapping[str, LlamaShape] = {
    "tiny": TINY,
    "split": SPLIT,
    "split-thirds": SPLIT_THIRDS,
    "experts": EXPERTS,
    "billion": BILLION,
    "large": LARGE,
}


def make_llama(path: Path, shape: LlamaShape, seed: int = 0) -> None:
    """Write a model with random weights to `path`.

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
    _add_vocabulary(writer, shape)
    random = np.random.default_rng(seed)
    stored = gguf.GGMLQuantizationType[shape.weights.upper()]
    for name, data in _data(random, shape):
        quantised = data.dtype == np.uint8
        writer.add_tensor(name, data, raw_dtype=stored if quantised else None)
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
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)


def _add_vocabulary(writer: Any, shape: LlamaShape) -> None:
    if not shape.vocabulary:
        writer.add_tokenizer_model("no_vocab")
        return
    tokens = [
        *_SPECIAL,
        *((f"<0x{byte:02X}>", _BYTE) for byte in range(_BYTE_TOKENS)),
    ]
    tokens += [(f"▁t{n}", _PLAIN) for n in range(len(tokens), shape.n_vocab)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _data(
    random: np.random.Generator, shape: LlamaShape
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Every tensor's name and data; bytes are blocks of the shape's weights."""
    # As large as what a layer adds: the last tokens must not drown.
    embeddings = random.standard_normal((shape.n_vocab, shape.n_embd), np.float32)
    yield "token_embd.weight", _stored(embeddings, shape)
    yield "output.weight", _stored(_output(random, embeddings, shape), shape)
    for name, dimensions in _tensors(shape).items():
        yield name, _weights(random, dimensions, shape)


def _tensors(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Name and dimensions of all others, the longest stride first."""
    embd, ff = shape.n_embd, shape.n_ff
    kv = shape.n_head_kv * shape.head_size
    tensors: dict[str, tuple[int, ...]] = {"output_norm.weight": (embd,)}
    for i in range(shape.n_layer):
        tensors |= {
            f"blk.{i}.attn_norm.weight": (embd,),
            f"blk.{i}.attn_q.weight": (embd, embd),
            f"blk.{i}.attn_k.weight": (kv, embd),
            f"blk.{i}.attn_v.weight": (kv, embd),
            f"blk.{i}.attn_output.weight": (embd, embd),
            f"blk.{i}.ffn_norm.weight": (embd,),
        }
        many: tuple[int, ...] = (shape.n_expert,) if shape.n_expert else ()
        kind = "_exps" if shape.n_expert else ""
        if shape.n_expert:
            tensors[f"blk.{i}.ffn_gate_inp.weight"] = (shape.n_expert, embd)
        tensors |= {
            f"blk.{i}.ffn_gate{kind}.weight": (*many, ff, embd),
            f"blk.{i}.ffn_up{kind}.weight": (*many, ff, embd),
            f"blk.{i}.ffn_down{kind}.weight": (*many, embd, ff),
        }
    return tensors


def _normal(
    random: np.random.Generator, dimensions: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    # Scaled so that activations keep their size from layer to layer.
    weights = random.standard_normal(dimensions, np.float32)
    weights *= dimensions[-1] ** -0.5
    return weights


def _output(
    random: np.random.Generator, embeddings: npt.NDArray[np.float32], shape: LlamaShape
) -> npt.NDArray[np.float32]:
    """Rows that answer to their predecessor's embedding, as far as that is wanted."""
    output = _normal(random, embeddings.shape)
    if shape.succession:
        order = random.permutation(shape.n_vocab)
        # A row meets its predecessor's embedding in a state that has the layers' own
        # in it, too, about 1.4 times as much from each.
        share = shape.succession * (1 + 1.4 * shape.n_layer) ** 0.5 / shape.n_embd
        output[np.roll(order, -1)] += np.float32(share) * embeddings[order]
    return output


def _weights(
    random: np.random.Generator, dimensions: tuple[int, ...], shape: LlamaShape
) -> npt.NDArray[Any]:
    if len(dimensions) == 1:
        return np.ones(dimensions, np.float32)
    routes = dimensions[0] == shape.n_expert and len(dimensions) == 2
    if shape.weights == "f32" or routes:
        return _normal(random, dimensions)
    # Drawn as they are stored: to quantise a billion weights takes a minute.
    blocks = (*dimensions[:-1], dimensions[-1] // _BLOCK)
    size = _BLOCK if shape.weights == "q8_0" else _BLOCK // 2
    data = np.empty((*blocks, 2 + size), np.uint8)
    scale = dimensions[-1] ** -0.5 / _DEVIATION[shape.weights]
    data[..., :2] = np.array([scale], np.float16).view(np.uint8)
    data[..., 2:] = _drawn(random, shape.weights, (*blocks, size))
    return data.reshape(*dimensions[:-1], -1)


def _drawn(
    random: np.random.Generator, weights: str, dimensions: tuple[int, ...]
) -> npt.NDArray[np.uint8]:
    """Bytes of quantised weights, without their scales."""
    drawn = np.frombuffer(random.bytes(math.prod(dimensions)), np.uint8)
    if weights == "q4_0":
        drawn = _BALANCED[drawn]
    return drawn.reshape(dimensions)


def _stored(weights: npt.NDArray[np.float32], shape: LlamaShape) -> npt.NDArray[Any]:
    if shape.weights == "f32":
        return weights
    import gguf

    kind = gguf.GGMLQuantizationType[shape.weights.upper()]
    stored: npt.NDArray[Any] = gguf.quants.quantize(weights, kind)
    return stored


def main() -> int:
    """Write one of the named models."""
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("name", choices=list(_NAMED))
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        make_llama(arguments.file, _NAMED[arguments.name], arguments.seed)
    except (LongwireError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
