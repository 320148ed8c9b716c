"""Who is told of what passes, without anything that passes being held up.

Events go into a bounded queue, and a thread of its own hands them to the views. What
the queue has no room for is counted, and not shown.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from longwire.tap.steps import Step, StepCounter
from longwire.wire.trace import Event

__all__ = ["Closed", "Opened", "Shown", "Source", "View", "Views"]

_log = logging.getLogger("longwire.tap")

_ROOM = 1 << 16
"""Events that may wait: some tens of MB, and seconds of the busiest traffic."""

_IDLE_S = 0.25
"""How long views may go without a call."""

_GATHER_S = 0.02
"""How long events gather before they are shown."""

_BATCH = 1000
"""Events between two calls of `flush`, if they come without a pause."""

_CLOSE_S = 5.0
"""How long the last events may take to show."""


@dataclass(frozen=True, slots=True)
class Source:
    """A connection of which events are shown."""

    number: int
    """Counts from 1."""
    peer: str
    """The client's address."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A client has connected, and the server has taken it."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """A connection is over."""

    at_s: float
    reason: str
    owed: tuple[str, ...] = ()
    """Commands that got no answer any more."""


Shown = Event | Step | Opened | Closed
_Noted = tuple[Source, Event | Opened | Closed]


class View(Protocol):
    """Something that shows events. All calls are from one thread."""

    def show(self, source: Source, event: Shown) -> None:
        """The next event."""

    def flush(self) -> None:
        """No more events for now; also called now and then in between."""

    def close(self, lost: int) -> None:
        """No more events at all; `lost` are missing."""


class Views:
    """Shows events while the body of a `with` runs; its end shows what is left."""

    def __init__(self, views: Sequence[View]) -> None:
        self.lost = 0
        """Events that there was no room for."""
        self._views = list(views)
        """Those that can go on."""
        self._queue: queue.Queue[_Noted] = queue.Queue(_ROOM)
        self._lock = threading.Lock()
        self._steps: dict[Source, StepCounter] = {}
        self._done = threading.Event()
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def note(self, source: Source, event: Event | Opened | Closed) -> None:
        """Have an event shown; any thread may. Returns at once."""
        try:
            self._queue.put_nowait((source, event))
        except queue.Full:
            with self._lock:
                self.lost += 1

    def __enter__(self) -> Views:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raises: OSError: what was to be written could not be."""
        self._done.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the output takes nothing in; its end is missing")
        if self.lost:
            _log.warning("%d messages are missing from the output", self.lost)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        while self._show_some():
            self._each(lambda view: view.flush())
        self._each(lambda view: view.close(self.lost))

    def _each(self, call: Callable[[View], None]) -> None:
        """Call all views. One that fails is let go: what passes is not its matter."""
        for view in list(self._views):
            try:
                call(view)
            except OSError as error:
                _log.warning("nothing more is shown: %s", error)
                self._failure = self._failure or error
                self._views.remove(view)

    def _show_some(self) -> bool:
        """Show what has come; False once there will be no more."""
        # Looked at first: what was noted before the end is shown.
        done = self._done.is_set()
        try:
            first = self._queue.get(not done, _IDLE_S)
            # Awake for each event, this thread would be in the way of what passes.
            self._done.wait(_GATHER_S)
            self._show(*first)
            for _ in range(_BATCH):
                self._show(*self._queue.get_nowait())
        except queue.Empty:
            return not done
        return True

    def _show(self, source: Source, event: Event | Opened | Closed) -> None:
        step = None
        if isinstance(event, Opened):
            self._steps[source] = StepCounter()
        elif isinstance(event, Closed):
            self._steps.pop(source, None)
        elif source in self._steps:
            step = self._steps[source].put(event)
        self._each(lambda view: view.show(source, event))
        if step is not None:
            self._each(lambda view: view.show(source, step))
