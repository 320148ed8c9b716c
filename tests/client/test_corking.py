"""What is held back: in order, whole, and counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.client.corking import BULK, CORK_LIMIT, NUMBER_SIZE, Cork
from longwire.wire.constants import Command
from longwire.wire.dialects import MAX_PREPARED, MAX_PREPARED_DATA
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.prepared import SetPrepared
from support.scripted import frames

HEAD = REQUEST_HEADER.size
Write = tuple[int, bytes]


def writes(body: bytes, sizes: dict[int, int]) -> list[Write]:
    """The prepared writes of one message, each of its number's size."""
    message = SetPrepared.decode(memoryview(body))
    found, at = [], 0
    for number in message.each():
        found.append((number, bytes(message.data[at : at + sizes[number]])))
        at += sizes[number]
    assert at == len(message.data)
    return found


STEPS = st.lists(st.tuples(st.sampled_from("put write fold take".split()), st.binary()))


@settings(deadline=None)
@given(STEPS)
def test_any_sequence_leaves_in_order(steps: list[tuple[str, bytes]]) -> None:
    cork = Cork()
    expected: list[bytes | Write] = []
    taken = bytearray()
    sizes: dict[int, int] = {}
    for i, (step, data) in enumerate(steps):
        if step == "put":
            cork.put(Command.SET_TENSOR, len(data) + 1, (b"#", data))
            expected.append(b"#" + data)
        elif step == "write":
            cork.write(i, data)
            sizes[i] = len(data)
            expected.append((i, data))
        elif step == "fold":
            cork.fold()
        else:
            taken += cork.take()
    cork.fold()
    assert cork.size == len(cork.corked)
    taken += cork.take()
    assert not cork.size and not cork.corked
    left: list[bytes | Write] = []
    for request in frames(bytes(taken)):
        if request.command == Command.LX_SET_PREPARED:
            left += writes(request.body, sizes)
        else:
            left.append(request.body)
    assert left == expected


def test_what_is_apart_counts_and_stays() -> None:
    cork = Cork()
    cork.put(Command.SET_TENSOR, 5, (b"12345",))
    cork.write(3, bytes(40))
    assert cork.size == HEAD + 5 + NUMBER_SIZE + 40
    assert len(cork.take()) == HEAD + 5
    assert cork.size == NUMBER_SIZE + 40


@pytest.mark.parametrize(
    ("n", "size"), [(MAX_PREPARED, 1), (4, MAX_PREPARED_DATA // 4 + 1)]
)
def test_no_message_is_larger_than_a_server_takes(n: int, size: int) -> None:
    cork = Cork()
    for number in range(n):
        cork.write(number, bytes(size))
    assert len(cork.corked) > 0
    (request,) = frames(bytes(cork.take()))
    message = SetPrepared.decode(memoryview(request.body))
    assert len(message.each()) <= MAX_PREPARED
    assert len(message.data) <= MAX_PREPARED_DATA


def test_too_much_is_said_once_it_is() -> None:
    cork = Cork()
    most = CORK_LIMIT - HEAD
    assert not cork.put(Command.SET_TENSOR, most, (bytes(most),))
    # Not yet corked.
    assert not cork.write(1, b"data")
    assert cork.put(Command.SET_TENSOR, 0)


def test_a_graph_is_held_until_it_is_taken() -> None:
    cork = Cork()
    cork.put(Command.SET_TENSOR, 4, (b"data",))
    assert not cork.holds_graph
    cork.put(Command.GRAPH_RECOMPUTE, 12, (bytes(12),))
    cork.put(Command.SET_TENSOR, 4, (b"data",))
    assert cork.holds_graph
    cork.take()
    assert not cork.holds_graph


def test_a_head_alone_holds_nothing_back() -> None:
    """Its body goes right after it, from where it lies."""
    cork = Cork()
    cork.put(Command.GRAPH_COMPUTE, BULK)
    assert (cork.size, cork.holds_graph) == (HEAD, False)
    assert cork.last == Command.GRAPH_COMPUTE
