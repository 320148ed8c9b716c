"""Prepared writes: checked when a step first does them, done at once afterwards.

What clients of ours do with LX_SET_PREPARED; `rewrites` is for those that send each
write by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from longwire.errors import BadFrame, BadRequest
from longwire.server.tensors import CheckedTensor, TensorChecker
from longwire.wire.prepared import PrepareSet, SetPrepared

__all__ = ["PreparedWrites"]

_MOST_PLANS = 256
"""Different steps of one client; llama.cpp has two or three at a time."""


class _Place(NamedTuple):
    """Where one write's part of the data goes."""

    target: memoryview | None
    """None: the host cannot reach it."""
    tensor: CheckedTensor
    offset: int
    begin: int
    end: int


class _Plan(NamedTuple):
    places: list[_Place]
    size: int


class PreparedWrites:
    """The numbered writes of one session. Not locked."""

    def __init__(self, tensors: TensorChecker) -> None:
        self._tensors = tensors
        self._writes: dict[int, PrepareSet] = {}
        self._plans: dict[bytes, _Plan] = {}
        tensors.on_forget(self._plans.clear)

    def prepare(self, write: PrepareSet) -> None:
        """Take a write's number from now on for this one.

        Raises:
            BadRequest: its range is in no tensor of a live buffer.
        """
        self._check(write, "LX_PREPARE_SET")
        self._writes[write.number] = write
        self._plans.clear()

    def do(self, request: SetPrepared) -> None:
        """Put the data where the numbers say.

        Raises:
            BadRequest: a number that was never given, or whose tensor is gone.
            BadFrame: not as much data as these writes have.
        """
        plan = self._plans.get(request.numbers) or self._plan(request)
        data = request.data
        if len(data) != plan.size:
            raise BadFrame("LX_SET_PREPARED data", len(data), f"{plan.size}")
        for target, tensor, offset, begin, end in plan.places:
            if target is not None:
                target[:] = data[begin:end]
            elif end > begin:
                # A copy: the device may want an address that stays.
                tensor.store(memoryview(bytearray(data[begin:end])), offset)

    def _plan(self, request: SetPrepared) -> _Plan:
        numbers = request.each()
        # All once before any place is looked up: a check may move memory.
        for number in numbers:
            write = self._writes.get(number)
            if write is None:
                raise BadRequest("LX_SET_PREPARED", f"nothing has number {number}")
            self._check(write, "LX_SET_PREPARED")
        places, at = [], 0
        for number in numbers:
            write = self._writes[number]
            tensor = self._check(write, "LX_SET_PREPARED")
            target = tensor.bytes(write.offset, write.size)
            end = at + write.size
            places.append(_Place(target, tensor, write.offset, at, end))
            at = end
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        plan = self._plans[request.numbers] = _Plan(places, at)
        return plan

    def _check(self, write: PrepareSet, command: str) -> CheckedTensor:
        return self._tensors.check_range(
            write.tensor, write.offset, write.size, command
        )
