"""From a tensor record on the wire to checked memory.

The checks and their order are PROTOCOL.md's ("Tensor validation"). A client
sends the same record step after step, so what passed is remembered by its
bytes until a buffer is freed, or its memory moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.native.compute import NativeBuffer, tensor_record
from longwire.native.memory import address_of
from longwire.server.buffers import BufferTable, SessionBuffer
from longwire.server.rewrites import Rewrites
from longwire.server.verify.rules import RULES
from longwire.wire.constants import OP_COUNT, U32_MAX, U64_MAX
from longwire.wire.tensors import STRIDE_LIMIT, TENSOR_SIZE, Tensor
from longwire.wire.types import TYPES, nbytes

__all__ = ["CheckedTensor", "LinkedTensor", "TensorChecker", "fill_record"]

_REMEMBERED = 4096
"""A decode step names some tens of tensors; a load names each weight once."""


@dataclass(slots=True)
class CheckedTensor:
    """A tensor whose bytes lie wholly inside one live buffer."""

    buffer: SessionBuffer
    memory: NativeBuffer
    """The buffer's own, or that of an overlay."""
    start: int
    """Offset of the first byte in `memory`."""
    nbytes: int
    tensor: Tensor
    _native: npt.NDArray[Any] | None = field(default=None, repr=False)

    def bytes(self, offset: int, size: int) -> memoryview | None:
        """The memory of a checked range, where the host can reach it."""
        memory = self.memory.bytes
        if memory is None:
            return None
        begin = self.start + offset
        return memory[begin : begin + size]

    def read(self, offset: int, size: int) -> memoryview:
        """The bytes of a checked range: in place, or copied from the device."""
        data = self.bytes(offset, size)
        if data is None:
            data = memoryview(bytearray(size))
            self.fetch(data, offset)
        return data

    def fetch(self, data: memoryview, offset: int) -> None:
        """Copy a checked range from the device to memory of ours."""
        if len(data):
            self.buffer.device.get_tensor(
                self.native, address_of(data), offset, len(data)
            )

    def store(self, data: memoryview, offset: int) -> None:
        """Copy memory of ours to a checked range on the device."""
        if len(data):
            self.buffer.device.set_tensor(
                self.native, address_of(data), offset, len(data)
            )

    @property
    def native(self) -> npt.NDArray[Any]:
        """A `ggml_tensor` for calls into the engine."""
        if self._native is None:
            self._native = tensor_record()
            fill_record(self._native, self.tensor)
            self._native["buffer"] = self.memory.address
            self._native["data"] = self.memory.base + self.start
        return self._native


class LinkedTensor:
    """A tensor with its sources, for questions about an op; it has no memory."""

    def __init__(
        self, record: bytes, srcs: bytes, command: str, wide: bool = False
    ) -> None:
        """Read one record and those of its ten sources, zeros for none.

        `wide`: LX is spoken.

        Raises:
            BadRequest: a type, op or shape that cannot be.
        """
        self.tensor = Tensor.decode(record, wide)
        self.native = _unplaced(self.tensor, command)
        self._sources = []
        for i in range(10):
            part = srcs[i * TENSOR_SIZE : (i + 1) * TENSOR_SIZE]
            source = Tensor.decode(part, wide)
            if source.id:
                self._sources.append(_unplaced(source, command))
                self.native["src"][0, i] = self._sources[-1].ctypes.data

    @property
    def complete(self) -> bool:
        """Whether it has the sources that devices look at without a check."""
        rule = RULES.get(self.tensor.op)
        return rule is None or bool(self.native["src"][0, : rule.sources].all())


def _unplaced(tensor: Tensor, command: str) -> npt.NDArray[Any]:
    check_shape(tensor, command)
    record = tensor_record()
    fill_record(record, tensor)
    return record


class TensorChecker:
    """Checks records against the buffers of one session."""

    def __init__(self, buffers: BufferTable) -> None:
        self._buffers = buffers
        self._passed: dict[bytes, CheckedTensor] = {}
        self.rewrites = Rewrites()
        self._on_forget: list[Callable[[], None]] = [self.rewrites.forget]
        self._wide = False

    def widen(self) -> None:
        """LX has started: the same bytes may now say other strides."""
        self._wide = True
        self.forget()

    def forget(self) -> None:
        """Check everything anew: memory is gone, or is another."""
        self._passed.clear()
        for forget in self._on_forget:
            forget()

    def on_forget(self, forget: Callable[[], None]) -> None:
        """Have `forget` called as well whenever what was checked holds no longer."""
        self._on_forget.append(forget)

    def check(self, record: bytes, command: str) -> CheckedTensor:
        """The memory that a record names.

        Raises:
            BadRequest: a bad type or shape, an unknown handle, or bytes outside
                the buffer.
        """
        passed = self._passed.get(record)
        if passed is None:
            passed = self._check(Tensor.decode(record, self._wide), command)
            if len(self._passed) >= _REMEMBERED:
                self._passed.clear()
            self._passed[record] = passed
        return passed

    def check_range(
        self, record: bytes, offset: int, size: int, command: str
    ) -> CheckedTensor:
        """The memory that a record names, with `size` bytes at `offset` in it.

        Raises:
            BadRequest: as `check`, and for a range outside of the tensor.
        """
        tensor = self.check(record, command)
        if offset > tensor.nbytes or size > tensor.nbytes - offset:
            raise BadRequest(
                command, f"{size} bytes at {offset} in a tensor of {tensor.nbytes}"
            )
        return tensor

    def _check(self, tensor: Tensor, command: str) -> CheckedTensor:
        check_shape(tensor, command)
        buffer = self._buffers.of(tensor.buffer, command)
        size = nbytes(tensor.type, tensor.ne, tensor.nb)
        start = tensor.data - buffer.base
        if not 0 <= start <= buffer.size or size > buffer.size - start:
            raise BadRequest(
                command,
                f"tensor of {size} bytes at offset {start} "
                f"is outside its buffer of {buffer.size}",
            )
        return CheckedTensor(
            buffer, *self._buffers.place(buffer, start, size), size, tensor
        )


def check_shape(tensor: Tensor, command: str) -> None:
    """Check what needs no buffer: type, op, blocks, element count, wide strides.

    Raises:
        BadRequest: names the field.
    """
    traits = TYPES.get(tensor.type)
    if traits is None:
        raise BadRequest(command, f"type {tensor.type} does not exist")
    if tensor.op >= OP_COUNT:
        raise BadRequest(command, f"op {tensor.op} does not exist")
    if tensor.ne[0] % traits.block:
        raise BadRequest(
            command, f"row of {tensor.ne[0]} is no multiple of {traits.name}'s block"
        )
    elements = 1
    for n in tensor.ne:
        elements *= n
    if elements >= 1 << 62 or tensor.data > U64_MAX - (1 << 62):
        raise BadRequest(command, f"shape {tensor.ne} is too large")
    for n, b in zip(tensor.ne, tensor.nb, strict=True):
        if b > U32_MAX and max(n, 1) * b >= STRIDE_LIMIT:
            raise BadRequest(command, f"stride {b} of {n} elements is too large")


def fill_record(record: npt.NDArray[Any], tensor: Tensor) -> None:
    """Copy a tensor's own fields to a `GGML_TENSOR`; pointers are not its own."""
    record["type"] = tensor.type
    record["ne"] = tensor.ne
    record["nb"] = tensor.nb
    record["op"] = tensor.op
    record["op_params"].view("u1")[:] = list(tensor.op_params)
    record["flags"] = tensor.flags
    record["name"] = tensor.name[:63]
