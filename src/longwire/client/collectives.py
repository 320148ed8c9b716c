"""`communicate`: the devices of a tensor split sum among themselves.

Servers exchange the partial sums over links of their own; from here only the
commands leave, without answers. ggml asks for a communicator once per context
(`native/collectives.py`), and where none can be had it sums through the host: one
log line says why.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from longwire.client.buffer import RemoteBuffer, buffer_of
from longwire.client.device import RemoteDevice
from longwire.client.group import open_group
from longwire.client.links import NoLink
from longwire.client.pair import open_pair
from longwire.client.records import TENSOR_BYTES, NativeTensor, read_tensor
from longwire.client.together import Post, post_together
from longwire.errors import RemoteError
from longwire.native.contract import HostDevice
from longwire.native.memory import read
from longwire.wire.types import F32_TYPE

__all__ = ["Communicator", "Exchange", "communicate"]

_log = logging.getLogger("longwire.client")

_COMPUTE = 16
"""`GGML_TENSOR_FLAG_COMPUTE` (ggml.h): the tensor was computed in this step."""

_OFF = "GGML_RPC_NO_COMM"
"""Set to anything, it turns communicators off, as in llama.cpp's client."""

_ROUNDS = 8
"""All-reduces that leave together."""

_REMEMBERED = 4096
"""All-reduces that are known by their tensors; a model's graph has some hundred."""


def communicate(devices: Sequence[HostDevice | None]) -> Communicator | None:
    """A communicator over devices in rank order; None where there is no way.

    Raises:
        RemoteError: a connection failed.
    """
    members = [d for d in devices if isinstance(d, RemoteDevice)]
    try:
        if len(members) < len(devices):
            raise NoLink("not all of them are remote")
        if _OFF in os.environ:
            raise NoLink(f"{_OFF} is set")
        exchange = _exchange(members)
    except NoLink as reason:
        _say_no_way([d for d in devices if d is not None], reason)
        return None
    names = ", ".join(f"{device.name} ({device.endpoint})" for device in members)
    _log.info("%s: sums go from server to server", names)
    return Communicator(members, exchange)


def _say_no_way(devices: Sequence[HostDevice], reason: NoLink) -> None:
    names = ", ".join(device.name for device in devices)
    _log.warning("%s: sums go through this machine: %s", names, reason)


def _exchange(devices: Sequence[RemoteDevice]) -> Exchange:
    if all(device.connection.server is not None for device in devices):
        return open_group(devices)
    return open_pair(devices)


def _is_summable(tensor: NativeTensor) -> bool:
    """Whether it is contiguous f32."""
    size = 4
    for n, stride in zip(tensor.ne, tensor.nb, strict=True):
        if n != 1 and stride != size:
            return False
        size *= n
    return tensor.type == F32_TYPE


class Exchange(Protocol):
    """How the members of a communicator reach each other."""

    def posts(
        self, records: Sequence[bytes], absent: Sequence[bool]
    ) -> list[Post] | None:
        """What to post for one all-reduce; None where ggml has to do it."""

    def free(self) -> None:
        """Have the servers leave each other; there is nothing to post any more."""


class _Known(NamedTuple):
    """One all-reduce, as it was posted before."""

    raws: list[bytes]
    buffers: list[RemoteBuffer]
    posts: list[Post]

    def holds(self, raws: list[bytes]) -> bool:
        """Whether the same may be posted again."""
        # A handle dies with its buffer, and another may get its address.
        return raws == self.raws and all(buffer.live for buffer in self.buffers)


class Communicator:
    """Devices in rank order whose tensors can be summed in place."""

    def __init__(self, devices: Sequence[RemoteDevice], exchange: Exchange) -> None:
        self.size = len(devices)
        self._devices = devices
        self._sessions = [device.session for device in devices]
        self._connections = list(dict.fromkeys(s.connection for s in self._sessions))
        self._exchange: Exchange | None = exchange
        """None: ggml sums."""
        self._refusals = self._count_refusals()
        """Of all members, when they found each other."""
        self._known: dict[tuple[int, ...], _Known] = {}
        self._rounds = 0
        """All-reduces since somebody last waited for one of the servers."""
        self._waits = 0

    def allreduce(self, tensors: Sequence[int]) -> bool:
        """Have every tensor become the sum of all; False: ggml has to do it.

        Raises:
            LongwireError: the latched failure of a connection.
        """
        if any(connection.refusal for connection in self._connections):
            # What is to be summed may never have been computed.
            return False
        if self._refusals != self._count_refusals():
            self._renew()
        if self._exchange is None:
            return False
        raws = [read(t, TENSOR_BYTES) if t else b"" for t in tensors]
        key = tuple(tensors)
        known = self._known.get(key)
        if known is None or not known.holds(raws):
            known = self._look_at(tensors, raws)
            if known is None:
                return False
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = known
        post_together(known.posts)
        self._keep_busy()
        return True

    def _count_refusals(self) -> int:
        return sum(connection.refusals for connection in self._connections)

    def _renew(self) -> None:
        """A server that has not done a command has left the others for that."""
        self.free()
        if any(
            device.session is not session
            for device, session in zip(self._devices, self._sessions, strict=True)
        ):
            # What ggml has here lies on connections that were replaced.
            return
        try:
            self._exchange = _exchange(self._devices)
        except NoLink as reason:
            _say_no_way(self._devices, reason)
        # Those included that were on the way to each other.
        self._refusals = self._count_refusals()

    def _keep_busy(self) -> None:
        """Let the servers begin with a step while the rest of it is queued here."""
        waits = sum(c.traffic.round_trips for c in self._connections)
        self._rounds = 0 if waits != self._waits else self._rounds + 1
        self._waits = waits
        if self._rounds % _ROUNDS == 0:
            for connection in self._connections:
                connection.start()

    def _look_at(self, tensors: Sequence[int], raws: list[bytes]) -> _Known | None:
        """What to post for these; None where ggml has to do it."""
        if not all(tensors):
            return None
        found = [read_tensor(t) for t in tensors]
        buffers = [buffer_of(t) for t in tensors]
        counts = {math.prod(t.ne) for t in found}
        if len(counts) != 1 or not all(map(_is_summable, found)):
            return None
        for buffer, session in zip(buffers, self._sessions, strict=True):
            if buffer is None or buffer.session is not session:
                return None
        records = [
            session.records.of(tensor)
            for session, tensor in zip(self._sessions, tensors, strict=True)
        ]
        absent = [not t.flags & _COMPUTE for t in found]
        assert self._exchange is not None
        posts = self._exchange.posts(records, absent) if counts != {0} else []
        if posts is None:
            return None
        return _Known(raws, [b for b in buffers if b is not None], posts)

    def free(self) -> None:
        """Have the servers leave each other; from then on ggml sums. Idempotent."""
        exchange, self._exchange = self._exchange, None
        self._known.clear()
        if exchange is not None:
            exchange.free()

    def failed(self, error: BaseException) -> None:
        """Something raised inside a call from C."""
        if isinstance(error, RemoteError):
            # Latched where it happened. The others may be waiting for that one.
            self.free()
            return
        for connection in self._connections:
            connection.fail(error, "all-reduce")
