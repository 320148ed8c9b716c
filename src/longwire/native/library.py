"""The loaded engine library: every ggml function used, with its C signature."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longwire.errors import NativeError
from longwire.native.abi import BufferInterface, InitParams, P, S

__all__ = ["GGML", "AbortCallback", "Library", "LogCallback", "set_threads"]

Signature = tuple[Any, ...]
"""Result type first, then the arguments."""

LogCallback = C.CFUNCTYPE(None, C.c_int, C.c_char_p, P)
AbortCallback = C.CFUNCTYPE(None, C.c_char_p)

_STR = C.c_char_p
_INT = C.c_int
_I64 = C.c_int64
_BOOL = C.c_bool

GGML: Mapping[str, Signature] = {
    # ggml.h
    "ggml_init": (P, InitParams),
    "ggml_free": (None, P),
    "ggml_new_tensor_1d": (P, P, _INT, _I64),
    "ggml_new_tensor_2d": (P, P, _INT, _I64, _I64),
    "ggml_view_1d": (P, P, P, _I64, S),
    "ggml_add": (P, P, P, P),
    "ggml_set_name": (P, P, _STR),
    "ggml_nbytes": (S, P),
    "ggml_type_size": (S, _INT),
    "ggml_blck_size": (_I64, _INT),
    "ggml_op_name": (_STR, _INT),
    "ggml_new_graph_custom": (P, P, S, _BOOL),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_graph_n_nodes": (_INT, P),
    "ggml_graph_node": (P, P, _INT),
    "ggml_log_set": (None, P, P),
    "ggml_set_abort_callback": (P, P),
    # ggml-backend.h
    "ggml_backend_load_all_from_path": (None, _STR),
    "ggml_backend_register": (None, P),
    "ggml_backend_reg_name": (_STR, P),
    "ggml_backend_reg_get_proc_address": (P, P, _STR),
    "ggml_backend_dev_count": (S,),
    "ggml_backend_dev_get": (P, S),
    "ggml_backend_dev_by_name": (P, _STR),
    "ggml_backend_dev_name": (_STR, P),
    "ggml_backend_dev_description": (_STR, P),
    "ggml_backend_dev_memory": (None, P, C.POINTER(S), C.POINTER(S)),
    "ggml_backend_dev_type": (_INT, P),
    "ggml_backend_dev_backend_reg": (P, P),
    "ggml_backend_dev_init": (P, P, _STR),
    "ggml_backend_dev_supports_op": (_BOOL, P, P),
    "ggml_backend_dev_buffer_type": (P, P),
    "ggml_backend_free": (None, P),
    "ggml_backend_synchronize": (None, P),
    "ggml_backend_graph_compute": (_INT, P, P),
    "ggml_backend_graph_compute_async": (_INT, P, P),
    "ggml_backend_buft_alloc_buffer": (P, P, S),
    "ggml_backend_buft_get_alignment": (S, P),
    "ggml_backend_buft_get_max_size": (S, P),
    "ggml_backend_buft_get_alloc_size": (S, P, P),
    "ggml_backend_buft_is_host": (_BOOL, P),
    "ggml_backend_buffer_init": (P, P, BufferInterface, P, S),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_buffer_get_base": (P, P),
    "ggml_backend_buffer_get_size": (S, P),
    "ggml_backend_buffer_get_type": (P, P),
    "ggml_backend_buffer_init_tensor": (_INT, P, P),
    "ggml_backend_buffer_clear": (None, P, C.c_uint8),
    "ggml_backend_buffer_copy_tensor": (_BOOL, P, P),
    "ggml_backend_tensor_alloc": (_INT, P, P, P),
    "ggml_backend_tensor_set": (None, P, P, S, S),
    "ggml_backend_tensor_get": (None, P, P, S, S),
    "ggml_backend_tensor_memset": (None, P, C.c_uint8, S, S),
}


class Library:
    """Functions of one engine, found by name in the libraries it is made of.

    A declared function is an attribute: `library.ggml_nbytes(tensor)`. It is
    looked up on first use, so that a function which one engine lacks costs
    nothing to those who do not call it.
    """

    def __init__(self, name: str, handles: Sequence[C.CDLL], path: Path) -> None:
        self.name = name
        self.path = path
        self._handles = list(handles)
        self._signatures: dict[str, Signature] = dict(GGML)

    def declare(self, signatures: Mapping[str, Signature]) -> None:
        """Make more functions available as attributes; the last signature holds."""
        self._signatures.update(signatures)
        for symbol in signatures:
            self.__dict__.pop(symbol, None)

    def address(self, symbol: str) -> int | None:
        """Where an exported symbol is, or None."""
        for handle in self._handles:
            try:
                found: Any = getattr(handle, symbol)
            except AttributeError:
                continue
            return C.cast(found, P).value
        return None

    def __getattr__(self, symbol: str) -> Callable[..., Any]:
        signature = self.__dict__.get("_signatures", {}).get(symbol)
        if signature is None:
            raise AttributeError(symbol)
        address = self.address(symbol)
        if address is None:
            raise NativeError(f"{self.path} does not export {symbol}")
        function = C.CFUNCTYPE(signature[0], *signature[1:])(address)
        setattr(self, symbol, function)
        return function


def set_threads(library: Library, device: int, backend: int, n_threads: int) -> None:
    """Have a backend of a device compute with so many threads, if it has any."""
    reg = library.ggml_backend_dev_backend_reg(device)
    setter = library.ggml_backend_reg_get_proc_address(
        reg, b"ggml_backend_set_n_threads"
    )
    if setter:
        C.CFUNCTYPE(None, C.c_void_p, C.c_int)(setter)(backend, n_threads)
