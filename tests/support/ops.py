"""Graphs of single ops, made by ggml's own constructors.

A `Case` builds the graph of one op through the engine; `Built` is that graph with
its tensors laid out in one buffer, ready to be computed here or sent away.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.native.abi import P, S
from longwire.native.graph import use_counts
from longwire.native.memory import view
from longwire.wire.graphs import Graph
from longwire.wire.tensors import TENSOR
from support.ggml import Ggml, fields

__all__ = ["Built", "Case", "Maker", "built"]

F32, F16, I32, I64, BF16 = 0, 1, 26, 27, 30

_SIGNATURES: dict[str, str] = {
    # c: context, t: tensor, i: int, f: float, l: int64, z: size_t, b: bool
    **dict.fromkeys(
        "dup sqr sqrt log sin cos sum sum_rows cumsum mean argmax cont diag "
        "transpose silu gelu relu".split(),
        "t",
    ),
    **dict.fromkeys(
        "add sub mul div add1 count_equal repeat repeat_back mul_mat out_prod "
        "get_rows silu_back cpy ssm_conv cross_entropy_loss".split(),
        "tt",
    ),
    "add_inplace": "tt",
    "add_cast": "tti",
    "add_id": "ttt",
    "acc": "ttzzzz",
    "set": "ttzzzz",
    "cast": "ti",
    "concat": "tti",
    "norm": "tf",
    "rms_norm": "tf",
    "l2_norm": "tf",
    "rms_norm_back": "ttf",
    "group_norm": "tif",
    "mul_mat_id": "ttt",
    "scale": "tf",
    "scale_bias": "tff",
    "view_1d": "tlz",
    "view_2d": "tllzz",
    "view_3d": "tlllzzz",
    "view_4d": "tllllzzzz",
    "reshape_2d": "tll",
    "reshape_4d": "tllll",
    "permute": "tiiii",
    "get_rows_back": "ttt",
    "set_rows": "ttt",
    "diag_mask_inf": "ti",
    "diag_mask_zero": "ti",
    "soft_max": "t",
    "soft_max_ext": "ttff",
    "soft_max_ext_back": "ttff",
    "rope": "ttii",
    "rope_ext": "tttiiiffffff",
    "rope_multi": "tttiaiiffffff",
    "rope_ext_back": "tttiiiffffff",
    "clamp": "tff",
    "conv_transpose_1d": "ttiii",
    "im2col": "ttiiiiiibi",
    "im2col_back": "ttaiiiiiib",
    "im2col_3d": "ttliiiiiiiiii",
    "col2im_1d": "tiii",
    "conv_2d_direct": "ttiiiiii",
    "conv_3d_direct": "ttiiiiiiiiiiii",
    "conv_2d_dw_direct": "ttiiiiii",
    "conv_transpose_2d_p0": "tti",
    "pool_1d": "tiiii",
    "pool_2d": "tiiiiiff",
    "pool_2d_back": "ttiiiiiff",
    "upscale": "tii",
    "interpolate": "tllllu",
    "pad": "tiiii",
    "pad_ext": "tiiiiiiii",
    "pad_ext_circular": "tiiiiiiii",
    "pad_reflect_1d": "tii",
    "roll": "tiiii",
    "arange": "fff",
    "timestep_embedding": "tii",
    "argsort": "ti",
    "argsort_top_k": "ti",
    "top_k": "ti",
    "leaky_relu": "tfb",
    "tri": "ti",
    "fill": "tf",
    "flash_attn_ext": "ttttfff",
    "ssm_scan": "tttttttl",
    "win_part": "ti",
    "win_unpart": "tiii",
    "get_rel_pos": "tii",
    "add_rel_pos": "ttt",
    "rwkv_wkv6": "tttttt",
    "gated_linear_attn": "tttttf",
    "rwkv_wkv7": "ttttttt",
    "solve_tri": "ttbbb",
    "gated_delta_net": "ttttttl",
    "lightning_indexer": "tttt",
    "dsv4_hc_comb": "tttfi",
    "dsv4_hc_pre": "tt",
    "dsv4_hc_pre_gated": "ttf",
    "dsv4_hc_post": "tttt",
    "unary": "ti",
    "xielu": "tffff",
    "cross_entropy_loss_back": "ttt",
    "opt_step_adamw": "ttttt",
    "opt_step_sgd": "ttt",
    "glu": "tib",
    "glu_split": "tti",
    "swiglu_oai": "ttff",
    "soft_max_add_sinks": "-t",
    "flash_attn_ext_add_sinks": "-t",
    "rope_set_offset": "-i",
}

_KINDS: dict[str, Any] = {
    "t": P,
    "a": P,
    "i": C.c_int,
    "u": C.c_uint32,
    "f": C.c_float,
    "l": C.c_int64,
    "z": S,
    "b": C.c_bool,
}


class Maker:
    """Builds tensors in one context; remembers what data the leaves need."""

    def __init__(self, ggml: Ggml, context: int) -> None:
        self.ggml = ggml
        self.context = context
        self.leaves: list[int] = []
        self.data: dict[int, npt.NDArray[Any]] = {}
        self._random = np.random.default_rng(7)
        self._kept: list[Any] = []

    def new(self, *ne: int, type: int = F32) -> int:
        """A leaf with random data."""
        tensor = self.ggml.tensor(self.context, *ne, type=type)
        self.leaves.append(tensor)
        if type == F32:
            self.data[tensor] = self._random.uniform(0.1, 1.9, ne).astype("<f4")
        elif type == F16:
            self.data[tensor] = self._random.uniform(0.1, 1.9, ne).astype("<f2")
        else:
            # As halves 0.097, as bf16 0.98: no scale becomes infinite.
            fill = b"\x7b\x3f" if type == BF16 else b"\x2e\x2e"
            size = self.ggml.library.ggml_nbytes(tensor)
            self.data[tensor] = np.frombuffer(fill * (size // 2), np.uint8)
        return tensor

    def ids(self, limit: int, *ne: int, type: int = I32) -> int:
        """A leaf of distinct row numbers, as far as there are enough."""
        tensor = self.ggml.tensor(self.context, *ne, type=type)
        self.leaves.append(tensor)
        count = int(np.prod(ne))
        values = np.arange(count)[::-1] % limit
        self.data[tensor] = values.astype("<i4" if type == I32 else "<i8")
        return tensor

    def numbers(self, *values: int) -> int:
        """An array in memory, for constructors that take a pointer to one."""
        array = (C.c_int64 * len(values))(*values)
        self._kept.append(array)
        return C.addressof(array)

    def ints(self, *values: int) -> int:
        array = (C.c_int * len(values))(*values)
        self._kept.append(array)
        return C.addressof(array)

    def __getattr__(self, name: str) -> Callable[..., int]:
        signature = _SIGNATURES[name]
        plain = signature.startswith("-")
        kinds = [_KINDS[kind] for kind in signature.lstrip("-")]
        result = None if plain else P
        self.ggml.library.declare({f"ggml_{name}": (result, P, *kinds)})
        function = getattr(self.ggml.library, f"ggml_{name}")

        def call(*arguments: Any) -> int:
            first = () if plain else (self.context,)
            tensor: int = function(*first, *arguments)
            return tensor

        return call


@dataclass(frozen=True)
class Case:
    """A legal graph of one op."""

    name: str
    make: Callable[[Maker], int]

    @property
    def op(self) -> str:
        return self.name.partition(" ")[0]


class Built:
    """A graph whose tensors lie in one buffer of host memory."""

    ALIGN = 64

    def __init__(self, maker: Maker, result: int, buffer: int) -> None:
        library = maker.ggml.library
        self._library = library
        self.graph = maker.ggml.graph(maker.context, result)
        self.nodes = maker.ggml.nodes(self.graph)
        self.tensors = self._closure()
        roots = [t for t in self.tensors if not int(fields(t)["view_src"])]
        maker.ggml.place(buffer, *roots)
        for tensor in self.tensors:
            if tensor not in roots:
                library.ggml_backend_view_init(tensor)
        self.base = int(library.ggml_backend_buffer_get_base(buffer))
        last = max(int(fields(t)["data"]) + self.nbytes(t) for t in self.tensors)
        self.size = -(-(last - self.base) // self.ALIGN) * self.ALIGN
        self.memory = view(self.base, self.size)
        self.memory[:] = bytes(self.size)
        for tensor in maker.data.keys() & set(self.tensors):
            at = int(fields(tensor)["data"]) - self.base
            raw = maker.data[tensor].tobytes()
            self.memory[at : at + len(raw)] = raw
        self.before = bytes(self.memory)

    def nbytes(self, tensor: int) -> int:
        size: int = self._library.ggml_nbytes(tensor)
        return size

    def _closure(self) -> list[int]:
        found: dict[int, None] = {}

        def visit(tensor: int) -> None:
            if not tensor or tensor in found:
                return
            record = fields(tensor)
            for source in record["src"].tolist():
                # A cast is its own second source.
                if source != tensor:
                    visit(source)
            visit(int(record["view_src"]))
            found[tensor] = None

        for node in self.nodes:
            visit(node)
        return list(found)

    def compute(self, backend: int) -> bytes:
        """What the buffer holds after the graph ran here."""
        status = self._library.ggml_backend_graph_compute(backend, self.graph)
        assert status == 0
        after = bytes(self.memory)
        self.memory[:] = self.before
        return after

    def message(self, handle: int, base: int, uid: int = 0) -> Graph:
        """The graph with all tensors at the same offsets of another buffer."""
        records = np.zeros(len(self.tensors), TENSOR)
        tensors = np.array(self.tensors, np.uint64)
        records["use_count"] = use_counts(self.graph, tensors)
        for record, tensor in zip(records, self.tensors, strict=True):
            native = fields(tensor)
            record["id"] = tensor
            record["buffer"] = handle
            for name in ("type", "ne", "nb", "op", "op_params", "flags", "src"):
                record[name] = native[name]
            record["view_src"] = native["view_src"]
            record["view_offs"] = native["view_offs"]
            record["data"] = int(native["data"]) - self.base + base
            record["name"] = native["name"] or b"t%d" % (tensor % 1000)
            record["flags"] |= 16 if tensor in self.nodes else 0
        return Graph(0, uid, np.array(self.nodes, np.uint64), records)


@contextmanager
def built(ggml: Ggml, case: Case, size: int = 1 << 20) -> Iterator[Built]:
    """The graph of a case, in a buffer of its own."""
    ggml.library.declare({"ggml_nbytes": (S, P)})
    with ggml.context(1 << 20) as context, ggml.cpu_buffer(size) as buffer:
        maker = Maker(ggml, context)
        yield Built(maker, case.make(maker), buffer)
