"""Sets of types that rules name."""

from __future__ import annotations

from longwire.server.verify.columns import TypeSet, type_set
from longwire.wire.types import QUANTIZED

__all__ = [
    "BF16",
    "F16",
    "F16_F32",
    "F32",
    "FLOATS",
    "FROM_FLOAT",
    "I32",
    "I32_I64",
    "I64",
    "PLAIN",
    "QUANTIZED_IN",
    "TO_FLOAT",
    "VEC_DOT",
]

F32 = type_set("f32")
F16 = type_set("f16")
BF16 = type_set("bf16")
I32 = type_set("i32")
I64 = type_set("i64")
F16_F32 = F16 | F32
FLOATS = F16_F32 | BF16
I32_I64 = I32 | I64

PLAIN: TypeSet = FLOATS | I32 | type_set("i8", "i16")
"""Types whose elements CONCAT copies one by one."""

_INTERNAL = type_set("q8_1", "q8_K")
"""Only for products; nothing converts them back."""

QUANTIZED_IN: TypeSet = QUANTIZED & ~_INTERNAL

TO_FLOAT: TypeSet = QUANTIZED_IN | F16 | BF16
"""Types with a conversion to f32. For others the CPU would call NULL."""

FROM_FLOAT: TypeSet = (
    (QUANTIZED | FLOATS | I32)
    & ~type_set("iq2_xxs", "iq2_xs", "iq3_xxs", "iq3_s", "iq2_s", "iq1_s", "iq1_m")
)  # fmt: skip
"""Types with a conversion from f32."""

VEC_DOT: TypeSet = QUANTIZED_IN | FLOATS
"""Types that a product takes as its first operand."""
