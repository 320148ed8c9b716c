"""Every message body, except graphs: decoded, encoded again, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fuzz.source import Source
from longwire.errors import BadFrame, LimitExceeded
from longwire.wire import links, lx
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.patches import GraphPatch
from longwire.wire.spans import TraceAnswer, TraceRequest
from longwire.wire.tensors import TENSOR_SIZE, Tensor
from longwire.wire.types import TYPES, nbytes

__all__ = ["check", "seeds"]

_T = TENSOR_SIZE
_FIXED: list[tuple[Any, int]] = [
    (m.Hello, 24),
    (m.HelloAnswer, 28),
    (m.AllocBuffer, 12),
    (m.AllocBufferAnswer, 16),
    (m.DeviceMemory, 16),
    (m.BufferClear, 9),
    (m.MemsetTensor, _T + 17),
    (m.SetTensor, _T + 9),
    (m.SetTensorHash, _T + 16),
    (m.GetTensor, _T + 16),
    (m.CopyTensor, 2 * _T),
    (m.GetAllocSize, 4 + 11 * _T),
    (m.SetTensor2D, _T + 32),
    (m.GetTensor2D, _T + 32),
    (m.CommInit, 80),
    (m.CommAllreduce, 4 + _T),
    (lx.LxStart, 4),
    (lx.Top, _T + 20),
    (lx.SetDigest, _T + 48),
    (TraceRequest, 4),
    (links.Listening, 50),
    (links.LinkAccept, 52),
    (links.LinkPart, _T + 20),
]
"""Decoders and the one length that they are given (`ServerOrder` sees to it)."""

_VARYING: list[tuple[Callable[[bytes], Any], int]] = [
    (lx.ErrorAnswer.decode, 0),
    (lx.LxStartAnswer.decode, 0),
    (lx.LxDevice.decode, 0),
    (lx.SupportsOps.decode, 8),
    (lx.Have.decode, 4),
    (TraceAnswer.decode, 0),
    (GraphPatch.decode, 0),
    (links.LinkConnect.decode, 58),
    (LxCommInit.decode, 28),
    (LxAllreduce.decode, 8),
]
"""Decoders of any length from a least one on."""

_EXACT = (
    *(lx.SupportsOps.decode, lx.Have.decode, TraceAnswer.decode),
    *(LxCommInit.decode, LxAllreduce.decode),
)
"""Those that keep every byte: no text, that may not be UTF-8."""


def check(data: bytes) -> None:
    """Any bytes are a message, or one of the errors that its decoder names."""
    source = Source(data)
    kind = source.below(len(_FIXED) + len(_VARYING) + 1)
    if kind < len(_FIXED):
        message, size = _FIXED[kind]
        _check_fixed(message, source.take(size))
    elif kind < len(_FIXED) + len(_VARYING):
        decode, least = _VARYING[kind - len(_FIXED)]
        _check_varying(decode, source.take(max(least, source.left)))
    else:
        _check_tensor(source.take(_T))


def _check_fixed(message: Any, body: bytes) -> None:
    found = message.decode(body)
    again = found.encode()
    assert len(again) == len(body)
    # Texts end at their first NUL: what follows it is not kept.
    assert message.decode(again) == found
    if message is not m.CommInit:
        assert again == body


def _check_varying(decode: Callable[[bytes], Any], body: bytes) -> None:
    try:
        found = decode(body)
    except (BadFrame, LimitExceeded):
        return
    if decode in _EXACT:
        assert found.encode() == body
    if decode == GraphPatch.decode:
        assert b"".join(found.encode()) == body


def _check_tensor(body: bytes) -> None:
    tensor = Tensor.decode(body)
    assert Tensor.decode(tensor.encode()) == tensor
    if tensor.type in TYPES:
        assert nbytes(tensor.type, tensor.ne, tensor.nb) >= 0


def seeds() -> Iterator[bytes]:
    """Each kind, of ones and twos."""
    for kind in range(len(_FIXED) + len(_VARYING) + 1):
        yield bytes([kind]) + b"\1\0\0\0\2\0\0\0" * 500
