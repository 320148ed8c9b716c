"""Bytes as a row of choices, so that a fuzzer's mutations change decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["Source"]

T = TypeVar("T")


class Source:
    """Hands out choices from `data`; past its end all are the first, or 0."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not used yet."""
        return max(0, len(self._data) - self._at)

    def take(self, size: int) -> bytes:
        """The next `size` bytes, zeros where there are none."""
        part = self._data[self._at : self._at + size]
        self._at += size
        return part.ljust(size, b"\0")

    def number(self, size: int = 1) -> int:
        """An unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def below(self, limit: int) -> int:
        """A number under `limit`, which is 256 or less."""
        return self.number() % limit

    def rarely(self, times: int) -> bool:
        """True about once in so many times, and never past the end."""
        return self.below(times) == times - 1

    def pick(self, options: Sequence[T]) -> T:
        """One of the options; two bytes where one cannot reach them all."""
        return options[self.number(1 if len(options) <= 256 else 2) % len(options)]
