"""The load-time check: is this library the build its profile describes?

Small graphs are built through public functions and read back through our
structs, defaults are compared with known values, and one ADD is computed. A
mismatch is one clear error here and never a crash later.
"""

from __future__ import annotations

import ctypes as C
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from longwire.errors import AbiMismatch, NativeError
from longwire.native.abi import GGML_TENSOR, Cgraph, InitParams
from longwire.native.library import Library, set_threads
from longwire.native.llama import ModelParams
from longwire.native.memory import array_at, read, read_i32
from longwire.native.profiles import Profile, mismatch
from longwire.wire.constants import OP_COUNT
from longwire.wire.types import TYPES

__all__ = ["check_profile"]

_F32 = 0
_ADD = 2


def check_profile(profile: Profile, library: Library) -> None:
    """Compare `library` with `profile`.

    Raises:
        AbiMismatch: names the library, what differed, and what would work.
    """
    try:
        _check_api_version(profile, library)
        _check_tables(library)
        _check_defaults(profile, library)
        _check_graph(library)
        _check_compute(library)
    except _Differs as difference:
        raise mismatch(library.path, str(difference)) from difference
    except NativeError as error:
        if isinstance(error, AbiMismatch):
            raise
        raise mismatch(library.path, str(error)) from error


class _Differs(Exception):
    """One thing that is not as the profile says."""


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise _Differs(f"{what} is {found}, expected {expected}")


def _cpu_device(library: Library) -> int:
    device: int | None = library.ggml_backend_dev_by_name(b"CPU")
    if not device:
        raise _Differs("no CPU device is registered")
    return device


def _check_api_version(profile: Profile, library: Library) -> None:
    reg = library.ggml_backend_dev_backend_reg(_cpu_device(library))
    _expect("backend API version", read_i32(reg), profile.api_version)


def _check_tables(library: Library) -> None:
    last = (library.ggml_op_name(OP_COUNT - 1) or b"").decode()
    _expect(f"name of op {OP_COUNT - 1}", last, "GLU")
    _expect("name of op 2", (library.ggml_op_name(_ADD) or b"").decode(), "ADD")
    for number, traits in TYPES.items():
        _expect(
            f"block of type {traits.name}",
            (library.ggml_blck_size(number), library.ggml_type_size(number)),
            (traits.block, traits.size),
        )


def _defaults(library: Library, function: str, layout: Any) -> Any:
    """What a `..._default_params` function returns, read as a `layout`."""

    class Roomy(C.Structure):
        # A build whose struct is longer writes past the end of ours.
        _fields_ = [("params", layout), ("room", C.c_char * 512)]

    address = library.address(function)
    if address is None:
        raise _Differs(f"{function} is not exported")
    return C.CFUNCTYPE(Roomy)(address)().params


def _check_defaults(profile: Profile, library: Library) -> None:
    model = _defaults(library, "llama_model_default_params", ModelParams)
    found: dict[str, Any] = {
        "n_gpu_layers": model.n_gpu_layers,
        "split_mode": model.split_mode,
        "main_gpu": model.main_gpu,
        "vocab_only": model.vocab_only,
        "use_extra_bufts": model.use_extra_bufts,
        "no_alloc": model.no_alloc,
    }
    expected: dict[str, Any] = {
        "n_gpu_layers": -1,
        "split_mode": 1,
        "main_gpu": 0,
        "vocab_only": False,
        "use_extra_bufts": True,
        "no_alloc": False,
    }
    _expect("llama_model_params defaults", found, expected)

    context = _defaults(library, "llama_context_default_params", profile.context_params)
    found = {
        "n_ctx": context.n_ctx,
        "n_batch": context.n_batch,
        "n_ubatch": context.n_ubatch,
        "n_seq_max": context.n_seq_max,
        "rope_scaling_type": context.rope_scaling_type,
        "yarn_ext_factor": context.yarn_ext_factor,
        "type_k": context.type_k,
        "type_v": context.type_v,
        "abort_callback": context.abort_callback,
        "embeddings": context.embeddings,
        "offload_kqv": context.offload_kqv,
        "no_perf": context.no_perf,
        "op_offload": context.op_offload,
        "swa_full": context.swa_full,
        "kv_unified": context.kv_unified,
        "samplers": context.samplers,
        "n_samplers": context.n_samplers,
        "ctx_other": context.ctx_other,
    }
    expected = {
        "n_ctx": 512,
        "n_batch": 2048,
        "n_ubatch": 512,
        "n_seq_max": 1,
        "rope_scaling_type": -1,
        "yarn_ext_factor": -1.0,
        "type_k": 1,
        "type_v": 1,
        "abort_callback": None,
        "embeddings": False,
        "offload_kqv": True,
        "no_perf": True,
        "op_offload": True,
        "swa_full": True,
        "kv_unified": False,
        "samplers": None,
        "n_samplers": 0,
        "ctx_other": None,
    }
    _expect("llama_context_params defaults", found, expected)


