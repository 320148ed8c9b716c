"""Which writes a client sends by number, and when it forgets the numbers."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from longwire.client.prepared import PreparedWrites
from longwire.client.records import TENSOR_BYTES
from longwire.wire.constants import Command
from longwire.wire.dialects import MAX_PREPARED_DATA, MAX_PREPARED_SIZE

RECORD = bytes(296)


class Wire:
    """Takes down what a connection would send."""

    def __init__(self) -> None:
        self.refusals = 0
        self.sent: list[tuple[Any, ...]] = []

    def post(self, command: Command, body: bytes) -> None:
        assert command == Command.LX_PREPARE_SET
        self.sent.append(("prepare", int.from_bytes(body[:4], "little")))

    def write_prepared(self, number: int, data: bytes) -> None:
        self.sent.append((number, data))


class Memory:
    """A `ggml_tensor` and its new data."""

    def __init__(self, data: bytes = b"data") -> None:
        self._tensor = ctypes.create_string_buffer(TENSOR_BYTES)
        self._data = ctypes.create_string_buffer(data, max(1, len(data)))
        self.tensor = ctypes.addressof(self._tensor)
        self.data = ctypes.addressof(self._data)
        self.size = len(data)

    def change(self) -> None:
        """The same memory is another tensor's now."""
        self._tensor[80] = b"\1"


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def writes(wire: Wire) -> PreparedWrites:
    return PreparedWrites(wire)  # type: ignore[arg-type]


def step(writes: PreparedWrites, memory: Memory) -> bool:
    """What a buffer does; whether the write went by number."""
    if writes.write(memory.tensor, memory.data, memory.size):
        return True
    writes.note(memory.tensor, RECORD, memory.size)
    return False


def test_the_third_time_it_is_a_number(writes: PreparedWrites, wire: Wire) -> None:
    memory = Memory()
    assert [step(writes, memory) for _ in range(4)] == [False, False, True, True]
    assert wire.sent == [("prepare", 0), (0, b"data"), (0, b"data")]


def test_each_has_its_own(writes: PreparedWrites, wire: Wire) -> None:
    memories = [Memory(b"a"), Memory(b"bc")]
    for _ in range(3):
        for memory in memories:
            step(writes, memory)
    assert wire.sent[-2:] == [(0, b"a"), (1, b"bc")]


def test_another_tensor_in_the_same_memory(writes: PreparedWrites, wire: Wire) -> None:
    memory = Memory()
    for _ in range(3):
        step(writes, memory)
    memory.change()
    assert [step(writes, memory) for _ in range(3)] == [False, False, True]
    assert wire.sent[-2:] == [("prepare", 1), (1, b"data")]


def test_another_size(writes: PreparedWrites) -> None:
    memory = Memory()
    for _ in range(3):
        step(writes, memory)
    memory.size = 2
    assert not step(writes, memory)


def test_after_a_refusal_nothing_is_known(writes: PreparedWrites, wire: Wire) -> None:
    memory = Memory()
    for _ in range(3):
        step(writes, memory)
    wire.refusals += 1
    assert [step(writes, memory) for _ in range(3)] == [False, False, True]
    assert wire.sent[-2:] == [("prepare", 1), (1, b"data")]


def test_two_threads_have_no_number_in_common(
    writes: PreparedWrites, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Memory(), Memory()
    for memory in (one, other):
        step(writes, memory)
    second = threading.Thread(target=step, args=(writes, other))

    def post(command: Command, body: bytes) -> None:
        monkeypatch.undo()
        second.start()
        # With a number of its own it has to wait for this one.
        second.join(0.1)
        wire.post(command, body)

    monkeypatch.setattr(wire, "post", post)
    step(writes, one)
    second.join()
    assert wire.sent == [("prepare", 0), ("prepare", 1)]


def test_numbers_come_round(writes: PreparedWrites, wire: Wire) -> None:
    memories = [Memory(b"%d" % i) for i in range(1030)]
    for memory in memories:
        step(writes, memory), step(writes, memory)
    numbers = [number for _, number in wire.sent]
    assert numbers == [*range(1024), *range(6)]
    assert not writes.write(memories[0].tensor, memories[0].data, 1)
    assert step(writes, memories[-1])


def test_large_ones_stay_as_they_are(writes: PreparedWrites, wire: Wire) -> None:
    memory = Memory(bytes(MAX_PREPARED_SIZE + 1))
    for _ in range(3):
        assert not step(writes, memory)
    assert not wire.sent
    assert MAX_PREPARED_DATA > MAX_PREPARED_SIZE
