"""An LX communicator: links to all other servers, and the sums over them.

PROTOCOL.md, "Communicators".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longwire.errors import BadRequest, RemoteFailure
from longwire.native.compute import ComputeDevice
from longwire.server.exchange import Flow, exchange
from longwire.server.links import Link
from longwire.server.members import Members, Staging, count_of
from longwire.server.reduce import ROUND, Reducer
from longwire.server.rounding import Rounding, rounding
from longwire.server.swift import Room, Swift
from longwire.server.tensors import TensorChecker
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.messages import Bytes

__all__ = ["Communicator"]

_NAME = "LX_ALLREDUCE"

_REMEMBERED = 1024
"""Messages whose tensors are known; a step of a large model has some two hundred."""


class Communicator:
    """One of a session. Its links are its own until it is closed."""

    def __init__(
        self,
        request: LxCommInit,
        links: Sequence[Link | None],
        devices: Sequence[ComputeDevice],
        tensors: TensorChecker,
        abandoned: Callable[[], bool],
    ) -> None:
        """`links` are by rank, None at the own one."""
        self.links = [link for link in links if link is not None]
        self._least = request.least
        self._rounding = rounding(request.wire)
        self._devices = devices
        self._tensors = tensors
        self._abandoned = abandoned
        self._reducer = Reducer(request.own, links, self._swap)
        self._failure: RemoteFailure | None = None
        self._known: dict[bytes, Members] = {}
        self._swift: dict[bytes, Swift] = {}
        """Those of them that can be done in the short way."""
        self._room = Room(request.own, self.links)
        self._staging = [Staging() for _ in devices]
        for link in self.links:
            link.owner = request.comm

    def forget(self) -> None:
        """The memory of some tensors is gone, or is another."""
        self._known.clear()
        self._swift.clear()

    def allreduce(self, body: Bytes) -> None:
        """Do one LX_ALLREDUCE.

        Raises:
            BadRequest: tensors that cannot be summed.
            RemoteFailure: a peer failed, now or before.
        """
        if self._failure is not None:
            raise RemoteFailure(self._failure.endpoint, _NAME, self._failure.cause)
        key = bytes(body)
        swift = self._swift.get(key)
        if swift is not None and self._do_swiftly(swift):
            return
        for link in self.links:
            if link.failure is not None:
                # Of an earlier command, which closed all links of the session.
                raise RemoteFailure(link.peer, _NAME, link.failure)
        members = self._known.get(key)
        if members is None:
            members = self._remember(key, body)
        count = members.count
        narrow = self._narrowing(count)
        for at in range(0, count, ROUND):
            n = min(ROUND, count - at)
            numbers = members.gather(at, n)
            self._reducer.reduce(numbers, narrow)
            members.spread(numbers, at)

    def _narrowing(self, count: int) -> Rounding | None:
        return self._rounding if 4 * count >= self._least else None

    def _do_swiftly(self, swift: Swift) -> bool:
        """Do it in the short way; False: nothing has happened."""
        try:
            if not swift.begin():
                return False
            done = swift.end()
        except RemoteFailure as error:
            self._give_up(error)
            raise
        if not done:
            self._swap(self.links, None)
            swift.sum()
        return True

    def _remember(self, key: bytes, body: Bytes) -> Members:
        members = self._check(LxAllreduce.decode(body))
        if len(self._known) >= _REMEMBERED:
            self.forget()
        self._known[key] = members
        array = members.alone
        if array is not None and self._narrowing(members.count) is None:
            swift = self._room.swift(array)
            if swift is not None:
                self._swift[key] = swift
        return members

    def _check(self, request: LxAllreduce) -> Members:
        if len(request.tensors) != len(self._devices):
            reason = f"{len(request.tensors)} tensors for {len(self._devices)} devices"
            raise BadRequest(_NAME, reason)
        # All once before any is looked up: a check may move memory.
        for record in request.tensors:
            self._tensors.check(record, _NAME)
        tensors = [self._tensors.check(record, _NAME) for record in request.tensors]
        for tensor, device in zip(tensors, self._devices, strict=True):
            if tensor.buffer.device is not device:
                raise BadRequest(_NAME, f"a tensor that is not on {device.name}")
        counts = {count_of(tensor, _NAME) for tensor in tensors}
        if len(counts) != 1:
            raise BadRequest(_NAME, f"tensors of {sorted(counts)} numbers")
        if request.absent >> len(tensors):
            reason = f"absent {request.absent:#x} of {len(tensors)} devices"
            raise BadRequest(_NAME, reason)
        return Members(tensors, counts.pop(), self._staging, request.absent)

    def _swap(self, flows: Sequence[Flow], step: Callable[[], None] | None) -> None:
        try:
            exchange(flows, _NAME, self._abandoned, step)
        except RemoteFailure as error:
            self._give_up(error)
            raise

    def _give_up(self, error: RemoteFailure) -> None:
        self._failure = error
        # The others would wait for what cannot come any more.
        for link in self.links:
            link.close(str(error))
