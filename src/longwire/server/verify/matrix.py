"""Rules of products, of rows by number, and of soft max."""

from __future__ import annotations

import numpy as np

from longwire.server.verify.columns import Nodes
from longwire.server.verify.kinds import (
    F16_F32,
    F32,
    FLOATS,
    FROM_FLOAT,
    I32,
    I32_I64,
    TO_FLOAT,
    VEC_DOT,
)

_HADAMARD = 1
"""Value of MUL_MAT's second parameter: src 0 is not read at all."""

_TURN = 32
_ROW_LIMIT = 1 << 26
"""OUT_PROD takes so many rows a turn; so far apart, C ints can still find them."""


def mul_mat(n: Nodes) -> None:
    """MUL_MAT: dst[j, i] = src 0 row j times src 1 row i; src 0 is broadcast."""
    _factors(n)
    full = _computed(n)
    if full:
        _matrices(full)


def _matrices(n: Nodes) -> None:
    a, b, d = n.src(0), n.src(1), n.dst
    _shared_columns(n)
    n.divides(a.n2, b.n2, "src 0 does not broadcast to src 1")
    n.divides(a.n3, b.n3, "src 0 does not broadcast to src 1")
    n.require(d.n0 == a.n1, "rows of src 0 are not the columns of dst")
    n.require(d.ne[:, 1:] == b.ne[:, 1:], "src 1 and dst differ in rows")
    transform = n.where(n.param(1) == _HADAMARD)
    if transform:
        transform.require(transform.dst.n0 == transform.src(1).n0, "not a square")


def mul_mat_id(n: Nodes) -> None:
    """MUL_MAT_ID: the matrix of src 0 is chosen per row by an id (`indices`)."""
    _factors(n)
    n.typed(I32, n.src(2))
    full = _computed(n)
    if full:
        _chosen_matrices(full)


def _chosen_matrices(n: Nodes) -> None:
    a, b, ids, d = n.src(0), n.src(1), n.src(2), n.dst
    _shared_columns(n)
    n.require((a.n3 == 1) & (b.n3 == 1), "a fourth dimension")
    n.require((ids.n2 == 1) & (ids.n3 == 1), "ids are no matrix")
    n.require(ids.n1 == b.n2, "src 1 and the ids differ in tokens")
    n.divides(b.n1, ids.n0, "src 1 does not broadcast to the ids")
    shape = np.stack([a.n1, ids.n0, b.n2, np.ones_like(a.n1)], axis=1)
    n.require(d.ne == shape, "shape of dst")


def _factors(n: Nodes) -> None:
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(VEC_DOT, a)
    n.require(FLOATS[b.type] | b.quantized, "type of src 1")
    n.typed(F32, d)


def _computed(n: Nodes) -> Nodes | None:
    """Those that are not empty: of an empty product nothing is computed.

    ggml's meta backend cuts the factors of such where it cannot tell how: in a part of
    a prompt that no logits are wanted of.
    """
    return n.where(~n.dst.empty)


def _shared_columns(n: Nodes) -> None:
    a, b, d = n.src(0), n.src(1), n.dst
    n.require(a.n0 == b.n0, "src 0 and src 1 differ in columns")
    n.rows(a, b, d)
    packed = n.where(b.quantized)
    if packed:
        packed.dense(packed.src(1))


