"""Commands of communicators: LX's, and those of protocol 8.

What they do is in `communicator` and `pairs`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from longwire.errors import BadRequest
from longwire.server.communicator import Communicator
from longwire.server.handshake import pair_up
from longwire.server.pairs import ACCEPT_S, DIAL_S, Pair
from longwire.server.state import Handler, Pieces, SessionState
from longwire.transport.tls import explain
from longwire.wire import messages as m
from longwire.wire.collectives import LxCommInit, WireType
from longwire.wire.constants import Command

__all__ = ["COMM_HANDLERS"]

_log = logging.getLogger("longwire.session")

_MAX_COMMUNICATORS = 8
"""Of one session: a model has one, and each may hold some megabytes."""


def _lx_comm_init(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "LX_COMM_INIT"
    request = LxCommInit.decode(body)
    comm, links = request.comm, request.links
    if comm in s.communicators:
        raise BadRequest(name, f"communicator {comm} is there already")
    if len(s.communicators) >= _MAX_COMMUNICATORS:
        reason = f"there are {_MAX_COMMUNICATORS} communicators already"
        raise BadRequest(name, reason)
    if request.own >= len(links) or not request.devices:
        reason = f"rank {request.own} of {len(links)}, {len(request.devices)} devices"
        raise BadRequest(name, reason)
    if request.wire not in list(WireType):
        raise BadRequest(name, f"wire type {request.wire} does not exist")
    others = [number for q, number in enumerate(links) if q != request.own]
    if len(set(others)) != len(others):
        raise BadRequest(name, "one link to two servers")
    s.communicators[comm] = Communicator(
        request,
        [
            None if q == request.own else s.links.of(number, name)
            for q, number in enumerate(links)
        ],
        [s.device(index, name) for index in request.devices],
        s.tensors,
        s.links.abandoned,
    )
    return [b""]


def _lx_allreduce(s: SessionState, body: memoryview, length: int) -> Pieces:
    (number,) = m.U32.unpack_from(body)
    communicator = s.communicators.get(number)
    if communicator is None:
        raise BadRequest("LX_ALLREDUCE", f"there is no communicator {number}")
    communicator.allreduce(body)
    return None


def _lx_comm_free(s: SessionState, body: memoryview, length: int) -> Pieces:
    (number,) = m.U32.unpack(body)
    communicator = s.communicators.pop(number, None)
    if communicator is None:
        raise BadRequest("LX_COMM_FREE", f"there is no communicator {number}")
    for link in communicator.links:
        s.links.drop(link, "its communicator was freed")
    return None


def _comm_init(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = m.CommInit.decode(body)
    if request.device >= len(s.devices) or request.world != 2 or request.rank >= 2:
        return [m.U8.pack(0)]
    known = s.pairs.get(request.device)
    if known is not None and known.alive:
        return [m.U8.pack(1)]
    if known is not None:
        known.close("another one takes its place")
        del s.pairs[request.device]
    try:
        s.pairs[request.device] = _pair(s, request)
    except (EOFError, OSError) as error:
        # 0: no communicator here, the client sums through itself.
        _log.warning("COMM_INIT as rank %d: %s", request.rank, explain(error))
        return [m.U8.pack(0)]
    return [m.U8.pack(1)]


def _pair(s: SessionState, request: m.CommInit) -> Pair:
    doors, abandoned = s.links.doors, s.links.abandoned
    if doors is None:
        raise ConnectionError("this server makes no links")
    if request.rank == 0:
        if s.tokens or s.links.secured:
            # Its first bytes are zeros: whoever sends those would have the place.
            raise ConnectionError("a server with a token or TLS takes no bare stream")
        if request.port != s.links.peer_port:
            own = s.links.peer_port or "none"
            reason = f"peers shall come to port {request.port}, its own is {own}"
            raise ConnectionError(reason)
        sock, peer = doors.pair(ACCEPT_S, abandoned)
    else:
        host = request.host.decode("utf-8", "replace")
        sock, peer = doors.dial(host, request.port, DIAL_S, abandoned, again=True)
    return Pair(pair_up(sock, request.rank), peer, abandoned)


def _comm_allreduce(s: SessionState, body: memoryview, length: int) -> Pieces:
    name = "COMM_ALLREDUCE"
    request = m.CommAllreduce.decode(body)
    s.device(request.device, name)
    pair = s.pairs.get(request.device)
    if pair is None:
        raise BadRequest(name, "there is no communicator")
    tensor = s.tensors.check(request.tensor, name)
    s.drain()
    pair.allreduce(tensor)
    return None


def _comm_free(s: SessionState, body: memoryview, length: int) -> Pieces:
    (index,) = m.U32.unpack(body)
    s.device(index, "COMM_FREE")
    pair = s.pairs.pop(index, None)
    if pair is not None:
        pair.close("the communicator was freed")
    return None


COMM_HANDLERS: Mapping[int, Handler] = {
    Command.COMM_INIT: _comm_init,
    Command.COMM_ALLREDUCE: _comm_allreduce,
    Command.COMM_FREE: _comm_free,
    Command.LX_COMM_INIT: _lx_comm_init,
    Command.LX_ALLREDUCE: _lx_allreduce,
    Command.LX_COMM_FREE: _lx_comm_free,
}
