"""LX_GRAPH_PATCH: a graph as what differs from one that was sent before.

llama.cpp makes a new graph when its KV cache has grown or a batch has another
shape; of some hundred kilobytes a few hundred numbers have then changed.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from longwire.errors import BadFrame, BadRequest
from longwire.wire.messages import Bytes

__all__ = ["Base", "Bases", "GraphPatch", "PATCH_HEAD", "applied"]

_NAME = "LX_GRAPH_PATCH"
_HEAD = struct.Struct("<IQII")
PATCH_HEAD = _HEAD.size

_KEPT = 4
"""Graphs per device that a patch may start from: llama.cpp alternates between a
few, with pipelined ubatches among them."""

_LARGEST = 8 << 20
"""Bytes; a larger graph is no base, so that these cost a session little."""

Words = npt.NDArray[Any]
T = TypeVar("T")


class GraphPatch(NamedTuple):
    """Words of a graph's body, behind its uid, to be put in place of others."""

    device: int
    uid: int
    """0 in protocol 7, as everywhere."""
    base: int
    """How many graphs ago on this device: 0 is the last one."""
    positions: Words
    values: Words
    """Both u32."""

    def encode(self) -> list[Bytes]:
        """The message body in pieces."""
        head = _HEAD.pack(self.device, self.uid, self.base, len(self.positions))
        return [head, self.positions.tobytes(), self.values.tobytes()]

    @staticmethod
    def decode_head(body: Bytes) -> tuple[int, int, int, int]:
        """Device, uid, base and how many words, of a body or the start of one."""
        device, uid, base, count = _HEAD.unpack_from(body)
        return device, uid, base, count

    @classmethod
    def decode(cls, body: Bytes) -> GraphPatch:
        """Raises: BadFrame: not the length that the count says."""
        if len(body) < PATCH_HEAD:
            raise BadFrame(_NAME, len(body), f"at least {PATCH_HEAD}")
        device, uid, base, count = cls.decode_head(body)
        expected = PATCH_HEAD + 8 * count
        if len(body) != expected:
            raise BadFrame(_NAME, len(body), f"{expected}")
        words = np.frombuffer(body, "<u4", 2 * count, PATCH_HEAD)
        return cls(device, uid, base, words[:count], words[count:])


@dataclass(frozen=True, slots=True)
class Base(Generic[T]):
    """A graph's words, and whatever its keeper knows about it."""

    words: Words
    note: T


class Bases(Generic[T]):
    """The graphs of each device that a patch may start from; alike at both ends."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[Base[T]]] = {}

    def add(self, device: int, words: Words, note: T) -> None:
        """A graph has been sent, whole or as a patch."""
        if words.nbytes <= _LARGEST:
            kept = self._kept.setdefault(device, deque(maxlen=_KEPT))
            kept.appendleft(Base(words, note))

    def clear(self) -> None:
        """Forget all: a command was refused, and the ends may differ."""
        self._kept.clear()

    def find(self, device: int, base: int) -> Base[T]:
        """The graph a patch starts from.

        Raises:
            BadRequest: there are not so many.
        """
        kept = self._kept.get(device, ())
        if base >= len(kept):
            raise BadRequest(_NAME, f"no graph {base} of {len(kept)} to start from")
        return kept[base]

    def patch(self, device: int, uid: int, words: Words) -> GraphPatch | None:
        """The smallest patch that leads to `words`; None if none is worth it."""
        best: tuple[int, Words] | None = None
        for base, kept in enumerate(self._kept.get(device, ())):
            if len(kept.words) != len(words):
                continue
            changed = np.flatnonzero(kept.words != words)
            if best is None or len(changed) < len(best[1]):
                best = base, changed
        # A word costs its position as well.
        if best is None or 4 * len(best[1]) > len(words):
            return None
        base, changed = best
        positions = changed.astype(np.uint32)
        return GraphPatch(device, uid, base, positions, words[changed])


def applied(base: Words, patch: GraphPatch) -> Words:
    """The words of the graph that a patch makes of another.

    Raises:
        BadRequest: a position outside of it.
    """
    words: Words = base.copy()
    if len(patch.positions):
        if int(patch.positions.max()) >= len(words):
            raise BadRequest(_NAME, "a position outside of the graph")
        words[patch.positions] = patch.values
    return words
