"""f32 numbers as bf16 or f16 and back: to the nearest, of two the even one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.wire.collectives import WireType

__all__ = ["BF16", "Rounding", "rounding"]

Floats = npt.NDArray[Any]

_BLOCK = 16 * 1024
"""Numbers at a time: what is in between stays in a core's cache."""


class Rounding:
    """One narrow type. Not locked: it has memory of its own to work in."""

    def narrow(self, numbers: Floats, out: Floats) -> None:
        """Round f32 `numbers` into `out`, which has 16 bits each."""
        raise NotImplementedError

    def widen(self, narrow: Floats, out: Floats) -> None:
        """The f32 of each."""
        raise NotImplementedError


class BF16(Rounding):
    """The upper half of an f32."""

    def __init__(self) -> None:
        self._bits = np.empty(_BLOCK, np.uint32)

    def narrow(self, numbers: Floats, out: Floats) -> None:
        for at in range(0, len(numbers), _BLOCK):
            part = numbers[at : at + _BLOCK]
            words, bits = part.view(np.uint32), self._bits[: len(part)]
            # Half of what the lower half can say, and one more if the upper is odd.
            np.right_shift(words, 16, out=bits)
            np.bitwise_and(bits, 1, out=bits)
            np.add(bits, 0x7FFF, out=bits)
            np.add(bits, words, out=bits)
            np.right_shift(bits, 16, out=bits)
            out[at : at + _BLOCK] = bits
            nan = np.isnan(part)
            if nan.any():
                # As ggml does: the upper half as it is, made quiet.
                out[at : at + _BLOCK][nan] = (words[nan] >> 16) | 0x40

    def widen(self, narrow: Floats, out: Floats) -> None:
        np.left_shift(narrow, 16, out=out.view(np.uint32), dtype=np.uint32)


class F16(Rounding):
    """IEEE half precision; what is too large becomes infinite."""

    def narrow(self, numbers: Floats, out: Floats) -> None:
        out.view(np.float16)[:] = numbers

    def widen(self, narrow: Floats, out: Floats) -> None:
        out[:] = narrow.view(np.float16)


def rounding(wire: int) -> Rounding | None:
    """What numbers on the wire go through; None if they stay f32."""
    if wire == WireType.F32:
        return None
    return BF16() if wire == WireType.BF16 else F16()
