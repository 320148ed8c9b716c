"""What a connection holds back, and how much of it.

Commands without an answer are only appended here. They leave with the next command
whose answer somebody waits for: to a server of ours, a decode step's inputs, the
recompute and the read of its result are one write and one read.

When that is, and who may be waiting, is the connection's (`client/connection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from longwire.wire.constants import Command
from longwire.wire.dialects import MAX_PREPARED, MAX_PREPARED_DATA
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.messages import U32, Bytes
from longwire.wire.prepared import SetPrepared

__all__ = ["BEHIND_READ", "BULK", "CORK_LIMIT", "GRAPHS", "NUMBER_SIZE", "Cork"]

CORK_LIMIT = 96 * 1024
"""Held-back bytes beyond this leave without waiting for a reader. So much fits the
buffers between the two ends, even of a server that waits for another one's."""

BULK = 64 * 1024
"""Data from this size on goes between the caller's memory and the socket."""

BEHIND_READ = 32 * 1024
"""Most bytes that share a write with a read. They must fit the buffers between
the two ends: a server that cannot deliver its answer takes no more in."""

NUMBER_SIZE = U32.size
"""Of a prepared write's number, which travels beside its data."""

_HALVES = frozenset(
    {
        Command.COMM_ALLREDUCE,
        Command.LX_ALLREDUCE,
        Command.LX_SEND,
        Command.LX_RECEIVE,
    }
)
"""What a server does together with another one: it waits until that has its own."""

GRAPHS = _HALVES | {
    Command.GRAPH_RECOMPUTE,
    Command.GRAPH_COMPUTE,
    Command.LX_GRAPH_PATCH,
}
"""What a server computes on or another server waits for; nobody may be left waiting
for it."""


class Cork:
    """Commands in order, as the bytes to send. Not locked."""

    __slots__ = (
        "_data",
        "_numbers",
        "corked",
        "halves",
        "holds_graph",
        "last",
        "size",
    )

    def __init__(self) -> None:
        self.corked = bytearray()
        """Whole commands, but for a bulky one's data."""
        self.size = 0
        """Bytes held back, but for the header of prepared writes still apart."""
        self.holds_graph = False
        """A server is to compute, and has not been told."""
        self.halves = 0
        """How many commands have been queued that servers do together."""
        self.last = Command.HELLO
        """The last command queued; names a failure to send."""
        self._numbers: list[int] = []
        """Of prepared writes that are not in `corked` yet."""
        self._data = bytearray()
        """Theirs."""

    def put(self, command: Command, size: int, pieces: Sequence[Bytes] = ()) -> bool:
        """Append a command; True if what is corked has become too much to hold.

        Without pieces, `size` bytes of body are to be sent right after.
        """
        if self._numbers:
            self.fold()
        self.last = command
        self.corked += REQUEST_HEADER.pack(command, size)
        for piece in pieces:
            self.corked += piece
        if command in GRAPHS and pieces:
            self.holds_graph = True
            self.halves += command in _HALVES
        self.size = len(self.corked)
        return self.size > CORK_LIMIT

    def write(self, number: int, data: bytes) -> bool:
        """Append a prepared write; True if what is corked has become too much.

        Those in a row become one message.
        """
        if len(self._data) + len(data) > MAX_PREPARED_DATA:
            self.fold()
        self._numbers.append(number)
        self._data += data
        self.size += NUMBER_SIZE + len(data)
        if len(self._numbers) == MAX_PREPARED:
            self.fold()
        return len(self.corked) > CORK_LIMIT

    def fold(self) -> None:
        """Cork the prepared writes, if there are any."""
        if not self._numbers:
            return
        head = SetPrepared.head(self._numbers)
        size = len(head) + len(self._data)
        self.corked += REQUEST_HEADER.pack(Command.LX_SET_PREPARED, size)
        self.corked += head
        self.corked += self._data
        self._numbers.clear()
        self._data.clear()
        self.size = len(self.corked)

    def take(self) -> bytearray:
        """What is corked, to be sent. Prepared writes not folded in stay."""
        taken, self.corked = self.corked, bytearray()
        self.size -= len(taken)
        self.holds_graph = False
        return taken
