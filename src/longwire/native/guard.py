"""What stands between C and a Python callback: nothing raised gets past it."""

from __future__ import annotations

import ctypes as C
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from longwire.native.abi import P, S, Status
from longwire.native.memory import NOWHERE

__all__ = [
    "callback",
    "constant",
    "defer_interrupts",
    "install",
    "log_failure",
    "raise_kept",
]

_log = logging.getLogger("longwire.client")

Failed = Callable[[BaseException], None]

_FAILURE: dict[Any, Any] = {None: None, C.c_bool: False, P: None, S: 0}
"""What C gets from a slot that failed, by result type; a status is FAILED."""

_HARMLESS: dict[str, Any] = {
    "get_base": NOWHERE,
    "get_alignment": 128,
    "get_max_size": (1 << 64) - 1,
}
"""The same by slot, where ggml would abort or divide by zero otherwise."""


def install(
    table: C.Structure,
    prototypes: Mapping[str, Any],
    slots: Mapping[str, Callable[..., Any]],
    failed: Failed,
) -> None:
    """Point the slots of `table` at guarded thunks; absent slots stay NULL.

    What a slot raises goes to `failed`.
    """
    for name, function in slots.items():
        prototype = prototypes[name]
        failure = _FAILURE.get(prototype._restype_, Status.FAILED)
        failure = _HARMLESS.get(name, failure)
        thunk = prototype(_guarded(function, failure, failed))
        # C copies the address, not the object: a dropped thunk is a wild jump.
        _kept.append(thunk)
        setattr(table, name, C.cast(thunk, P).value)


_kept: list[object] = []


def constant(value: Any) -> Callable[..., Any]:
    """A slot that always gives the same result."""

    def constant(*_arguments: Any) -> Any:
        return value

    return constant


def log_failure(error: BaseException) -> None:
    """Where failures go that belong to no device."""
    _log.error("a call from ggml failed", exc_info=error)


def callback(function: Callable[..., Any], failure: Any = None) -> Callable[..., Any]:
    """A function for C to call that belongs to no device.

    What it raises is kept for `raise_kept`, and C gets `failure`.
    """
    return _guarded(function, failure, _kept_errors.append)


def raise_kept() -> None:
    """Raise what a `callback` raised during the native call that just returned."""
    if _kept_errors:
        error = _kept_errors[0]
        _kept_errors.clear()
        raise error


_kept_errors: list[BaseException] = []


def _guarded(
    function: Callable[..., Any], failure: Any, failed: Failed
) -> Callable[..., Any]:
    if getattr(function, "__code__", None) is _CONSTANT:
        return function

    def guarded(*arguments: Any) -> Any:
        try:
            result = function(*arguments)
            if _interrupts:
                failed(_interrupts.pop())
            return result
        # An exception of any kind, KeyboardInterrupt included, must not reach C.
        except BaseException as error:
            try:
                failed(error)
            except BaseException as again:
                log_failure(again)
            return failure

    return guarded


_CONSTANT = constant(None).__code__
_GUARDED = _guarded(log_failure, None, log_failure).__code__

_interrupts: list[KeyboardInterrupt] = []
"""Ctrl-C that struck where it could not be raised."""


def defer_interrupts() -> None:
    """Keep Ctrl-C from being raised between C and a guard's `try`.

    Does nothing where somebody else handles SIGINT.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    """Python's own SIGINT handler, except on the first step out of C.

    A signal that arrives while C runs is handled when Python is next entered:
    at the head of a thunk, before its `try`. Raised there, it would be dropped,
    and C would get an undefined result.
    """
    if frame is not None and frame.f_code in (_GUARDED, _CONSTANT):
        _interrupts[:] = [KeyboardInterrupt()]
        return
    signal.default_int_handler(number, frame)
