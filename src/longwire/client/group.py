"""LX's communicator: any number of servers of ours, each linked with each.

A server may take part with several devices; it sums those by itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from longwire.client.connection import Connection
from longwire.client.device import RemoteDevice
from longwire.client.links import close_end, open_link, refusable
from longwire.client.together import Post
from longwire.errors import RemoteError
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit, WireType
from longwire.wire.constants import U64_MAX, Command

__all__ = ["Group", "open_group"]

_numbers = itertools.count(1)


class Group:
    """Servers that know each other under one number."""

    def __init__(self, number: int, members: dict[Connection, list[int]]) -> None:
        """`members`: each connection's places among the ranks, servers in order."""
        self._number = number
        self._members = members

    def posts(
        self, records: Sequence[bytes], absent: Sequence[bool]
    ) -> list[Post] | None:
        """What to post for one all-reduce; None once it is freed."""
        if not self._members:
            return None
        return [
            Post(connection, Command.LX_ALLREDUCE, self._body(ranks, records, absent))
            for connection, ranks in self._members.items()
        ]

    def _body(
        self, ranks: list[int], records: Sequence[bytes], absent: Sequence[bool]
    ) -> bytes:
        bits = sum(absent[rank] << i for i, rank in enumerate(ranks))
        tensors = tuple(records[rank] for rank in ranks)
        return LxAllreduce(self._number, bits, tensors).encode()

    def free(self) -> None:
        """Have all servers leave each other, once; closes their links."""
        body = m.U32.pack(self._number)
        members, self._members = self._members, {}
        for connection in members:
            # One that is gone has left already.
            with contextlib.suppress(RemoteError):
                connection.post(Command.LX_COMM_FREE, body)
                connection.flush()


def open_group(devices: Sequence[RemoteDevice]) -> Group:
    """Link the devices' servers, each with each, and have them be a communicator.

    Raises:
        NoLink: two cannot reach each other; all connections go on.
        RemoteError: a connection failed.
    """
    members: dict[Connection, list[int]] = {}
    for rank, device in enumerate(devices):
        members.setdefault(device.connection, []).append(rank)
    number = next(_numbers)
    joined: dict[Connection, list[int]] = {}
    links: dict[Connection, dict[Connection, int]] = {c: {} for c in members}
    try:
        for first, second in itertools.combinations(members, 2):
            link = open_link(first, second)
            links[first][second], links[second][first] = link
        for own, (connection, ranks) in enumerate(members.items()):
            body = LxCommInit(
                number,
                WireType.F32,
                U64_MAX,
                own,
                tuple(links[connection].get(other, 0) for other in members),
                tuple(devices[rank].index for rank in ranks),
            ).encode()
            with refusable(connection):
                connection.ask(Command.LX_COMM_INIT, body)
            joined[connection] = ranks
    except BaseException:
        # Where there is a communicator it takes its links along.
        Group(number, joined).free()
        for connection, ends in links.items():
            for end in ends.values() if connection not in joined else ():
                close_end(connection, end)
        raise
    return Group(number, members)
