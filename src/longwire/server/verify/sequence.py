"""Rules of ops along a sequence: positions, attention, recurrent states."""

from __future__ import annotations

import numpy as np

from longwire.server.verify.columns import Bools, Ints, Nodes, Operand
from longwire.server.verify.kinds import F16, F16_F32, F32, I32, TO_FLOAT, VEC_DOT

_MROPE, _VISION = 8, 24
_ROPE_MODES = (0, 2, 8, 24, 40)
"""NORMAL, NEOX, MROPE, VISION, IMROPE."""

_ROUNDS = 4096
"""Models normalise some twenty times; the kernel would go on for 2^31."""

_STATE_STEP = 64
"""RWKV_WKV7 works in steps of up to 64 floats (AVX-512) without a rest."""


def rope(n: Nodes) -> None:
    """ROPE, ROPE_BACK: a position per token, four where sections are used."""
    a, pos, d = n.src(0), n.src(1), n.dst
    n_dims, mode, offset = n.param(1), n.param(2), n.param(15)
    n.typed(F16_F32, a)
    n.same_type(a, d)
    n.same_shape(a, d)
    n.rows(a, d)
    n.typed(I32, pos)
    n.dense(pos)
    n.require(np.isin(mode, _ROPE_MODES), "unknown mode")
    n.require(a.n0 % 2 == 0, "odd row")
    n.require((n_dims >= 2) & (n_dims % 2 == 0), "bad number of dimensions")
    n.require((offset >= 0) & (offset % 2 == 0), "bad offset")
    n.require(n_dims + offset <= a.n0, "dimensions beyond the row")
    sections = (mode & _MROPE) != 0
    n.require(pos.elements == a.n2 * np.where(sections, 4, 1), "not a position each")
    vision = mode == _VISION
    n.require(~vision | ((n_dims * 2 == a.n0) & (offset == 0)), "bad vision size")
    parts = np.stack([n.param(i) for i in range(11, 15)], axis=1)
    total = parts.sum(axis=1)
    n.require(
        ~sections | ((parts >= 0).all(axis=1) & (total > 0) & (total <= a.n0)),
        "bad sections",
    )
    scaled = n.having(2)
    if scaled:
        factors, a = scaled.src(2), scaled.src(0)
        scaled.typed(F32, factors)
        scaled.filled(factors)
        scaled.rows(factors)
        scaled.require(factors.n0 * 2 >= scaled.param(1), "too few factors")
        # The CPU reads a factor per pair of the row, also for pairs it leaves alone.
        short = scaled.where(factors.n0 * 2 < a.n0)
        if short:
            factors, a = short.src(2), short.src(0)
            short.require(factors.room() >= a.n0 * 2, "too few factors")


def flash_attn_ext(n: Nodes) -> None:
    """FLASH_ATTN_EXT: q, k, v; a mask (src 3) and sinks (src 4) may be there."""
    q, k, v, d = n.src(0), n.src(1), n.src(2), n.dst
    n.typed(F32, q, d)
    n.typed(VEC_DOT, k)
    n.typed(TO_FLOAT | F32, v)
    n.require(q.n0 == k.n0, "q and k differ in columns")
    n.require(k.n1 == v.n1, "k and v differ in rows")
    for t in (k, v):
        n.divides(t.n2, q.n2, f"{t} does not broadcast to q")
        n.divides(t.n3, q.n3, f"{t} does not broadcast to q")
    n.require(d.ne == np.stack([v.n0, q.n2, q.n1, q.n3], axis=1), "shape of dst")
    n.rows(q, k, v)
    # Heads are written nb[1] apart and nb[1] long, whatever ne[1] is.
    n.strict(d)
    masked = n.having(3)
    if masked:
        q, k, mask = masked.src(0), masked.src(1), masked.src(3)
        masked.typed(F16, mask)
        masked.rows(mask)
        masked.require(mask.n0 >= k.n1, "mask has too few columns")
        masked.require(mask.n1 >= q.n1, "mask has too few rows")
        masked.divides(mask.n2, q.n2, "mask does not broadcast to q")
        masked.divides(mask.n3, q.n3, "mask does not broadcast to q")
    sunk = n.having(4)
    if sunk:
        sinks = sunk.src(4)
        sunk.typed(F32, sinks)
        sunk.filled(sinks)
        sunk.rows(sinks)
        sunk.require(sinks.n0 == sunk.src(0).n2, "sinks are not one per head")


def flash_attn_back(n: Nodes) -> None:
    """FLASH_ATTN_BACK: ggml itself no longer builds it."""
    n.refuse(0, "not supported")


