"""`load_engine`: find an engine, check it, and hand out its functions."""

from __future__ import annotations

import ctypes as C
import logging
import os
import sys
import threading
from collections.abc import Callable

from longwire.errors import AbiMismatch
from longwire.native.check import check_profile
from longwire.native.guard import callback, defer_interrupts
from longwire.native.library import AbortCallback, Library, LogCallback
from longwire.native.llama import declare_llama
from longwire.native.profiles import Profile, locate

__all__ = ["NativeEngine", "load_engine", "log_listeners", "on_abort"]

_log = logging.getLogger("longwire.engine")

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
"""`enum ggml_log_level`: debug 1, info 2, warn 3, error 4, continuation 5.

llama.cpp's info lines are debug lines to us: a model load prints hundreds.
"""


class NativeEngine:
    """One loaded engine: its profile and its functions. Made by `load_engine`."""

    def __init__(self, profile: Profile, library: Library) -> None:
        self.profile = profile
        self.library = library


_lock = threading.Lock()
_loaded: dict[str, NativeEngine] = {}


def load_engine(engine: str) -> NativeEngine:
    """Load an engine by name or folder; once per process and name.

    Raises:
        LibraryNotFound: there is none.
        AbiMismatch: it is not one of the builds we know.
    """
    defer_interrupts()
    with _lock:
        if engine not in _loaded:
            _loaded[engine] = _load(engine)
        return _loaded[engine]


def _load(engine: str) -> NativeEngine:
    candidates, handles, path = locate(engine)
    library = Library(engine, handles, path)
    library.ggml_log_set(C.cast(_log_callback, C.c_void_p), None)
    if os.path.isdir(engine):
        # A build with loadable backends registers none by itself.
        library.ggml_backend_load_all_from_path(os.fsencode(path.parent))
    reasons: list[AbiMismatch] = []
    for profile in candidates:
        declare_llama(library, profile.context_params)
        try:
            check_profile(profile, library)
        except AbiMismatch as mismatch:
            reasons.append(mismatch)
            continue
        library.llama_log_set(C.cast(_log_callback, C.c_void_p), None)
        library.llama_backend_init()
        native = NativeEngine(profile, library)
        on_abort(native, _print_last_words)
        return native
    raise reasons[0]


def on_abort(engine: NativeEngine, last_words: Callable[[str], None]) -> None:
    """Have `last_words` called with ggml's message before it aborts the process."""

    def speak(message: bytes | None) -> None:
        last_words((message or b"").decode("utf-8", "replace").strip())

    thunk = AbortCallback(callback(speak))
    _thunks.append(thunk)
    engine.library.ggml_set_abort_callback(C.cast(thunk, C.c_void_p))


def _print_last_words(message: str) -> None:
    print(f"longwire: ggml aborts this process: {message}", file=sys.stderr, flush=True)


_thunks: list[object] = []
"""Callbacks that C may call until the process ends."""


log_listeners: list[Callable[[int, str], None]] = []
"""Called with level and text of each line of an engine's log, on the thread that
made it."""

_last_level = logging.DEBUG


def _on_log(level: int, text: bytes | None, _data: int | None) -> None:
    global _last_level
    # Level 5 continues the line before it.
    _last_level = _LEVELS.get(level, _last_level)
    line = (text or b"").decode("utf-8", "replace").rstrip("\n")
    for listener in log_listeners:
        listener(_last_level, line)
    if line.strip(". "):
        _log.log(_last_level, "%s", line)


_log_callback = LogCallback(callback(_on_log))
