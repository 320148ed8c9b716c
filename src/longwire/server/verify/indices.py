"""Ids that kernels follow unchecked: where they come from, and whether they fit.

The CPU kernels of GET_ROWS, SET_ROWS, ADD_ID and GET_ROWS_BACK compare each id
themselves and give up on a bad one. Those of MUL_MAT_ID and SSM_SCAN do not. Ids
that a client writes are looked at before each run; ids that the graph computes must
follow from ops whose results have a known range.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.native.memory import view
from longwire.server.verify.columns import Ints, Nodes, Tensors

__all__ = ["NO_INDICES", "IndexPlan", "plan_indices"]

Index = npt.NDArray[np.int64]

_FOLLOWED = {30: (2, 2), 77: (6, 3)}
"""By op (MUL_MAT_ID, SSM_SCAN): the source that holds ids, and the dimension of
source 0 that they count in."""

_STEPS = (98, 99)
"""OPT_STEP_ADAMW, OPT_STEP_SGD: they write to their sources."""

_COPIES = (1, 34, 35)
_SCALE, _GET_ROWS = 32, 40
_SORTS = (69, 70)
_COMPUTE = 16
_F32, _I32 = 0, 26
_EXACT = 1 << 24
"""Integers below this are exact as 32-bit floats."""

_CHUNK = 1 << 20
_DEPTH = 16


class IndexPlan:
    """The ids of one graph that a client writes, and how large they may be."""

    def __init__(self, checks: list[tuple[str, npt.NDArray[np.uint32], int]]) -> None:
        self._checks = checks

    def __len__(self) -> int:
        return len(self._checks)

    def check(self, command: str) -> None:
        """Look at the ids as they are now.

        Raises:
            BadRequest: an id is negative or too large.
        """
        for name, ids, limit in self._checks:
            # As unsigned numbers, negative ids are large.
            if ids.size and ids.max() >= limit:
                raise BadRequest(command, f"{name}: an id is not below {limit}")


NO_INDICES = IndexPlan([])


def plan_indices(
    tensors: Tensors, groups: Mapping[int, Nodes], sources: Index, nodes: Index
) -> IndexPlan:
    """Find all ids that a kernel follows, and show that they fit or plan a check.

    Raises:
        BadRequest: ids are computed, and nothing bounds them.
    """
    followed = [(groups[op], *_FOLLOWED[op]) for op in _FOLLOWED if op in groups]
    if not followed:
        return NO_INDICES
    tracer = _Tracer(tensors, sources, nodes)
    for group, slot, dimension in followed:
        if any(op in groups for op in _STEPS):
            group.refuse(0, "ids beside an optimiser's step")
        limits = group.src(0).ne[:, dimension]
        tracer.follow(group, group.sources[:, slot], limits)
    return IndexPlan(tracer.checks)


class _Unbounded(Exception):
    """Nothing is known about a tensor's values."""


