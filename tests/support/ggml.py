"""Tensors, graphs and buffers made through ggml's public functions."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longwire.errors import LibraryNotFound
from longwire.native.abi import GGML_TENSOR, Cgraph, DeviceProps, InitParams, P, S
from longwire.native.engine import NativeEngine, load_engine
from longwire.native.library import Signature
from longwire.native.memory import read, view
from longwire.native.profiles import DEFAULT_ENGINE

ENGINES = (DEFAULT_ENGINE, "llama-cpp-python")

F32, F16, Q4_0, Q8_0, I8 = 0, 1, 2, 8, 24
NONE, ADD, MUL, MUL_MAT, VIEW = 0, 2, 7, 29, 37
COMPUTE = 16

_INT, _I64, _STR, _BOOL = C.c_int, C.c_int64, C.c_char_p, C.c_bool
_RANGE = (P, P, S, S)
_RANGE_2D = (P, P, S, S, S, S, S)

PUBLIC: dict[str, Signature] = {
    "ggml_new_tensor_4d": (P, P, _INT, _I64, _I64, _I64, _I64),
    "ggml_view_2d": (P, P, P, _I64, _I64, S, S),
    "ggml_cumsum": (P, P, P),
    "ggml_mul": (P, P, P, P),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_scale": (P, P, P, C.c_float),
    "ggml_set_output": (None, P),
    "ggml_graph_view": (Cgraph, P, _INT, _INT),
    "ggml_backend_name": (_STR, P),
    "ggml_backend_reg_dev_count": (S, P),
    "ggml_backend_reg_dev_get": (P, P, S),
    "ggml_backend_dev_get_props": (None, P, C.POINTER(DeviceProps)),
    "ggml_backend_dev_supports_op": (_BOOL, P, P),
    "ggml_backend_dev_supports_buft": (_BOOL, P, P),
    "ggml_backend_buft_name": (_STR, P),
    "ggml_backend_buft_get_device": (P, P),
    "ggml_backend_buffer_get_alignment": (S, P),
    "ggml_backend_buffer_reset": (None, P),
    "ggml_backend_buffer_set_usage": (None, P, _INT),
    "ggml_backend_view_init": (_INT, P),
    "ggml_backend_tensor_set_2d": (None, *_RANGE_2D),
    "ggml_backend_tensor_get_2d": (None, *_RANGE_2D),
    "ggml_backend_tensor_set_async": (None, P, *_RANGE),
    "ggml_backend_tensor_get_async": (None, P, *_RANGE),
    "ggml_backend_tensor_copy": (None, P, P),
    "ggml_backend_tensor_copy_async": (None, P, P, P, P),
    "ggml_backend_event_new": (P, P),
    "ggml_backend_event_free": (None, P),
    "ggml_backend_event_record": (None, P, P),
    "ggml_backend_event_wait": (None, P, P),
    "ggml_backend_event_synchronize": (None, P),
}


class Ggml:
    """One engine, and what a test wants of ggml in few words."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.library = engine.library
        self.library.declare(PUBLIC)
        self._parts: list[Cgraph] = []

    @contextmanager
    def context(self, size: int = 1 << 20) -> Iterator[int]:
        """A ggml context for the structs of tensors and graphs; no data."""
        context = self.library.ggml_init(InitParams(size, None, True))
        try:
            yield context
        finally:
            self.library.ggml_free(context)

    def tensor(
        self, context: int, *ne: int, type: int = F32, name: str | bytes = b""
    ) -> int:
        """A new tensor without data, as the address of its struct."""
        shape = (*ne, 1, 1, 1)[:4]
        tensor: int = self.library.ggml_new_tensor_4d(context, type, *shape)
        if name:
            raw = name if isinstance(name, bytes) else name.encode()
            self.library.ggml_set_name(tensor, raw)
        return tensor

    def graph(self, context: int, *results: int, size: int = 64) -> int:
        """The graph that computes `results`."""
        graph: int = self.library.ggml_new_graph_custom(context, size, False)
        for result in results:
            self.library.ggml_build_forward_expand(graph, result)
        return graph

    def nodes(self, graph: int) -> list[int]:
        """The graph's nodes, as ggml itself lists them."""
        n = self.library.ggml_graph_n_nodes(graph)
        return [self.library.ggml_graph_node(graph, i) for i in range(n)]

    def part(self, graph: int, start: int, end: int) -> int:
        """Some nodes of a graph as a graph of their own, as schedulers make them."""
        self._parts.append(self.library.ggml_graph_view(graph, start, end))
        return C.addressof(self._parts[-1])

    @contextmanager
    def cpu_buffer(self, size: int = 1 << 16) -> Iterator[int]:
        """A buffer of host memory."""
        library = self.library
        cpu = library.ggml_backend_dev_by_name(b"CPU")
        kind = library.ggml_backend_dev_buffer_type(cpu)
        buffer = library.ggml_backend_buft_alloc_buffer(kind, size)
        try:
            yield buffer
        finally:
            library.ggml_backend_buffer_free(buffer)

    def place(self, buffer: int, *tensors: int, offset: int = 0) -> None:
        """Give the tensors their places in a buffer, one behind the other."""
        library = self.library
        base = library.ggml_backend_buffer_get_base(buffer)
        for tensor in tensors:
            status = library.ggml_backend_tensor_alloc(buffer, tensor, base + offset)
            assert status == 0
            size = library.ggml_backend_buft_get_alloc_size(
                library.ggml_backend_buffer_get_type(buffer), tensor
            )
            offset += -(-size // 64) * 64


def open_ggml(engine: str) -> Ggml:
    """The engine's functions; skips the test when an optional engine is missing."""
    try:
        return Ggml(load_engine(engine))
    except LibraryNotFound as error:
        if engine == DEFAULT_ENGINE:
            raise
        pytest.skip(f"engine missing: {error.engine}")


def fields(tensor: int) -> Any:
    """A copy of the `ggml_tensor` at an address, as a numpy record."""
    return np.frombuffer(read(tensor, GGML_TENSOR.itemsize), GGML_TENSOR)[0]


def change(tensor: int, field: str, value: Any) -> None:
    """Write one field of the `ggml_tensor` at an address."""
    np.frombuffer(view(tensor, GGML_TENSOR.itemsize), GGML_TENSOR)[field] = value


def f32(values: Any) -> npt.NDArray[np.float32]:
    """The values as contiguous 32-bit floats."""
    return np.ascontiguousarray(values, np.float32)
