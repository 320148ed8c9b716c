"""The check of a whole graph, op by op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.native.compute import NativeBuffer
from longwire.server.verify.columns import Nodes, Tensors
from longwire.server.verify.indices import IndexPlan, plan_indices
from longwire.server.verify.rules import NO_DATA, RULES, VIEWS

__all__ = ["verify_graph"]

_COUNT_LIMIT = 1 << 31
"""Kernels count rows, and the elements of a dimension, as C ints."""

Index = npt.NDArray[np.int64]


def verify_graph(
    native: npt.NDArray[Any],
    sizes: npt.NDArray[np.uint64],
    sources: Index,
    views: Index,
    nodes: Index,
    memory: Mapping[int, NativeBuffer],
) -> IndexPlan:
    """Check what kernels rely on; returns what is to be checked at each run.

    `native` are placed `GGML_TENSOR` records and `sizes` their `nbytes`; `sources`
    (m x 10), `views` (m) and `nodes` are indices of records, -1 for none; `memory`
    are the live buffers by address.

    Raises:
        BadRequest: names the op, the tensor and the rule it breaks.
    """
    tensors = Tensors(native, sizes, memory)
    _check_views(tensors, views)
    groups = list(_by_op(tensors, sources, nodes))
    _check_operands(tensors, groups)
    for op, group in groups:
        RULES[op].check(group)
    return plan_indices(tensors, dict(groups), sources, nodes)


def _by_op(
    tensors: Tensors, sources: Index, nodes: Index
) -> Iterator[tuple[int, Nodes]]:
    """The computing nodes of each op, all with the sources that the op needs."""
    ops = tensors.native["op"][nodes]
    order = np.argsort(ops, kind="stable")
    ops = ops[order]
    starts = np.flatnonzero(np.diff(ops, prepend=-1))
    ends = [*starts[1:].tolist(), len(ops)]
    for start, end in zip(starts.tolist(), ends, strict=True):
        op = int(ops[start])
        if NO_DATA[op]:
            continue
        rule = RULES.get(op)
        if rule is None:
            raise BadRequest("GRAPH_COMPUTE", f"op {op} has no rule")
        index = nodes[order[start:end]]
        group = Nodes(tensors, rule.name, index, sources[index])
        for slot in range(rule.sources):
            group.require(group.present(slot), f"no src {slot}")
        yield op, group


def _check_operands(tensors: Tensors, groups: list[tuple[int, Nodes]]) -> None:
    """What holds for every tensor that a kernel touches."""
    n0, n1, n2, n3 = tensors.n
    counted = (
        (n1.astype(np.float64) * n2 * n3 < _COUNT_LIMIT)
        & (n0 < _COUNT_LIMIT)
        & (n1 < _COUNT_LIMIT)
        & (n2 < _COUNT_LIMIT)
        & (n3 < _COUNT_LIMIT)
    )
    # Blocks closer than their size would reach beyond what nbytes counts.
    apart = (tensors.block == 1) | (tensors.b[0] >= tensors.size)
    good = np.append(counted & apart, True)
    if good.all():
        return
    for _, group in groups:
        group.require(good[group.index], "dst has too many rows or blocks that overlap")
        group.require(
            good[group.sources], "a source has too many rows or blocks that overlap"
        )


def _check_views(tensors: Tensors, views: Index) -> None:
    """A view lies within the tensor it views."""
    # Other ops with a viewed tensor write where they are; that is checked as memory.
    viewing = np.flatnonzero((views >= 0) & VIEWS[tensors.native["op"]])
    if not len(viewing):
        return
    viewed = views[viewing]
    data = tensors.native["data"].astype(np.int64)
    nbytes = tensors.nbytes
    inner, outer = data[viewing], data[viewed]
    inside = (inner >= outer) & (inner + nbytes[viewing] <= outer + nbytes[viewed]) | (
        nbytes[viewing] == 0
    )
    # A view may be placed by itself where the viewed tensor is elsewhere.
    inside |= (inner == 0) | (outer == 0)
    Nodes(tensors, "view", viewing, np.zeros((0, 10), np.int64)).require(
        inside, "reaches beyond the tensor it views"
    )
