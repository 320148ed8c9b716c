"""Struct layouts and enums of ggml's backend interface: declarations only.

Sources: `ggml.h`, `ggml-impl.h` and `ggml-backend-impl.h` of llama.cpp, 64-bit
little-endian targets. They hold for backend API versions 2 and 3, which differ
in the buffer type interface alone. `native/check.py` compares them with the
loaded library; `tests/native/test_abi.py` with what a C compiler sees.
"""

from __future__ import annotations

import ctypes as C
from enum import IntEnum

import numpy as np

__all__ = [
    "BACKEND_I",
    "BUFFER_I",
    "BUFT_I",
    "COMM",
    "DEVICE_I",
    "GGML_TENSOR",
    "REG_I",
    "Backend",
    "Buffer",
    "BufferInterface",
    "BufferType2",
    "BufferType3",
    "Cgraph",
    "Comm",
    "Device",
    "DeviceProps",
    "DeviceType",
    "Event",
    "InitParams",
    "Reg",
    "Status",
    "Usage",
]

P = C.c_void_p
S = C.c_size_t

GGML_TENSOR = np.dtype(
    {
        "names": [
            "type",
            "buffer",
            "ne",
            "nb",
            "op",
            "op_params",
            "flags",
            "src",
            "view_src",
            "view_offs",
            "data",
            "name",
            "extra",
        ],
        "formats": [
            "<i4",
            "<u8",
            ("<i8", 4),
            ("<u8", 4),
            "<i4",
            ("<i4", 16),
            "<i4",
            ("<u8", 10),
            "<u8",
            "<u8",
            "<u8",
            "S64",
            "<u8",
        ],
        "offsets": [0, 8, 16, 48, 80, 84, 148, 152, 232, 240, 248, 256, 320],
        "itemsize": 336,
    }
)
"""`struct ggml_tensor` (ggml.h), 336 bytes, the last 8 of them padding."""


class Status(IntEnum):
    """`enum ggml_status` (ggml.h)."""

    ALLOC_FAILED = -2
    FAILED = -1
    SUCCESS = 0
    ABORTED = 1


class DeviceType(IntEnum):
    """`enum ggml_backend_dev_type` (ggml-backend.h)."""

    CPU = 0
    GPU = 1
    IGPU = 2
    ACCEL = 3
    META = 4


class Usage(IntEnum):
    """`enum ggml_backend_buffer_usage` (ggml-backend.h)."""

    ANY = 0
    WEIGHTS = 1
    COMPUTE = 2


class InitParams(C.Structure):
    """`struct ggml_init_params` (ggml.h)."""

    _fields_ = [("mem_size", S), ("mem_buffer", P), ("no_alloc", C.c_bool)]


class HashSet(C.Structure):
    """`struct ggml_hash_set` (ggml-impl.h): slot = address >> 4, modulo size."""

    _fields_ = [("size", S), ("used", P), ("keys", P)]


class Cgraph(C.Structure):
    """`struct ggml_cgraph` (ggml-impl.h)."""

    _fields_ = [
        ("size", C.c_int),
        ("n_nodes", C.c_int),
        ("n_leafs", C.c_int),
        ("nodes", P),
        ("grads", P),
        ("grad_accs", P),
        ("leafs", P),
        ("use_counts", P),
        ("visited_hash_set", HashSet),
        ("order", C.c_int),
        ("uid", C.c_uint64),
    ]


def _prototype(result: type | None, *arguments: type) -> type[C._CFunctionType]:
    return C.CFUNCTYPE(result, *arguments)


_RANGE = (P, P, P, S, S)
_RANGE_2D = (P, P, P, S, S, S, S, S)

BUFT_I = {
    "get_name": _prototype(P, P),
    "alloc_buffer": _prototype(P, P, S),
    "alloc_buffer_n": _prototype(P, P, P, C.c_int),
    "get_alignment": _prototype(S, P),
    "get_max_size": _prototype(S, P),
    "get_alloc_size": _prototype(S, P, P),
    "get_alloc_size_n": _prototype(S, P, P, C.c_int),
    "is_host": _prototype(C.c_bool, P),
}
"""`ggml_backend_buffer_type_i`; API 2 lacks the two `_n` slots."""

BUFFER_I = {
    "free_buffer": _prototype(None, P),
    "get_base": _prototype(P, P),
    "init_tensor": _prototype(C.c_int, P, P),
    "memset_tensor": _prototype(None, P, P, C.c_uint8, S, S),
    "set_tensor": _prototype(None, *_RANGE),
    "get_tensor": _prototype(None, *_RANGE),
    "set_tensor_2d": _prototype(None, *_RANGE_2D),
    "get_tensor_2d": _prototype(None, *_RANGE_2D),
    "cpy_tensor": _prototype(C.c_bool, P, P, P),
    "clear": _prototype(None, P, C.c_uint8),
    "reset": _prototype(None, P),
}
"""`ggml_backend_buffer_i`."""

