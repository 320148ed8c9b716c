"""Memory that could not be had, where ggml knows no such thing."""

from __future__ import annotations

from typing import Any

__all__ = ["Absent"]

_NOWHERE = 1 << 60
"""Aligned, and no address that anything has."""


class Absent:
    """A `HostBuffer` of a device that has failed: whatever is done with it is not."""

    address = 0

    def base(self) -> int:
        return _NOWHERE

    def init_tensor(self, tensor: int) -> bool:
        return True

    def cpy_tensor(self, src: int, dst: int) -> bool:
        return True

    def _nothing(self, *arguments: Any) -> None:
        return None

    free = clear = memset_tensor = _nothing
    set_tensor = get_tensor = set_tensor_2d = get_tensor_2d = _nothing
