"""Rules of ops that work element by element or row by row."""

from __future__ import annotations

import numpy as np

from longwire.server.verify.columns import Nodes
from longwire.server.verify.kinds import (
    F16_F32,
    F32,
    FROM_FLOAT,
    I32,
    I64,
    PLAIN,
    QUANTIZED_IN,
    TO_FLOAT,
)

UNARY_OPS = 22
GLU_OPS = 7
TRI_TYPES = 4


def copy(n: Nodes) -> None:
    """DUP, CPY: any shape to any other of as many elements."""
    a, d = n.src(0), n.dst
    n.require(a.elements == d.elements, "src 0 and dst differ in elements")
    packing = n.where(d.quantized & (a.type != d.type))
    if packing:
        a, d = packing.src(0), packing.dst
        # The kernel converts a row of the source in space for a row of dst.
        packing.require(a.n0 <= d.n0, "row of src 0 is longer than one of dst")
        packing.divides(d.block, a.n0, "row of src 0 is no multiple of dst's block")
    unpacking = n.where(a.quantized & (a.type != d.type))
    if unpacking:
        unpacking.typed(TO_FLOAT, unpacking.src(0))
        # Offsets in dst are computed from src 1.
        target = unpacking.having(1)
        if target is None or len(target.index) < len(unpacking.index):
            unpacking.refuse(0, "no src 1 to copy to")
        b, d = unpacking.src(1), unpacking.dst
        unpacking.same_type(b, d)
        unpacking.require(b.ne == d.ne, "src 1 and dst differ in shape")
        unpacking.require((b.nb == d.nb) | (b.ne == 1), "src 1 and dst differ in nb")


def cont(n: Nodes) -> None:
    """CONT: a copy without gaps of the same type."""
    a, d = n.src(0), n.dst
    n.same_type(a, d)
    n.require(a.elements == d.elements, "src 0 and dst differ in elements")


def add(n: Nodes) -> None:
    """ADD: as `binary`; a quantised src 0 is converted row by row."""
    binary(n)
    packed = n.where(n.src(0).quantized)
    if packed:
        packed.typed(QUANTIZED_IN, packed.src(0))
        packed.typed(FROM_FLOAT, packed.dst)
        packed.typed(F32, packed.src(1))
        packed.same_shape(packed.src(0), packed.src(1))
        packed.rows(packed.src(0), packed.src(1))


def binary(n: Nodes) -> None:
    """ADD, SUB, MUL, DIV: src 1 repeats to src 0."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.same_shape(a, d)
    n.repeats(b, a)
    n.rows(a, d)


def add_id(n: Nodes) -> None:
    """ADD_ID: a row of src 1 per row of src 0; the kernel checks the ids."""
    a, b, ids, d = n.src(0), n.src(1), n.src(2), n.dst
    n.typed(F32, a, b, d)
    n.typed(I32, ids)
    n.same_shape(a, d)
    n.require(a.n0 == b.n0, "src 0 and src 1 differ in columns")
    n.require(a.ne[:, 1:3] == ids.ne[:, :2], "src 0 and the ids differ in rows")
    n.filled(b, ids)
    n.rows(a, b, d)


def add1(n: Nodes) -> None:
    """ADD1: one number to all."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.same_shape(a, d)
    n.same_type(a, d)
    n.require(b.elements == 1, "src 1 is not one number")
    n.require(F32[b.type] | (b.type == a.type), "type of src 1")
    n.require(~a.quantized | QUANTIZED_IN[a.type], "type of src 0")
    n.rows(a, d)


