"""Commands of links: how they come about, and tensors that travel on them."""

from __future__ import annotations

from collections.abc import Mapping

from longwire.native.memory import address_of
from longwire.server.exchange import exchange
from longwire.server.links import Link
from longwire.server.state import Handler, Pieces, SessionState
from longwire.server.tensors import CheckedTensor
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.links import LinkAccept, LinkConnect, LinkPart

__all__ = ["LINK_HANDLERS"]


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
    data = tensor.bytes(part.offset, part.size)
    if data is None:
        data = memoryview(bytearray(part.size))
        if part.size:
            tensor.buffer.device.get_tensor(
                tensor.native, address_of(data), part.offset, part.size
            )
    link.send([data])
    exchange([link], name, s.links.abandoned)
    return None


def _receive(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "LX_RECEIVE"
    link, tensor, part = _named(s, body, name)
    target = tensor.bytes(part.offset, part.size)
    data = memoryview(bytearray(part.size)) if target is None else target
    link.receive(data)
    exchange([link], name, s.links.abandoned)
    if target is None and part.size:
        tensor.buffer.device.set_tensor(
            tensor.native, address_of(data), part.offset, part.size
        )
    return None


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
