"""Which graphs a server still has: the client's half of the shared rule.

PROTOCOL.md, "Graph reuse". A C++ server drops every stored graph when any
buffer is freed, but goes on counting the entries, so both are tracked here.
"""

from __future__ import annotations

from longwire.wire.constants import GRAPH_CACHE_MAX
from longwire.wire.dialects import Dialect

__all__ = ["GraphReuse"]


class GraphReuse:
    """The uids that may be recomputed, for all devices of one connection."""

    def __init__(self, dialect: Dialect) -> None:
        self._by_uid = dialect.graph_uid
        self._entries: dict[int, set[int]] = {}
        self._valid: dict[int, set[int]] = {}

    def may_recompute(self, device: int, uid: int) -> bool:
        """Whether GRAPH_RECOMPUTE is safe for this graph now."""
        return uid != 0 and uid in self._valid.get(device, ())

    def sent(self, device: int, uid: int) -> None:
        """A graph leaves whole: follow what the server does with its store."""
        entries = self._entries.setdefault(device, set())
        valid = self._valid.setdefault(device, set())
        if not self._by_uid or (uid and len(entries) >= GRAPH_CACHE_MAX):
            entries.clear()
            valid.clear()
        if uid:
            entries.add(uid)
            valid.add(uid)

    def clear(self) -> None:
        """The server has forgotten all graphs (LX, after an error)."""
        self._entries.clear()
        self._valid.clear()

    def freed(self) -> None:
        """A buffer was freed on this connection: nothing may be recomputed."""
        for valid in self._valid.values():
            valid.clear()