def part(n: Nodes) -> None:
    """ACC, SET: src 1 goes to a part of dst; strides and offset are parameters."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(F32 | I32, a)
    n.same_type(a, d, b)
    n.same_shape(a, d)
    n.dense(a, d)
    n.rows(b)
    strides = np.stack([n.param(i) for i in range(4)], axis=1)
    n.require(strides >= 0, "negative stride or offset")
    last = np.maximum(b.ne - 1, 0)
    end = last[:, 0] * b.size + b.size + strides[:, 3]
    end = end + (last[:, 1:] * strides[:, :3]).sum(axis=1)
    n.require((end <= d.nbytes) | b.empty, "src 1 reaches beyond dst")


def same(n: Nodes) -> None:
    """SQR and its like: dst is what src 0 is."""
    a, d = n.src(0), n.dst
    n.same_shape(a, d)
    n.same_type(a, d)
    n.rows(a, d)


def unary(n: Nodes) -> None:
    """UNARY."""
    same(n)
    sub = n.param(0)
    n.require((sub >= 0) & (sub < UNARY_OPS), "unknown sub-op")


def linear(n: Nodes) -> None:
    """CLAMP, LEAKY_RELU: kernels number all rows, nb[1] apart."""
    same(n)
    n.reach(n.src(0), n.dst)


def scale(n: Nodes) -> None:
    """SCALE: as `linear`, and one stride serves both tensors."""
    same(n)
    n.dense(n.src(0), n.dst)
    n.require(
        n.src(0).of(n.tensors.even) & n.dst.of(n.tensors.even),
        "rows are not evenly spaced",
    )


def silu_back(n: Nodes) -> None:
    """SILU_BACK."""
    linear(n)
    n.same_shape(n.dst, n.src(1))
    n.same_type(n.dst, n.src(1))
    n.reach(n.src(1))


def glu(n: Nodes) -> None:
    """GLU: halves of src 0, or src 0 with src 1."""
    a, d = n.src(0), n.dst
    n.same_type(a, d)
    sub = n.param(0)
    n.require((sub >= 0) & (sub < GLU_OPS), "unknown sub-op")
    n.require(a.ne[:, 1:] == d.ne[:, 1:], "src 0 and dst differ in rows")
    even = n.tensors.even
    n.require(a.of(even) & d.of(even), "rows are not evenly spaced")
    two = n.having(1)
    columns = a.n0 // 2
    if two:
        a, b = two.src(0), two.src(1)
        two.same_type(a, b)
        two.same_shape(a, b)
        two.require(b.of(even), "rows are not evenly spaced")
        columns = np.where(n.present(1), n.src(0).n0, columns)
    n.require(d.n0 == columns, "dst has not the columns of the result")


def total(n: Nodes) -> None:
    """SUM: everything to one number."""
    a, d = n.src(0), n.dst
    n.same_type(a, d)
    n.rows(a)
    n.require(d.elements == 1, "dst is not one number")


def sum_rows(n: Nodes) -> None:
    """SUM_ROWS, MEAN: a number per row."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.rows(a)
    n.require((d.n0 == 1) & (a.ne[:, 1:] == d.ne[:, 1:]).all(axis=1), "shape of dst")


def argmax(n: Nodes) -> None:
    """ARGMAX: a column number per row of a matrix."""
    a, d = n.src(0), n.dst
    n.typed(I32, d)
    n.rows(a)
    n.require((a.n2 == 1) & (a.n3 == 1), "src 0 is no matrix")
    n.require((d.n0 == a.n1) & (d.elements == a.n1), "shape of dst")


def count_equal(n: Nodes) -> None:
    """COUNT_EQUAL: the CPU kernel mixes up the rows of more than a matrix."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.typed(I32, a, b)
    n.typed(I64, d)
    n.same_shape(a, b)
    n.require((a.n2 == 1) & (a.n3 == 1), "src 0 is no matrix")
    n.require(d.elements == 1, "dst is not one number")


def repeat(n: Nodes) -> None:
    """REPEAT."""
    n.same_type(n.src(0), n.dst)
    n.repeats(n.src(0), n.dst)
    n.rows(n.src(0), n.dst)


def repeat_back(n: Nodes) -> None:
    """REPEAT_BACK."""
    n.typed(F32, n.src(0), n.dst)
    n.repeats(n.dst, n.src(0))
    n.rows(n.src(0), n.dst)


def concat(n: Nodes) -> None:
    """CONCAT: dst is src 0 and then src 1 along one dimension."""
    a, b, d = n.src(0), n.src(1), n.dst
    n.same_type(a, b, d)
    dim = n.param(0)
    n.require((dim >= 0) & (dim < 4), "dimension that does not exist")
    joined = np.arange(4) == dim[:, None]
    n.require(d.ne == a.ne + np.where(joined, b.ne, 0), "shape of dst")
    n.require(joined | (b.ne == d.ne), "src 1 does not fit beside src 0")
    n.rows(d)
    n.require(
        PLAIN[a.type] | (a.of(n.tensors.rows) & b.of(n.tensors.rows)),
        "sources have gaps in rows",
    )


def norm(n: Nodes) -> None:
    """NORM, RMS_NORM, L2_NORM."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.same_shape(a, d)


