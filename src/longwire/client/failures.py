"""Which failure of several connections is the one to tell of."""

from __future__ import annotations

from collections.abc import Iterable

from longwire.client.connection import Connection

__all__ = ["check_all"]


def check_all(connections: Iterable[Connection]) -> None:
    """Raise what went wrong on any of them, a lost connection before all else.

    Servers wait for each other, so that one which is lost makes others refuse what
    they were asked for. When one has refused something, the others are asked for a
    sign of life: nobody may have waited for an answer of theirs in a long time.

    Raises:
        RemoteError: names the endpoint, the command and the cause.
    """
    known = list(dict.fromkeys(connections))
    if len(known) > 1 and any(c.refusal is not None for c in known):
        for connection in known:
            connection.health()
        if not all(connection.healthy for connection in known):
            for connection in known:
                connection.refusal = None
    for connection in known:
        connection.check()
