"""What an op will look like later in a prompt.

llama.cpp asks about a graph of the largest sizes first, and then about graphs that
look at a growing part of the cache: views, which devices may answer differently for.
A question in the middle of a long prompt waits for all that its worker computes,
so the larger ones are asked along with the first. So is the one row that is taken of
a prompt's last part, for its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longwire.client.records import NativeTensor

__all__ = ["Growth", "one_row"]

_GET_ROWS = 40

_DOUBLINGS = 16

_Ne = tuple[int, int, int, int]
_Sources = Sequence[NativeTensor | None]


class Growth:
    """The largest sizes that each sort of op was seen with."""

    def __init__(self) -> None:
        self._largest: dict[tuple[object, ...], list[_Ne | None]] = {}

    def ahead(
        self, op: NativeTensor, sources: _Sources
    ) -> Iterator[tuple[NativeTensor, _Sources]]:
        """The same op, its growing extents doubled until they are nearly as large as
        known: at that they would be no part of something any more."""
        tensors: list[NativeTensor | None] = [op, *sources]
        key = (op.op, op.op_params, *(t.type if t else None for t in tensors))
        here = [t.ne if t else None for t in tensors]
        most = self._largest.get(key, here)
        self._largest[key] = [
            _largest(a, b) if a and b else None for a, b in zip(most, here, strict=True)
        ]
        last: list[NativeTensor | None] = tensors
        for doublings in range(1, _DOUBLINGS + 1):
            grown, *rest = (
                _grown(t, limit, 1 << doublings) if t and limit else None
                for t, limit in zip(tensors, most, strict=True)
            )
            if grown is None or [grown, *rest] == last:
                return
            last = [grown, *rest]
            yield grown, rest


def one_row(
    op: NativeTensor, sources: _Sources
) -> Iterator[tuple[NativeTensor, _Sources]]:
    """Where the op takes several rows, the same with a single one."""
    ids = sources[1]
    if op.op != _GET_ROWS or ids is None or op.ne[1] < 2:
        return
    row, id_ = op.nb[1], ids.nb[0]
    one = op._replace(ne=(op.ne[0], 1, 1, 1), nb=(op.nb[0], row, row, row))
    its = ids._replace(ne=(1, 1, 1, 1), nb=(id_, id_, id_, id_))
    yield one, [sources[0], its, *sources[2:]]


def _largest(a: _Ne, b: _Ne) -> _Ne:
    w, x, y, z = map(max, a, b)
    return w, x, y, z


def _grown(tensor: NativeTensor, limit: _Ne, factor: int) -> NativeTensor:
    """The tensor with all extents so many times as large, but below their limit."""
    a, b, c, d = (
        min(n * factor, max(n, most - n))
        for n, most in zip(tensor.ne, limit, strict=True)
    )
    nb = tensor.nb
    if _is_contiguous(tensor):
        row = nb[1] * a // max(tensor.ne[0], 1)
        nb = (nb[0], row, row * b, row * b * c)
    return tensor._replace(ne=(a, b, c, d), nb=nb)


def _is_contiguous(tensor: NativeTensor) -> bool:
    ne, nb = tensor.ne, tensor.nb
    return nb[2] == nb[1] * ne[1] and nb[3] == nb[2] * ne[2]
