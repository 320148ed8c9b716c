"""Graphs from the wire: checked as arrays, built, and kept for re-runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import BadRequest
from longwire.native.abi import GGML_TENSOR
from longwire.native.compute import NativeBuffer
from longwire.native.graph import NativeGraph
from longwire.server.buffers import BufferTable, SessionBuffer
from longwire.server.overlays import TORN
from longwire.server.verify import NO_DATA, NO_INDICES, IndexPlan, verify_graph
from longwire.wire.constants import GRAPH_CACHE_MAX, OP_COUNT, POINTER_OPS
from longwire.wire.dialects import Dialect
from longwire.wire.graphs import Graph
from longwire.wire.tensors import strides, too_wide
from longwire.wire.types import BLOCK_BYTES, BLOCK_SIZE, TYPE_COUNT

__all__ = ["GraphStore", "StoredGraph", "build_graph"]

_NAME = "GRAPH_COMPUTE"
_SIZE_LIMIT = float(1 << 62)
_I32 = 26
_HOLDS_POINTER = np.zeros(OP_COUNT, np.bool_)
_HOLDS_POINTER[list(POINTER_OPS)] = True

Columns = npt.NDArray[Any]


def build_graph(
    message: Graph, buffers: BufferTable, verify: bool = True
) -> StoredGraph:
    """Check a graph message against the session's buffers and build it.

    Without `verify`, what kernels rely on is believed; that is for measuring.

    Raises:
        BadRequest: names the first tensor or node that fails, and why.
    """
    records = message.tensors
    if len(message.nodes) == 0 or len(records) == 0:
        raise BadRequest(_NAME, "a graph without nodes")
    _check_types(records)
    elements = _elements(records)
    ids = _Ids(records["id"])
    nodes = ids.resolve(message.nodes, "node")
    _require(nodes >= 0, "node id 0", nodes)
    if np.count_nonzero(_marked(len(records), nodes)) != len(nodes):
        raise BadRequest(_NAME, "a node is listed twice")

    native = np.zeros(len(records), GGML_TENSOR)
    for name in ("type", "ne", "op", "op_params", "flags", "view_offs"):
        native[name] = records[name]
    native["nb"] = nb = strides(records)
    # ggml counts on a NUL in a name's 64 bytes.
    native["name"] = records["name"].astype("S63")
    sizes = _sizes(records, nb, elements)
    handles = _place(records, native, sizes, buffers)
    sources = ids.resolve(records["src"].ravel(), "source").reshape(-1, 10)
    views = ids.resolve(records["view_src"], "viewed tensor")
    computing = nodes[~NO_DATA[native["op"][nodes]]]
    used = _marked(len(records), computing, sources[computing])
    _check_memory(native, used & (elements > 0))
    _check_overlap(native, computing, elements, sizes)
    indices = NO_INDICES
    if verify:
        memory = buffers.memory(handles)
        indices = verify_graph(native, sizes, sources, views, nodes, memory)
    counts = records["use_count"][nodes].astype(np.int32)
    graph = NativeGraph(native, sources, views, nodes, counts)
    return StoredGraph(graph, handles, indices, buffers.layout)


def _require(good: Columns, what: str, names: Columns) -> None:
    if not good.all():
        bad = names[int(np.argmin(good))]
        raise BadRequest(_NAME, f"{what} ({bad})")


def _check_types(records: Columns) -> None:
    types, ops = records["type"], records["op"]
    known = types < TYPE_COUNT
    _require(known, "type that does not exist", types)
    _require(BLOCK_SIZE[types] > 0, "type that was removed", types)
    _require(ops < OP_COUNT, "op that does not exist", ops)
    _require(~_HOLDS_POINTER[ops], "op that carries a function pointer", ops)


def _marked(count: int, *indices: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """By record, of so many, whether it is among the indices; -1 is none of them."""
    marked = np.zeros(count + 1, np.bool_)
    for index in indices:
        marked[index] = True
    return marked[:-1]


def _elements(records: Columns) -> npt.NDArray[np.float64]:
    """Of every record, as a float: a product of wire numbers may pass 2^64. Shapes
    that nothing can have are refused."""
    ne = records["ne"]
    whole = ne[:, 0] % BLOCK_SIZE[records["type"]] == 0
    _require(whole, "row that is no multiple of its type's block", records["name"])
    n0, n1, n2, n3 = ne.astype(np.float64).T
    elements: npt.NDArray[np.float64] = n0 * n1 * n2 * n3
    _require(elements < _SIZE_LIMIT, "shape that is too large", records["name"])
    return elements


def _sizes(
    records: Columns,
    nb: npt.NDArray[np.uint64],
    elements: npt.NDArray[np.float64],
) -> npt.NDArray[np.uint64]:
    """`nbytes` of every record; sums that would not fit are refused."""
    name = records["name"]
    ne = records["ne"].astype(np.uint64)
    fits = np.all(~too_wide(ne, nb), axis=1)
    _require(fits, "strides that are too large", name)
    block = BLOCK_SIZE[records["type"]].astype(np.uint64)
    last = np.where(ne > 0, ne - np.uint64(1), np.uint64(0))
    # Two 32-bit factors make less than 2^64, and others less than 2^62; their
    # sum is checked as a float.
    # Four columns: numpy would take longer over rows of four.
    s0, s1, s2, s3 = (last * nb).T
    s0 = np.where(
        block == 1,
        s0 + BLOCK_BYTES[records["type"]].astype(np.uint64),
        ne[:, 0] * nb[:, 0] // block,
    )
    total = s0.astype(np.float64) + s1 + s2 + s3
    empty = elements == 0
    _require((total < _SIZE_LIMIT) | empty, "strides that are too large", name)
    sizes: npt.NDArray[np.uint64] = s0 + s1 + s2 + s3
    sizes[empty] = 0
    return sizes


def _place(
    records: Columns, native: Columns, sizes: Columns, buffers: BufferTable
) -> frozenset[int]:
    """Turn handles and virtual addresses into pointers, all bounds checked; returns
    the handles."""
    handles, (base, room, address, real) = buffers.columns(records["buffer"])
    data = records["data"].astype(np.uint64)
    name = records["name"]
    owned = address > 0
    _require(owned | (data == 0), "tensor without a live buffer has an address", name)
    offset = data - base
    inside = (data >= base) & (offset <= room) & (sizes <= room - offset)
    _require(inside | ~owned | (sizes == 0), "tensor outside its buffer", name)
    native["buffer"] = address
    native["data"] = np.where(owned, real + np.where(inside, offset, 0), 0)
    for buffer in buffers.overlaid(handles):
        rows = np.flatnonzero(inside & (records["buffer"] == buffer.handle))
        _overlay(native, rows, offset[rows], sizes[rows], buffer, buffers)
    return handles


def _overlay(
    native: Columns,
    rows: Columns,
    offset: Columns,
    sizes: Columns,
    buffer: SessionBuffer,
    buffers: BufferTable,
) -> None:
    """Point those of a buffer's tensors that lie in overlays there."""
    for torn in np.flatnonzero(buffer.overlays.locate(offset, sizes) == TORN).tolist():
        buffers.place(buffer, int(offset[torn]), int(sizes[torn]))
    around = buffer.overlays.locate(offset, sizes)
    hits = around >= 0
    around, offset, rows = around[hits], offset[hits], rows[hits]
    start, _, address, real = (column[around] for column in buffer.overlays.columns())
    native["buffer"][rows] = address
    native["data"][rows] = real + (offset - start)


