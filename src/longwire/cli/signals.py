"""SIGTERM and Ctrl-C for commands that serve until they are told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["stopped_by_signals"]


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Have SIGTERM and Ctrl-C call `stop`, and do nothing else."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    numbers = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
