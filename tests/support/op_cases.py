"""Every op as ggml's own constructors build it, small and legal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from longwire.native.abi import P
from support.ops import Case, Maker

__all__ = ["CASES"]

F32, F16, Q4_0, Q8_0, Q4_K, I32, I64, BF16 = 0, 1, 2, 8, 12, 26, 27, 30


def _cases() -> Iterator[Case]:
    def c(name: str, make: Callable[[Maker], int]) -> Case:
        return Case(name, make)

    yield c("DUP", lambda g: g.dup(g.new(8, 3)))
    yield c("CPY f32 to f16", lambda g: g.cpy(g.new(8, 3), g.new(24, type=F16)))
    yield c("CPY f32 to q8_0", lambda g: g.cpy(g.new(64, 3), g.new(64, 3, type=Q8_0)))
    yield c("CPY q4_0 to f32", lambda g: g.cast(g.new(64, 3, type=Q4_0), F32))
    yield c("CPY transposed", lambda g: g.cpy(g.transpose(g.new(8, 3)), g.new(3, 8)))
    yield c("CPY i32 to f32", lambda g: g.cast(g.ids(9, 8, 2), F32))
    yield c("CONT", lambda g: g.cont(g.transpose(g.new(8, 3))))
    yield c("CONT permuted", lambda g: g.cont(g.permute(g.new(8, 3, 2), 0, 2, 1, 3)))
    for name in ("add", "sub", "mul", "div"):
        op = name.upper()
        yield c(op, lambda g, n=name: getattr(g, n)(g.new(8, 3, 2), g.new(8, 3, 2)))
        yield c(
            f"{op} broadcast",
            lambda g, n=name: getattr(g, n)(g.new(8, 4, 2), g.new(1, 2)),
        )
    yield c("ADD quantised", lambda g: g.add(g.new(64, 2, type=Q8_0), g.new(64, 2)))
    yield c("ADD in place", lambda g: g.add_inplace(g.new(8, 3), g.new(8)))
    yield c("ADD f16", lambda g: g.add_cast(g.new(8, 3, type=F16), g.new(8), F32))
    yield c(
        "ADD strided source",
        lambda g: g.add(g.new(8, 3), g.transpose(g.new(3, 8))),
    )
    yield c("ADD_ID", lambda g: g.add_id(g.new(8, 2, 3), g.new(8, 4), g.ids(4, 2, 3)))
    yield c("ADD1", lambda g: g.add1(g.new(8, 3), g.new(1)))
    for name in ("acc", "set"):
        yield c(
            name.upper(),
            lambda g, n=name: getattr(g, n)(
                g.new(8, 4, 2), g.new(4, 2, 1), 32, 128, 256, 36
            ),
        )
    for name in ("sqr", "sqrt", "log", "sin", "cos"):
        yield c(name.upper(), lambda g, n=name: getattr(g, n)(g.new(8, 3)))
    yield c("SUM", lambda g: g.sum(g.new(8, 3)))
    yield c("SUM_ROWS", lambda g: g.sum_rows(g.new(8, 3, 2)))
    yield c("CUMSUM", lambda g: g.cumsum(g.new(8, 3, 2)))
    yield c("MEAN", lambda g: g.mean(g.new(8, 3, 2)))
    yield c("ARGMAX", lambda g: g.argmax(g.new(8, 3)))
    yield c("COUNT_EQUAL", lambda g: g.count_equal(g.ids(9, 8, 3), g.ids(5, 8, 3)))
    yield c("REPEAT", lambda g: g.repeat(g.new(4, 1, 2), g.new(8, 3, 2)))
    yield c("REPEAT_BACK", lambda g: g.repeat_back(g.new(8, 3, 2), g.new(4, 1, 2)))
    for dim in range(4):
        yield c(
            f"CONCAT {dim}",
            lambda g, d=dim: g.concat(
                g.new(*(3 if i == d else 2 for i in range(4))), g.new(2, 2, 2, 2), d
            ),
        )
    yield c(
        "CONCAT quantised",
        lambda g: g.concat(g.new(32, 2, type=Q8_0), g.new(32, 3, type=Q8_0), 1),
    )
    yield c("SILU_BACK", lambda g: g.silu_back(g.new(8, 3), g.new(8, 3)))
    yield c("NORM", lambda g: g.norm(g.new(8, 3, 2), 1e-5))
    yield c("RMS_NORM", lambda g: g.rms_norm(g.new(8, 3, 2), 1e-5))
    yield c(
        "RMS_NORM fused",
        lambda g: g.mul(g.rms_norm(g.new(8, 3, 2), 1e-5), g.new(8)),
    )
    yield c(
        "RMS_NORM_BACK",
        lambda g: g.rms_norm_back(g.new(8, 3), g.new(8, 3), 1e-5),
    )
    yield c("GROUP_NORM", lambda g: g.group_norm(g.new(4, 3, 6), 2, 1e-5))
    yield c("L2_NORM", lambda g: g.l2_norm(g.new(8, 3), 1e-5))
    for kind, name in ((F32, "f32"), (F16, "f16"), (Q4_0, "q4_0"), (Q4_K, "q4_K")):
        yield c(
            f"MUL_MAT {name}",
            lambda g, k=kind: g.mul_mat(g.new(256, 5, type=k), g.new(256, 9)),
        )
    yield c("MUL_MAT broadcast", lambda g: g.mul_mat(g.new(8, 3, 2), g.new(8, 5, 4)))
    yield c(
        "MUL_MAT permuted",
        lambda g: g.mul_mat(
            g.permute(g.new(8, 2, 3, type=F16), 0, 2, 1, 3),
            g.permute(g.new(8, 2, 5), 0, 2, 1, 3),
        ),
    )
    yield c(
        "MUL_MAT_ID",
        lambda g: g.mul_mat_id(g.new(8, 5, 4), g.new(8, 1, 3), g.ids(4, 2, 3)),
    )
    yield c(
        "MUL_MAT_ID computed",
        lambda g: g.mul_mat_id(
            g.new(64, 5, 4, type=Q4_0),
            g.new(64, 1, 3),
            g.argsort_top_k(g.new(4, 3), 2),
        ),
    )
    yield c(
        "MUL_MAT_ID scaled",
        lambda g: g.mul_mat_id(
            g.new(8, 5, 4),
            g.new(8, 2, 3),
            g.cast(g.scale(g.cast(g.argsort_top_k(g.new(8, 3), 2), F32), 0.5), I32),
        ),
    )
    yield c(
        "MUL_MAT_ID by table",
        lambda g: g.mul_mat_id(
            g.new(8, 5, 4), g.new(8, 1, 3), g.get_rows(g.ids(4, 2, 9), g.ids(9, 3))
        ),
    )
    yield c("OUT_PROD", lambda g: g.out_prod(g.new(4, 6), g.new(3, 6)))
    yield c(
        "OUT_PROD transposed",
        lambda g: g.out_prod(g.new(4, 6), g.transpose(g.new(6, 3))),
    )
    yield c("SCALE", lambda g: g.scale(g.new(8, 3), 0.5))
    yield c("SCALE bias", lambda g: g.scale_bias(g.new(8, 1, 3), 0.5, 1.0))
    yield c("RESHAPE", lambda g: g.sqr(g.reshape_2d(g.new(8, 3), 6, 4)))
    yield c("VIEW", lambda g: g.sqr(g.view_2d(g.new(8, 6), 4, 3, 64, 16)))
    for kind, name in ((F32, "f32"), (F16, "f16"), (Q8_0, "q8_0"), (BF16, "bf16")):
        yield c(
            f"GET_ROWS {name}",
            lambda g, k=kind: g.get_rows(g.new(64, 5, type=k), g.ids(5, 3)),
        )
    yield c("GET_ROWS i32", lambda g: g.get_rows(g.ids(40, 8, 5), g.ids(5, 3)))
    yield c("GET_ROWS planes", lambda g: g.get_rows(g.new(8, 5, 2), g.ids(5, 3, 2)))
    yield c(
        "GET_ROWS_BACK",
        lambda g: g.get_rows_back(g.new(8, 3), g.ids(5, 3), g.new(8, 5)),
    )
    for kind, name in ((F32, "f32"), (F16, "f16"), (Q8_0, "q8_0")):
        for ids in (I32, I64):
            yield c(
                f"SET_ROWS {name} {'i32' if ids == I32 else 'i64'}",
                lambda g, k=kind, i=ids: g.set_rows(
                    g.new(64, 5, 2, type=k), g.new(64, 3, 2), g.ids(5, 3, 1, type=i)
                ),
            )
    yield c("DIAG", lambda g: g.diag(g.new(5, 1, 2)))
    yield c("DIAG_MASK_INF", lambda g: g.diag_mask_inf(g.new(6, 4, 2), 2))
    yield c("DIAG_MASK_ZERO", lambda g: g.diag_mask_zero(g.new(6, 4, 2), 2))
    yield c("SOFT_MAX", lambda g: g.soft_max(g.new(8, 3, 2)))
    yield c(
        "SOFT_MAX mask",
        lambda g: g.soft_max_ext(g.new(8, 3, 4), g.new(8, 4, 2, type=F16), 0.5, 0.0),
    )

    def sinks(g: Maker) -> int:
        result = g.soft_max_ext(g.new(8, 3, 4), g.new(8, 3), 0.5, 8.0)
        g.soft_max_add_sinks(result, g.new(4))
        return result

    yield c("SOFT_MAX sinks", sinks)
    yield c(
        "SOFT_MAX_BACK",
        lambda g: g.soft_max_ext_back(g.new(8, 3), g.new(8, 3), 0.5, 0.0),
    )
    floats = (1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
    for mode in (0, 2):
        yield c(
            f"ROPE {mode}",
            lambda g, m=mode: g.rope(g.new(8, 2, 3), g.ids(9, 3), 8, m),
        )
    yield c(
        "ROPE factors",
        lambda g: g.rope_ext(g.new(8, 2, 3), g.ids(9, 3), g.new(2), 4, 2, 64, *floats),
    )
    for mode in (8, 24, 40):
        yield c(
            f"ROPE {mode}",
            lambda g, m=mode: g.rope_multi(
                g.new(8, 2, 3),
                g.ids(9, 12),
                None,
                4,
                g.ints(2, 1, 1, 0),
                m,
                64,
                *floats,
            ),
        )
    yield c(
        "ROPE_BACK",
        lambda g: g.rope_ext_back(g.new(8, 2, 3), g.ids(9, 3), None, 8, 2, 64, *floats),
    )
    yield c("CLAMP", lambda g: g.clamp(g.new(8, 3, 2), 0.2, 0.6))
    yield c(
        "CONV_TRANSPOSE_1D",
        lambda g: g.conv_transpose_1d(g.new(3, 2, 4), g.new(5, 4), 2, 0, 1),
    )
    yield c(
        "IM2COL 1d",
        lambda g: g.im2col(
            g.new(3, 4, 5, type=F16), g.new(9, 4, 2), 1, 0, 1, 0, 1, 0, False, F16
        ),
    )
    yield c(
        "IM2COL 2d",
        lambda g: g.im2col(
            g.new(3, 3, 4, 5), g.new(9, 7, 4, 2), 2, 1, 1, 0, 1, 2, True, F32
        ),
    )
    yield c(
        "IM2COL_BACK",
        lambda g: g.im2col_back(
            g.new(36, 5, 5, 2),
            g.new(3, 3, 4, 5, type=F16),
            g.numbers(7, 7, 4, 2),
            *(1, 1, 0, 0, 1, 1),
            True,
        ),
    )
    yield c(
        "IM2COL_3D",
        lambda g: g.im2col_3d(
            g.new(3, 3, 2, 6), g.new(6, 5, 4, 4), 2, *(1, 1, 1, 1, 1, 0, 1, 1, 1), F32
        ),
    )
    yield c("COL2IM_1D", lambda g: g.col2im_1d(g.new(12, 5), 2, 4, 1))
    yield c(
        "CONV_2D",
        lambda g: g.conv_2d_direct(
            g.new(3, 3, 4, 5), g.new(9, 7, 4, 2), 2, 1, 1, 0, 1, 2
        ),
    )
    yield c(
        "CONV_3D",
        lambda g: g.conv_3d_direct(
            g.new(2, 3, 2, 6),
            g.new(6, 5, 4, 4),
            *(1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 2, 3),
        ),
    )
    yield c(
        "CONV_2D_DW",
        lambda g: g.conv_2d_dw_direct(
            g.new(3, 3, 1, 4), g.new(9, 7, 4, 2), 2, 1, 1, 0, 1, 1
        ),
    )
    yield c(
        "CONV_2D_DW channels",
        lambda g: g.conv_2d_dw_direct(
            g.permute(g.new(4, 1, 3, 3), 3, 2, 0, 1),
            g.permute(g.new(4, 9, 7, 2), 2, 0, 1, 3),
            *(1, 1, 1, 1, 1, 1),
        ),
    )
    yield c(
        "CONV_TRANSPOSE_2D",
        lambda g: g.conv_transpose_2d_p0(g.new(3, 3, 5, 4), g.new(4, 3, 4, 2), 2),
    )
    yield c("POOL_1D", lambda g: g.pool_1d(g.new(9, 3), 0, 3, 2, 0))
    yield c("POOL_2D", lambda g: g.pool_2d(g.new(9, 8, 3), 1, 3, 2, 2, 2, 1.0, 0.0))
    yield c(
        "POOL_2D_BACK",
        lambda g: g.pool_2d_back(
            g.new(4, 4, 3), g.new(8, 8, 3), 1, 2, 2, 2, 2, 0.0, 0.0
        ),
    )
    for mode in range(3):
        yield c(f"UPSCALE {mode}", lambda g, m=mode: g.upscale(g.new(5, 4, 3), 2, m))
    yield c(
        "UPSCALE down", lambda g: g.interpolate(g.new(9, 8, 3), 4, 3, 3, 1, 1 | 1 << 8)
    )
    yield c("PAD", lambda g: g.pad_ext(g.new(5, 4, 3), 1, 2, 0, 1, 2, 0, 0, 1))
    yield c(
        "PAD circular",
        lambda g: g.pad_ext_circular(g.new(5, 4, 3), 1, 2, 0, 1, 2, 0, 0, 1),
    )
    yield c("PAD_REFLECT_1D", lambda g: g.pad_reflect_1d(g.new(5, 4), 2, 3))
    yield c("ROLL", lambda g: g.roll(g.new(5, 4, 3), 2, -3, 1, 0))
    yield c("ARANGE", lambda g: g.arange(0.0, 9.0, 2.0))
    yield c("TIMESTEP_EMBEDDING", lambda g: g.timestep_embedding(g.new(3), 8, 100))
    yield c("TIMESTEP_EMBEDDING odd", lambda g: g.timestep_embedding(g.new(3), 7, 100))
    yield c("ARGSORT", lambda g: g.argsort(g.new(9, 3), 1))
    yield c("TOP_K", lambda g: g.top_k(g.new(9, 3), 4))
    yield c("LEAKY_RELU", lambda g: g.leaky_relu(g.new(8, 3), 0.1, False))
    for kind in range(4):
        yield c(f"TRI {kind}", lambda g, k=kind: g.tri(g.new(4, 4, 2), k))
    yield c("FILL", lambda g: g.fill(g.new(8, 3), 2.0))
    for kind, name in ((F16, "f16"), (Q8_0, "q8_0"), (F32, "f32")):
        yield c(
            f"FLASH_ATTN_EXT {name}",
            lambda g, k=kind: g.flash_attn_ext(
                g.permute(g.new(32, 4, 3), 0, 2, 1, 3),
                g.permute(g.new(32, 2, 16, type=k), 0, 2, 1, 3),
                g.permute(g.new(32, 2, 16, type=k), 0, 2, 1, 3),
                g.new(16, 3, type=F16),
                0.2,
                0.0,
                0.0,
            ),
        )

    def sunk(g: Maker) -> int:
        q, k, v = g.new(32, 70, 4), g.new(32, 64, 2), g.new(16, 64, 2)
        result = g.flash_attn_ext(q, k, v, g.new(64, 70, type=F16), 0.2, 0.0, 30.0)
        g.flash_attn_ext_add_sinks(result, g.new(4))
        return result

    yield c("FLASH_ATTN_EXT sinks", sunk)
    yield c("SSM_CONV", lambda g: g.ssm_conv(g.new(7, 6, 2), g.new(4, 6)))

    def scan(g: Maker, width: int) -> int:
        return g.ssm_scan(
            g.new(8, 4, 6, 5),
            g.new(4, 6, 3, 2),
            g.new(6, 3, 2),
            g.new(width, 6),
            g.new(8, 2, 3, 2),
            g.new(8, 2, 3, 2),
            g.ids(5, 2),
            1,
        )

    yield c("SSM_SCAN 2", lambda g: scan(g, 1))
    yield c("SSM_SCAN 1", lambda g: scan(g, 8))
    yield c("WIN_PART", lambda g: g.win_part(g.new(4, 7, 5), 3))
    yield c("WIN_UNPART", lambda g: g.win_unpart(g.new(4, 3, 3, 6), 7, 5, 3))
    yield c("GET_REL_POS", lambda g: g.get_rel_pos(g.new(4, 9, type=F16), 5, 5))
    yield c(
        "ADD_REL_POS",
        lambda g: g.add_rel_pos(g.new(9, 6, 2), g.new(3, 3, 2, 2), g.new(3, 3, 2, 2)),
    )
    head = (64, 2, 6)
    yield c(
        "RWKV_WKV6",
        lambda g: g.rwkv_wkv6(
            *(g.new(*head) for _ in range(3)),
            g.new(64, 2),
            g.new(*head),
            g.new(64 * 64 * 2, 2),
        ),
    )
    yield c(
        "GATED_LINEAR_ATTN",
        lambda g: g.gated_linear_attn(
            *(g.new(*head) for _ in range(4)), g.new(64 * 64 * 2, 2), 0.5
        ),
    )
    yield c(
        "RWKV_WKV7",
        lambda g: g.rwkv_wkv7(*(g.new(*head) for _ in range(6)), g.new(64 * 64 * 2, 2)),
    )
    yield c(
        "SOLVE_TRI",
        lambda g: g.solve_tri(g.new(5, 5, 2), g.new(3, 5, 2), True, True, False),
    )

    def delta(g: Maker, kept: int) -> int:
        return g.gated_delta_net(
            g.new(16, 2, 5, 2),
            g.new(16, 2, 5, 2),
            g.new(16, 4, 5, 2),
            g.new(1, 4, 5, 2),
            g.new(1, 4, 5, 2),
            g.new(16, 16, 4, 2),
            kept,
        )

    yield c("GATED_DELTA_NET", lambda g: delta(g, 1))
    yield c("GATED_DELTA_NET kept", lambda g: delta(g, 3))
    yield c(
        "LIGHTNING_INDEXER",
        lambda g: g.lightning_indexer(
            g.new(32, 4, 3),
            g.new(32, 1, 8, type=F16),
            g.new(4, 3),
            g.new(8, 3, type=F16),
        ),
    )
    yield c(
        "DSV4_HC_COMB",
        lambda g: g.dsv4_hc_comb(g.new(24, 3), g.new(3), g.new(24), 1e-6, 3),
    )
    yield c("DSV4_HC_PRE", lambda g: g.dsv4_hc_pre(g.new(8, 4, 3), g.new(4, 3)))
    yield c(
        "DSV4_HC_PRE gated",
        lambda g: g.dsv4_hc_pre_gated(g.new(8, 4, 3), g.new(8, 4, 3), 0.5),
    )
    yield c(
        "DSV4_HC_POST",
        lambda g: g.dsv4_hc_post(
            g.new(8, 3), g.new(8, 4, 3), g.new(4, 3), g.new(4, 4, 3)
        ),
    )
    for kind in range(22):
        if kind != 17:
            yield c(f"UNARY {kind}", lambda g, k=kind: g.unary(g.new(8, 3), k))
    yield c("UNARY xielu", lambda g: g.xielu(g.new(8, 3), 0.1, 0.2, 0.5, 1e-6))
    yield c("UNARY f16", lambda g: g.unary(g.new(8, 3, type=F16), 10))
    yield c(
        "CROSS_ENTROPY_LOSS", lambda g: g.cross_entropy_loss(g.new(8, 3), g.new(8, 3))
    )
    yield c(
        "CROSS_ENTROPY_LOSS_BACK",
        lambda g: g.cross_entropy_loss_back(g.new(1), g.new(8, 3), g.new(8, 3)),
    )

    def weights(g: Maker, *ne: int) -> int:
        tensor = g.new(*ne)
        g.ggml.library.declare({"ggml_set_param": (None, P)})
        g.ggml.library.ggml_set_param(tensor)
        return tensor

    yield c(
        "OPT_STEP_ADAMW",
        lambda g: g.opt_step_adamw(
            weights(g, 8, 3), g.new(8, 3), g.new(8, 3), g.new(8, 3), g.new(7)
        ),
    )
    yield c(
        "OPT_STEP_SGD",
        lambda g: g.opt_step_sgd(weights(g, 8, 3), g.new(8, 3), g.new(2)),
    )
    for kind in range(6):
        if kind != 3:
            yield c(f"GLU {kind}", lambda g, k=kind: g.glu(g.new(8, 3), k, k % 2 == 1))
            yield c(
                f"GLU {kind} split",
                lambda g, k=kind: g.glu_split(g.new(8, 3), g.new(8, 3), k),
            )
    yield c("GLU oai", lambda g: g.swiglu_oai(g.new(8, 3), g.new(8, 3), 1.7, 7.0))


CASES = list(_cases())
