"""Whether a model can be split by tensors, and over how many devices.

llama.cpp decides this while it computes, and where it cannot, ggml ends the process.
So its rules are followed here beforehand: `llama_meta_device_get_split_state` in
`src/llama-model.cpp` and `ggml/src/ggml-backend-meta.cpp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from longwire.errors import UsageError
from longwire.models.gguf import GgufHead
from longwire.wire.types import TYPES

__all__ = ["MOST_DEVICES", "Attention", "SplitModel", "check_split", "split_model"]

MOST_DEVICES = 16
"""`GGML_BACKEND_META_MAX_DEVICES`."""

REFUSED = frozenset(
    "grok mpt plamo2 minicpm3 gemma3n mamba mamba2 jamba falcon-h1 olmo2 olmoe "
    "deepseek2 deepseek32 deepseek4 glm-dsa bitnet t5 nemotron_h nemotron_h_moe "
    "granitehybrid lfm2 lfm2moe minimax-m2 mistral4 kimi-linear".split()
)
"""Architectures of `llm_arch_supports_sm_tensor`; llama.cpp knows of others itself."""

_WIDE = 128
"""llama.cpp makes slices of up to this many columns where that idles no device."""

_ATTENTION = re.compile(r"blk\.(\d+)\.attn_(?:q|k|v|qkv)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's attention, as far as a split depends on it."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    block: int
    """Columns per block of the output matrix: no cut goes through one."""

    def slices(
        self, devices: int, shares: Sequence[float], rotation: int
    ) -> Iterator[tuple[int, Fraction | None]]:
        """Per cut piece its device, and the heads that go to it.

        Heads are counted as KV heads. None where the parts of the layer do not go
        together: ggml ends the process then.
        """
        grouped = self.heads // self.kv_heads
        columns = grouped * self.key_size
        block = self.block
        while block < _WIDE and block * devices < columns:
            block *= 2
        grain = math.lcm(columns, block)
        # Query, output, key, value: the columns of each, and its grain.
        parts = [
            (self.heads * self.key_size, grain, columns),
            (self.heads * self.value_size, grain, grouped * self.value_size),
            (self.kv_heads * self.key_size, grain // grouped, self.key_size),
            (self.kv_heads * self.value_size, grain // grouped, self.value_size),
        ]
        cut = [_cut(total, g, devices, shares, rotation) for total, g, _ in parts]
        for piece, sizes in enumerate(zip(*cut, strict=True)):
            counts = {
                Fraction(size, per_head)
                for size, (_, _, per_head) in zip(sizes, parts, strict=True)
            }
            same = len(counts) == 1 and counts.copy().pop().denominator == 1
            device = (piece + rotation) % devices
            yield device, counts.pop() if same else None


def _cut(
    total: int, grain: int, devices: int, shares: Sequence[float], rotation: int
) -> list[int]:
    """The sizes of the pieces, in llama.cpp's order and in its arithmetic."""
    turned = [shares[(j + rotation) % devices] for j in range(devices)]
    sums = np.cumsum(np.array(turned, np.float32), dtype=np.float32)
    sizes, low = [], 0
    for j in range(devices - 1):
        if sums[-1] == 0:
            high = total * (j + 1) // devices
        else:
            high = int(np.float32(total) * sums[j] / sums[-1])
        high -= high % grain
        sizes.append(high - low)
        low = high
    return [*sizes, total - low]


@dataclass(frozen=True, slots=True)
class SplitModel:
    """What a split depends on."""

    architecture: str
    layers: Mapping[Attention, int]
    """By kind how many layers there are, up to the last one of it; those without
    attention are no kind, and recurrent ones are not counted."""
    unknown: str | None = None
    """A layer whose attention llama.cpp has no rule for."""


