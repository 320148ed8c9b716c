"""Every message body of fixed size, against bytes put together by hand."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import pytest

from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8
from longwire.wire.messages import (
    SET_TENSOR_2D_HEAD,
    SET_TENSOR_HEAD,
    U8,
    U32,
    U64,
    AllocBuffer,
    AllocBufferAnswer,
    BufferClear,
    CommAllreduce,
    CommInit,
    CopyTensor,
    DeviceMemory,
    GetAllocSize,
    GetTensor,
    GetTensor2D,
    Hello,
    HelloAnswer,
    MemsetTensor,
    SetTensor,
    SetTensor2D,
    SetTensorHash,
)

RECORD = bytes((7 * i + 1) % 256 for i in range(296))
OTHER = RECORD[::-1]
SOURCES = bytes((11 * i + 3) % 256 for i in range(2960))
CAPS = bytes(range(0xA0, 0xB8))


class Case(NamedTuple):
    """A message and its body; `answer` tells which side of the command it is."""

    command: Command
    message: Any
    body: bytes
    answer: bool = False


C = Command
CASES = [
    Case(C.HELLO, Hello(), bytes(24)),
    Case(C.HELLO, Hello(CAPS), CAPS),
    Case(C.HELLO, HelloAnswer(7, 0, 0), bytes.fromhex("07000000") + bytes(24), True),
    Case(C.HELLO, HelloAnswer(8, 0, 0), bytes.fromhex("08000000") + bytes(24), True),
    Case(C.HELLO, HelloAnswer(8, 1, 2, 3, CAPS), b"\x08\x01\x02\x03" + CAPS, True),
    Case(
        C.ALLOC_BUFFER,
        AllocBuffer(device=1, size=0x1122334455667788),
        bytes.fromhex("01000000 8877665544332211"),
    ),
    Case(
        C.ALLOC_BUFFER,
        AllocBufferAnswer(handle=0xFEDCBA9876543210, size=4096),
        bytes.fromhex("1032547698badcfe 0010000000000000"),
        True,
    ),
    Case(C.ALLOC_BUFFER, AllocBufferAnswer(0, 0), bytes(16), True),
    Case(
        C.GET_DEVICE_MEMORY,
        DeviceMemory(free=0x100000000, total=0x200000000),
        bytes.fromhex("0000000001000000 0000000002000000"),
        True,
    ),
    Case(
        C.BUFFER_CLEAR,
        BufferClear(handle=2**64 - 1, value=0xAB),
        bytes.fromhex("ffffffffffffffff ab"),
    ),
    Case(
        C.MEMSET_TENSOR,
        MemsetTensor(RECORD, offset=16, size=2**40, value=5),
        RECORD + bytes.fromhex("1000000000000000 0000000000010000 05"),
    ),
    Case(
        C.SET_TENSOR,
        SetTensor(RECORD, cache_flag=1, offset=0x0102030405060708),
        RECORD + bytes.fromhex("01 0807060504030201"),
    ),
    Case(
        C.SET_TENSOR_HASH,
        SetTensorHash(RECORD, offset=3, hash=0x85944171F73967E8),
        RECORD + bytes.fromhex("0300000000000000 e86739f771419485"),
    ),
    Case(
        C.GET_TENSOR,
        GetTensor(RECORD, offset=4, size=0xFF),
        RECORD + bytes.fromhex("0400000000000000 ff00000000000000"),
    ),
    Case(C.COPY_TENSOR, CopyTensor(src=RECORD, dst=OTHER), RECORD + OTHER),
    Case(
        C.GET_ALLOC_SIZE,
        GetAllocSize(device=2, tensor=RECORD, srcs=SOURCES),
        bytes.fromhex("02000000") + RECORD + SOURCES,
    ),
    Case(
        C.SET_TENSOR_2D,
        SetTensor2D(RECORD, offset=1, size=272, n_copies=512, stride=544),
        RECORD + struct.pack("<4Q", 1, 272, 512, 544),
    ),
    Case(
        C.GET_TENSOR_2D,
        GetTensor2D(RECORD, offset=0, size=640, n_copies=64, stride=1280),
        RECORD + struct.pack("<4Q", 0, 640, 64, 1280),
    ),
    Case(
        C.COMM_INIT,
        CommInit(device=0, rank=0, world=2, port=51052, host=b""),
        bytes.fromhex("00000000 00000000 02000000 6cc70000") + bytes(64),
    ),
    Case(
        C.COMM_INIT,
        CommInit(device=3, rank=1, world=2, port=51052, host=b"10.0.0.7"),
        bytes.fromhex("03000000 01000000 02000000 6cc70000") + b"10.0.0.7" + bytes(56),
    ),
    Case(
        C.COMM_ALLREDUCE,
        CommAllreduce(device=1, tensor=RECORD),
        bytes.fromhex("01000000") + RECORD,
    ),
]
HEADS = {C.SET_TENSOR, C.SET_TENSOR_2D}

case_by_case = pytest.mark.parametrize(
    "case", CASES, ids=[f"{i}-{type(c.message).__name__}" for i, c in enumerate(CASES)]
)


@case_by_case
def test_encode_gives_the_bytes(case: Case) -> None:
    assert case.message.encode() == case.body


@case_by_case
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decode_gives_the_message(case: Case, kind: type) -> None:
    message = type(case.message).decode(kind(case.body))
    assert message == case.message
    assert type(message) is type(case.message)


@case_by_case
def test_decode_refuses_every_truncation(case: Case) -> None:
    for length in range(len(case.body)):
        with pytest.raises(struct.error):
            type(case.message).decode(case.body[:length])


@case_by_case
@pytest.mark.parametrize("surplus", [b"\0", b"\xff", bytes(296)])
def test_decode_refuses_trailing_bytes(case: Case, surplus: bytes) -> None:
    with pytest.raises(struct.error):
        type(case.message).decode(case.body + surplus)


@case_by_case
def test_body_has_the_size_that_the_dialect_lists(case: Case) -> None:
    for dialect in (V7, V8):
        if not dialect.has(case.command):
            assert dialect is V7
            continue
        shape = dialect.shapes[case.command]
        if case.answer:
            assert shape.answer == len(case.body)
        else:
            assert shape.least == len(case.body)
            assert (shape.most == shape.least) is (case.command not in HEADS)


@pytest.mark.parametrize(
    ("layout", "value", "body"),
    [
        (U8, 0x7F, "7f"),
        (U32, 0x01020304, "04030201"),
        (U64, 0x0102030405060708, "0807060504030201"),
    ],
)
def test_bare_numbers_are_little_endian(
    layout: struct.Struct, value: int, body: str
) -> None:
    assert layout.pack(value) == bytes.fromhex(body)
    assert layout.unpack(bytes.fromhex(body)) == (value,)


def test_data_starts_right_after_the_head() -> None:
    assert SET_TENSOR_HEAD == 305
    assert SET_TENSOR_2D_HEAD == 328


def test_a_host_ends_at_its_first_nul() -> None:
    body = struct.pack("<4I", 0, 1, 2, 51052) + b"first\0second".ljust(64, b"\0")
    assert CommInit.decode(body).host == b"first"


def test_a_host_may_fill_its_field() -> None:
    message = CommInit(0, 1, 2, 51052, b"h" * 64)
    assert CommInit.decode(message.encode()) == message


@pytest.mark.parametrize(
    "message",
    [
        AllocBuffer(device=2**32, size=0),
        AllocBuffer(device=0, size=2**64),
        BufferClear(handle=1, value=256),
        GetTensor(RECORD, offset=-1, size=0),
        HelloAnswer(256, 0, 0),
    ],
    ids=repr,
)
def test_encode_refuses_what_does_not_fit(message: Any) -> None:
    with pytest.raises(struct.error):
        message.encode()
