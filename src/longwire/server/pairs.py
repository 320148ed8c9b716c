"""Protocol 8's communicator: two servers, a bare stream, and the sum of a tensor.

PROTOCOL.md, "Collectives". The peer may be a C++ server: it sends no sign of life,
and all its bytes before or after ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import RemoteFailure
from longwire.server.exchange import Flow, exchange
from longwire.server.members import Members, Staging, count_of, raw
from longwire.server.rounding import BF16
from longwire.server.tensors import CheckedTensor
from longwire.transport.duplex import Duplex

__all__ = ["ACCEPT_S", "DIAL_S", "Pair"]

ACCEPT_S = 10.0
"""How long rank 0 waits for rank 1; in C++ for ever."""

DIAL_S = 5.0
"""How long rank 1 tries to connect, as in C++."""

_NARROW = 32768
"""Numbers from which on they travel as bf16."""

_BLOCK = 32 * 1024

_NAME = "COMM_ALLREDUCE"


class Pair:
    """One device's stream to its peer."""

    def __init__(
        self, duplex: Duplex, peer: str, abandoned: Callable[[], bool]
    ) -> None:
        self._flow = Flow(duplex, peer)
        self._abandoned = abandoned
        self._bf16 = BF16()
        self._wide = np.empty(_BLOCK, np.float32)
        self._room = np.empty(0, np.uint8)
        self._staging = Staging()

    @property
    def alive(self) -> bool:
        """Whether the peer still is there."""
        return self._flow.failure is None and not self._flow.duplex.ended()

    def close(self, reason: str) -> None:
        """Leave the peer; idempotent."""
        self._flow.close(reason)

    def allreduce(self, tensor: CheckedTensor) -> None:
        """Add the peer's tensor to ours, in place.

        Raises:
            BadRequest: a tensor that cannot be summed.
            RemoteFailure: the peer is gone.
        """
        count = count_of(tensor, _NAME)
        if self._flow.failure is not None:
            raise RemoteFailure(self._flow.peer, _NAME, self._flow.failure)
        if not count:
            return
        members = Members([tensor], count, [self._staging])
        numbers = members.gather(0, count)
        if count >= _NARROW:
            self._add_narrow(numbers)
        else:
            self._add(numbers)
        members.spread(numbers, 0)

    def _add(self, numbers: npt.NDArray[Any]) -> None:
        theirs = self._memory(4 * len(numbers)).view(np.float32)
        self._exchange(numbers, theirs)
        np.add(numbers, theirs, out=numbers)

    def _add_narrow(self, numbers: npt.NDArray[Any]) -> None:
        count = len(numbers)
        ours, theirs = self._memory(4 * count).view(np.uint16).reshape(2, count)
        self._bf16.narrow(numbers, ours)
        self._exchange(ours, theirs)
        for at in range(0, count, _BLOCK):
            # Only the peer's numbers are rounded, as C++ servers do it.
            part = theirs[at : at + _BLOCK]
            wide, sums = self._wide[: len(part)], numbers[at : at + _BLOCK]
            self._bf16.widen(part, wide)
            np.add(sums, wide, out=sums)

    def _memory(self, size: int) -> npt.NDArray[Any]:
        if len(self._room) < size:
            self._room = np.empty(size, np.uint8)
        return self._room[:size]

    def _exchange(self, ours: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> None:
        # Rank 0 is to send first, and rank 1 to receive: both at once suits either.
        self._flow.send([raw(ours)])
        self._flow.receive(raw(theirs))
        exchange([self._flow], _NAME, self._abandoned)
