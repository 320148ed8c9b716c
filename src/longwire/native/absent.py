"""Memory that could not be had, where ggml knows no such thing."""

from __future__ import annotations

from typing import Any

from longwire.native.contract import Rows
from longwire.native.memory import NOWHERE, fill

__all__ = ["Absent"]


class Absent:
    """A `HostBuffer` of a device without room: whatever is done with it is not."""

    address = 0

    def base(self) -> int:
        return NOWHERE

    def init_tensor(self, tensor: int) -> bool:
        return True

    def cpy_tensor(self, src: int, dst: int) -> bool:
        return True

    # C has no way to hear of the failure: zeros, not garbage.

    def get_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        fill(data, 0, size)

    def get_tensor_2d(self, tensor: int, rows: Rows) -> None:
        for view in rows.views():
            view[:] = bytes(rows.size)

    def _nothing(self, *arguments: Any) -> None:
        return None

    free = clear = memset_tensor = set_tensor = set_tensor_2d = _nothing
