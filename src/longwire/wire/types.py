"""The ggml type table and the sizes that follow from it.

Numbers, block sizes and byte sizes are those of `ggml.c` (`type_traits`) at
`GGML_TYPE_COUNT` 43, the count of protocols 7.0.0 and 8.0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_BYTES", "BLOCK_SIZE", "F32_TYPE", "QUANTIZED", "TYPES", "TYPE_COUNT"]
__all__ += ["TypeTraits", "nbytes"]

TYPE_COUNT = 43

F32_TYPE = 0


class TypeTraits(NamedTuple):
    """How one ggml type packs its elements."""

    name: str
    block: int
    """Elements per block."""
    size: int
    """Bytes per block."""
    quantized: bool


def _table(rows: str) -> dict[int, TypeTraits]:
    table = {}
    for row in rows.split():
        number, name, block, size = row.split(",")
        quantized = size.endswith("q")
        table[int(number)] = TypeTraits(
            name, int(block), int(size.rstrip("q")), quantized
        )
    return table


TYPES = _table(
    """
    0,f32,1,4  1,f16,1,2  2,q4_0,32,18q  3,q4_1,32,20q  6,q5_0,32,22q  7,q5_1,32,24q
    8,q8_0,32,34q  9,q8_1,32,36q  10,q2_K,256,84q  11,q3_K,256,110q
    12,q4_K,256,144q  13,q5_K,256,176q  14,q6_K,256,210q  15,q8_K,256,292q
    16,iq2_xxs,256,66q  17,iq2_xs,256,74q  18,iq3_xxs,256,98q  19,iq1_s,256,50q
    20,iq4_nl,32,18q  21,iq3_s,256,110q  22,iq2_s,256,82q  23,iq4_xs,256,136q
    24,i8,1,1  25,i16,1,2  26,i32,1,4  27,i64,1,8  28,f64,1,8  29,iq1_m,256,56q
    30,bf16,1,2  34,tq1_0,256,54q  35,tq2_0,256,66q  39,mxfp4,32,17q
    40,nvfp4,64,36q  41,q1_0,128,18q  42,q2_0,64,18q
    """
)
"""Live types by number; 4, 5, 31-33 and 36-38 were removed upstream."""


def _column(field: str) -> npt.NDArray[np.int64]:
    column = np.zeros(TYPE_COUNT, np.int64)
    for number, traits in TYPES.items():
        column[number] = getattr(traits, field)
    return column


BLOCK_SIZE = _column("block")
"""Elements per block by type number; 0 for a removed type."""
BLOCK_BYTES = _column("size")
QUANTIZED = _column("quantized").astype(bool)


def nbytes(type_number: int, ne: Sequence[int], nb: Sequence[int]) -> int:
    """Bytes from a tensor's first to its last, as `ggml_nbytes` counts them.

    `ne` are four element counts, `nb` four strides in bytes. The result is a
    Python integer and cannot overflow.
    """
    if min(ne) <= 0:
        return 0
    traits = TYPES[type_number]
    if traits.block == 1:
        return traits.size + sum((n - 1) * b for n, b in zip(ne, nb, strict=True))
    size = ne[0] * nb[0] // traits.block
    for dim in (1, 2, 3):
        size += (ne[dim] - 1) * nb[dim]
    return size
