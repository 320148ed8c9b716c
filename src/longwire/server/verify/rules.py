"""The table: what each op needs. Numbers, sources, and the function that checks.

A function sees all nodes of its op at once. It requires what ggml's constructor
of the op requires, and what the CPU kernel relies on beyond that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from longwire.server.verify import elementwise as e
from longwire.server.verify import image as i
from longwire.server.verify import matrix as m
from longwire.server.verify import sequence as s
from longwire.server.verify.columns import Nodes
from longwire.wire.constants import OP_COUNT

__all__ = ["NO_DATA", "RULES", "VIEWS", "Rule"]

Check = Callable[[Nodes], None]


class Rule(NamedTuple):
    """One op."""

    name: str
    sources: int
    """How many sources it must have, from the first on; more may be optional."""
    check: Check


VIEWS = np.zeros(OP_COUNT, np.bool_)
"""By op number, whether it is RESHAPE, VIEW, PERMUTE or TRANSPOSE: no kernel runs."""
VIEWS[36:40] = True

NO_DATA = VIEWS.copy()
"""NONE as well."""
NO_DATA[0] = True

RULES: Mapping[int, Rule] = {
    1: Rule("DUP", 1, e.copy),
    2: Rule("ADD", 2, e.add),
    3: Rule("ADD_ID", 3, e.add_id),
    4: Rule("ADD1", 2, e.add1),
    5: Rule("ACC", 2, e.part),
    6: Rule("SUB", 2, e.binary),
    7: Rule("MUL", 2, e.binary),
    8: Rule("DIV", 2, e.binary),
    9: Rule("SQR", 1, e.same),
    10: Rule("SQRT", 1, e.same),
    11: Rule("LOG", 1, e.same),
    12: Rule("SIN", 1, e.same),
    13: Rule("COS", 1, e.same),
    14: Rule("SUM", 1, e.total),
    15: Rule("SUM_ROWS", 1, e.sum_rows),
    16: Rule("CUMSUM", 1, e.cumsum),
    17: Rule("MEAN", 1, e.sum_rows),
    18: Rule("ARGMAX", 1, e.argmax),
    19: Rule("COUNT_EQUAL", 2, e.count_equal),
    20: Rule("REPEAT", 1, e.repeat),
    21: Rule("REPEAT_BACK", 1, e.repeat_back),
    22: Rule("CONCAT", 2, e.concat),
    23: Rule("SILU_BACK", 2, e.silu_back),
    24: Rule("NORM", 1, e.norm),
    25: Rule("RMS_NORM", 1, e.row_norm),
    26: Rule("RMS_NORM_BACK", 2, e.rms_norm_back),
    27: Rule("GROUP_NORM", 1, e.group_norm),
    28: Rule("L2_NORM", 1, e.norm),
    29: Rule("MUL_MAT", 2, m.mul_mat),
    30: Rule("MUL_MAT_ID", 3, m.mul_mat_id),
    31: Rule("OUT_PROD", 2, m.out_prod),
    32: Rule("SCALE", 1, e.scale),
    33: Rule("SET", 2, e.part),
    34: Rule("CPY", 1, e.copy),
    35: Rule("CONT", 1, e.cont),
    40: Rule("GET_ROWS", 2, m.get_rows),
    41: Rule("GET_ROWS_BACK", 2, m.get_rows_back),
    42: Rule("SET_ROWS", 2, m.set_rows),
    43: Rule("DIAG", 1, e.diag),
    44: Rule("DIAG_MASK_INF", 1, e.diag_mask),
    45: Rule("DIAG_MASK_ZERO", 1, e.diag_mask),
    46: Rule("SOFT_MAX", 1, m.soft_max),
    47: Rule("SOFT_MAX_BACK", 2, m.soft_max_back),
    48: Rule("ROPE", 2, s.rope),
    49: Rule("ROPE_BACK", 2, s.rope),
    50: Rule("CLAMP", 1, e.linear),
    51: Rule("CONV_TRANSPOSE_1D", 2, i.conv_transpose_1d),
    52: Rule("IM2COL", 2, i.im2col),
    53: Rule("IM2COL_BACK", 2, i.im2col_back),
    54: Rule("IM2COL_3D", 2, i.im2col_3d),
    55: Rule("COL2IM_1D", 1, i.col2im_1d),
    56: Rule("CONV_2D", 2, i.conv_2d),
    57: Rule("CONV_3D", 2, i.conv_3d),
    58: Rule("CONV_2D_DW", 2, i.conv_2d_dw),
    59: Rule("CONV_TRANSPOSE_2D", 2, i.conv_transpose_2d),
    60: Rule("POOL_1D", 1, i.pool_1d),
    61: Rule("POOL_2D", 1, i.pool_2d),
    62: Rule("POOL_2D_BACK", 2, i.pool_2d_back),
    63: Rule("UPSCALE", 1, i.upscale),
    64: Rule("PAD", 1, i.pad),
    65: Rule("PAD_REFLECT_1D", 1, i.pad_reflect_1d),
    66: Rule("ROLL", 1, e.roll),
    67: Rule("ARANGE", 0, e.arange),
    68: Rule("TIMESTEP_EMBEDDING", 1, i.timestep_embedding),
    69: Rule("ARGSORT", 1, e.argsort),
    70: Rule("TOP_K", 1, e.top_k),
    71: Rule("LEAKY_RELU", 1, e.linear),
    72: Rule("TRI", 1, e.tri),
    73: Rule("FILL", 1, e.fill),
    74: Rule("FLASH_ATTN_EXT", 3, s.flash_attn_ext),
    75: Rule("FLASH_ATTN_BACK", 4, s.flash_attn_back),
    76: Rule("SSM_CONV", 2, s.ssm_conv),
    77: Rule("SSM_SCAN", 7, s.ssm_scan),
    78: Rule("WIN_PART", 1, i.win_part),
    79: Rule("WIN_UNPART", 1, i.win_unpart),
    80: Rule("GET_REL_POS", 1, i.get_rel_pos),
    81: Rule("ADD_REL_POS", 3, i.add_rel_pos),
    82: Rule("RWKV_WKV6", 6, s.rwkv_wkv6),
    83: Rule("GATED_LINEAR_ATTN", 5, s.gated_linear_attn),
    84: Rule("RWKV_WKV7", 7, s.rwkv_wkv7),
    85: Rule("SOLVE_TRI", 2, m.solve_tri),
    86: Rule("GATED_DELTA_NET", 6, s.gated_delta_net),
    87: Rule("LIGHTNING_INDEXER", 4, s.lightning_indexer),
    88: Rule("DSV4_HC_COMB", 3, s.dsv4_hc_comb),
    89: Rule("DSV4_HC_PRE", 2, s.dsv4_hc_pre),
    90: Rule("DSV4_HC_POST", 3, s.dsv4_hc_post),
    91: Rule("UNARY", 1, e.unary),
    96: Rule("CROSS_ENTROPY_LOSS", 2, m.cross_entropy_loss),
    97: Rule("CROSS_ENTROPY_LOSS_BACK", 3, m.cross_entropy_loss_back),
    98: Rule("OPT_STEP_ADAMW", 5, m.opt_step_adamw),
    99: Rule("OPT_STEP_SGD", 3, m.opt_step_sgd),
    100: Rule("GLU", 1, e.glu),
}
"""By `ggml_op` number of protocols 7.0.0 and 8.0.0. 92 to 95 carry a pointer and
are refused before; NONE and the views have the rule of all views only."""
