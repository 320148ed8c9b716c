"""How much a server lends: numbers of clients, seconds of patience, bytes of memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

__all__ = ["Ledger", "Limits"]

_LEAST_CHARGE = 4096
"""What any buffer counts for: an empty one costs a session memory as well."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the supervisor of one server enforces. Seconds of 0 mean no limit."""

    clients: int = 64
    """A process each; further clients wait, most of them in the kernel's queue."""
    spares: int = 2
    """Warm sessions kept ready. A C++ client opens several connections in a row."""
    silent: int = 256
    """Connections without a first byte: they cost a descriptor, and the oldest goes."""
    memory: int | None = None
    """Bytes that all clients together may allocate."""
    client_memory: int | None = None
    """Bytes that one client may allocate."""
    handshake_s: float = 10.0
    """From accept to a complete HELLO."""
    drain_s: float = 30.0
    """What clients get to finish after SIGTERM; 0 ends them at once."""

    @property
    def most_spares(self) -> int:
        """More than these are let go after a rush; more than `spares`, or every
        short visit would cost a new process."""
        return 2 * self.spares


@dataclass(slots=True)
class Ledger:
    """Who holds how much memory. The supervisor keeps it, so that the share of a
    session comes back however the session ends."""

    limits: Limits
    total: int = 0
    """Bytes that all clients hold."""
    _held: dict[Hashable, int] = field(default_factory=dict)

    def claim(self, client: Hashable, size: int) -> str | None:
        """Count a new buffer of `size` bytes, or say which limit it would break."""
        charge = max(size, _LEAST_CHARGE)
        held = self._held.get(client, 0)
        for limit, used, whose in (
            (self.limits.client_memory, held, "this client holds"),
            (self.limits.memory, self.total, "all clients hold"),
        ):
            if limit is not None and used + charge > limit:
                return f"{whose} {used} of {limit} bytes allowed"
        self._held[client] = held + charge
        self.total += charge
        return None

    def release(self, client: Hashable, size: int) -> None:
        """Count a buffer of `size` bytes as freed."""
        charge = min(max(size, _LEAST_CHARGE), self._held.get(client, 0))
        if charge:
            self._held[client] -= charge
            self.total -= charge

    def drop(self, client: Hashable) -> None:
        """Count all that a client holds as freed; idempotent."""
        self.total -= self._held.pop(client, 0)

    def room(self, client: Hashable) -> tuple[int | None, int | None]:
        """What is left for a client, and the most it could ever have."""
        limits = self.limits
        left, most = [], []
        if limits.memory is not None:
            left.append(limits.memory - self.total)
            most.append(limits.memory)
        if limits.client_memory is not None:
            left.append(limits.client_memory - self._held.get(client, 0))
            most.append(limits.client_memory)
        return min(left, default=None), min(most, default=None)