class _Tracer:
    def __init__(self, tensors: Tensors, sources: Index, nodes: Index) -> None:
        native = tensors.native
        self.checks: list[tuple[str, npt.NDArray[np.uint32], int]] = []
        self._tensors = tensors
        self._sources = sources
        writing = (native["flags"][nodes] & _COMPUTE != 0) & ~np.isin(
            native["op"][nodes], (0, 36, 37, 38, 39)
        )
        self._writers = nodes[writing]
        self._turn = np.full(len(native), -1, np.int64)
        self._turn[self._writers] = np.arange(len(self._writers))
        self._data = native["data"].astype(np.int64)
        self._start = self._data[self._writers]
        self._end = self._start + tensors.nbytes[self._writers]
        self._planned: set[tuple[int, int]] = set()

    def follow(self, group: Nodes, ids: Index, limits: Ints) -> None:
        """Bound the ids of each node of a group."""
        turns = self._turn[group.index]
        # Up to the node itself: SSM_SCAN writes before it has read all ids.
        last = self._last_writers(ids, turns + 1)
        found: dict[int, tuple[int, int]] = {}
        rows = zip(
            ids.tolist(), limits.tolist(), turns.tolist(), last.tolist(), strict=True
        )
        for which, (tensor, limit, turn, writer) in enumerate(rows):
            # A node without the compute flag does not run.
            if turn < 0 or self._tensors.empty[tensor]:
                continue
            if writer == turn:
                group.refuse(which, "dst overlaps the ids")
            if found.get(tensor) == (limit, writer):
                continue
            found[tensor] = (limit, writer)
            try:
                self._bound(tensor, writer, limit, _DEPTH)
            except _Unbounded:
                group.refuse(which, "ids are computed, and nothing bounds them")

    def _last_writers(self, tensors: Index, turns: Index) -> Index:
        """Which node wrote to each tensor's memory last before a turn, or -1."""
        last = np.full(len(tensors), -1, np.int64)
        n = len(self._start)
        if not n:
            return last
        step = max(1, _CHUNK // max(n, 1))
        order = np.arange(n)
        for at in range(0, len(tensors), step):
            part = slice(at, at + step)
            start = self._data[tensors[part], None]
            end = start + self._tensors.nbytes[tensors[part], None]
            hit = (self._start < end) & (self._end > start)
            hit &= order < turns[part, None]
            found = n - 1 - hit[:, ::-1].argmax(axis=1)
            last[part] = np.where(hit.any(axis=1), found, -1)
        return last

    def _writer(self, tensor: int, turn: int) -> int:
        return int(self._last_writers(np.array([tensor]), np.array([turn]))[0])

    def _bound(self, tensor: int, writer: int, limit: int, depth: int) -> None:
        """Every 32-bit integer of `tensor` is in [0, limit), or will be checked."""
        if self._tensors.type[tensor] != _I32 or depth == 0:
            raise _Unbounded
        if writer < 0:
            self._plan(tensor, limit)
            return
        node = self._exact(tensor, writer)
        op = int(self._tensors.native["op"][node])
        source = int(self._sources[node, 0])
        if op in _SORTS:
            if self._tensors.n[0][source] > limit:
                raise _Unbounded
        elif op in _COPIES or op == _GET_ROWS:
            before = self._writer(source, writer)
            if self._tensors.type[source] == _F32:
                low, high = self._range(source, before, depth - 1)
                if low <= -1 or high >= limit:
                    raise _Unbounded
            else:
                self._bound(source, before, limit, depth - 1)
        else:
            raise _Unbounded

    def _range(self, tensor: int, writer: int, depth: int) -> tuple[float, float]:
        """Bounds of a tensor of floats that were computed from sorted positions."""
        if writer < 0 or depth == 0:
            raise _Unbounded
        node = self._exact(tensor, writer)
        op = int(self._tensors.native["op"][node])
        source = int(self._sources[node, 0])
        before = self._writer(source, writer)
        if op == _SCALE:
            low, high = self._range(source, before, depth - 1)
            params = self._tensors.native["op_params"][node, :2]
            factor, bias = map(float, params.view(np.float32))
            ends = (low * factor + bias, high * factor + bias)
            if not np.isfinite(ends).all():
                raise _Unbounded
            return min(ends), max(ends)
        if op in _COPIES and self._tensors.type[source] == _I32 and before >= 0:
            producer = self._exact(source, before)
            if int(self._tensors.native["op"][producer]) in _SORTS:
                n = int(self._tensors.n[0][self._sources[producer, 0]])
                if n < _EXACT:
                    return 0.0, n - 1.0
        elif op in _COPIES and self._tensors.type[source] == _F32:
            return self._range(source, before, depth - 1)
        raise _Unbounded

    def _exact(self, tensor: int, writer: int) -> int:
        """The node that wrote a tensor, if it wrote all of it, number by number."""
        t = self._tensors
        node = int(self._writers[writer])
        within = int(self._data[tensor]) - int(self._data[node])
        apart = zip(t.ne[tensor].tolist(), t.nb[tensor].tolist(), strict=True)
        if not (
            t.dense[node]
            and int(t.size[node]) == int(t.size[tensor]) == 4
            and 0 <= within <= int(t.nbytes[node]) - int(t.nbytes[tensor])
            and within % 4 == 0
            and all(n == 1 or stride % 4 == 0 for n, stride in apart)
        ):
            raise _Unbounded
        return node

    def _plan(self, tensor: int, limit: int) -> None:
        if (tensor, limit) in self._planned:
            return
        self._planned.add((tensor, limit))
        t = self._tensors
        native: Any = t.native[tensor]
        memory = t.memory.get(int(native["buffer"]))
        # What the host cannot reach belongs to a GPU, whose kernels skip bad ids.
        if memory is None or memory.bytes is None:
            return
        ids: npt.NDArray[np.uint32] = np.ndarray(
            tuple(t.ne[tensor].tolist()),
            np.uint32,
            view(int(native["data"]), int(t.nbytes[tensor])),
            strides=tuple(t.nb[tensor].tolist()),
        )
        name = bytes(native["name"]).decode(errors="replace")
        self.checks.append((repr(name), np.squeeze(ids), limit))
