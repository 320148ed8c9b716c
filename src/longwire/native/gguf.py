"""What a GGUF file says about its tensors, read by the engine's own ggml."""

from __future__ import annotations

import ctypes as C
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from longwire.errors import CallFailed
from longwire.native.abi import P, S
from longwire.native.engine import NativeEngine, log_listeners
from longwire.native.library import Library, Signature

__all__ = ["tensor_places"]


class _Params(C.Structure):
    """`gguf_init_params`: without a context, only the file's head is read."""

    _fields_ = [("no_alloc", C.c_bool), ("ctx", P)]


_FUNCTIONS: Mapping[str, Signature] = {
    "gguf_init_from_file": (P, C.c_char_p, _Params),
    "gguf_free": (None, P),
    "gguf_get_data_offset": (S, P),
    "gguf_get_n_tensors": (C.c_int64, P),
    "gguf_get_tensor_name": (C.c_char_p, P, C.c_int64),
    "gguf_get_tensor_offset": (S, P, C.c_int64),
    "gguf_get_tensor_size": (S, P, C.c_int64),
}


def tensor_places(engine: NativeEngine, path: Path) -> list[tuple[str, int, int]]:
    """Name, offset in the file and size in bytes of each tensor, as the file says.

    Nothing is checked against the size of the file.

    Raises:
        CallFailed: ggml does not take it for a GGUF file; with what it said.
    """
    library = engine.library
    library.declare(_FUNCTIONS)
    said: list[str] = []
    thread = threading.get_ident()

    def listen(level: int, line: str) -> None:
        if level >= logging.ERROR and threading.get_ident() == thread:
            said.append(line)

    log_listeners.append(listen)
    try:
        params = _Params(no_alloc=True, ctx=None)
        context = library.gguf_init_from_file(os.fsencode(path), params)
    finally:
        log_listeners.remove(listen)
    if not context:
        # The first line names the cause, those after it what that prevented.
        cause = said[0].rpartition("gguf_init_from_reader: ")[2] if said else "refused"
        raise CallFailed("gguf_init_from_file", cause)
    try:
        return _places(library, context)
    finally:
        library.gguf_free(context)


def _places(library: Library, context: int) -> list[tuple[str, int, int]]:
    start = library.gguf_get_data_offset(context)
    return [
        (
            library.gguf_get_tensor_name(context, i).decode("utf-8", "replace"),
            start + library.gguf_get_tensor_offset(context, i),
            library.gguf_get_tensor_size(context, i),
        )
        for i in range(library.gguf_get_n_tensors(context))
    ]