@contextmanager
def _ggml_context(library: Library) -> Iterator[int]:
    context = library.ggml_init(InitParams(1 << 20, None, True))
    if not context:
        raise _Differs("ggml_init failed")
    try:
        yield context
    finally:
        library.ggml_free(context)


class _Sum:
    """d = (a + b) + view(a), the graph that is read back."""

    def __init__(self, library: Library, context: int) -> None:
        self.a = library.ggml_new_tensor_2d(context, _F32, 4, 3)
        self.b = library.ggml_new_tensor_2d(context, _F32, 4, 3)
        self.c = library.ggml_add(context, self.a, self.b)
        self.view = library.ggml_view_1d(context, self.a, 4, 16)
        self.d = library.ggml_add(context, self.c, self.view)
        library.ggml_set_name(self.d, b"longwire check")
        self.graph = library.ggml_new_graph_custom(context, 16, False)
        library.ggml_build_forward_expand(self.graph, self.d)


def _check_graph(library: Library) -> None:
    with _ggml_context(library) as context:
        s = _Sum(library, context)
        graph = Cgraph.from_address(s.graph)
        n = library.ggml_graph_n_nodes(s.graph)
        _expect("ggml_cgraph.size", graph.size, 16)
        _expect("ggml_cgraph.n_nodes", graph.n_nodes, n)
        _expect("ggml_cgraph.n_leafs", graph.n_leafs, 2)
        _expect("ggml_cgraph.uid", graph.uid, 0)
        nodes = array_at(graph.nodes, n, "<u8").tolist()
        known = [library.ggml_graph_node(s.graph, i) for i in range(n)]
        _expect("ggml_cgraph.nodes", nodes, known)

        record = np.frombuffer(read(s.d, GGML_TENSOR.itemsize), GGML_TENSOR)[0]
        _expect("ggml_tensor.ne", record["ne"].tolist(), [4, 3, 1, 1])
        _expect("ggml_tensor.nb", record["nb"].tolist(), [4, 16, 48, 48])
        _expect("ggml_tensor.op", int(record["op"]), _ADD)
        _expect("ggml_tensor.src", record["src"].tolist()[:3], [s.c, s.view, 0])
        _expect("ggml_tensor.name", record["name"], b"longwire check")
        view = np.frombuffer(read(s.view, GGML_TENSOR.itemsize), GGML_TENSOR)[0]
        _expect("ggml_tensor.view_src", int(view["view_src"]), s.a)
        _expect("ggml_tensor.view_offs", int(view["view_offs"]), 16)

        size = graph.visited_hash_set.size
        keys = array_at(graph.visited_hash_set.keys, size, "<u8")
        counts = array_at(graph.use_counts, size, "<i4")
        start = (s.a >> 4) % size
        slots = itertools.chain(range(start, size), range(start))
        slot = next((i for i in slots if int(keys[i]) == s.a), None)
        if slot is None:
            raise _Differs("a tensor is missing from ggml_cgraph.visited_hash_set")
        word = array_at(graph.visited_hash_set.used, slot // 32 + 1, "<u4")[slot // 32]
        _expect("bit in ggml_hash_set.used", int(word) >> (slot % 32) & 1, 1)
        # Once by the first ADD, once by its view.
        _expect("ggml_cgraph.use_counts", int(counts[slot]), 2)


def _check_compute(library: Library) -> None:
    device = _cpu_device(library)
    buffer_type = library.ggml_backend_dev_buffer_type(device)
    backend = library.ggml_backend_dev_init(device, None)
    # Threads that are there before a session is confined escape that.
    set_threads(library, device, backend, 1)
    with _ggml_context(library) as context:
        a = library.ggml_new_tensor_1d(context, _F32, 4)
        b = library.ggml_new_tensor_1d(context, _F32, 4)
        total = library.ggml_add(context, a, b)
        graph = library.ggml_new_graph_custom(context, 8, False)
        library.ggml_build_forward_expand(graph, total)
        buffer = library.ggml_backend_buft_alloc_buffer(buffer_type, 4096)
        base = library.ggml_backend_buffer_get_base(buffer)
        for i, tensor in enumerate((a, b, total)):
            library.ggml_backend_tensor_alloc(buffer, tensor, base + 1024 * i)
        left = np.array([1, 2, 3, 4], np.float32)
        right = np.array([10, 20, 30, 40], np.float32)
        out = np.zeros(4, np.float32)
        library.ggml_backend_tensor_set(a, left.ctypes.data, 0, 16)
        library.ggml_backend_tensor_set(b, right.ctypes.data, 0, 16)
        status = library.ggml_backend_graph_compute(backend, graph)
        library.ggml_backend_tensor_get(total, out.ctypes.data, 0, 16)
        library.ggml_backend_buffer_free(buffer)
    library.ggml_backend_free(backend)
    _expect("status of a computed ADD", status, 0)
    _expect("a computed ADD", out.tolist(), (left + right).tolist())