def split_model(heads: Sequence[GgufHead]) -> SplitModel:
    """What the files of a model say; the first one has the values."""
    values = heads[0].values
    types = {name: number for head in heads for name, number in head.types.items()}
    architecture = str(values.get("general.architecture", ""))

    def value(key: str, default: int) -> int:
        found = values.get(f"{architecture}.{key}", default)
        return found if isinstance(found, int) else default

    def per_layer(key: str, layer: int, default: int) -> int:
        found = values.get(f"{architecture}.{key}", default)
        if isinstance(found, list):
            return found[layer] if layer < len(found) else 0
        return found if isinstance(found, int) else default

    layers: dict[Attention, int] = {}
    unknown = None
    attending = {int(m[1]) for m in map(_ATTENTION.fullmatch, types) if m}
    known = sorted({int(m[1]) for m in map(_LAYER.match, types) if m})
    plain = [n for n in known if f"blk.{n}.ssm_out.weight" not in types]
    for place, layer in enumerate(plain, 1):
        count = per_layer("attention.head_count", layer, 0)
        kv_count = per_layer("attention.head_count_kv", layer, count)
        if layer not in attending or 0 in (count, kv_count):
            continue
        output = types.get(f"blk.{layer}.attn_output.weight")
        if output is None:
            unknown = unknown or f"blk.{layer}"
            continue
        size = value("embedding_length", 0) // count
        attention = Attention(
            count,
            kv_count,
            value("attention.key_length", size),
            value("attention.value_length", size),
            TYPES[output].block if output in TYPES else 1,
        )
        layers[attention] = place
    return SplitModel(architecture, layers, unknown)


def check_split(
    model: SplitModel, names: Sequence[str], shares: Sequence[float] = ()
) -> None:
    """Refuse what ggml would end the process for, or a server could not compute.

    `names` are of the devices, in their order; `shares` as many or none.

    Raises:
        UsageError: says why, and how many devices would do.
    """
    reason = _refusal(model, names, shares)
    if reason is None:
        return
    counts = [n for n in range(2, MOST_DEVICES + 1) if not _refusal(model, [""] * n)]
    if len(names) in counts:
        advice = "with other shares or none it would work"
    elif counts:
        advice = f"it would work over {_listed(counts)} devices"
    else:
        advice = "use split mode 'layer'"
    raise UsageError(f"the model cannot be split by tensors: {reason}; {advice}")


def _listed(counts: Sequence[int]) -> str:
    if len(counts) > 2 and counts[-1] - counts[0] == len(counts) - 1:
        return f"{counts[0]} to {counts[-1]}"
    *others, last = map(str, counts)
    return f"{', '.join(others)} or {last}" if others else last


def _refusal(
    model: SplitModel, names: Sequence[str], shares: Sequence[float] = ()
) -> str | None:
    devices = len(names)
    if model.architecture in REFUSED:
        return f"llama.cpp has no such split for architecture {model.architecture!r}"
    if model.unknown:
        return f"llama.cpp has no rule for the attention of {model.unknown}"
    if devices == 0:
        return "there is no device to put it on"
    if devices > MOST_DEVICES:
        return f"ggml takes at most {MOST_DEVICES} devices, not {devices}"
    if shares and len(shares) != devices:
        what = "one share" if len(shares) == 1 else f"{len(shares)} shares"
        return (
            f"there {'is' if len(shares) == 1 else 'are'} {what} for {devices} devices"
        )
    for attention, layers in model.layers.items():
        reason = _unfit(attention, layers, names, shares)
        if reason:
            return reason
    return None


def _unfit(
    attention: Attention, layers: int, names: Sequence[str], shares: Sequence[float]
) -> str | None:
    devices, kv = len(names), attention.kv_heads
    if attention.heads == 1:
        return "it has one attention head"
    if attention.heads % kv:
        return f"{attention.heads} heads do not share {kv} KV heads evenly"
    if devices > kv:
        what = "one KV head" if kv == 1 else f"{kv} KV heads"
        return f"it has {what} for {devices} devices"
    # Cuts turn with the layers, to even out what rounding gives to whom: one further
    # for each earlier layer of the same sort. With or without a window is a sort, which
    # not every file tells, so all turns count that a layer of this kind may have.
    for rotation in range(min(devices, layers)):
        for device, heads in attention.slices(
            devices, shares or [0] * devices, rotation
        ):
            if heads is None:
                sizes = f"{attention.key_size} and {attention.value_size}"
                return (
                    f"heads of {sizes} columns in blocks of {attention.block} "
                    f"cannot be cut over {devices} devices"
                )
            if heads == 0:
                return f"{names[device] or 'a device'} would get none of {kv} KV heads"
    return None
