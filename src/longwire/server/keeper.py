"""A thread that puts weights into the cache while more of them come in.

It works on the tensors' own memory, which must not be freed before `settle`. A file
is named by what was written to it, so that who changes that memory meanwhile gains
nothing by it.
"""

from __future__ import annotations

import threading
from collections import deque

from longwire.server.cache import WeightCache
from longwire.wire.constants import Command

__all__ = ["LOADING", "Keeper"]

LOADING = frozenset({Command.SET_TENSOR, Command.LX_SET_DIGEST, Command.INIT_TENSOR})
"""Commands that a load is made of; all others come after what is to be stored."""

_MOST_WAITING = 256 << 20
"""Bytes: for memory that the host cannot reach they are copies."""


class Keeper:
    """Stores in the order of `put`, for one session. `close` joins its thread."""

    def __init__(self, cache: WeightCache) -> None:
        """The thread starts with the first `put`."""
        self.pending = 0
        """Weights that are not stored yet."""
        self._cache = cache
        self._jobs: deque[tuple[memoryview, bool]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closing = False

    def put(self, data: memoryview, by_hash: bool) -> None:
        """Store `data` soon: as C++ clients ask for it (`by_hash`), or LX clients."""
        with self._changed:
            while self._bytes and self._bytes + data.nbytes > _MOST_WAITING:
                self._changed.wait()
            self._check()
            self._jobs.append((data, by_hash))
            self._bytes += data.nbytes
            self.pending += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="keeper", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all is stored, which takes as long as the disk does."""
        with self._changed:
            while self.pending:
                self._changed.wait()
            self._check()

    def close(self) -> None:
        """Store what is left, and end the thread; idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (job := self._next()) is not None:
            data, by_hash = job
            try:
                self._cache.store(data, by_hash)
            except BaseException as error:
                # The cache itself bears all that a disk can do: this ends the session.
                self._error = error
            with self._changed:
                self._bytes -= data.nbytes
                self.pending -= 1
                self._changed.notify_all()

    def _next(self) -> tuple[memoryview, bool] | None:
        with self._changed:
            while not self._jobs and not self._closing:
                self._changed.wait()
            return self._jobs.popleft() if self._jobs else None