BACKEND_I = {
    "get_name": _prototype(P, P),
    "free": _prototype(None, P),
    "set_tensor_async": _prototype(None, *_RANGE),
    "get_tensor_async": _prototype(None, *_RANGE),
    "set_tensor_2d_async": _prototype(None, *_RANGE_2D),
    "get_tensor_2d_async": _prototype(None, *_RANGE_2D),
    "cpy_tensor_async": _prototype(C.c_bool, P, P, P, P),
    "synchronize": _prototype(None, P),
    "graph_plan_create": _prototype(P, P, P),
    "graph_plan_free": _prototype(None, P, P),
    "graph_plan_update": _prototype(None, P, P, P),
    "graph_plan_compute": _prototype(C.c_int, P, P),
    "graph_compute": _prototype(C.c_int, P, P),
    "event_record": _prototype(None, P, P),
    "event_wait": _prototype(None, P, P),
    "graph_optimize": _prototype(None, P, P, P),
}
"""`ggml_backend_i`."""

DEVICE_I = {
    "get_name": _prototype(P, P),
    "get_description": _prototype(P, P),
    "get_memory": _prototype(None, P, P, P),
    "get_type": _prototype(C.c_int, P),
    "get_props": _prototype(None, P, P),
    "init_backend": _prototype(P, P, P),
    "get_buffer_type": _prototype(P, P),
    "get_host_buffer_type": _prototype(P, P),
    "buffer_from_host_ptr": _prototype(P, P, P, S, S),
    "supports_op": _prototype(C.c_bool, P, P),
    "supports_buft": _prototype(C.c_bool, P, P),
    "offload_op": _prototype(C.c_bool, P, P),
    "event_new": _prototype(P, P),
    "event_free": _prototype(None, P, P),
    "event_synchronize": _prototype(None, P, P),
}
"""`ggml_backend_device_i`."""

REG_I = {
    "get_name": _prototype(P, P),
    "get_device_count": _prototype(S, P),
    "get_device": _prototype(P, P, S),
    "get_proc_address": _prototype(P, P, C.c_char_p),
}
"""`ggml_backend_reg_i`."""

COMM = {
    "ggml_backend_comm_init": _prototype(P, P, S),
    "ggml_backend_comm_free": _prototype(None, P),
    "ggml_backend_comm_allreduce_tensor": _prototype(C.c_bool, P, P),
}
"""What ggml's meta backend asks a registry's `get_proc_address` for
(`ggml_backend_comm_init_t` and so on, ggml-backend.h)."""


def _slots(table: dict[str, type], *without: str) -> list[tuple[str, type]]:
    return [(name, P) for name in table if name not in without]


class BufferType2(C.Structure):
    """`struct ggml_backend_buffer_type`, backend API version 2."""

    _fields_ = [
        *_slots(BUFT_I, "alloc_buffer_n", "get_alloc_size_n"),
        ("device", P),
        ("context", P),
    ]


class BufferType3(C.Structure):
    """`struct ggml_backend_buffer_type`, backend API version 3."""

    _fields_ = [*_slots(BUFT_I), ("device", P), ("context", P)]


class BufferInterface(C.Structure):
    """`struct ggml_backend_buffer_i`, passed by value to `buffer_init`."""

    _fields_ = _slots(BUFFER_I)


class Buffer(C.Structure):
    """`struct ggml_backend_buffer`."""

    _fields_ = [
        ("iface", BufferInterface),
        ("buft", P),
        ("context", P),
        ("size", S),
        ("usage", C.c_int),
    ]


class Backend(C.Structure):
    """`struct ggml_backend`."""

    _fields_ = [("guid", P), *_slots(BACKEND_I), ("device", P), ("context", P)]


class Event(C.Structure):
    """`struct ggml_backend_event`; the generic layer reads `device`."""

    _fields_ = [("device", P), ("context", P)]


class Device(C.Structure):
    """`struct ggml_backend_device`."""

    _fields_ = [*_slots(DEVICE_I), ("reg", P), ("context", P)]


class Reg(C.Structure):
    """`struct ggml_backend_reg`."""

    _fields_ = [("api_version", C.c_int), *_slots(REG_I), ("context", P)]


class Comm(C.Structure):
    """Not ggml's: where the functions of `COMM` are kept."""

    _fields_ = _slots(COMM)


class DeviceProps(C.Structure):
    """`struct ggml_backend_dev_props`, capabilities written out."""

    _fields_ = [
        ("name", P),
        ("description", P),
        ("memory_free", S),
        ("memory_total", S),
        ("type", C.c_int),
        ("device_id", P),
        ("async_", C.c_bool),
        ("host_buffer", C.c_bool),
        ("buffer_from_host_ptr", C.c_bool),
        ("events", C.c_bool),
        ("mmap_support", C.c_bool),
    ]
