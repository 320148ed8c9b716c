"""Clients that have their servers link up, and sum among themselves."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.links import LinkAccept, LinkConnect, LinkPart, Listening
from longwire.wire.tensors import Tensor
from support.lx import WideClient
from support.tensors import tensor

__all__ = ["Rank", "join", "link", "sum_of"]

Floats = npt.NDArray[np.float32]

PATIENCE_MS = 5000


class Rank(WideClient):
    """A client of one server, in LX."""

    def __init__(
        self, endpoint: Endpoint, *, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(endpoint, V8, 20.0, tls=tls)
        self.endpoint = endpoint
        self.certificate = b""
        if isinstance(self.socket, ssl.SSLSocket):
            self.certificate = self.socket.getpeercert(binary_form=True) or b""

    def listen(self) -> Listening:
        return Listening.decode(self.ask(Command.LX_LISTEN))

    def numbers(self, values: Floats) -> Tensor:
        """A tensor of these numbers, in a buffer of its own."""
        buffer = self.alloc(max(4 * len(values), 64))
        placed = tensor(1, buffer, 0, (len(values),))
        self.write(placed, values.astype("<f4").tobytes())
        return placed

    def values(self, placed: Tensor) -> Floats:
        return np.frombuffer(self.read(placed), "<f4")

    def connect(self, there: Rank, heard: Listening, **changes: object) -> None:
        """Ask for a link to that server; the answer is still to be read."""
        host, ticket = there.endpoint.host, heard.ticket
        request = LinkConnect(
            ticket, PATIENCE_MS, heard.port, host, there.certificate
        )._replace(**changes)
        self.post(Command.LX_CONNECT, request.encode())

    def accept(self, heard: Listening, patience_ms: int = PATIENCE_MS) -> None:
        """The other end of it."""
        body = LinkAccept(heard.ticket, patience_ms).encode()
        self.post(Command.LX_ACCEPT, body)

    def linked(self) -> int:
        (number,) = m.U32.unpack(self.answer())
        return int(number)

    def pass_on(
        self, command: Command, number: int, placed: Tensor, size: int, offset: int = 0
    ) -> None:
        """LX_SEND or LX_RECEIVE."""
        part = LinkPart(number, placed.encode(wide=True), offset, size)
        self.post(command, part.encode())

    def allreduce(self, *placed: Tensor, comm: int = 1, absent: int = 0) -> None:
        records = tuple(t.encode(wide=True) for t in placed)
        body = LxAllreduce(comm, absent, records).encode()
        self.post(Command.LX_ALLREDUCE, body)


def link(a: Rank, b: Rank) -> tuple[int, int]:
    """A link between the two: its number at either."""
    heard = b.listen()
    a.connect(b, heard)
    b.accept(heard)
    return a.linked(), b.linked()


def join(
    ranks: Sequence[Rank],
    *,
    wire: int = 0,
    least: int = 0,
    devices: Sequence[int] = (0,),
    comm: int = 1,
) -> None:
    """Make a communicator of all."""
    links = [[0] * len(ranks) for _ in ranks]
    for i, a in enumerate(ranks):
        for j, b in enumerate(ranks[:i]):
            links[i][j], links[j][i] = link(a, b)
    for own, rank in enumerate(ranks):
        request = LxCommInit(comm, wire, least, own, tuple(links[own]), tuple(devices))
        assert rank.ask(Command.LX_COMM_INIT, request.encode()) == b""


def sum_of(
    ranks: Sequence[Rank], values: Sequence[Floats], **options: int
) -> list[Floats]:
    """What each rank has after one LX_ALLREDUCE."""
    placed = [rank.numbers(v) for rank, v in zip(ranks, values, strict=True)]
    for rank, t in zip(ranks, placed, strict=True):
        rank.allreduce(t, **options)
    return [rank.values(t) for rank, t in zip(ranks, placed, strict=True)]
