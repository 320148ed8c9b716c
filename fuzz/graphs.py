"""GRAPH_COMPUTE's body: decoded, checked, and built, but not run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from fuzz.opgraphs import op_graphs
from fuzz.source import Source
from longwire.errors import BadFrame, BadRequest, LimitExceeded
from longwire.server.buffers import BufferTable
from longwire.server.graphs import build_graph
from longwire.wire import messages as m
from longwire.wire.dialects import DIALECTS
from longwire.wire.graphs import Graph, GraphRecompute
from support.client import Buffer
from support.device import PlainDevice

__all__ = ["check", "seeds"]

_OWN = Buffer(0xA5C3_0000_F19E_0000, 1 << 18, 1 << 44)
"""How an input names the one buffer there is."""


def check(data: bytes) -> None:
    """Any body is a graph in bounds, or one of the errors that PROTOCOL.md names."""
    source = Source(data)
    dialect = DIALECTS[source.pick((8, 7))]
    if source.rarely(2):
        dialect = dialect.with_lx()
    device = PlainDevice()
    buffers = BufferTable()
    buffer = buffers.open(cast(Any, device), _OWN.size)
    assert buffer is not None and buffer.base == _OWN.base
    handle = m.U64.pack(buffer.handle)
    body = source.take(source.left).replace(m.U64.pack(_OWN.handle), handle)
    try:
        graph = Graph.decode(dialect, body)
        assert body.startswith(b"".join(graph.encode(dialect)))
        built = build_graph(graph, buffers)
        built.indices.check("GRAPH_COMPUTE")
        device.compute(built.native.address)
        assert device.astray == [], device.astray
    except (BadFrame, BadRequest, LimitExceeded):
        pass
    finally:
        buffers.close_all()
    size = 12 if dialect.graph_uid else 4
    GraphRecompute.decode(dialect, body[:size].ljust(size, b"\0"))


def seeds() -> Iterator[bytes]:
    """A legal graph of every op, in both dialects."""
    for ops in op_graphs():
        for way in (0, 1):
            sent = ops.placed(_OWN, 1).encode(DIALECTS[8 - way])
            yield bytes([way, 0]) + b"".join(bytes(part) for part in sent)
