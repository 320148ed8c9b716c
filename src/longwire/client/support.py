"""Which ops a remote device can do: asked once per kind of op, then remembered.

A server that speaks LX knows; of any other everything is believed. ggml's
scheduler asks about every node of every new graph, so questions are told apart
by what a device's answer can depend on, not by exact shapes: a growing KV cache
must not bring new ones each step. It asks one at a time; what one device of this
process was asked, the next one, or a new connection, is asked in one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.client.growth import Growth, one_row
from longwire.client.records import NativeTensor, Records
from longwire.wire.constants import U32_MAX, Command
from longwire.wire.lx import SupportsOps
from longwire.wire.tensors import NULL_TENSOR

__all__ = ["OpSupport"]

_LAYOUT_OPS = frozenset({0, 36, 37, 38, 39})
"""NONE, RESHAPE, VIEW, PERMUTE, TRANSPOSE: there is nothing to do in them."""

_ALIGNMENT = 256
"""Kernels want sizes that are multiples of a power of two up to this one."""

Kind = tuple[object, ...]
Sizes = tuple[int, ...]


class _Question(NamedTuple):
    op: NativeTensor
    sources: Sequence[NativeTensor | None]


_Questions = dict[tuple[Kind, Sizes], _Question]

_asked: dict[str, _Questions] = {}
"""By engine, whose numbers of ops these are: what devices of this process were
asked last."""

_SHARED = 192
"""Questions, of 3 kB each: a model has some fifty, and their larger ones."""


class OpSupport:
    """One device's answers."""

    def __init__(
        self, connection: Connection, records: Records, device: int, engine: str
    ) -> None:
        self._connection = connection
        self._asked = _asked.setdefault(engine, {})
        self._records = records
        self._device = device
        self._known: dict[Kind, dict[Sizes, bool]] = {}
        self._growth = Growth()
        self._fresh = True
        """Nothing was asked so far."""
        self.asked = 0
        """Messages that went over the wire."""

    def supports(
        self, op: NativeTensor, sources: Sequence[NativeTensor | None]
    ) -> bool:
        """Whether the device can do `op` with these ten sources.

        Raises:
            RemoteError: the device could not be asked.
        """
        # Of a prompt's parts but the last nobody wants logits: from the last layer on
        # they are empty, and backends leave empty ones alone.
        if op.op in _LAYOUT_OPS or 0 in op.ne:
            return True
        kind, sizes = _names(op, sources)
        known = self._answer(kind, sizes)
        if known is None:
            questions = {(kind, sizes): _Question(op, sources)}
            for later in (*self._growth.ahead(op, sources), *one_row(op, sources)):
                names = _names(*later)
                if self._answer(*names) is None:
                    questions.setdefault(names, _Question(*later))
            self._ask(questions)
            known = self._known[kind][sizes]
        return known

    def _answer(self, kind: Kind, sizes: Sizes) -> bool | None:
        """What larger and smaller ones of the same kind say, if they say anything.

        What a device can do for large tensors it can do for small ones, and what it
        cannot do for small ones it cannot for large ones.
        """
        for known, answer in self._known.get(kind, {}).items():
            larger, smaller = (known, sizes) if answer else (sizes, known)
            if all(a >= b for a, b in zip(larger, smaller, strict=True)):
                return answer
        return None

    def _ask(self, questions: _Questions) -> None:
        """Ask, and what other devices were asked as well, if this is the first time."""
        if self._fresh:
            questions = {**questions, **self._asked}
        queries = tuple(map(self._query, questions.values()))
        body = SupportsOps(self._device, queries).encode()
        answer = self._connection.ask_sized(Command.LX_SUPPORTS_OPS, body, len(queries))
        self._fresh = False
        self.asked += 1
        for (kind, sizes), can in zip(questions, answer, strict=True):
            self._known.setdefault(kind, {})[sizes] = bool(can)
        for asked, question in questions.items():
            self._asked.setdefault(asked, question)
        while len(self._asked) > _SHARED:
            self._asked.pop(next(iter(self._asked)))

    def _query(self, question: _Question) -> bytes:
        op, sources = question
        # Whatever does not fit this wire is never asked about on it.
        fit = self._records.fit
        records = [t if t and fit(t) else None for t in (op, *sources)]
        encode = self._records.encode
        return b"".join(encode(t) if t else NULL_TENSOR for t in records)


def _names(
    op: NativeTensor, sources: Sequence[NativeTensor | None]
) -> tuple[Kind, Sizes]:
    tensors = [op, *(source for source in sources if source)]
    kind = (op.op, op.op_params, *map(_kind, tensors))
    return kind, tuple(size for tensor in tensors for size in map(_size, tensor.ne))


def _size(n: int) -> int:
    """Limits of kernels are powers of two; sizes between two of them are one."""
    return max(n - 1, 0).bit_length()


def _kind(tensor: NativeTensor) -> Kind:
    ne, nb = tensor.ne, tensor.nb
    return (
        tensor.type,
        nb[0],
        nb[0] <= nb[1] <= nb[2] <= nb[3],
        nb[1] * ne[1] == nb[2] and nb[2] * ne[2] == nb[3],
        # Kernels that count bytes in 32 bits say no to these.
        max(nb) > U32_MAX,
        *(min(n & -n, _ALIGNMENT) for n in ne),
    )
