"""Carrying bytes between two streams."""

from __future__ import annotations

import select
from collections.abc import Callable

from longwire.transport.stream import Stream

__all__ = ["splice"]


def splice(
    a: Stream, b: Stream, watch: Callable[[Stream, memoryview], None] | None = None
) -> None:
    """Carry what comes from either to the other until one closes.

    What one does not take in holds the other up, so both ends must read while
    they write much; every end of this protocol does. `watch` is shown where bytes
    came from, and the bytes, once they have left; they are valid inside of the call.

    Raises:
        EOFError: one end has closed its stream.
        OSError: a stream broke, or took nothing in before its deadline.
    """
    ways = {a.fileno(): (a, b), b.fileno(): (b, a)}
    poll = select.poll()
    for fd in ways:
        poll.register(fd, select.POLLIN)
    while True:
        ready = [fd for fd, (source, _) in ways.items() if source.holds]
        for fd in ready or [fd for fd, _ in poll.poll()]:
            source, sink = ways[fd]
            data = source.take_some()
            sink.send([data])
            if watch is not None:
                watch(source, data)
