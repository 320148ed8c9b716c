"""The commands that compute: graphs sent whole, as a patch, or known already."""

from __future__ import annotations

import time

from longwire.errors import RemoteFailure
from longwire.native.abi import Status
from longwire.native.compute import ComputeDevice
from longwire.server.graphs import StoredGraph, build_graph
from longwire.server.state import Pieces, SessionState
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.patches import GraphPatch, applied
from longwire.wire.spans import COMPUTING

__all__ = ["graph_compute", "graph_patch", "graph_recompute"]


def graph_compute(s: SessionState, body: memoryview, length: int) -> Pieces:
    message = Graph.decode(s.dialect, body)
    device = s.device(message.device, "GRAPH_COMPUTE")
    graph = build_graph(message, s.buffers, s.verify)
    if s.dialect.lx:
        s.bases.add(message.device, message.words(), graph)
    _compute(s, device, message, graph, "GRAPH_COMPUTE")
    return None


def graph_patch(s: SessionState, body: memoryview, length: int) -> Pieces:
    patch = GraphPatch.decode(body)
    device = s.device(patch.device, "LX_GRAPH_PATCH")
    base = s.bases.find(patch.device, patch.base)
    words, graph = applied(base.words, patch), base.note
    if len(patch.positions) or not graph.holds(s.buffers):
        message = Graph.of_words(s.dialect, patch.device, patch.uid, words)
        graph = build_graph(message, s.buffers, s.verify)
    s.bases.add(patch.device, words, graph)
    _compute(s, device, patch, graph, "LX_GRAPH_PATCH")
    return None


def graph_recompute(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = GraphRecompute.decode(s.dialect, body)
    device = s.device(request.device, "GRAPH_RECOMPUTE")
    graph = s.graphs.find(request.device, request.uid)
    _run(s, device, graph, "GRAPH_RECOMPUTE")
    return None


def _compute(
    s: SessionState,
    device: ComputeDevice,
    request: Graph | GraphPatch,
    graph: StoredGraph,
    command: str,
) -> None:
    """Run a graph that was just sent, and keep it."""
    # A graph that replaces another may still be read by the device.
    s.drain()
    s.graphs.keep(request.device, request.uid, graph)
    _run(s, device, graph, command)
    if not request.uid and s.dialect.graph_uid:
        s.drain()


def _run(
    s: SessionState, device: ComputeDevice, graph: StoredGraph, command: str
) -> None:
    device.open(s.n_threads)
    graph.indices.check(command)
    started_ns = time.monotonic_ns()
    status = device.compute(graph.native.address)
    s.running = True
    s.served.graphs += 1
    s.served.graph_time_s += (time.monotonic_ns() - started_ns) / 1e9
    if s.spans is not None:
        s.spans.add(COMPUTING, started_ns)
    if status != Status.SUCCESS:
        cause = f"the device says {status.name}"
        raise RemoteFailure(device.name, command, cause)
