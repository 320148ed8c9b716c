"""From ggml's tensors to the records that name them on the wire."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from longwire.client.memo import remember
from longwire.errors import UsageError
from longwire.native.abi import GGML_TENSOR
from longwire.native.graph import gather, graph_nodes, use_counts
from longwire.native.memory import read, read_i32
from longwire.wire.constants import U32_MAX
from longwire.wire.graphs import Graph
from longwire.wire.tensors import (
    STRIDE_LIMIT,
    TENSOR,
    WIDE_NAME,
    WIDE_TENSOR,
    Tensor,
    put_strides,
    too_wide,
)

__all__ = ["NativeTensor", "Records", "TENSOR_BYTES", "buffer_address"]
__all__ += ["buffers_of", "name_of", "node_layout", "op_layout", "read_tensor"]
__all__ += ["type_of"]

TENSOR_BYTES: int = GGML_TENSOR.itemsize
"""Of a `ggml_tensor`."""

assert GGML_TENSOR.fields is not None
_OFFSETS = {name: field[1] for name, field in GGML_TENSOR.fields.items()}
_BUFFER, _NE, _OP = (_OFFSETS[name] for name in ("buffer", "ne", "op"))
_FLAGS, _SRC, _VIEW_SRC = (_OFFSETS[name] for name in ("flags", "src", "view_src"))
_NAME = _OFFSETS["name"]
_NAME_BYTES = GGML_TENSOR["name"].itemsize
_TYPE_BYTES = 4
_SOURCES = struct.Struct("<10Q")
_NOTHING = bytes(8)
_NATIVE = struct.Struct("<i4xQ4q4Qi64si10QQQQ64sQ8x")
assert _NATIVE.size == TENSOR_BYTES


class NativeTensor(NamedTuple):
    """The fields of one `ggml_tensor`, in Python."""

    address: int
    type: int
    buffer: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    op: int
    op_params: bytes
    flags: int
    src: tuple[int, ...]
    view_src: int
    view_offs: int
    data: int
    name: bytes

    def fits(self, wide: bool) -> bool:
        """Whether the wire can carry shape and strides; `wide`: where LX is spoken.

        Without LX they have 32 bits each. The stride of a dimension of one element
        moves nothing and may have more.
        """
        if max(self.ne) > U32_MAX:
            return False
        if max(self.nb) <= U32_MAX:
            return True
        over = [p for p in zip(self.ne, self.nb, strict=True) if p[1] > U32_MAX]
        if wide:
            return all(max(n, 1) * b < STRIDE_LIMIT for n, b in over)
        return all(n == 1 for n, _ in over)


def read_tensor(address: int) -> NativeTensor:
    """Read the `ggml_tensor` at `address`."""
    return _unpack(address, read(address, TENSOR_BYTES))


def type_of(address: int) -> int:
    """A tensor's type."""
    return read_i32(address)


def name_of(address: int) -> bytes:
    """A tensor's name."""
    return read(address + _NAME, _NAME_BYTES).split(b"\0", 1)[0]


def op_layout(address: int) -> tuple[bytes, bytes, bool]:
    """All that the size of a tensor can depend on, to compare: type; shape, strides,
    op and parameters; whether it is a view.

    A new graph has hundreds of nodes that are asked about, and most look alike.
    """
    raw = read(address, _VIEW_SRC + len(_NOTHING))
    return raw[:_TYPE_BYTES], raw[_NE:_FLAGS], raw[_VIEW_SRC:] != _NOTHING


def node_layout(address: int) -> tuple[bytes, ...]:
    """All that doing an op can depend on, to compare: type; shape, strides, op and
    parameters; of each source type, and shape and strides."""
    raw = read(address, _VIEW_SRC)
    layout = [raw[:_TYPE_BYTES], raw[_NE:_FLAGS]]
    for source in _SOURCES.unpack_from(raw, _SRC):
        if source:
            other = read(source, _OP)
            layout += other[:_TYPE_BYTES], other[_NE:]
        else:
            layout.append(b"")
    return tuple(layout)


def buffer_address(tensor: int) -> int:
    """Of the `ggml_backend_buffer` that a tensor lies in; 0 for none."""
    return int.from_bytes(read(tensor + _BUFFER, 8), "little")


def _unpack(address: int, raw: bytes) -> NativeTensor:
    f = _NATIVE.unpack(raw)
    return NativeTensor(
        address=address,
        type=f[0],
        buffer=f[1],
        ne=f[2:6],
        nb=f[6:10],
        op=f[10],
        op_params=f[11],
        flags=f[12],
        src=f[13:23],
        view_src=f[23],
        view_offs=f[24],
        data=f[25],
        name=f[26].split(b"\0", 1)[0],
    )


def buffers_of(graph: int) -> set[int]:
    """The native buffers of a graph's nodes and of their sources."""
    nodes = gather(graph_nodes(graph))
    sources = gather(np.setdiff1d(nodes["src"], [0]))
    return {*nodes["buffer"].tolist(), *sources["buffer"].tolist()} - {0}


