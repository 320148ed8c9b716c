"""How LX starts and what it tells, and errors as answers instead of a closed door.

Commands of LX that move or compute data stand beside their kin: `handlers`,
`computing`, `digests`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

from longwire.errors import WIRE_CODES, BadRequest, LongwireError, Unauthenticated
from longwire.native.compute import op_names
from longwire.server.spans import SpanRing
from longwire.server.state import Handler, Pieces, SessionState
from longwire.server.tensors import LinkedTensor
from longwire.wire import messages as m
from longwire.wire.constants import LX_VERSION, Command
from longwire.wire.lx import (
    HAS_PEERS,
    KEEPS_DATA,
    ErrorAnswer,
    LxDevice,
    LxStart,
    LxStartAnswer,
    SupportsOps,
)
from longwire.wire.proof import NONCE_SIZE, matching, server_proof
from longwire.wire.spans import MAX_SPANS, TraceAnswer, TraceRequest
from longwire.wire.tensors import TENSOR_SIZE

__all__ = ["LX_HANDLERS", "error_answer"]


def error_answer(error: LongwireError) -> ErrorAnswer:
    """How a failed command is answered."""
    name = type(error).__name__
    return ErrorAnswer(WIRE_CODES.get(name, 0), name, str(error))


def _auth(s: SessionState, body: memoryview, length: int) -> Pieces:
    if not s.tokens:
        # A client that was given a token wants to be sure of its server.
        raise Unauthenticated("LX_AUTH", "this server has no token (--token-file)")
    if s.nonces is not None:
        # Else a client could keep its place for ever, and never come in.
        raise Unauthenticated("LX_AUTH", "a second one before LX_PROVE")
    s.nonces = bytes(body), secrets.token_bytes(NONCE_SIZE)
    return [s.nonces[1]]


def _prove(s: SessionState, body: memoryview, length: int) -> Pieces:
    nonces, s.nonces = s.nonces, None
    if nonces is None:
        raise Unauthenticated("LX_PROVE", "no LX_AUTH before it")
    token = matching(s.tokens, bytes(body), *nonces)
    if token is None:
        raise Unauthenticated("LX_PROVE", "not the token of this server")
    s.proven = True
    return [server_proof(token, *nonces)]


def _start(s: SessionState, body: memoryview, length: int) -> Pieces:
    if s.locked:
        raise Unauthenticated("LX_START", "a token is needed (--token-file)")
    version = min(LX_VERSION, LxStart.decode(body).version)
    engine = s.devices[0].engine
    s.dialect = s.dialect.with_lx()
    s.tensors.widen()
    flags = KEEPS_DATA if s.store.keeps else 0
    flags |= HAS_PEERS if s.links.peer_port is not None else 0
    answer = LxStartAnswer(version, engine.profile.label, op_names(engine), flags)
    return [answer.encode()]


def _device(s: SessionState, body: memoryview, length: int) -> Pieces:
    (index,) = m.U32.unpack(body)
    device = s.device(index, "LX_DEVICE")
    free, total = s.memory(device)
    answer = LxDevice(device.type, free, total, device.name, device.description)
    return [answer.encode()]


def _supports_ops(s: SessionState, body: memoryview, length: int) -> Pieces:
    request = SupportsOps.decode(body)
    device = s.device(request.device, "LX_SUPPORTS_OPS")
    answers = bytearray()
    for query in request.queries:
        record, srcs = query[:TENSOR_SIZE], query[TENSOR_SIZE:]
        op = LinkedTensor(record, srcs, "LX_SUPPORTS_OPS", wide=True)
        answers.append(op.complete and device.supports_op(op.native))
    return [answers]


def _ping(s: SessionState, body: memoryview, length: int) -> Pieces:
    return [b""]


def _trace(s: SessionState, body: memoryview, length: int) -> Pieces:
    (on,) = TraceRequest.decode(body)
    if on not in (0, 1):
        raise BadRequest("LX_TRACE", f"{on} is neither on (1) nor off (0)")
    ring = s.spans or SpanRing()
    s.spans = ring if on else None
    answer = TraceAnswer(time.monotonic_ns(), ring.lost, ring.take(MAX_SPANS))
    return [answer.encode()]


LX_HANDLERS: Mapping[int, Handler] = {
    Command.LX_START: _start,
    Command.LX_DEVICE: _device,
    Command.LX_SUPPORTS_OPS: _supports_ops,
    Command.LX_PING: _ping,
    Command.LX_AUTH: _auth,
    Command.LX_PROVE: _prove,
    Command.LX_TRACE: _trace,
}
