"""Rules of ops over planes: convolution, pooling, padding, windows."""

from __future__ import annotations

import numpy as np

from longwire.server.verify.columns import Bools, Ints, Nodes, Operand
from longwire.server.verify.kinds import BF16, F16, F16_F32, F32, FLOATS

_POOLS = 2
_STRIDE_LIMIT = 1 << 31
_SIZE_LIMIT = 1 << 22
"""Up to here a 32-bit float tells neighbouring coordinates apart."""


def _slid(size: Ints, kernel: Ints, stride: Ints, pad: Ints, dilation: Ints) -> Ints:
    """How many places a kernel has on a side of that size."""
    room = size + 2 * pad - dilation * (kernel - 1) - 1
    return np.where(room >= 0, room // np.maximum(stride, 1) + 1, 0)


def _packed_planes(t: Operand) -> Bools:
    """Rows of a plane follow each other; planes may lie anywhere."""
    nb = t.nb
    good: Bools = (nb[:, 0] == t.size) & ((nb[:, 1] == t.n0 * t.size) | (t.n1 == 1))
    return good


def _small_strides(n: Nodes, *operands: Operand) -> None:
    for t in operands:
        n.require(t.nb < _STRIDE_LIMIT, f"stride of {t} is over 2 GiB")


def _parameters(n: Nodes, strides: int, pads: int, dilations: int, axes: int) -> None:
    """Stride and dilation positive, padding not negative, on each used axis."""
    for i in range(axes):
        n.require(n.param(strides + i) > 0, "stride is not positive")
        n.require(n.param(pads + i) >= 0, "padding is negative")
        n.require(n.param(dilations + i) > 0, "dilation is not positive")


def im2col(n: Nodes) -> None:
    """IM2COL: src 0 gives the kernel's shape, src 1 the image."""
    k, a, d = n.src(0), n.src(1), n.dst
    n.typed(F16_F32, a, d)
    n.require(F16[d.type] | F32[a.type], "types of src 1 and dst")
    n.dense(d)
    n.require(_packed_planes(a), "planes of src 1 are not packed")
    _small_strides(n, a)
    plane = n.param(6) == 1
    _parameters(n, 0, 2, 4, 1)
    width = _slid(a.n0, k.n0, n.param(0), n.param(2), n.param(4))
    flat = n.where(~plane)
    if flat:
        k1, a1, d1 = flat.src(0), flat.src(1), flat.dst
        flat.require((a1.n1 == k1.n1) & (a1.n3 == 1), "src 0 and src 1 differ")
        flat.require((d1.n0 == k1.n0 * k1.n1) & (d1.n2 == a1.n2), "shape of dst")
        flat.require(d1.n3 == 1, "shape of dst")
    full = n.where(plane)
    if full:
        k2, a2, d2 = full.src(0), full.src(1), full.dst
        for i in (1, 3, 5):
            full.require(full.param(i) >= (0 if i == 3 else 1), "bad parameter")
        full.require(a2.n2 == k2.n2, "src 0 and src 1 differ in channels")
        height = _slid(a2.n1, k2.n1, full.param(1), full.param(3), full.param(5))
        full.require(d2.n0 == k2.n0 * k2.n1 * k2.n2, "shape of dst")
        full.require((d2.n2 == height) & (d2.n3 == a2.n3), "shape of dst")
    n.require(d.n1 == width, "shape of dst")


def im2col_back(n: Nodes) -> None:
    """IM2COL_BACK: columns (src 0) summed up in an image of src 1's kernel."""
    a, k, d = n.src(0), n.src(1), n.dst
    n.typed(F32, a, d)
    n.typed(F16_F32, k)
    n.dense(a, d)
    _small_strides(n, d)
    plane = n.param(6) == 1
    n.require(n.param(0) > 0, "stride is not positive")
    n.require((n.param(1) > 0) | ~plane, "stride is not positive")
    channels = np.where(plane, d.n2, d.n1)
    images = np.where(plane, d.n3, d.n2)
    height = np.where(plane, k.n1, 1)
    n.require(plane | (d.n3 == 1), "shape of dst")
    n.require(a.n0 == channels * height * k.n0, "shape of src 0")
    n.require(np.where(plane, a.n3, a.n2) >= images, "src 0 has too few images")


def im2col_3d(n: Nodes) -> None:
    """IM2COL_3D: channels and images share the fourth dimension of src 1."""
    k, a, d = n.src(0), n.src(1), n.dst
    channels = n.param(9)
    n.typed(F32, a)
    n.typed(F16_F32, d)
    n.dense(d)
    _parameters(n, 0, 3, 6, 3)
    n.require(channels > 0, "no channels")
    channels = np.maximum(channels, 1)
    images = a.n3 // channels
    n.require(images > 0, "no images")
    sides = [
        _slid(a.ne[:, i], k.ne[:, i], n.param(i), n.param(3 + i), n.param(6 + i))
        for i in range(3)
    ]
    columns = k.n0 * k.n1 * k.n2 * channels
    shape = np.stack([columns, sides[0], sides[1], sides[2] * images], axis=1)
    n.require(d.ne == shape, "shape of dst")


def col2im_1d(n: Nodes) -> None:
    """COL2IM_1D: columns (kernel x channels) summed up in a signal."""
    a, d = n.src(0), n.dst
    stride, channels, pad = n.param(0), n.param(1), n.param(2)
    n.typed(FLOATS, a)
    n.same_type(a, d)
    n.dense(a, d)
    n.require((a.n2 == 1) & (a.n3 == 1), "src 0 is no matrix")
    n.require((stride > 0) & (channels > 0) & (pad >= 0), "bad parameter")
    kernel = a.n0 // np.maximum(channels, 1)
    n.require(a.n0 == kernel * channels, "src 0 has not all channels")
    n.require(d.n0 == (a.n1 - 1) * stride + kernel - 2 * pad, "shape of dst")
    n.require((d.n1 == channels) & (d.n2 == 1) & (d.n3 == 1), "shape of dst")


def conv_transpose_1d(n: Nodes) -> None:
    """CONV_TRANSPOSE_1D: kernel (src 0) K x out x in, signal (src 1) L x in."""
    k, a, d = n.src(0), n.src(1), n.dst
    n.typed(F16_F32, k)
    n.typed(F32, a, d)
    n.rows(k, a, d)
    n.require(n.param(0) > 0, "stride is not positive")
    n.require((a.n2 == 1) & (a.n3 == 1) & (k.n3 == 1), "src 1 is no matrix")
    n.require(k.n2 == a.n1, "src 0 and src 1 differ in channels")
    n.require(d.n0 == (a.n0 - 1) * n.param(0) + k.n0, "shape of dst")
    n.require((d.n1 == k.n1) & (d.n2 == 1) & (d.n3 == 1), "shape of dst")


def _sides(n: Nodes, axes: int) -> None:
    """dst is as wide, high (and deep) as the kernel has places."""
    k, a, d = n.src(0), n.src(1), n.dst
    _parameters(n, 0, axes, 2 * axes, axes)
    for i in range(axes):
        places = _slid(
            a.ne[:, i],
            k.ne[:, i],
            n.param(i),
            n.param(axes + i),
            n.param(2 * axes + i),
        )
        n.require(d.ne[:, i] == places, "shape of dst")


def conv_2d(n: Nodes) -> None:
    """CONV_2D."""
    k, a, d = n.src(0), n.src(1), n.dst
    n.typed(F16_F32, k)
    n.typed(F32, a, d)
    n.dense(k)
    _sides(n, 2)
    n.require(k.n2 == a.n2, "src 0 and src 1 differ in channels")
    n.require((d.n2 == k.n3) & (d.n3 == a.n3), "shape of dst")


def conv_3d(n: Nodes) -> None:
    """CONV_3D: channels and images share the fourth dimension."""
    k, a, d = n.src(0), n.src(1), n.dst
    channels, images, out = n.param(9), n.param(10), n.param(11)
    n.typed(F16_F32, k)
    n.typed(F32, a, d)
    n.dense(k)
    _sides(n, 3)
    n.require((channels > 0) & (images > 0) & (out > 0), "bad parameter")
    n.require(k.n3 == channels * out, "src 0 has not all channels")
    n.require(a.n3 == channels * images, "src 1 has not all channels")
    n.require(d.n3 == out * images, "shape of dst")


def conv_2d_dw(n: Nodes) -> None:
    """CONV_2D_DW: a plane of the kernel per channel; elements are read in order."""
    k, a, d = n.src(0), n.src(1), n.dst
    n.typed(F16_F32, k)
    n.typed(F32, a, d)
    _sides(n, 2)
    n.require((k.n2 == 1) & (k.n3 == a.n2), "src 0 and src 1 differ in channels")
    n.require(d.ne[:, 2:] == a.ne[:, 2:], "shape of dst")
    n.flat(k, a, d)


def conv_transpose_2d(n: Nodes) -> None:
    """CONV_TRANSPOSE_2D."""
    k, a, d = n.src(0), n.src(1), n.dst
    stride = n.param(0)
    n.typed(F16_F32, k)
    n.typed(F32, a, d)
    n.rows(a)
    n.dense(d)
    n.require(_packed_planes(k), "planes of src 0 are not packed")
    n.require(stride > 0, "stride is not positive")
    n.require(k.n3 == a.n2, "src 0 and src 1 differ in channels")
    for i in range(2):
        side = (a.ne[:, i] - 1) * stride + k.ne[:, i]
        n.require(d.ne[:, i] == side, "shape of dst")
    n.require((d.n2 == k.n2) & (d.n3 == a.n3), "shape of dst")


def _pool(n: Nodes, image: Operand, axes: int) -> None:
    """Kind, kernel, stride and padding on each axis."""
    kind = n.param(0)
    n.require((kind >= 0) & (kind < _POOLS), "unknown pooling")
    for i in range(axes):
        kernel, stride = n.param(1 + i), n.param(1 + axes + i)
        pad = n.param(1 + 2 * axes + i)
        n.require((kernel > 0) & (stride > 0), "kernel or stride is not positive")
        n.require(pad >= 0, "padding is negative")
        # One more than the padding, which ggml may have cut off.
        side = image.ne[:, i] + 2 * (pad + 1)
        n.require(kernel < side + stride, "kernel is larger than the image")


def pool_1d(n: Nodes) -> None:
    """POOL_1D: rows are numbered, nb[1] apart."""
    a, d = n.src(0), n.dst
    n.typed(F16_F32, a)
    n.typed(F32, d)
    _pool(n, a, 1)
    pad = n.param(3)
    ones = np.ones_like(pad)
    n.require(d.n0 == _slid(a.n0, n.param(1), n.param(2), pad, ones), "shape of dst")
    n.require(a.ne[:, 1:] == d.ne[:, 1:], "src 0 and dst differ in rows")
    n.reach(a, d)


def pool_2d(n: Nodes) -> None:
    """POOL_2D: the kernel steps from plane to plane up to the tensor's end.

    Padding is a float that ggml cuts off, so the sides of dst are not recomputed;
    the kernel takes them as they are.
    """
    a, d = n.src(0), n.dst
    n.typed(F16_F32, a)
    n.typed(F32, d)
    _pool(n, a, 2)
    n.require(a.ne[:, 2:] == d.ne[:, 2:], "src 0 and dst differ in planes")
    n.strict(a)
    n.dense(d)


def pool_2d_back(n: Nodes) -> None:
    """POOL_2D_BACK: as POOL_2D, from src 0 to dst, which is what src 1 is."""
    a, f, d = n.src(0), n.src(1), n.dst
    n.typed(F32, a)
    n.typed(F16_F32, d)
    n.same_type(f, d)
    n.same_shape(f, d)
    _pool(n, d, 2)
    n.require(a.ne[:, 2:] == d.ne[:, 2:], "src 0 and dst differ in planes")
    n.strict(f, d)
    n.dense(a)


def upscale(n: Nodes) -> None:
    """UPSCALE: coordinates are computed as floats."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.require(a.ne > 0, "src 0 is empty")
    n.require((a.ne < _SIZE_LIMIT) & (d.ne < _SIZE_LIMIT), "size over 4 million")


def pad(n: Nodes) -> None:
    """PAD: zeros on both sides, or src 0 again (ninth parameter)."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    left = np.stack([n.param(2 * i) for i in range(4)], axis=1)
    right = np.stack([n.param(2 * i + 1) for i in range(4)], axis=1)
    n.require((left >= 0) & (right >= 0), "padding is negative")
    n.require(d.ne == a.ne + left + right, "shape of dst")
    n.flat(d)
    circular = (n.param(8) != 0)[:, None]
    n.require(~circular | ((left <= a.ne) & (a.ne > 0)), "padding is over a period")


def pad_reflect_1d(n: Nodes) -> None:
    """PAD_REFLECT_1D: less than a row on each side."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.rows(a, d)
    for i in range(2):
        n.require((n.param(i) >= 0) & (n.param(i) < a.n0), "padding is over the row")
    n.require(d.n0 == a.n0 + n.param(0) + n.param(1), "shape of dst")
    n.require(a.ne[:, 1:] == d.ne[:, 1:], "src 0 and dst differ in rows")


def timestep_embedding(n: Nodes) -> None:
    """TIMESTEP_EMBEDDING: a row per step."""
    a, d = n.src(0), n.dst
    n.typed(F32, a, d)
    n.rows(a, d)
    n.require((n.param(0) >= 1) & (d.n0 == n.param(0)), "shape of dst")
    n.require((d.n1 == a.n0) & (d.n2 == 1) & (d.n3 == 1), "shape of dst")
    n.filled(a)


def win_part(n: Nodes) -> None:
    """WIN_PART: windows of w x w; elements are read and written in order."""
    a, d = n.src(0), n.dst
    across, down, w = n.param(0), n.param(1), n.param(2)
    n.typed(F32, a, d)
    n.dense(a, d)
    n.require((across > 0) & (down > 0) & (w > 0), "bad parameter")
    n.require(a.n3 == 1, "src 0 has a fourth dimension")
    n.require((d.n0 == a.n0) & (d.n1 == w) & (d.n2 == w), "shape of dst")
    n.require(d.n3 == across * down, "shape of dst")


def win_unpart(n: Nodes) -> None:
    """WIN_UNPART: the other way."""
    a, d = n.src(0), n.dst
    w = n.param(0)
    n.typed(F32, a, d)
    n.dense(a, d)
    n.require(w > 0, "bad parameter")
    w = np.maximum(w, 1)
    n.require((d.n0 == a.n0) & (a.n1 == w) & (a.n2 == w), "shape of src 0")
    n.require((-(-d.n1 // w)) * (-(-d.n2 // w)) <= a.n3, "src 0 has too few windows")
    n.require(d.n3 == 1, "dst has a fourth dimension")


def get_rel_pos(n: Nodes) -> None:
    """GET_REL_POS: row w - 1 + i - j of src 0 for each i and j."""
    a, d = n.src(0), n.dst
    n.typed(F16 | BF16, a)
    n.typed(F16, d)
    n.filled(a)
    n.dense(a, d)
    n.require((d.n0 == a.n0) & (d.n1 == d.n2) & (d.n3 == 1), "shape of dst")
    n.require(a.n1 == 2 * d.n1 - 1, "shape of src 0")


def add_rel_pos(n: Nodes) -> None:
    """ADD_REL_POS: a, and one position tensor for each direction."""
    a, w, h, d = n.src(0), n.src(1), n.src(2), n.dst
    n.typed(F32, a, w, h, d)
    n.same_shape(a, d)
    n.same_shape(w, h)
    n.dense(a, w, h, d)
    n.require(w.n0 * w.n0 == a.n0, "src 0 and src 1 differ")
    n.require((w.n1 * w.n2 == a.n1) & (w.n3 == a.n2), "src 0 and src 1 differ")
    n.require(a.n3 == 1, "src 0 has a fourth dimension")
