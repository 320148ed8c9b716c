"""A device of plain memory: it computes nothing, but sees what it is asked to."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.native.abi import Status
from longwire.native.compute import NativeBuffer
from longwire.native.graph import gather, graph_nodes
from longwire.wire.types import nbytes

__all__ = ["PlainDevice"]

_GUARD = 4096


class PlainDevice:
    """Stands in for a `ComputeDevice` where no engine may crash."""

    name = "plain"

    def __init__(self) -> None:
        self.computed = 0
        self.astray: list[str] = []
        """Tensors of computed graphs that were not in a live buffer."""
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._live: dict[int, range] = {}

    def intact(self) -> bool:
        """Whether nobody wrote around the buffers."""
        return all(
            (memory[:_GUARD] == 0xEE).all() and (memory[-_GUARD:] == 0xEE).all()
            for memory in self._memory.values()
        )

    def compute(self, graph: int) -> Status:
        """Look at every tensor that a kernel would follow a pointer to."""
        nodes = gather(graph_nodes(graph))
        sources = np.unique(nodes["src"])
        for tensor in np.append(nodes, gather(sources[sources > 0])):
            size = nbytes(
                int(tensor["type"]), tensor["ne"].tolist(), tensor["nb"].tolist()
            )
            data = range(int(tensor["data"]), int(tensor["data"]) + size)
            if data and data.start and not self._holds(data):
                self.astray.append(str(tensor))
        self.computed += 1
        return Status.SUCCESS

    def _holds(self, data: range) -> bool:
        return any(
            buffer.start <= data.start and data.stop <= buffer.stop
            for buffer in self._live.values()
        )

    def alloc(self, size: int) -> NativeBuffer | None:
        if size > 1 << 20:
            return None
        memory = np.full(size + 2 * _GUARD, 0xEE, np.uint8)
        address = 1 + len(self._memory)
        inside = memory[_GUARD : _GUARD + size]
        base = inside.ctypes.data
        self._memory[address] = memory
        self._live[address] = range(base, base + size)
        return NativeBuffer(address, base, size, inside.data)

    def free(self, buffer: NativeBuffer) -> None:
        del self._live[buffer.address]
        buffer.bytes = None

    def clear(self, buffer: NativeBuffer, value: int) -> None:
        assert buffer.bytes is not None
        buffer.bytes[:] = bytes([value]) * buffer.size

    def init_tensor(self, buffer: NativeBuffer, tensor: npt.NDArray[Any]) -> None:
        assert buffer.address in self._live

    def alloc_size(self, tensor: npt.NDArray[Any], buffer: int | None) -> int:
        assert buffer is None or buffer in self._live
        return 1

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30

    def alignment(self) -> int:
        return 32

    def max_size(self) -> int:
        return 1 << 40

    def open(self, n_threads: int) -> None: ...

    def close(self) -> None: ...

    def synchronize(self) -> None: ...
