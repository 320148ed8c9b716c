"""LX_TRACE's messages."""

from __future__ import annotations

import struct

import pytest

from longwire.errors import BadFrame, LimitExceeded, ProtocolError
from longwire.wire.constants import Command
from longwire.wire.lx import MAX_ANSWER
from longwire.wire.spans import (
    COMPUTING,
    MAX_SPANS,
    WAITING,
    TraceAnswer,
    TraceRequest,
    WorkSpan,
)

BODY = struct.pack("<QQI", 7, 8, 2) + struct.pack("<QQQIQQQI", 1, 2, 3, 4, 5, 6, 7, 8)
ANSWER = TraceAnswer(7, 8, (WorkSpan(1, 2, 3, 4), WorkSpan(5, 6, 7, 8)))


def test_bytes() -> None:
    assert ANSWER.encode() == BODY
    assert TraceAnswer.decode(BODY) == ANSWER
    assert TraceRequest(1).encode() == b"\1\0\0\0"
    assert TraceRequest.decode(b"\0\0\0\0").on == 0


@pytest.mark.parametrize("size", range(len(BODY)))
def test_cut_off(size: int) -> None:
    with pytest.raises(BadFrame):
        TraceAnswer.decode(BODY[:size])


def test_too_much() -> None:
    with pytest.raises(BadFrame):
        TraceAnswer.decode(BODY + b"\0")
    with pytest.raises(LimitExceeded):
        TraceAnswer.decode(struct.pack("<QQI", 7, 8, MAX_SPANS + 1))
    with pytest.raises(ProtocolError):
        TraceAnswer.decode(struct.pack("<QQI", 7, 8, 0xFFFF_FFFF))


def test_the_largest_answer_fits_the_limit() -> None:
    answer = TraceAnswer(1, 0, (WorkSpan(1, 2, 3, 4),) * MAX_SPANS)
    assert len(answer.encode()) <= MAX_ANSWER
    assert TraceAnswer.decode(answer.encode()) == answer


def test_names() -> None:
    kinds = (Command.LX_TOP, COMPUTING, WAITING, 0x7F)
    names = [WorkSpan(0, 0, 0, kind).name for kind in kinds]
    assert names == ["LX_TOP", "compute", "wait for the device", "0x7f"]
