"""The LX commands' handlers, and errors as answers instead of a closed door."""

from __future__ import annotations

from collections.abc import Mapping

from longwire.errors import WIRE_CODES, LongwireError
from longwire.native.compute import op_names
from longwire.server.state import Handler, Pieces, SessionState
from longwire.server.tensors import LinkedTensor
from longwire.wire import messages as m
from longwire.wire.constants import LX_VERSION, Command
from longwire.wire.lx import (
    ErrorAnswer,
    LxDevice,
    LxStart,
    LxStartAnswer,
    SupportsOps,
)
from longwire.wire.tensors import TENSOR_SIZE

__all__ = ["LX_HANDLERS", "error_answer"]


def error_answer(error: LongwireError) -> ErrorAnswer:
    """How a failed command is answered."""
    name = type(error).__name__
    return ErrorAnswer(WIRE_CODES.get(name, 0), name, str(error))


def _start(s: SessionState, body: memoryview, length: int) -> Pieces:
    version = min(LX_VERSION, LxStart.decode(body).version)
    engine = s.devices[0].engine
    s.dialect = s.dialect.with_lx()
    answer = LxStartAnswer(version, engine.profile.label, op_names(engine))
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
        op = LinkedTensor(record, srcs, "LX_SUPPORTS_OPS")
        answers.append(device.supports_op(op.native))
    return [answers]


def _ping(s: SessionState, body: memoryview, length: int) -> Pieces:
    return [b""]


LX_HANDLERS: Mapping[int, Handler] = {
    Command.LX_START: _start,
    Command.LX_DEVICE: _device,
    Command.LX_SUPPORTS_OPS: _supports_ops,
    Command.LX_PING: _ping,
}