def _narrow(nb: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides as sent without LX: those over 32 bits move nothing, see `fits`."""
    if max(nb) <= U32_MAX:
        return nb
    a, b, c, d = (min(n, U32_MAX) for n in nb)
    return a, b, c, d


class Handled(Protocol):
    """A buffer that has a handle on the server."""

    handle: int


class Records:
    """Makes the records of one connection.

    `buffers` are that connection's live buffers by native address; a tensor
    anywhere else is sent without buffer and address (PROTOCOL.md, "Tensor
    record"). Ids are the tensors' addresses under a secret mask: they stay
    unique, and the server learns no address of this process.
    """

    def __init__(
        self,
        buffers: Mapping[int, Handled],
        ops: npt.NDArray[np.int32] | None = None,
        wide: bool = False,
    ) -> None:
        """`ops` are the server's op numbers by ours, where they differ.

        `wide`: LX is spoken, so that strides may have 64 bits.
        """
        self._buffers = buffers
        self._wide = wide
        self._room = "32 bits (strides: 62)" if wide else "32 bits"
        self._ops = ops
        self._mask = secrets.randbits(63) << 1 | 1
        self._known: dict[int, tuple[bytes, bytes]] = {}

    def of(self, address: int) -> bytes:
        """The 296 bytes of one tensor, for everything but graphs."""
        raw = read(address, TENSOR_BYTES)
        known = self._known.get(address)
        if known is not None and known[0] == raw:
            return known[1]
        record = self.encode(_unpack(address, raw))
        remember(self._known, address, (raw, record))
        return record

    def forget(self) -> None:
        """A buffer is gone, and with it the handle in remembered records."""
        self._known.clear()

    def fit(self, tensor: NativeTensor) -> bool:
        """Whether this connection can carry the tensor."""
        return tensor.fits(self._wide)

    def encode(self, tensor: NativeTensor) -> bytes:
        """The record of a tensor that was read before. Its sources are left out.

        Raises:
            UsageError: it does not fit.
        """
        if not self.fit(tensor):
            raise UsageError(
                f"tensor {tensor.name.decode(errors='replace')!r}: shape {tensor.ne} "
                f"with strides {tensor.nb} does not fit the wire's {self._room}"
            )
        buffer = self._buffers.get(tensor.buffer)
        return Tensor(
            id=tensor.address ^ self._mask,
            type=tensor.type,
            buffer=buffer.handle if buffer else 0,
            ne=tensor.ne,
            nb=tensor.nb if self._wide else _narrow(tensor.nb),
            op=tensor.op if self._ops is None else int(self._ops[tensor.op]),
            op_params=tensor.op_params,
            flags=tensor.flags,
            view_src=tensor.view_src ^ self._mask if tensor.view_src else 0,
            view_offs=tensor.view_offs,
            data=tensor.data if buffer else 0,
            name=tensor.name,
        ).encode(self._wide)

    def graph(self, graph: int, device: int, uid: int) -> Graph:
        """The message for a `ggml_cgraph`, pruned to what the server needs.

        That is the nodes, their sources, and what those are views of. Sources
        of tensors that are not nodes are written as 0, so that a graph does
        not drag along the history that computed its inputs.
        """
        addresses = graph_nodes(graph)
        n_nodes = len(addresses)
        tensors = gather(addresses)
        wanted = np.append(tensors["src"].ravel(), tensors["view_src"])
        while len(new := np.setdiff1d(wanted[wanted != 0], addresses)):
            found = gather(new).copy()
            found["src"] = 0
            wanted = found["view_src"]
            addresses = np.append(addresses, new)
            tensors = np.append(tensors, found)
        records = self._columns(addresses, tensors)
        records["use_count"] = use_counts(graph, addresses)
        return Graph(device, uid, records["id"][:n_nodes].copy(), records)

    def _columns(
        self, addresses: npt.NDArray[np.uint64], tensors: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        records = np.zeros(len(tensors), WIDE_TENSOR if self._wide else TENSOR)
        put_strides(records, self._strides(tensors))
        for name in ("type", "ne", "op", "op_params", "flags", "view_offs"):
            records[name] = tensors[name]
        if self._ops is not None:
            records["op"] = self._ops[tensors["op"]]
        names = np.array(tensors["name"], "S64").view(np.uint8).reshape(-1, 64)
        # ggml leaves what an earlier, longer name had behind the NUL.
        names *= np.logical_and.accumulate(names != 0, axis=1)
        if self._wide:
            names[:, WIDE_NAME:] = 0
        records["name"] = names.view("S64").ravel()
        records["id"] = self._masked(addresses)
        records["src"] = self._masked(tensors["src"])
        records["view_src"] = self._masked(tensors["view_src"])
        unique, inverse = np.unique(tensors["buffer"], return_inverse=True)
        known = [self._buffers.get(address) for address in unique.tolist()]
        handles = np.array([b.handle if b else 0 for b in known], np.uint64)
        records["buffer"] = handles[inverse.ravel()]
        records["data"] = np.where(records["buffer"] != 0, tensors["data"], 0)
        return records

    def _strides(self, tensors: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
        """Strides as sent; for many tensors what `fit` and `_narrow` are for one."""
        ne: npt.NDArray[np.int64] = tensors["ne"]
        nb: npt.NDArray[np.uint64] = tensors["nb"]
        wide = too_wide(ne, nb) if self._wide else (nb > U32_MAX) & (ne != 1)
        if (ne > U32_MAX).any() or wide.any():
            raise UsageError(
                f"a graph's shapes or strides do not fit the wire's {self._room}"
            )
        return nb if self._wide else np.minimum(nb, U32_MAX)

    def _masked(self, addresses: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        masked: npt.NDArray[np.uint64] = np.where(
            addresses != 0, addresses ^ np.uint64(self._mask), np.uint64(0)
        )
        return masked
