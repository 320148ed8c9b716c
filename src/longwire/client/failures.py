"""Which failure of several connections is the one to tell of."""

from __future__ import annotations

from collections.abc import Iterable

from longwire.client.connection import Connection
from longwire.errors import RemoteFailure
from longwire.wire.constants import Command

__all__ = ["check_all"]

_TOGETHER = (
    Command.LX_RECEIVE,
    Command.LX_SEND,
    Command.LX_ALLREDUCE,
    Command.COMM_ALLREDUCE,
)
"""What servers do together: each refuses it because of another."""


def check_all(connections: Iterable[Connection]) -> None:
    """Raise what went wrong on any of them, a lost connection before all else.

    Servers wait for each other, so that one which is lost, or has refused something,
    makes others refuse what they were asked for. When one has, the others are asked
    for a sign of life: nobody may have waited for an answer of theirs in a long time.
    One failure is raised, and what the others refused is over with it.

    Raises:
        RemoteError: names the endpoint, the command and the cause.
    """
    known = list(dict.fromkeys(connections))
    if len(known) > 1 and any(c.refusal is not None for c in known):
        for connection in known:
            connection.health()
        refusals = [c.refusal for c in known if c.refusal is not None]
        for connection in known:
            connection.refusal = None
        for connection in known:
            connection.check()
        raise min(refusals, key=_is_of_another)
    for connection in known:
        connection.check()


def _is_of_another(refusal: RemoteFailure) -> bool:
    """Whether it came of another server's failure, which says more."""
    # The sentence has the other's name in front: "RemoteFailure: HOST: LX_SEND: ...".
    name, _, sentence = refusal.cause.partition(": ")
    words = (f": {command.name}: " for command in _TOGETHER)
    return name == RemoteFailure.__name__ and any(word in sentence for word in words)
