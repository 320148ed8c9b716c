"""A legal graph of every op, ready to be moved to a buffer and spoilt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longwire.native.profiles import DEFAULT_ENGINE
from longwire.wire.constants import U64_MAX
from longwire.wire.graphs import Graph
from longwire.wire.tensors import TENSOR
from support.client import Buffer
from support.ggml import open_ggml
from support.op_cases import CASES
from support.ops import built

__all__ = ["OpGraph", "op_graphs"]

_SIZE = 1 << 18


class OpGraph(NamedTuple):
    """The graph of one op, with its tensors in a buffer at address 0."""

    nodes: npt.NDArray[np.uint64]
    tensors: npt.NDArray[Any]
    content: bytes
    """What the buffer should hold before it runs."""

    def placed(self, buffer: Buffer, uid: int) -> Graph:
        """The graph in that buffer."""
        records = self.tensors.copy()
        records["buffer"] = buffer.handle
        records["data"] += np.uint64(buffer.base)
        return Graph(0, uid, self.nodes, records)


def op_graphs() -> list[OpGraph]:
    """All of them, the same ones in the same order every time."""
    ggml = open_ggml(DEFAULT_ENGINE)
    found = []
    for case in CASES:
        with built(ggml, case, _SIZE) as graph:
            found.append(_renumbered(graph.message(0, 0), graph.before))
    return found


def _renumbered(graph: Graph, content: bytes) -> OpGraph:
    # Ids are addresses of this process, and would differ from run to run.
    known = np.concatenate([[np.uint64(0)], graph.tensors["id"]])
    order = np.argsort(known)

    def number(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        at = order[np.searchsorted(known[order], ids)]
        return np.where(known[at] == ids, at, U64_MAX).astype(np.uint64)

    tensors = np.zeros(len(graph.tensors), TENSOR)
    for name in TENSOR.names or ():
        tensors[name] = graph.tensors[name]
    for name in ("id", "src", "view_src"):
        tensors[name] = number(graph.tensors[name])
    tensors["name"] = b""
    return OpGraph(number(graph.nodes), tensors, content)
