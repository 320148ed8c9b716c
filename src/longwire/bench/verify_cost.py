"""What the check of a graph costs: `python -m longwire.bench.verify_cost`.

The graph is a llama's decode step, written down as records; nothing runs it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from longwire.native.abi import GGML_TENSOR
from longwire.native.compute import NativeBuffer
from longwire.server.verify import IndexPlan, verify_graph
from longwire.wire.types import TYPES, nbytes

__all__ = ["Step", "main"]

_F32, _F16, _Q4_K, _I32, _I64 = 0, 1, 12, 26, 27
_EMBD, _HEADS, _HEAD, _KV, _FF, _VOCAB = 1024, 16, 64, 256, 2816, 32000
_EXPERTS, _USED = 32, 4
_ROUNDS = 200


class Step:
    """The tensors and nodes of one decode step."""

    def __init__(self, layers: int, experts: bool = False) -> None:
        self._records: list[dict[str, Any]] = []
        self.nodes: list[int] = []
        self._end = 1 << 40
        x = self._op("GET_ROWS", 40, [_EMBD], self._leaf(_VOCAB, _Q4_K), self._ids(1))
        pos, row, mask = self._ids(1), self._ids(1, _I64), self._leaf(1, _F16, _KV)
        for _ in range(layers):
            x = self._attention(x, pos, row, mask)
            norm = self._norm(x)
            x = self._add(x, self._experts(norm) if experts else self._forward(norm))
        self._mul_mat(self._norm(x), _VOCAB, _Q4_K)
        self.memory = {
            1: NativeBuffer(1, 1 << 40, self._end - (1 << 40), None),
        }

    # Tensors.

    def _new(self, ne: Sequence[int], type_: int = _F32, **fields: Any) -> int:
        shape = (*ne, 1, 1, 1)[:4]
        traits = TYPES[type_]
        nb = [traits.size, shape[0] // traits.block * traits.size]
        nb += [nb[1] * shape[1], nb[1] * shape[1] * shape[2]]
        record = {"ne": shape, "nb": nb, "type": type_, "data": self._end, **fields}
        self._records.append(record)
        if "data" not in fields:
            self._end += nb[3] * shape[3] + 64
        return len(self._records) - 1

    def _leaf(self, rows: int, type_: int, columns: int = _EMBD, n: int = 1) -> int:
        return self._new([columns, rows, n], type_)

    def _ids(self, count: int, type_: int = _I32) -> int:
        return self._new([count], type_)

    def _op(
        self, name: str, op: int, ne: Sequence[int], *sources: int, **fields: Any
    ) -> int:
        node = self._new(ne, op=op, name=name.encode(), sources=sources, **fields)
        self.nodes.append(node)
        return node

    def _view(self, op: int, ne: Sequence[int], of: int, **fields: Any) -> int:
        root = self._records[of]
        fields = {"data": root["data"], "type_": root["type"], **fields}
        return self._op("view", op, ne, of, view=of, **fields)

    # Parts of a layer.

    def _mul_mat(self, x: int, rows: int, type_: int = _Q4_K) -> int:
        columns = self._records[x]["ne"][0]
        return self._op("mul", 29, [rows], self._leaf(rows, type_, columns), x)

    def _norm(self, x: int) -> int:
        norm = self._op("norm", 25, [_EMBD], x)
        return self._op("scaled", 7, [_EMBD], norm, self._new([_EMBD]))

    def _add(self, x: int, y: int) -> int:
        return self._op("add", 2, [_EMBD], x, y)

    def _attention(self, x: int, pos: int, row: int, mask: int) -> int:
        norm = self._norm(x)
        heads = [_HEAD, _HEADS, 1]
        turn = np.array([0, _HEAD, 2], np.int32)
        q = self._view(36, heads, self._mul_mat(norm, _EMBD))
        k = self._view(36, heads, self._mul_mat(norm, _EMBD))
        q = self._op("q", 48, heads, q, pos, params=turn)
        k = self._op("k", 48, heads, k, pos, params=turn)
        v = self._mul_mat(norm, _EMBD)
        kept = []
        for new in (k, v):
            cache = self._leaf(_KV, _F16)
            flat = self._view(36, [_EMBD, 1], new)
            place = {"data": self._records[cache]["data"], "type_": _F16}
            self._op("set", 42, [_EMBD, _KV], flat, row, cache, **place)
            per_head = [2, 2 * _EMBD, 2 * _HEAD, 2 * _EMBD * _KV]
            kept.append(self._view(37, [_HEAD, _KV, _HEADS], cache, nb=per_head))
        turned = [4, 4 * _EMBD, 4 * _HEAD, 4 * _EMBD]
        q = self._view(38, [_HEAD, 1, _HEADS], q, nb=turned)
        a = self._op("attention", 74, [_HEAD, _HEADS, 1], q, *kept, mask)
        return self._add(x, self._mul_mat(self._view(36, [_EMBD], a), _EMBD))

    def _forward(self, x: int) -> int:
        gate, up = self._mul_mat(x, _FF), self._mul_mat(x, _FF)
        glu = self._op("glu", 100, [_FF], gate, up, params=np.array([2], np.int32))
        return self._mul_mat(glu, _EMBD)

    def _experts(self, x: int) -> int:
        order = self._op("sort", 69, [_EXPERTS], self._mul_mat(x, _EXPERTS), type_=_I32)
        ids = self._view(37, [_USED, 1], order)
        x = self._view(36, [_EMBD, 1, 1], x)
        gate, up = (
            self._op("id", 30, [_FF, _USED], self._choice(_FF, _EMBD), x, ids)
            for _ in range(2)
        )
        glu = self._op(
            "glu", 100, [_FF, _USED], gate, up, params=np.array([2], np.int32)
        )
        down = self._op("id", 30, [_EMBD, _USED], self._choice(_EMBD, _FF), glu, ids)
        return self._view(37, [_EMBD], down)

    def _choice(self, rows: int, columns: int) -> int:
        return self._leaf(rows, _Q4_K, columns, _EXPERTS)

    # As arrays.

    def arguments(self) -> tuple[Any, ...]:
        """What `verify_graph` takes."""
        m = len(self._records)
        native = np.zeros(m, GGML_TENSOR)
        sources = np.full((m, 10), -1, np.int64)
        views = np.full(m, -1, np.int64)
        for i, record in enumerate(self._records):
            for field in ("ne", "nb", "type", "data", "op", "name"):
                if field in record:
                    native[field][i] = record[field]
            for field, column in (("sources", sources), ("view", views)):
                if field in record:
                    given = record[field]
                    if field == "sources":
                        column[i, : len(given)] = given
                    else:
                        column[i] = given
            params = record.get("params", np.zeros(0, np.int32))
            native["op_params"][i, : len(params)] = params
        native["buffer"] = 1
        native["flags"] = 16
        sizes = np.array(
            [nbytes(int(r["type"]), r["ne"], r["nb"]) for r in self._records], np.uint64
        )
        nodes = np.array(self.nodes, np.int64)
        return native, sizes, sources, views, nodes, self.memory


def _plan(checks: int) -> IndexPlan:
    """A plan with so many tensors of ids, each of 512."""
    ids = np.zeros((checks, 512), np.uint32)
    return IndexPlan([("ids", row, 8) for row in ids])


def _microseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _line(what: str, microseconds: float) -> str:
    return f"{what:<58} {microseconds:8.1f} us"


def main() -> None:
    """Print the medians of 200 rounds each."""
    for name, layers, experts in (
        ("llama", 37, False),
        ("mixture of experts", 34, True),
    ):
        given = Step(layers, experts).arguments()
        size = f"{len(given[0])} tensors, {len(given[4])} nodes"
        spent = _microseconds(partial(verify_graph, *given))
        print(_line(f"a new graph, {name}: {size}", spent))
    for checks in (0, 1, 24):
        plan = _plan(checks)
        spent = _microseconds(partial(plan.check, "bench"))
        print(_line(f"a re-run, {checks} tensors of 512 ids to look at", spent))


if __name__ == "__main__":
    main()