def _check_memory(native: Columns, used: npt.NDArray[np.bool_]) -> None:
    """Refuse a node that a kernel would follow to a NULL pointer."""
    placed = native["data"] != 0
    _require(placed | ~used, "node works on a tensor without memory", native["name"])


def _check_overlap(
    native: Columns,
    computing: Columns,
    elements: npt.NDArray[np.float64],
    sizes: Columns,
) -> None:
    """Refuse a node whose elements need more memory than its strides span.

    A kernel that trusts the shape alone would write past the end.
    """
    types = native["type"][computing]
    needed = elements[computing] / BLOCK_SIZE[types] * BLOCK_BYTES[types]
    _require(
        needed <= sizes[computing].astype(np.float64),
        "node whose elements overlap",
        native["name"][computing],
    )


class _Ids:
    """Which record carries which id; the first one wins, 0 is nobody."""

    def __init__(self, ids: Columns) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    def resolve(self, wanted: Columns, what: str) -> npt.NDArray[np.int64]:
        """Index of each id's record, -1 for id 0.

        Raises:
            BadRequest: an id that no record carries.
        """
        index = np.full(len(wanted), -1, np.int64)
        asked = np.flatnonzero(wanted)
        wanted = wanted[asked]
        at = np.searchsorted(self._sorted, wanted)
        at[at == len(self._sorted)] = 0
        _require(self._sorted[at] == wanted, f"{what} that is not sent", wanted)
        index[asked] = self._order[at]
        return index


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A graph that can run as long as all its buffers live."""

    native: NativeGraph
    handles: frozenset[int]
    indices: IndexPlan
    """What is left to check before each run."""
    layout: int = 0
    """That of the session's memory when its addresses were looked up."""

    def holds(self, buffers: BufferTable) -> bool:
        """Whether all its addresses still are what they were."""
        alive = all(map(buffers.find, self.handles - {0}))
        return alive and self.layout == buffers.layout

    def has_ids_in(self, memory: NativeBuffer) -> bool:
        """Whether ids that are checked before each run may lie there."""
        tensors = self.native.tensors
        rows = tensors["buffer"] == memory.address
        return bool(len(self.indices) and (tensors["type"][rows] == _I32).any())

    def move(self, old: NativeBuffer, new: NativeBuffer, offset: int) -> None:
        """What lies in `old` is at `offset` in `new` from now on."""
        tensors = self.native.tensors
        rows = tensors["buffer"] == old.address
        # Wraps around, as addresses do, where the way is backwards.
        way = (new.base + offset - old.base) % (1 << 64)
        tensors["data"][rows] += np.uint64(way)
        tensors["buffer"][rows] = new.address