def row_norm(n: Nodes) -> None:
    """RMS_NORM: rows are read and written as a whole."""
    norm(n)
    n.rows(n.src(0), n.dst)


def group_norm(n: Nodes) -> None:
    """GROUP_NORM: over groups of channels (dimension 2)."""
    row_norm(n)
    groups = n.param(0)
    n.require((groups >= 1) & (groups <= np.maximum(n.dst.n2, 1)), "bad groups")


def rms_norm_back(n: Nodes) -> None:
    """RMS_NORM_BACK."""
    row_norm(n)
    n.typed(F32, n.src(1))
    n.same_shape(n.dst, n.src(1))
    n.rows(n.src(1))


def diag(n: Nodes) -> None:
    """DIAG: a row becomes the diagonal of a square."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.require((d.n0 == a.n0) & (d.n1 == a.n0) & (a.n1 == 1), "shape of dst")
    n.require(d.ne[:, 2:] == a.ne[:, 2:], "src 0 and dst differ in planes")
    n.rows(a, d)


def diag_mask(n: Nodes) -> None:
    """DIAG_MASK_INF, DIAG_MASK_ZERO: the kernel numbers planes, nb[2] apart."""
    same(n)
    n.typed(F32, n.src(0))
    n.require(n.param(0) >= 0, "negative past")
    d = n.dst
    n.require((d.n3 == 1) | (d.nb[:, 3] == d.nb[:, 2] * d.n2), "planes are not packed")


def cumsum(n: Nodes) -> None:
    """CUMSUM."""
    same(n)
    n.typed(F32, n.src(0))


def tri(n: Nodes) -> None:
    """TRI: one triangle of squares."""
    cumsum(n)
    n.dense(n.src(0))
    kind = n.param(0)
    n.require((kind >= 0) & (kind < TRI_TYPES), "unknown triangle")


def fill(n: Nodes) -> None:
    """FILL."""
    same(n)
    n.typed(F16_F32, n.src(0))


def roll(n: Nodes) -> None:
    """ROLL: shifts stay within the dimension."""
    cumsum(n)
    shifts = np.stack([n.param(i) for i in range(4)], axis=1)
    n.require(np.abs(shifts) < np.maximum(n.dst.ne, 1), "shift is too large")


def arange(n: Nodes) -> None:
    """ARANGE: as many numbers as its parameters say."""
    n.typed(F32, n.dst)
    n.rows(n.dst)
    start, stop, step = (n.float_param(i) for i in range(3))
    with np.errstate(all="ignore"):
        steps = np.ceil((stop - start) / step)
    n.require(n.dst.elements == steps, "shape of dst")


def argsort(n: Nodes) -> None:
    """ARGSORT: rows are numbered, nb[1] apart."""
    a, d = n.src(0), n.dst
    n.typed(F32, a)
    n.typed(I32, d)
    n.same_shape(a, d)
    n.reach(a, d)
    # Rows are sorted where they are, without a look at their ends: an order that
    # changes meanwhile, by the sort itself or by another thread's, leads beyond.
    n.strict(d)
    n.apart(d, a)


def top_k(n: Nodes) -> None:
    """TOP_K: no more than a row has; rows as in ARGSORT."""
    a, d = n.src(0), n.dst
    n.typed(F32, a)
    n.typed(I32, d)
    n.require(d.n0 <= a.n0, "more columns than src 0 has")
    n.require(a.ne[:, 1:] == d.ne[:, 1:], "src 0 and dst differ in rows")
    n.reach(a, d)
