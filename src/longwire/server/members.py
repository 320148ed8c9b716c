"""The tensors of one reduction on this server, as arrays to sum.

Where the host can reach a tensor's memory it is used in place; what a device keeps
to itself passes through memory of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.server.tensors import CheckedTensor
from longwire.wire.types import F32_TYPE

__all__ = ["Members", "Staging", "count_of", "raw"]

Floats = npt.NDArray[Any]


def raw(numbers: Floats) -> memoryview:
    """The bytes of an array, in place."""
    return numbers.view(np.uint8).data


def count_of(tensor: CheckedTensor, command: str) -> int:
    """How many numbers a tensor has that can be summed.

    Raises:
        BadRequest: not f32, or not contiguous.
    """
    described = tensor.tensor
    if described.type != F32_TYPE:
        raise BadRequest(command, f"type {described.type} where f32 is summed")
    count, stride = 1, 4
    for n, b in zip(described.ne, described.nb, strict=True):
        if n != 1 and b != stride and tensor.nbytes:
            raise BadRequest(command, "a tensor that is not contiguous")
        count *= n
        stride = b * n if n != 1 else stride
    return count


class Staging:
    """Memory that one device's numbers pass through, if the host cannot reach them.
    Not locked; grows to what was needed once."""

    def __init__(self) -> None:
        self._room = np.empty(0, np.float32)

    def place(self, n: int) -> Floats:
        """Room for `n` numbers: the same with each call."""
        if len(self._room) < n:
            self._room = np.empty(n, np.float32)
        return self._room[:n]


class Members:
    """One tensor for each local device, all of `count` numbers."""

    def __init__(
        self,
        tensors: Sequence[CheckedTensor],
        count: int,
        staging: Sequence[Staging],
        absent: int = 0,
    ) -> None:
        """`staging` is one for each tensor, and all sums of a communicator may share
        it. Bit i of `absent`: tensor i counts as zeros."""
        self.count = count
        self._tensors = tensors
        self._present = [not absent >> i & 1 for i in range(len(tensors))]
        found = [tensor.bytes(0, 4 * count) for tensor in tensors]
        self._arrays = [
            None if data is None else np.frombuffer(data, np.float32) for data in found
        ]
        self._staging = staging

    @property
    def alone(self) -> Floats | None:
        """The only tensor's memory, where nothing has to be done to sum it."""
        alone = len(self._arrays) == 1 and self._present[0]
        return self._arrays[0] if alone else None

    def gather(self, at: int, n: int) -> Floats:
        """The sum of `n` numbers from `at` on, in the first tensor itself or in memory
        of ours."""
        out = self._place(0, at, n)
        begun = False
        for i, present in enumerate(self._present):
            if not present:
                continue
            numbers = self._load(i, at, n)
            if begun:
                np.add(out, numbers, out=out)
            elif i:
                out[:] = numbers
            begun = True
        if not begun:
            out[:] = 0
        return out

    def spread(self, out: Floats, at: int) -> None:
        """Give all tensors the result, which stands where `gather` put its own."""
        for i, (tensor, array) in enumerate(
            zip(self._tensors, self._arrays, strict=True)
        ):
            if array is None:
                tensor.store(raw(out), 4 * at)
            elif i:
                array[at : at + len(out)] = out

    def _place(self, i: int, at: int, n: int) -> Floats:
        array = self._arrays[i]
        if array is not None:
            return array if n == self.count else array[at : at + n]
        return self._staging[i].place(n)

    def _load(self, i: int, at: int, n: int) -> Floats:
        place = self._place(i, at, n)
        if self._arrays[i] is None:
            self._tensors[i].fetch(raw(place), 4 * at)
        return place