def lightning_indexer(n: Nodes) -> None:
    """LIGHTNING_INDEXER: q, k, weights, mask."""
    q, k, w, mask, d = n.src(0), n.src(1), n.src(2), n.src(3), n.dst
    n.typed(F32, q, w, d)
    n.typed(TO_FLOAT | F32, k)
    n.typed(F16, mask)
    n.require(q.n0 == k.n0, "q and k differ in columns")
    n.require((k.n1 == 1) & (w.n2 == 1) & (mask.n2 == 1), "a dimension is not 1")
    n.require((q.n1 == w.n0) & (q.n2 == w.n1), "q and the weights differ")
    n.require((mask.n0 == k.n2) & (mask.n1 == q.n2), "the mask does not fit")
    n.require((q.n3 == k.n3) & (q.n3 == w.n3), "sources differ in streams")
    n.divides(mask.n3, w.n3, "the mask does not fit")
    shape = np.stack([k.n2, q.n2, np.ones_like(q.n2), q.n3], axis=1)
    n.require(d.ne == shape, "shape of dst")
    n.rows(q, k, w, mask, d)


def ssm_conv(n: Nodes) -> None:
    """SSM_CONV: a window of src 1's width moves along the rows of src 0."""
    a, c, d = n.src(0), n.src(1), n.dst
    n.typed(F32, a, c, d)
    n.require((a.n3 == 1) & (d.n3 == 1) & (c.n2 == 1) & (c.n3 == 1), "a dimension")
    n.require((a.n1 == c.n1) & (d.n0 == c.n1), "sources differ in channels")
    n.require(a.n0 == c.n0 + d.n1 - 1, "src 0 has not a window per token")
    n.require(a.n2 == d.n2, "src 0 and dst differ in sequences")
    n.rows(d)
    n.dense(c)
    n.require(
        (a.nb[:, 0] == a.size) & (a.nb[:, 1] == a.n0 * a.size),
        "channels of src 0 are not packed",
    )


def ssm_scan(n: Nodes) -> None:
    """SSM_SCAN: s, x, dt, A, B, C, ids; the ids choose states (`indices`)."""
    s, x, dt, a = n.src(0), n.src(1), n.src(2), n.src(3)
    b, c, ids, d = n.src(4), n.src(5), n.src(6), n.dst
    n.typed(F32, s, x, dt, a, b, c, d)
    n.typed(I32, ids)
    k = n.param(0)
    n.require(k >= 1, "no states")
    n.require((s.n1 == x.n0) & (s.n2 == x.n1), "s and x differ in heads")
    n.require(dt.ne[:, :3] == x.ne[:, 1:], "dt and x differ")
    n.require(dt.n3 == 1, "dt has a fourth dimension")
    n.require((b.n0 == s.n0) & (b.n2 == x.n2) & (b.n3 == x.n3), "B does not fit")
    n.same_shape(b, c)
    n.divides(b.n1, x.n1, "groups do not divide the heads")
    n.require((a.n1 == x.n1) & (a.n2 == 1) & (a.n3 == 1), "A does not fit")
    n.require((a.n0 == 1) | ((a.n0 == s.n0) & (k == 1)), "A does not fit")
    n.require((ids.n0 == x.n3) & (ids.elements == ids.n0), "not an id per sequence")
    states = k * s.n0 * s.n1 * s.n2 * ids.n0
    n.require(d.elements == x.elements + states, "dst has not room for all states")
    n.dense(dt, a, ids, d)
    # Strides of s place the states in dst, too.
    n.strict(s)
    for t in (x, b, c):
        n.require(
            (t.nb[:, 0] == t.size) & (t.nb[:, 1] == t.n0 * t.size),
            f"heads of {t} are not packed",
        )


def _recurrence(
    n: Nodes, inputs: list[Operand], like: Operand, state: Operand
) -> tuple[Ints, Ints]:
    """Inputs of shape (S, H, tokens) and a state for each sequence."""
    d = n.dst
    size, heads, tokens, seqs = like.n0, like.n1, like.n2, state.n1
    n.typed(F32, *inputs, state, d)
    for t in inputs:
        n.require(t.ne[:, :3] == like.ne[:, :3], f"shape of {t}")
        n.require(t.n3 == 1, f"shape of {t}")
    n.require(heads > 0, "no heads")
    n.divides(seqs, tokens, "sequences differ in tokens")
    n.require(state.elements == size * size * heads * seqs, "size of the state")
    n.require(
        (d.n0 == size * heads) & (d.elements == d.n0 * (tokens + size * seqs)),
        "shape of dst",
    )
    n.dense(*inputs, state, d)
    return size, heads


def rwkv_wkv6(n: Nodes) -> None:
    """RWKV_WKV6: k, v, r, tf, td, state."""
    k, factor = n.src(0), n.src(3)
    inputs = [k, n.src(1), n.src(2), n.src(4)]
    size, heads = _recurrence(n, inputs, k, n.src(5))
    n.typed(F32, factor)
    n.require(factor.elements >= size * heads, "shape of src 3")
    n.dense(factor)


