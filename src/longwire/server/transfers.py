"""Commands of links: how they come about, and tensors that travel on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from longwire.server.exchange import exchange
from longwire.server.links import Link
from longwire.server.state import Handler, Pieces, SessionState
from longwire.server.tensors import CheckedTensor
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.links import LinkAccept, LinkConnect, LinkPart

__all__ = ["CHUNK", "LINK_HANDLERS", "receive_part", "send_part"]

CHUNK = 4 << 20
"""What the host cannot reach passes through so much memory, which no quota counts."""


def _listen(s: SessionState, body: memoryview, length: int) -> Pieces:
    return [s.links.listen().encode()]


def _connect(s: SessionState, body: memoryview, length: int) -> Pieces:
    return [m.U32.pack(s.links.connect(LinkConnect.decode(body)).number)]


def _accept(s: SessionState, body: memoryview, length: int) -> Pieces:
    return [m.U32.pack(s.links.accept(LinkAccept.decode(body)).number)]


def _unlink(s: SessionState, body: memoryview, length: int) -> Pieces:
    (number,) = m.U32.unpack(body)
    s.links.release(number, "LX_UNLINK")
    return None


def _send(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "LX_SEND"
    link, tensor, part = _named(s, body, name)
    send_part(link, tensor, part.offset, part.size, s.links.abandoned)
    return None


def _receive(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "LX_RECEIVE"
    link, tensor, part = _named(s, body, name)
    receive_part(link, tensor, part.offset, part.size, s.links.abandoned)
    return None


def send_part(
    link: Link,
    tensor: CheckedTensor,
    offset: int,
    size: int,
    abandoned: Callable[[], bool],
) -> None:
    """Send a checked range as one frame.

    Raises:
        RemoteFailure: the peer is gone or silent.
    """
    data = tensor.bytes(offset, size)
    step = None
    if data is None:
        room, at = memoryview(bytearray(min(size, CHUNK))), 0

        def fetched() -> memoryview:
            nonlocal at
            part = room[: size - at]
            tensor.fetch(part, offset + at)
            at += len(part)
            return part

        def refill() -> None:
            if link.dry and at < size:
                link.refill(fetched())

        data, step = fetched(), refill
    link.send([data], size - len(data))
    exchange([link], "LX_SEND", abandoned, step)


def receive_part(
    link: Link,
    tensor: CheckedTensor,
    offset: int,
    size: int,
    abandoned: Callable[[], bool],
) -> None:
    """Receive one frame into a checked range.

    Raises:
        RemoteFailure: the peer is gone or silent, or sends another size.
    """
    target = tensor.bytes(offset, size)
    step = None
    if target is None:
        target, at = memoryview(bytearray(min(size, CHUNK))), 0
        part = target

        def empty() -> None:
            nonlocal at, part
            if link.full and at < size:
                tensor.store(part, offset + at)
                at += len(part)
                part = target[: size - at]
                link.empty(part)

        step = empty
    link.receive(target, size - len(target))
    exchange([link], "LX_RECEIVE", abandoned, step)


def _named(
    s: SessionState, body: memoryview, command: str
) -> tuple[Link, CheckedTensor, LinkPart]:
    part = LinkPart.decode(body)
    link = s.links.of(part.link, command)
    tensor = s.tensors.check_range(part.tensor, part.offset, part.size, command)
    return link, tensor, part


LINK_HANDLERS: Mapping[int, Handler] = {
    Command.LX_LISTEN: _listen,
    Command.LX_CONNECT: _connect,
    Command.LX_ACCEPT: _accept,
    Command.LX_UNLINK: _unlink,
    Command.LX_SEND: _send,
    Command.LX_RECEIVE: _receive,
}