def out_prod(n: Nodes) -> None:
    """OUT_PROD: dst[j, i] = sum over rows of src 0 column j times src 1 column i."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(TO_FLOAT | F32, a)
    n.typed(F32, b, d)
    n.require(a.n1 == b.n1, "src 0 and src 1 differ in rows")
    n.divides(a.n2, b.n2, "src 0 does not broadcast to src 1")
    n.divides(a.n3, b.n3, "src 0 does not broadcast to src 1")
    n.require((d.n0 == a.n0) & (d.n1 == b.n0), "shape of dst")
    n.require(d.ne[:, 2:] == b.ne[:, 2:], "src 1 and dst differ in planes")
    n.rows(a, d)
    for t in (a, b):
        # The kernel finds the rows of a turn, counted from its first, by C ints.
        near = (t.nb[:, 1] <= _ROW_LIMIT) | (t.n1 < _TURN)
        n.require(near, f"rows of {t} are over 64 MiB apart")


def get_rows(n: Nodes) -> None:
    """GET_ROWS: rows of src 0 by the ids in src 1; the kernel checks the ids."""
    a, ids, d = n.src(0), n.src(1), n.dst
    n.typed(TO_FLOAT | F32 | I32, a)
    n.typed(I32, ids)
    n.typed(F32 | I32, d)
    n.require(a.ne[:, 2:] == ids.ne[:, 1:3], "src 0 and the ids differ in planes")
    n.require(ids.n3 == 1, "ids have a fourth dimension")
    n.require(d.n0 == a.n0, "src 0 and dst differ in columns")
    n.require(d.ne[:, 1:] == ids.ne[:, :3], "dst has not a row per id")
    n.rows(a, d)


def get_rows_back(n: Nodes) -> None:
    """GET_ROWS_BACK: adds rows of src 0 to those named; the kernel checks the ids."""
    a, ids, d = n.src(0), n.src(1), n.dst
    n.typed(F16_F32, a)
    n.typed(I32, ids)
    n.typed(F32, d)
    n.require((a.n2 == 1) & (a.n3 == 1), "src 0 is no matrix")
    n.require((d.n2 == 1) & (d.n3 == 1), "dst is no matrix")
    n.require(a.n0 == d.n0, "src 0 and dst differ in columns")
    n.require(a.n1 >= ids.elements, "src 0 has not a row per id")
    n.rows(a)
    n.dense(ids, d)


def set_rows(n: Nodes) -> None:
    """SET_ROWS: rows of src 0 to those that src 1 names; the kernel checks the ids."""
    a, ids, d = n.src(0), n.src(1), n.dst
    n.typed(F16_F32, a)
    n.typed(I32_I64, ids)
    n.typed(FROM_FLOAT, d)
    n.require(d.n0 == a.n0, "src 0 and dst differ in columns")
    n.require(d.ne[:, 2:] == a.ne[:, 2:], "src 0 and dst differ in planes")
    n.require(ids.n0 == a.n1, "src 0 has not a row per id")
    n.divides(ids.n1, a.n2, "ids do not broadcast to src 0")
    n.divides(ids.n2, a.n3, "ids do not broadcast to src 0")
    n.require(ids.n3 == 1, "ids have a fourth dimension")
    n.rows(a, d)


def soft_max(n: Nodes) -> None:
    """SOFT_MAX: a mask (src 1) and sinks (src 2) may be there."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.same_shape(a, d)
    n.rows(a, d)
    masked = n.having(1)
    if masked:
        a, mask = masked.src(0), masked.src(1)
        masked.typed(F16_F32, mask)
        masked.require(mask.n0 == a.n0, "mask and src 0 differ in columns")
        masked.require(mask.n1 >= a.n1, "mask has too few rows")
        masked.divides(mask.n2, a.n2, "mask does not broadcast to src 0")
        masked.divides(mask.n3, a.n3, "mask does not broadcast to src 0")
        masked.rows(mask)
    sunk = n.having(2)
    if sunk:
        a, sinks = sunk.src(0), sunk.src(2)
        sunk.typed(F32, sinks)
        sunk.require(sinks.n0 == a.n2, "sinks are not one per head")
        sunk.filled(sinks)
        sunk.rows(sinks)


def soft_max_back(n: Nodes) -> None:
    """SOFT_MAX_BACK: rows are numbered, nb[1] apart."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(F32, a, b, d)
    n.same_shape(a, b, d)
    n.reach(a, b, d)


def solve_tri(n: Nodes) -> None:
    """SOLVE_TRI: squares in src 0, right-hand sides in src 1."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(F32, a, b, d)
    n.require(a.n0 == a.n1, "src 0 is no square")
    n.require(a.ne[:, 1:] == b.ne[:, 1:], "src 0 and src 1 differ in rows")
    n.same_shape(b, d)
    n.dense(a, b, d)


def cross_entropy_loss(n: Nodes) -> None:
    """CROSS_ENTROPY_LOSS: rows are numbered, nb[1] apart."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(F32, a, b, d)
    n.same_shape(a, b)
    n.reach(a, b)
    n.require(d.elements == 1, "dst is not one number")


def cross_entropy_loss_back(n: Nodes) -> None:
    """CROSS_ENTROPY_LOSS_BACK: rows are numbered, nb[1] apart."""
    grad, a, b, d = n.src(0), n.src(1), n.src(2), n.dst
    n.typed(F32, grad, a, b, d)
    n.require(grad.elements == 1, "src 0 is not one number")
    n.same_shape(a, b, d)
    n.reach(a, b, d)


def _step(n: Nodes, params: int, count: int) -> None:
    a = n.src(0)
    settings = n.src(params)
    n.typed(F32, n.dst, *[n.src(i) for i in range(params + 1)])
    n.same_shape(a, n.dst, *[n.src(i) for i in range(1, params)])
    n.require(settings.elements == count, f"not {count} settings")
    n.dense(settings)
    n.rows(a)
    # All tensors are walked with the strides of src 0.
    for other in [n.src(i) for i in range(1, params)]:
        n.require((a.nb == other.nb) | (a.ne == 1), f"{a} and {other} differ in nb")


def opt_step_adamw(n: Nodes) -> None:
    """OPT_STEP_ADAMW: weights, gradient, two moments, seven settings."""
    _step(n, 4, 7)


def opt_step_sgd(n: Nodes) -> None:
    """OPT_STEP_SGD: weights, gradient, two settings."""
    _step(n, 2, 2)
