"""The frame header, and which headers a server admits when."""

from __future__ import annotations

import pytest

from longwire.errors import BadFrame, BadRequest, ProtocolError, UnknownCommand
from longwire.wire.constants import Command
from longwire.wire.dialects import DIALECTS, V7, V8, Dialect
from longwire.wire.frames import (
    ANSWER_HEADER,
    REQUEST_HEADER,
    ServerOrder,
    command_name,
)

C = Command
HUGE = [2**32, 2**61, 2**62, 2**63, 2**64 - 1]

both = pytest.mark.parametrize("dialect", [V7, V8], ids=["v7", "v8"])
every_command = pytest.mark.parametrize(
    ("dialect", "number"),
    [(dialect, number) for dialect in (V7, V8) for number in dialect.shapes],
    ids=lambda value: (
        value.version if isinstance(value, Dialect) else Command(value).name
    ),
)


def greeted(dialect: Dialect) -> ServerOrder:
    """A connection that has seen its HELLO."""
    order = ServerOrder(dialect)
    order.admit(C.HELLO, 24)
    return order


def test_headers_are_packed_and_little_endian() -> None:
    hello = bytes.fromhex("0e 1800000000000000")
    assert REQUEST_HEADER.pack(C.HELLO, 24) == hello
    assert REQUEST_HEADER.unpack(hello) == (14, 24)
    assert REQUEST_HEADER.pack(0xFF, 2**63 + 1) == bytes.fromhex("ff 0100000000000080")
    assert ANSWER_HEADER.pack(28) == bytes.fromhex("1c00000000000000")


def test_a_number_nobody_knows_is_shown_in_hex() -> None:
    assert command_name(0x0E) == "HELLO"
    assert command_name(0x17) == "0x17"
    assert command_name(0xFF) == "0xff"


def test_dialects_are_found_by_major_version() -> None:
    assert DIALECTS == {7: V7, 8: V8}
    assert [d.version for d in DIALECTS.values()] == ["7.0.0", "8.0.0"]


@both
def test_hello_comes_first(dialect: Dialect) -> None:
    order = ServerOrder(dialect)
    assert not order.greeted
    assert order.admit(C.HELLO, 24).answer == 28
    assert order.greeted


@every_command
def test_nothing_but_hello_may_come_first(dialect: Dialect, number: int) -> None:
    order = ServerOrder(dialect)
    if number == C.HELLO:
        order.admit(number, 24)
        return
    with pytest.raises(BadRequest, match="no HELLO"):
        order.admit(number, dialect.shapes[number].least)
    assert not order.greeted


@both
def test_a_second_hello_is_refused(dialect: Dialect) -> None:
    order = greeted(dialect)
    order.admit(C.DEVICE_COUNT, 0)
    with pytest.raises(BadRequest, match="a second HELLO"):
        order.admit(C.HELLO, 24)


@both
@pytest.mark.parametrize("length", [0, 23, 25, *HUGE])
def test_a_hello_of_another_length_greets_nobody(dialect: Dialect, length: int) -> None:
    order = ServerOrder(dialect)
    with pytest.raises(BadFrame, match=f"HELLO: length {length}, expected 24"):
        order.admit(C.HELLO, length)
    assert not order.greeted


@every_command
def test_every_command_is_admitted_after_hello(dialect: Dialect, number: int) -> None:
    if number == C.HELLO:
        return
    order = greeted(dialect)
    shape = dialect.shapes[number]
    assert order.admit(number, shape.least) is shape
    assert order.admit(number, shape.most) is shape


@pytest.mark.parametrize(("dialect", "count"), [(V7, 18), (V8, 23)], ids=["v7", "v8"])
def test_numbers_outside_the_dialect_are_unknown(dialect: Dialect, count: int) -> None:
    assert sorted(dialect.shapes) == list(range(count))
    for order in (ServerOrder(dialect), greeted(dialect)):
        for number in range(count, 0x100):
            with pytest.raises(UnknownCommand) as caught:
                order.admit(number, 0)
            assert caught.value.number == number
            assert caught.value.dialect == dialect.version


def test_protocol_8_s_new_numbers_are_unknown_to_protocol_7() -> None:
    new = [C.SET_TENSOR_2D, C.GET_TENSOR_2D, C.COMM_INIT, C.COMM_ALLREDUCE, C.COMM_FREE]
    assert new == [18, 19, 20, 21, 22]
    for number in new:
        with pytest.raises(UnknownCommand):
            greeted(V7).admit(number, V8.shapes[number].least)


@every_command
def test_wrong_lengths_are_refused(dialect: Dialect, number: int) -> None:
    if number == C.HELLO:
        return
    order = greeted(dialect)
    shape = dialect.shapes[number]
    wrong = [shape.least - 1, shape.most + 1, *HUGE]
    for length in wrong:
        if length < 0 or shape.least <= length <= shape.most:
            continue
        with pytest.raises(BadFrame) as caught:
            order.admit(number, length)
        assert caught.value.length == length
        assert caught.value.command == command_name(number)


@both
def test_a_huge_graph_is_refused_by_its_header(dialect: Dialect) -> None:
    for length in HUGE:
        with pytest.raises(BadFrame):
            greeted(dialect).admit(C.GRAPH_COMPUTE, length)


def test_the_two_dialects_differ_in_their_recompute() -> None:
    greeted(V7).admit(C.GRAPH_RECOMPUTE, 4)
    greeted(V8).admit(C.GRAPH_RECOMPUTE, 12)
    with pytest.raises(BadFrame):
        greeted(V7).admit(C.GRAPH_RECOMPUTE, 12)
    with pytest.raises(BadFrame):
        greeted(V8).admit(C.GRAPH_RECOMPUTE, 4)


def test_only_data_may_have_any_length() -> None:
    open_ended = {
        (dialect.major, number)
        for dialect in (V7, V8)
        for number, shape in dialect.shapes.items()
        if shape.most >= 2**61
    }
    assert open_ended == {(7, C.SET_TENSOR), (8, C.SET_TENSOR), (8, C.SET_TENSOR_2D)}


@both
def test_a_refusal_leaves_the_connection_as_it_was(dialect: Dialect) -> None:
    order = greeted(dialect)
    for number, length in [(0x80, 0), (C.HELLO, 24), (C.FREE_BUFFER, 7)]:
        with pytest.raises(ProtocolError):
            order.admit(number, length)
    order.admit(C.FREE_BUFFER, 8)
