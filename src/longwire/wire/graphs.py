"""GRAPH_COMPUTE and GRAPH_RECOMPUTE, whose layouts differ between dialects."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.constants import MAX_GRAPH_NODES, MAX_GRAPH_TENSORS
from longwire.wire.dialects import Dialect
from longwire.wire.messages import U32, Bytes
from longwire.wire.tensors import TENSOR, TENSOR_SIZE, WIDE_TENSOR

__all__ = ["Graph", "GraphRecompute"]

_NAME = "GRAPH_COMPUTE"
_HEAD_PLAIN = struct.Struct("<II")
_HEAD_UID = struct.Struct("<IQI")
_UID = struct.Struct("<IQ")


class Graph(NamedTuple):
    """A whole compute graph: node ids in execution order and all tensors."""

    device: int
    uid: int
    """0: not to be kept. Protocol 7 has no such field and always reads 0."""
    nodes: npt.NDArray[np.uint64]
    tensors: npt.NDArray[Any]
    """Array of `TENSOR` records, where LX is spoken of `WIDE_TENSOR`; closed under
    view_src and the nodes' src."""

    def encode(self, dialect: Dialect) -> list[Bytes]:
        """The message body as a list of pieces, none of them copied."""
        n = len(self.nodes)
        if dialect.graph_uid:
            head = _HEAD_UID.pack(self.device, self.uid, n)
        else:
            head = _HEAD_PLAIN.pack(self.device, n)
        return [
            head,
            self.nodes.data.cast("B"),
            U32.pack(len(self.tensors)),
            self.tensors.view(np.uint8).data,
        ]

    def words(self) -> npt.NDArray[Any]:
        """The body behind the node count as u32: what a patch counts in."""
        pieces = (
            np.array([len(self.nodes)], np.uint32),
            self.nodes.view(np.uint32),
            np.array([len(self.tensors)], np.uint32),
            self.tensors.view(np.uint32),
        )
        return np.concatenate(pieces)

    @classmethod
    def of_words(
        cls, dialect: Dialect, device: int, uid: int, words: npt.NDArray[Any]
    ) -> Graph:
        """The graph of `words`.

        Raises: as `decode`.
        """
        head = U32.pack(device)
        if dialect.graph_uid:
            head = _UID.pack(device, uid)
        return cls.decode(dialect, head + words.tobytes())

    @classmethod
    def decode(cls, dialect: Dialect, body: Bytes) -> Graph:
        """Read a body; both arrays are views of it. Surplus bytes are ignored.

        Raises:
            BadFrame: the counts ask for more bytes than the body has.
            LimitExceeded: more nodes or tensors than a graph may have.
        """
        head = _HEAD_UID if dialect.graph_uid else _HEAD_PLAIN
        if len(body) < head.size:
            raise BadFrame(_NAME, len(body), f"at least {head.size}")
        if dialect.graph_uid:
            device, uid, n_nodes = head.unpack_from(body)
        else:
            (device, n_nodes), uid = head.unpack_from(body), 0
        if n_nodes > MAX_GRAPH_NODES:
            raise LimitExceeded(_NAME, "node count", n_nodes, MAX_GRAPH_NODES)
        at = head.size + 8 * n_nodes
        if len(body) < at + 4:
            raise BadFrame(_NAME, len(body), f"at least {at + 4}")
        (n_tensors,) = U32.unpack_from(body, at)
        if n_tensors > MAX_GRAPH_TENSORS:
            raise LimitExceeded(_NAME, "tensor count", n_tensors, MAX_GRAPH_TENSORS)
        end = at + 4 + TENSOR_SIZE * n_tensors
        if len(body) < end:
            raise BadFrame(_NAME, len(body), f"at least {end}")
        nodes = np.frombuffer(body, "<u8", n_nodes, head.size)
        layout = WIDE_TENSOR if dialect.lx else TENSOR
        tensors = np.frombuffer(body, layout, n_tensors, at + 4)
        return cls(device, uid, nodes, tensors)


class GraphRecompute(NamedTuple):
    """Run a kept graph again: by uid in protocol 8, the last one in protocol 7."""

    device: int
    uid: int = 0

    def encode(self, dialect: Dialect) -> bytes:
        if dialect.graph_uid:
            return _UID.pack(self.device, self.uid)
        return U32.pack(self.device)

    @classmethod
    def decode(cls, dialect: Dialect, body: Bytes) -> GraphRecompute:
        if dialect.graph_uid:
            return cls(*_UID.unpack(body))
        return cls(*U32.unpack(body))
