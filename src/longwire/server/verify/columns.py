"""A graph's tensors as columns, and the nodes of one op with their operands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.native.compute import NativeBuffer
from longwire.wire.types import BLOCK_BYTES, BLOCK_SIZE, QUANTIZED, TYPE_COUNT, TYPES

__all__ = ["Bools", "Ints", "Nodes", "Operand", "Tensors", "TypeSet", "type_set"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
TypeSet = npt.NDArray[np.bool_]
"""By type number: whether it is in the set."""


def type_set(*names: str) -> TypeSet:
    """The types of these names."""
    known = np.zeros(TYPE_COUNT, np.bool_)
    numbers = {traits.name: number for number, traits in TYPES.items()}
    known[[numbers[name] for name in names]] = True
    return known


class Tensors:
    """All tensors of a graph; a column is computed when first asked for."""

    def __init__(
        self,
        native: npt.NDArray[Any],
        sizes: npt.NDArray[np.uint64],
        memory: Mapping[int, NativeBuffer],
    ) -> None:
        self.native = native
        self.memory = memory
        """The live buffers by their address."""
        self.type = np.ascontiguousarray(native["type"])
        self.ne: Ints = np.ascontiguousarray(native["ne"])
        self.nb: Ints = native["nb"].astype(np.int64)
        self.nbytes: Ints = sizes.astype(np.int64)

    @cached_property
    def n(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The four columns of `ne`."""
        n0, n1, n2, n3 = np.ascontiguousarray(self.ne.T)
        return n0, n1, n2, n3

    @cached_property
    def b(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The four columns of `nb`."""
        b0, b1, b2, b3 = np.ascontiguousarray(self.nb.T)
        return b0, b1, b2, b3

    @cached_property
    def block(self) -> Ints:
        block: Ints = BLOCK_SIZE[self.type]
        return block

    @cached_property
    def size(self) -> Ints:
        """Bytes per block."""
        size: Ints = BLOCK_BYTES[self.type]
        return size

    @cached_property
    def row_bytes(self) -> Ints:
        """Bytes of a row without gaps."""
        return self.n[0] // self.block * self.size

    @cached_property
    def elements(self) -> Ints:
        n0, n1, n2, n3 = self.n
        return n0 * n1 * n2 * n3

    @cached_property
    def n_rows(self) -> Ints:
        _, n1, n2, n3 = self.n
        return n1 * n2 * n3

    @cached_property
    def empty(self) -> Bools:
        empty: Bools = self.elements == 0
        return empty

    @cached_property
    def rows(self) -> Bools:
        """Every row is without gaps (`ggml_is_contiguous_rows`)."""
        rows: Bools = (self.b[0] == self.size) | (self.n[0] == self.block)
        return rows

    @cached_property
    def dense(self) -> Bools:
        """Without gaps as a whole (`ggml_is_contiguous`)."""
        return self._packed(self.row_bytes, 1)

    @cached_property
    def even(self) -> Bools:
        """Rows without gaps, and planes of rows packed (`ggml_is_contiguous_1`).

        Other than `dense`, it looks at nb[1] also where ne[1] is 1: kernels that
        number all rows of a tensor step by it.
        """
        return self._packed(self.n[1] * self.b[1], 2)

    def _packed(self, start: Ints, first: int) -> Bools:
        good: Bools = self.rows.copy()
        step = start
        for n, b in zip(self.n[first:], self.b[first:], strict=True):
            good &= (n == 1) | (b == step)
            step = step * n
        return good

    @cached_property
    def strict(self) -> Bools:
        """Without gaps, and all strides as if no dimension were 1."""
        n0, n1, n2, _ = self.n
        b0, b1, b2, b3 = self.b
        good: Bools = (b0 == self.size) & (b1 == self.row_bytes)
        good &= (b2 == b1 * n1) & (b3 == b2 * n2)
        return good

    @cached_property
    def reach(self) -> Bools:
        """All rows, nb[1] apart, lie within the tensor."""
        # Floats: a product of two wire numbers may pass 2^63.
        last = (self.n_rows - 1).astype(np.float64) * self.b[1] + self.row_bytes
        reach: Bools = self.rows & ((last <= self.nbytes) | self.empty)
        return reach

    @cached_property
    def flat(self) -> Bools:
        """As many elements without gaps would lie within the tensor."""
        # A float: 2^61 elements of 8 bytes pass 2^63.
        needed = (self.elements // self.block).astype(np.float64) * self.size
        flat: Bools = needed <= self.nbytes
        return flat


class Operand:
    """One tensor of each node of a group: its output or one source."""

    def __init__(self, tensors: Tensors, index: npt.NDArray[np.int64], label: str):
        self.tensors = tensors
        self.index = index
        self.label = label
        self.type: npt.NDArray[np.int32] = tensors.type[index]
        self.ne: Ints = tensors.ne[index]

    def __str__(self) -> str:
        return self.label

    def of(self, column: npt.NDArray[Any]) -> Any:
        """This operand's part of a column of all tensors."""
        return column[self.index]

    @cached_property
    def nb(self) -> Ints:
        nb: Ints = self.of(self.tensors.nb)
        return nb

    @property
    def n0(self) -> Ints:
        return self.ne[:, 0]

    @property
    def n1(self) -> Ints:
        return self.ne[:, 1]

    @property
    def n2(self) -> Ints:
        return self.ne[:, 2]

    @property
    def n3(self) -> Ints:
        return self.ne[:, 3]

    @property
    def elements(self) -> Ints:
        elements: Ints = self.of(self.tensors.elements)
        return elements

    @property
    def nbytes(self) -> Ints:
        nbytes: Ints = self.of(self.tensors.nbytes)
        return nbytes

    @property
    def size(self) -> Ints:
        size: Ints = self.of(self.tensors.size)
        return size

    @property
    def block(self) -> Ints:
        block: Ints = self.of(self.tensors.block)
        return block

    @property
    def empty(self) -> Bools:
        empty: Bools = self.of(self.tensors.empty)
        return empty

    @property
    def quantized(self) -> Bools:
        quantized: Bools = QUANTIZED[self.type]
        return quantized

    def room(self) -> Ints:
        """Bytes from the tensor's first to its buffer's end."""
        native = self.tensors.native[self.index]
        ends = [
            memory.base + memory.size if memory else 0
            for memory in map(self.tensors.memory.get, native["buffer"].tolist())
        ]
        room: Ints = (np.array(ends, np.uint64) - native["data"]).astype(np.int64)
        return room


class Nodes:
    """All nodes of a graph that do the same op."""

    def __init__(
        self,
        tensors: Tensors,
        name: str,
        index: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
    ) -> None:
        """`sources` are n x 10 indices, -1 for none."""
        self.tensors = tensors
        self.name = name
        self.index = index
        self.sources = sources
        self.dst = Operand(tensors, index, "dst")

    def src(self, slot: int) -> Operand:
        """One source of all nodes; none may lack it."""
        return Operand(self.tensors, self.sources[:, slot], f"src {slot}")

    def present(self, slot: int) -> Bools:
        """Which nodes have an optional source."""
        present: Bools = self.sources[:, slot] >= 0
        return present

    def having(self, slot: int) -> Nodes | None:
        """The nodes that have an optional source, None where none has."""
        return self.where(self.present(slot))

    def where(self, chosen: Bools) -> Nodes | None:
        """The chosen nodes, None where there are none."""
        if not chosen.any():
            return None
        if chosen.all():
            return self
        return Nodes(self.tensors, self.name, self.index[chosen], self.sources[chosen])

    def param(self, i: int) -> Ints:
        """The i-th 32-bit integer of the nodes' parameters."""
        column: Ints = self._params[:, i].astype(np.int64)
        return column

    def float_param(self, i: int) -> npt.NDArray[np.float32]:
        """The i-th parameter as the float it is."""
        column: npt.NDArray[np.float32] = self._params.view(np.float32)[:, i]
        return column

    @cached_property
    def _params(self) -> npt.NDArray[np.int32]:
        params: npt.NDArray[np.int32] = self.tensors.native["op_params"][self.index]
        return params

    def require(self, good: Bools, rule: str) -> None:
        """Go on only if `good` holds: one value per node, or a row of values.

        Raises:
            BadRequest: names the first node for which it does not.
        """
        if not good.size:
            return
        first = int(good.argmin())
        if not good.flat[first]:
            self.refuse(first // (good.size // len(self.index)), rule)

    def refuse(self, which: int, rule: str) -> NoReturn:
        """Refuse the graph for one of these nodes."""
        raw = bytes(self.tensors.native["name"][self.index[which]])
        name = raw.decode(errors="replace")
        raise BadRequest("GRAPH_COMPUTE", f"{self.name} {name!r}: {rule}")

    # Rules that many ops have.

    def same_shape(self, *operands: Operand) -> None:
        first, *others = operands
        for other in others:
            self.require(first.ne == other.ne, f"{first} and {other} differ in shape")

    def same_type(self, *operands: Operand) -> None:
        first, *others = operands
        for other in others:
            self.require(
                first.type == other.type, f"{first} and {other} differ in type"
            )

    def typed(self, types: TypeSet, *operands: Operand) -> None:
        for operand in operands:
            self.require(types[operand.type], f"type of {operand}")

    def rows(self, *operands: Operand) -> None:
        for operand in operands:
            self.require(operand.of(self.tensors.rows), f"{operand} has gaps in rows")

    def dense(self, *operands: Operand) -> None:
        for operand in operands:
            self.require(operand.of(self.tensors.dense), f"{operand} is not contiguous")

    def strict(self, *operands: Operand) -> None:
        for operand in operands:
            self.require(
                operand.of(self.tensors.strict), f"strides of {operand} are not packed"
            )

    def reach(self, *operands: Operand) -> None:
        for operand in operands:
            self.require(
                operand.of(self.tensors.reach), f"rows of {operand} leave the tensor"
            )

    def flat(self, *operands: Operand) -> None:
        for operand in operands:
            self.require(
                operand.of(self.tensors.flat), f"elements of {operand} overlap"
            )

    def filled(self, *operands: Operand) -> None:
        """For sources of which only some dimensions are compared with others.

        A kernel that takes no notice of the rest would read where nothing is: what
        has no bytes may lie at its buffer's end, or nowhere.
        """
        for operand in operands:
            self.require(~operand.empty | self.dst.empty, f"{operand} is empty")

    def apart(self, one: Operand, other: Operand) -> None:
        start, begin = (t.of(self.tensors.native["data"]) for t in (one, other))
        end, finish = start + one.nbytes.astype("u8"), begin + other.nbytes.astype("u8")
        self.require((end <= begin) | (finish <= start), f"{one} overlaps {other}")

    def repeats(self, small: Operand, large: Operand) -> None:
        """`small` fits into `large` a whole number of times in each dimension."""
        whole = (large.ne % np.maximum(small.ne, 1) == 0) & (small.ne > 0)
        both = (small.empty & large.empty)[:, None]
        self.require(whole | both, f"{small} does not repeat to {large}")

    def divides(self, small: Ints, large: Ints, rule: str) -> None:
        self.require((small > 0) & (large % np.maximum(small, 1) == 0), rule)
