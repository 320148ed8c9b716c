"""Messages of links and communicators: both directions, cut short, and lies."""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Any

import pytest

from longwire.errors import BadFrame, LimitExceeded
from longwire.wire.collectives import COMM_INIT_HEAD, LxAllreduce, LxCommInit, WireType
from longwire.wire.constants import Command
from longwire.wire.dialects import (
    LX_SHAPES,
    MAX_CERTIFICATE,
    MAX_HOST,
    MAX_MEMBERS,
    MAX_SERVERS,
    Shape,
)
from longwire.wire.links import (
    CONNECT_HEAD,
    SIGN_OF_LIFE,
    LinkAccept,
    LinkConnect,
    LinkPart,
    Listening,
    Ticket,
)
from longwire.wire.lx import HAS_PEERS, KEEPS_DATA, LxStartAnswer
from longwire.wire.tensors import TENSOR_SIZE

TICKET = Ticket(b"i" * 16, b"s" * 32)
_T = b"i" * 16 + b"s" * 32
RECORDS = (b"\1" * TENSOR_SIZE, b"\2" * TENSOR_SIZE)

MESSAGES: list[tuple[Any, str]] = [
    (Listening(0xC771, TICKET), "71c7" + _T.hex()),
    (
        LinkConnect(TICKET, 2000, 0xC771, "pc", b"\x30\x82"),
        _T.hex() + "d0070000 71c7 0200 0200" + b"pc\x30\x82".hex(),
    ),
    (LinkConnect(TICKET, 0, 1, "pc"), _T.hex() + "00000000 0100 0200 0000 7063"),
    (LinkAccept(TICKET, 60_000), _T.hex() + "60ea0000"),
    (
        LinkPart(3, RECORDS[0], 4, 1 << 33),
        "03000000" + "01" * TENSOR_SIZE + "0400000000000000 0000000002000000",
    ),
    (
        LxCommInit(7, WireType.BF16, 1 << 17, 1, (5, 0, 6), (0, 2)),
        "07000000 01000000 0000020000000000 01000000 03000000 02000000"
        "05000000 00000000 06000000 00000000 02000000",
    ),
    (
        LxAllreduce(7, 2, RECORDS),
        "07000000 02000000" + "01" * TENSOR_SIZE + "02" * TENSOR_SIZE,
    ),
]


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_both_directions(message: Any, expected: str) -> None:
    body = bytes.fromhex(expected)
    assert message.encode() == body
    assert type(message).decode(memoryview(body)) == message


@pytest.mark.parametrize(("message", "expected"), MESSAGES)
def test_cut_short(message: Any, expected: str) -> None:
    body = bytes.fromhex(expected)
    for size in range(0, len(body), max(1, len(body) // 97)):
        if isinstance(message, LxAllreduce) and size >= 8:
            # A record less is another message, and a part of one is none.
            size += (size - 8) % TENSOR_SIZE == 0
        with pytest.raises((struct.error, BadFrame)):
            type(message).decode(memoryview(body[:size]))


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (LinkConnect(TICKET, 0, 1, "h" * (MAX_HOST + 1)), "bytes of host 256"),
        (
            LinkConnect(TICKET, 0, 1, "", bytes(MAX_CERTIFICATE + 1)),
            "bytes of certificate 8193",
        ),
        (LxCommInit(1, 0, 0, 0, (1,) * (MAX_SERVERS + 1), (0,)), "server count 65"),
        (LxCommInit(1, 0, 0, 0, (1,), (0,) * (MAX_MEMBERS + 1)), "device count 17"),
    ],
)
def test_over_a_limit(message: Any, words: str) -> None:
    with pytest.raises(LimitExceeded, match=words):
        type(message).decode(message.encode())


def test_a_count_that_lies() -> None:
    body = bytearray(LxCommInit(1, 0, 0, 0, (1, 2), (0,)).encode())
    body[20:24] = struct.pack("<I", 3)
    with pytest.raises(BadFrame):
        LxCommInit.decode(body)


def test_sizes_are_typed_once() -> None:
    """`dialects` cannot import the layouts that its sizes follow from."""
    shapes = {Command(number): shape for number, shape in LX_SHAPES.items()}
    listen = shapes[Command.LX_LISTEN]
    assert listen == Shape(0, 0, len(Listening(0, TICKET).encode()))
    connect = shapes[Command.LX_CONNECT]
    assert connect.least == CONNECT_HEAD
    assert connect.most == CONNECT_HEAD + MAX_HOST + MAX_CERTIFICATE
    assert shapes[Command.LX_ACCEPT].most == len(LinkAccept(TICKET, 0).encode())
    part = len(LinkPart(0, RECORDS[0], 0, 0).encode())
    assert shapes[Command.LX_SEND].most == shapes[Command.LX_RECEIVE].least == part
    init = shapes[Command.LX_COMM_INIT]
    assert (init.least, init.most) == (COMM_INIT_HEAD, COMM_INIT_HEAD + 4 * 80)
    most = LxAllreduce(0, 0, RECORDS[:1] * MAX_MEMBERS).encode()
    reduce = shapes[Command.LX_ALLREDUCE]
    assert (reduce.least, reduce.most) == (8 + TENSOR_SIZE, len(most))


def test_a_secret_stays_one() -> None:
    assert "s" * 8 not in repr(LinkConnect(TICKET, 0, 1, "pc"))
    assert "73737373" not in repr(Listening(1, TICKET))


def test_proofs() -> None:
    def proof(words: bytes) -> bytes:
        return hmac.new(b"s" * 32, words, hashlib.sha256).digest()

    assert TICKET.connector_proof() == proof(b"longwire connects")
    assert TICKET.acceptor_proof() == proof(b"longwire accepts")


def test_a_sign_of_life_is_no_size_that_could_be() -> None:
    assert bytes.fromhex("ff" * 8) == SIGN_OF_LIFE


def test_flags_of_a_start() -> None:
    answer = LxStartAnswer(1, "engine", (), HAS_PEERS)
    assert (answer.has_peers, answer.keeps_data) == (True, False)
    assert not LxStartAnswer(1, "engine", (), KEEPS_DATA).has_peers
