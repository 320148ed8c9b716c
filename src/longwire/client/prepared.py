"""The client's half of prepared writes: a step's inputs by number.

A write that comes a second time, to the same tensor and of the same size, is given
a number; from then on only its data travels, many writes in one message.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.client.records import TENSOR_BYTES
from longwire.native.memory import read
from longwire.wire.constants import Command
from longwire.wire.dialects import MAX_PREPARED, MAX_PREPARED_SIZE
from longwire.wire.prepared import PrepareSet

__all__ = ["PreparedWrites"]


class _Known(NamedTuple):
    raw: bytes
    """The `ggml_tensor` as it was: its memory may by now be another tensor's."""
    size: int
    number: int


class PreparedWrites:
    """Which writes the server knows by number. Safe to use from several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._known: dict[int, _Known] = {}
        """By the tensor's address."""
        self._seen: dict[int, tuple[bytes, int]] = {}
        self._next = 0
        self._refusals = 0
        self._lock = threading.RLock()
        """Held until what was decided here is queued: a number may be given to
        another tensor right after."""

    def forget(self) -> None:
        """Tensors may have gone, or the server has not done what it was told."""
        with self._lock:
            self._known.clear()
            self._seen.clear()

    def write(self, tensor: int, data: int, size: int) -> bool:
        """Send a whole tensor's data by number; False if it has none.

        Raises:
            LongwireError: the latched failure.
        """
        with self._lock:
            if self._refusals != self._connection.refusals:
                self._refusals = self._connection.refusals
                self.forget()
            known = self._known.get(tensor)
            if (
                known is None
                or known.size != size
                or known.raw != read(tensor, TENSOR_BYTES)
            ):
                return False
            self._connection.write_prepared(known.number, read(data, size))
            return True

    def note(self, tensor: int, record: bytes, size: int) -> None:
        """A whole tensor's data was sent under its record.

        Raises:
            LongwireError: the latched failure.
        """
        if size > MAX_PREPARED_SIZE:
            return
        with self._lock:
            sight = read(tensor, TENSOR_BYTES), size
            if self._seen.get(tensor) != sight:
                if len(self._seen) >= MAX_PREPARED:
                    self._seen.clear()
                self._seen[tensor] = sight
                return
            if self._next == MAX_PREPARED:
                self.forget()
                self._next = 0
            self._known[tensor] = _Known(*sight, self._next)
            body = PrepareSet(self._next, record, 0, size).encode()
            self._connection.post(Command.LX_PREPARE_SET, body)
            self._next += 1