def gated_linear_attn(n: Nodes) -> None:
    """GATED_LINEAR_ATTN: k, v, q, g, state."""
    k = n.src(0)
    _recurrence(n, [k, n.src(1), n.src(2), n.src(3)], k, n.src(4))


def rwkv_wkv7(n: Nodes) -> None:
    """RWKV_WKV7: r, w, k, v, a, b, state. Stricter than ggml on the head size."""
    inputs = [n.src(i) for i in range(6)]
    size, _ = _recurrence(n, inputs, n.src(2), n.src(6))
    n.require(size % _STATE_STEP == 0, f"head size is no multiple of {_STATE_STEP}")


def gated_delta_net(n: Nodes) -> None:
    """GATED_DELTA_NET: q, k, v, g, beta, state; the last K states are kept."""
    q, k, v = n.src(0), n.src(1), n.src(2)
    g, beta, state, d = n.src(3), n.src(4), n.src(5), n.dst
    kept = n.param(0)
    n.typed(F32, q, k, v, g, beta, state, d)
    n.require(kept >= 1, "no states")
    for t in (q, k):
        n.require((t.n0 == v.n0) & (t.n2 == v.n2) & (t.n1 > 0), f"shape of {t}")
        n.divides(t.n3, v.n3, f"{t} does not broadcast to v")
    n.require((g.n0 == 1) | (g.n0 == v.n0), "shape of g")
    n.require(beta.n0 == 1, "shape of beta")
    for t in (g, beta):
        n.require(t.ne[:, 1:] == v.ne[:, 1:], f"shape of {t}")
    square = np.stack([v.n0, v.n0, v.n1, v.n3], axis=1)
    n.require(state.ne == square, "shape of the state")
    tokens = v.n2 * v.n3 + kept * v.n0 * v.n3
    n.require((d.n0 == v.n0 * v.n1) & (d.elements == d.n0 * tokens), "shape of dst")
    n.rows(q, k, v)
    n.dense(g, beta, state, d)


def _flags(*conditions: Bools) -> Bools:
    good: Bools = np.logical_and.reduce(conditions)
    return good


def dsv4_hc_comb(n: Nodes) -> None:
    """DSV4_HC_COMB: 24 mixes per token to a 4 x 4 matrix."""
    mixes, scale, base, d = n.src(0), n.src(1), n.src(2), n.dst
    n.typed(F32, mixes, scale, base, d)
    n.require(
        _flags(mixes.n0 == 24, mixes.n2 == 1, mixes.n3 == 1), "shape of the mixes"
    )
    n.require((scale.n0 >= 3) & (scale.elements == scale.n0), "shape of the scale")
    n.require((base.n0 == 24) & (base.elements == 24), "shape of the base")
    n.require(_flags(d.n0 == 4, d.n1 == 4, d.n2 == mixes.n1, d.n3 == 1), "shape of dst")
    rounds = n.param(1)
    n.require((rounds > 0) & (rounds <= _ROUNDS), "bad number of iterations")


def dsv4_hc_pre(n: Nodes) -> None:
    """DSV4_HC_PRE: weighted sum over streams; gated, each element has its weight."""
    x, w, d = n.src(0), n.src(1), n.dst
    n.typed(F32, x, w, d)
    n.require(x.n3 == 1, "shape of x")
    gated = n.param(1) != 0
    own = (w.ne == x.ne).all(axis=1)
    shared = _flags(w.n0 == x.n1, w.n1 == x.n2, w.n2 == 1, w.n3 == 1)
    n.require(np.where(gated, own, shared), "shape of the weights")
    n.require(_flags(d.n0 == x.n0, d.n1 == x.n2, d.n2 == 1, d.n3 == 1), "shape of dst")


def dsv4_hc_post(n: Nodes) -> None:
    """DSV4_HC_POST: x, residual, post; a combination (src 3) may be there."""
    x, residual, post, d = n.src(0), n.src(1), n.src(2), n.dst
    n.typed(F32, x, residual, post, d)
    n.require((x.n2 == 1) & (x.n3 == 1), "shape of x")
    n.require(
        _flags(residual.n0 == x.n0, residual.n2 == x.n1, residual.n3 == 1),
        "shape of the residual",
    )
    n.require(
        _flags(post.n0 == residual.n1, post.n1 == x.n1, post.n2 == 1, post.n3 == 1),
        "shape of post",
    )
    n.same_shape(residual, d)
    combined = n.having(3)
    if combined:
        comb, residual = combined.src(3), combined.src(1)
        combined.typed(F32, comb)
        combined.require(
            _flags(
                comb.n0 == residual.n1,
                comb.n1 == residual.n1,
                comb.n2 == residual.n2,
                comb.n3 == 1,
            ),
            "shape of the combination",
        )
