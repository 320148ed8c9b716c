"""Commands of several servers that wait for each other's.

Two threads that queued such commands crosswise would have the servers wait for ever.
So all of them are queued at once, under the locks of all connections; no lock is held
while waiting for another one, or for a server. That none of them stays here while
somebody waits for a server is the connections' (`client/connection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.wire.constants import Command
from longwire.wire.frames import REQUEST_HEADER

__all__ = ["Post", "post_together"]


class Post(NamedTuple):
    """A command without an answer, and where it is to go."""

    connection: Connection
    command: Command
    body: bytes


def post_together(posts: Sequence[Post]) -> None:
    """Queue commands whose servers wait for each other; all of them or none.

    Raises:
        LongwireError: the latched failure of a connection.
    """
    sizes: dict[Connection, int] = {}
    for connection, _, body in posts:
        size = REQUEST_HEADER.size + len(body)
        sizes[connection] = sizes.get(connection, 0) + size
    connections = list(sizes)
    while connections:
        _acquire(connections)
        try:
            for connection, size in sizes.items():
                if not connection.has_room(size):
                    break
            else:
                for connection, command, body in posts:
                    connection.put(command, body)
                return
        finally:
            for connection in connections:
                connection.lock.release()
        for connection, size in sizes.items():
            connection.make_room(size)


def _acquire(connections: Sequence[Connection]) -> None:
    """Take all locks, and wait for each without holding any."""
    waited_for = connections[0]
    while True:
        waited_for.lock.acquire()
        taken = [waited_for]
        for connection in connections:
            if connection is taken[0]:
                continue
            if not connection.lock.acquire(blocking=False):
                waited_for = connection
                break
            taken.append(connection)
        else:
            return
        for connection in taken:
            connection.lock.release()