class GraphStore:
    """The graphs a session keeps per device, by the rule both sides share.

    Protocol 8 keeps up to 1,024 per device by uid and clears them all before
    one more; protocol 7 keeps the last one (PROTOCOL.md, "Graph reuse").
    """

    def __init__(self, dialect: Dialect) -> None:
        self._by_uid = dialect.graph_uid
        # None: a buffer of the graph was freed. The entry still counts.
        self._kept: dict[int, dict[int, StoredGraph | None]] = {}

    def keep(self, device: int, uid: int, graph: StoredGraph) -> None:
        """Remember a graph that was just sent."""
        kept = self._kept.setdefault(device, {})
        if not self._by_uid:
            kept[0] = graph
        elif uid:
            if len(kept) >= GRAPH_CACHE_MAX:
                kept.clear()
            kept[uid] = graph

    def clear(self) -> None:
        """Forget all: what a client believes to be kept may not be."""
        self._kept.clear()

    def find(self, device: int, uid: int) -> StoredGraph:
        """The graph to run again.

        Raises:
            BadRequest: never sent, cleared, or dropped with a freed buffer.
        """
        graph = self._kept.get(device, {}).get(uid if self._by_uid else 0)
        if graph is None:
            raise BadRequest("GRAPH_RECOMPUTE", f"no graph {uid} on device {device}")
        return graph

    def uses(self, handle: int) -> bool:
        """Whether a graph that may run again has tensors in that buffer."""
        return any(
            graph is not None and handle in graph.handles
            for kept in self._kept.values()
            for graph in kept.values()
        )

    def move(self, old: NativeBuffer, new: NativeBuffer, offset: int) -> None:
        """What lies in `old` is at `offset` in `new` from now on."""
        for kept in self._kept.values():
            for uid, graph in kept.items():
                # Its plan might look at ids where they were. Nobody who means
                # well has ids among the weights.
                if graph is not None and graph.has_ids_in(old):
                    kept[uid] = None
        # Not before: of a graph with several uids the first would hide the others.
        for kept in self._kept.values():
            for graph in kept.values():
                if graph is not None:
                    graph.move(old, new, offset)

    def drop(self, handle: int) -> None:
        """A buffer was freed: the graphs that use it must not run again.

        Others stay: a C++ client does not forget its uids on a free, and may
        ask for any graph whose own buffers are all alive.
        """
        for kept in self._kept.values():
            for uid, graph in kept.items():
                if graph is not None and handle in graph.handles:
                    kept[uid] = None
