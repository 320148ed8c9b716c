"""What a GGUF file says of a model, read by the engine's own ggml."""

from __future__ import annotations

import ctypes as C
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from longwire.errors import CallFailed
from longwire.native.abi import P, S
from longwire.native.engine import NativeEngine, log_listeners
from longwire.native.library import Library, Signature
from longwire.native.memory import array_at

__all__ = ["HeadValue", "file_head", "tensor_places"]

HeadValue = int | float | bool | str | list[int]
"""A value of a GGUF file's head; of its arrays, those of integers."""

_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""`enum gguf_type`, as numpy calls it."""

_STRING, _ARRAY = 8, 9
_REAL = (6, 12)


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
    "gguf_get_tensor_type": (C.c_int, P, C.c_int64),
    "gguf_get_n_kv": (C.c_int64, P),
    "gguf_get_key": (C.c_char_p, P, C.c_int64),
    "gguf_get_kv_type": (C.c_int, P, C.c_int64),
    "gguf_get_val_str": (C.c_char_p, P, C.c_int64),
    "gguf_get_val_data": (P, P, C.c_int64),
    "gguf_get_arr_type": (C.c_int, P, C.c_int64),
    "gguf_get_arr_n": (S, P, C.c_int64),
    "gguf_get_arr_data": (P, P, C.c_int64),
}


def tensor_places(engine: NativeEngine, path: Path) -> list[tuple[str, int, int]]:
    """Name, offset in the file and size in bytes of each tensor, as the file says.

    Nothing is checked against the size of the file.

    Raises:
        CallFailed: ggml does not take it for a GGUF file; with what it said.
    """
    with _opened(engine, path) as (library, context):
        start = library.gguf_get_data_offset(context)
        return [
            (
                _name(library, context, i),
                start + library.gguf_get_tensor_offset(context, i),
                library.gguf_get_tensor_size(context, i),
            )
            for i in range(library.gguf_get_n_tensors(context))
        ]


def file_head(
    engine: NativeEngine, path: Path
) -> tuple[dict[str, HeadValue], dict[str, int]]:
    """The file's values by key, and the ggml type of each tensor by its name.

    Values are numbers, texts, and arrays of integers; others are left out.

    Raises:
        CallFailed: ggml does not take it for a GGUF file; with what it said.
    """
    values: dict[str, HeadValue] = {}
    with _opened(engine, path) as (library, context):
        for i in range(library.gguf_get_n_kv(context)):
            value = _value(library, context, i)
            if value is not None:
                key = library.gguf_get_key(context, i).decode("utf-8", "replace")
                values[key] = value
        types = {
            _name(library, context, i): int(library.gguf_get_tensor_type(context, i))
            for i in range(library.gguf_get_n_tensors(context))
        }
    return values, types


@contextmanager
def _opened(engine: NativeEngine, path: Path) -> Iterator[tuple[Library, int]]:
    """The head of a file, as a `gguf_context`, while the body runs."""
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
        yield library, context
    finally:
        library.gguf_free(context)


def _name(library: Library, context: int, i: int) -> str:
    name: bytes = library.gguf_get_tensor_name(context, i)
    return name.decode("utf-8", "replace")


def _value(library: Library, context: int, i: int) -> HeadValue | None:
    kind = library.gguf_get_kv_type(context, i)
    if kind == _STRING:
        text: bytes = library.gguf_get_val_str(context, i)
        return text.decode("utf-8", "replace")
    if kind != _ARRAY:
        data = library.gguf_get_val_data(context, i)
        number: int | float | bool = array_at(data, 1, _NUMBERS[kind])[0].item()
        return number
    kind = library.gguf_get_arr_type(context, i)
    count = library.gguf_get_arr_n(context, i)
    if kind not in _NUMBERS or kind in _REAL:
        return None
    if count == 0:
        return []
    data = library.gguf_get_arr_data(context, i)
    numbers: list[int] = array_at(data, count, _NUMBERS[kind]).tolist()
    return numbers
