"""`ggml_cgraph` in both directions: read the host's, build a server's.

Both work on arrays of `GGML_TENSOR` records, not tensor by tensor: a graph of
1,500 tensors takes milliseconds.
"""

from __future__ import annotations

import ctypes as C
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.native.abi import GGML_TENSOR, Cgraph
from longwire.native.memory import array_at, read

__all__ = ["NativeGraph", "gather", "graph_nodes", "graph_uid", "use_counts"]

Addresses = npt.NDArray[np.uint64]

_UID = Cgraph.uid.offset
_TENSOR = GGML_TENSOR.itemsize
_ADDRESS_UNIT = 16
"""ggml hashes an address as `address >> 4`."""


def graph_uid(graph: int) -> int:
    """The graph's uid; 0 for one that must not be kept."""
    return C.c_uint64.from_address(graph + _UID).value


def graph_nodes(graph: int) -> Addresses:
    """Addresses of the graph's nodes in execution order, copied."""
    header = Cgraph.from_address(graph)
    if header.n_nodes == 0:
        return np.zeros(0, np.uint64)
    nodes: Addresses = array_at(header.nodes, header.n_nodes, "<u8").copy()
    return nodes


def gather(addresses: Addresses) -> npt.NDArray[Any]:
    """Copies of the `ggml_tensor` structs at `addresses`."""
    raw = b"".join(map(read, addresses.tolist(), repeat(_TENSOR)))
    return np.frombuffer(raw, GGML_TENSOR)


def use_counts(graph: int, addresses: Addresses) -> npt.NDArray[np.int32]:
    """How often the graph uses each tensor; 0 for one it does not list."""
    table = Cgraph.from_address(graph).visited_hash_set
    size = table.size
    counts = np.zeros(len(addresses), np.int32)
    if size == 0:
        return counts
    keys = array_at(table.keys, size, "<u8")
    stored = array_at(Cgraph.from_address(graph).use_counts, size, "<i4")
    words = array_at(table.used, (size + 31) // 32, "<u4")
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    used = np.flatnonzero(bits)
    order = used[np.argsort(keys[used], kind="stable")]
    if len(order) == 0:
        return counts
    at = np.searchsorted(keys[order], addresses)
    at[at == len(order)] = 0
    slots = order[at]
    found = keys[slots] == addresses
    counts[found] = stored[slots[found]]
    return counts


class NativeGraph:
    """A `ggml_cgraph` with its tensors, in memory of ours.

    The kernels read node pointers, use counts and the hash set; they never
    write to the graph, and a client's uid is not theirs to know.
    """

    def __init__(
        self,
        tensors: npt.NDArray[Any],
        sources: npt.NDArray[np.int64],
        view_sources: npt.NDArray[np.int64],
        nodes: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int32],
    ) -> None:
        """Take `tensors` (m `GGML_TENSOR` records) over and link them.

        `sources` (m x 10), `view_sources` (m) and `nodes` (n) are indices into
        `tensors`, -1 for none; `counts` (n) are the nodes' use counts. All
        must be checked: an index is followed here without a question.
        """
        self.tensors = tensors
        base = tensors.ctypes.data
        # One more entry, so that index -1 picks the NULL at the end.
        pointers = np.append(
            base + _TENSOR * np.arange(len(tensors), dtype=np.uint64), np.uint64(0)
        ).astype(np.uint64)
        tensors["src"] = pointers[sources]
        tensors["view_src"] = pointers[view_sources]
        self._nodes = pointers[nodes]

        # The tensors lie 336 = 21 * 16 bytes apart, and 21 has no factor in
        # common with a power of two: in a table of such a size they never
        # collide. Twice as many slots as tensors keep half of them unused.
        size = 1 << max(3, (2 * len(tensors)).bit_length())
        slots = (self._nodes // _ADDRESS_UNIT) % size
        self._keys = np.zeros(size, np.uint64)
        self._keys[slots] = self._nodes
        self._counts = np.zeros(size, np.int32)
        self._counts[slots] = counts
        used = np.zeros(size, np.uint8)
        used[slots] = 1
        self._used = np.packbits(used, bitorder="little")
        if len(self._used) % 4:
            self._used = np.append(self._used, np.zeros(3, np.uint8))

        self._struct = Cgraph(
            size=len(nodes),
            n_nodes=len(nodes),
            nodes=self._nodes.ctypes.data,
            use_counts=self._counts.ctypes.data,
        )
        table = self._struct.visited_hash_set
        table.size = size
        table.used = self._used.ctypes.data
        table.keys = self._keys.ctypes.data
        self.address = C.addressof(self._struct)
