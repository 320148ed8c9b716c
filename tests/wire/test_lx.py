"""LX messages: one table for both directions, and what is cut short or lies."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from longwire.errors import BadFrame, LimitExceeded, ProtocolError
from longwire.wire.constants import Command
from longwire.wire.dialects import (
    LX_OFFER,
    LX_SHAPES,
    MAX_SUPPORT_QUERIES,
    V7,
    V8,
)
from longwire.wire.frames import ServerOrder
from longwire.wire.lx import (
    MAX_ANSWER,
    QUERY_SIZE,
    ErrorAnswer,
    Have,
    LxDevice,
    LxStart,
    LxStartAnswer,
    SetDigest,
    SupportsOps,
    Top,
)
from longwire.wire.patches import PATCH_HEAD
from longwire.wire.tensors import TENSOR_SIZE

MESSAGES = [
    (LxStart(1), "01000000"),
    (
        LxStartAnswer(1, "eng", ("NONE", "ADD"), 1),
        "01000000 01000000 0300 0800" + b"engNONE\nADD".hex(),
    ),
    (
        LxDevice(1, 2, 3, "CUDA0", "é"),
        "01000000 0200000000000000 0300000000000000 0500 0200"
        + "CUDA0é".encode().hex(),
    ),
    (ErrorAnswer(4, "BadRequest", "no"), "04000000 0a00" + b"BadRequestno".hex()),
    (SupportsOps(2, ()), "02000000 00000000"),
    (
        SupportsOps(2, (b"\1" * QUERY_SIZE, b"\2" * QUERY_SIZE)),
        "02000000 02000000" + "01" * QUERY_SIZE + "02" * QUERY_SIZE,
    ),
]


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_both_directions(message: Any, expected: str) -> None:
    body = bytes.fromhex(expected)
    assert message.encode() == body
    assert type(message).decode(memoryview(body)) == message


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_truncated(message: Any, expected: str) -> None:
    body = bytes.fromhex(expected)
    for size in range(0, len(body), max(1, len(body) // 97)):
        # A shorter sentence is a sentence: its length is the answer's.
        if isinstance(message, ErrorAnswer) and size >= 16:
            continue
        with pytest.raises((struct.error, BadFrame)):
            type(message).decode(memoryview(body[:size]))


def test_an_error_fits_an_answer() -> None:
    assert len(ErrorAnswer(1, "E", "é" * MAX_ANSWER).encode()) <= MAX_ANSWER


def test_too_many_questions() -> None:
    with pytest.raises(LimitExceeded):
        SupportsOps.decode(struct.pack("<II", 0, 1025))


@pytest.mark.parametrize("dialect", [V7, V8])
def test_lx_is_known_from_start_on(dialect: Any) -> None:
    order = ServerOrder(dialect.offering_lx())
    order.admit(0x0E, 24)
    with pytest.raises(ProtocolError):
        order.admit(0x81, 4)
    order.admit(0x80, 4)
    order.dialect = dialect.with_lx()
    for number, size in [(0x81, 4), (0x82, 8), (0x83, 0), (0x0B, 4)]:
        order.admit(number, size)
    for number, size in [(0x80, 4), (0x84, 0), (0xFF, 0), (0x82, 7)]:
        with pytest.raises(ProtocolError):
            order.admit(number, size)


def test_sizes_are_typed_once() -> None:
    """`dialects` cannot import the layouts that its sizes follow from."""
    record = bytes(TENSOR_SIZE)
    sizes = {
        Command.LX_START: len(LxStart(1).encode()),
        Command.LX_SUPPORTS_OPS: len(SupportsOps(0, ()).encode()),
        Command.LX_TOP: len(Top(record, 0, 0, 1).encode()),
        Command.LX_HAVE: len(Have(()).encode()),
        Command.LX_SET_DIGEST: len(SetDigest(record, 0, 0, bytes(32)).encode()),
        Command.LX_GRAPH_PATCH: PATCH_HEAD,
    }
    shapes = {**LX_OFFER, **LX_SHAPES}
    assert {c: shapes[c].least for c in sizes} == sizes
    assert shapes[Command.LX_SUPPORTS_OPS].most == 8 + QUERY_SIZE * MAX_SUPPORT_QUERIES
