"""Sums over the devices of several servers."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from longwire.native.compute import ComputeDevice
from longwire.server.communicator import Communicator
from longwire.server.reduce import ROUND, part_of
from longwire.server.tensors import CheckedTensor, TensorChecker
from longwire.transport.tls import client_context
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.constants import U64_MAX, Command
from longwire.wire.dialects import V8
from support.client import Buffer, RawClient
from support.keys import Keys
from support.links import Rank, join, link, sum_of
from support.tensors import tensor
from support.worker import Worker, running_worker

C = Command
Floats = npt.NDArray[np.float32]
Ranks = Callable[[int], list[Rank]]

ONE_SHOT = 16 * 1024
"""Numbers up to which all goes to everybody at once."""

COUNTS = [1, 5, 2048, ONE_SHOT + 1, ROUND - 1, 2 * ROUND + 3]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """Two servers: neighbouring ranks are on different ones."""
    with ExitStack() as stack:
        start = stack.enter_context
        yield [start(running_worker("--protocol", "8", "--spares", "3")) for _ in "ab"]


@pytest.fixture
def ranks(workers: list[Worker]) -> Iterator[Ranks]:
    """Opens clients that speak LX; all leave when the test ends."""
    with ExitStack() as stack:

        def opened(count: int) -> list[Rank]:
            endpoints = [workers[i % 2].endpoint for i in range(count)]
            found = [stack.enter_context(Rank(endpoint)) for endpoint in endpoints]
            for rank in found:
                rank.hello()
                rank.start()
            return found

        yield opened


def numbers(count: int, ranks: int, seed: int = 0) -> list[Floats]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(count, np.float32) for _ in range(ranks)]


def in_order(values: Sequence[Floats]) -> Floats:
    total = values[0].copy()
    for value in values[1:]:
        total = total + value
    return total


def bf16(values: Floats) -> Floats:
    """Rounded to the nearest bf16, of two the even one."""
    words = values.view(np.uint32).astype(np.uint64)
    words = (words + 0x7FFF + (words >> 16 & 1)) >> 16 << 16
    return words.astype(np.uint32).view(np.float32)


def f16(values: Floats) -> Floats:
    return values.astype(np.float16).astype(np.float32)


class TestSums:
    @pytest.mark.parametrize("count", COUNTS)
    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_all_ranks_have_the_same_bits(
        self, ranks: Ranks, size: int, count: int
    ) -> None:
        group = ranks(size)
        join(group)
        values = numbers(count, size)
        expected = in_order(values).tobytes()
        for found in sum_of(group, values):
            assert found.tobytes() == expected

    @pytest.mark.parametrize("size", [2, 3])
    def test_again_and_again(self, ranks: Ranks, size: int) -> None:
        group = ranks(size)
        join(group)
        placed = [rank.numbers(np.ones(7, np.float32)) for rank in group]
        for _ in range(9):
            for rank, t in zip(group, placed, strict=True):
                rank.allreduce(t)
        for rank, t in zip(group, placed, strict=True):
            assert rank.values(t).tolist() == [float(size**9)] * 7

    def test_infinite_and_none(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        big = np.float32(3e38)
        values = [np.array([big, np.inf, np.nan, 0], np.float32) for _ in group]
        values[1][1] = -np.inf
        for found in sum_of(group, values):
            assert found[0] == np.inf and np.isnan(found[1:3]).all() and found[3] == 0

    @pytest.mark.parametrize(("wire", "rounded"), [(1, bf16), (2, f16)])
    @pytest.mark.parametrize("count", [5, ONE_SHOT + 1, ROUND + 9])
    @pytest.mark.parametrize("size", [2, 3])
    def test_narrow(
        self,
        ranks: Ranks,
        size: int,
        count: int,
        wire: int,
        rounded: Callable[[Floats], Floats],
    ) -> None:
        group = ranks(size)
        join(group, wire=wire)
        values = numbers(count, size)
        expected = in_order([rounded(v) for v in values])
        if size > 2:
            for at in range(0, count, ROUND):
                part = expected[at : at + ROUND]
                if len(part) > ONE_SHOT:
                    part[:] = rounded(part)
        for found in sum_of(group, values):
            assert found.tobytes() == expected.tobytes()

    def test_bf16_of_what_is_no_number(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group, wire=1)
        words = np.array([0x7FFFFFFF, 0xFF800001, 0x7F800000, 0x3F808000], np.uint32)
        values = [words.view(np.float32), np.zeros(4, np.float32)]
        for found in sum_of(group, values):
            assert np.isnan(found[:2]).all()
            assert found[2:].tolist() == [np.inf, 1.0]

    def test_what_is_small_stays_f32(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group, wire=1, least=64)
        for count, rounded in [(15, lambda v: v), (16, bf16)]:
            values = numbers(count, 2)
            expected = in_order([rounded(v) for v in values])
            for found in sum_of(group, values):
                assert found.tobytes() == expected.tobytes()


class TestDevices:
    """Several of one server; this one has one, which may be named twice."""

    @pytest.mark.parametrize("count", [5, ROUND + 1])
    def test_two_of_each_server(self, ranks: Ranks, count: int) -> None:
        group = ranks(2)
        join(group, devices=(0, 0))
        values = numbers(count, 4)
        placed = [group[i // 2].numbers(v) for i, v in enumerate(values)]
        for i, rank in enumerate(group):
            rank.allreduce(*placed[2 * i : 2 * i + 2])
        sums = [in_order(values[2 * i : 2 * i + 2]) for i in range(2)]
        for i, t in enumerate(placed):
            assert group[i // 2].values(t).tobytes() == in_order(sums).tobytes()

    @pytest.mark.parametrize("absent", range(8))
    def test_absent(self, ranks: Ranks, absent: int) -> None:
        (rank,) = ranks(1)
        join([rank], devices=(0, 0, 0))
        values = numbers(9, 3)
        placed = [rank.numbers(v) for v in values]
        rank.allreduce(*placed, absent=absent)
        present = [v for i, v in enumerate(values) if not absent >> i & 1]
        expected = in_order(present) if present else np.zeros(9, np.float32)
        for t in placed:
            assert rank.values(t).tobytes() == expected.tobytes()

    def test_absent_on_one_server(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        # What is in its memory does not matter.
        values = [np.full(6, np.nan, np.float32), np.ones(6, np.float32)]
        placed = [rank.numbers(v) for rank, v in zip(group, values, strict=True)]
        group[0].allreduce(placed[0], absent=1)
        group[1].allreduce(placed[1])
        for rank, t in zip(group, placed, strict=True):
            assert rank.values(t).tolist() == [1.0] * 6

    def test_nothing_to_sum(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        for rank in group:
            empty = tensor(1, rank.alloc(64), 0, (0,))
            rank.allreduce(empty)
            assert rank.device_count() == 1

    def test_memory_that_comes_again(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        for _ in range(3):
            values = numbers(64, 2)
            placed = [rank.numbers(v) for rank, v in zip(group, values, strict=True)]
            for rank, t in zip(group, placed, strict=True):
                rank.allreduce(t)
            for rank, t in zip(group, placed, strict=True):
                assert rank.values(t).tobytes() == in_order(values).tobytes()
                rank.post(C.FREE_BUFFER, m.U64.pack(t.buffer))
                rank.allreduce(t)
            for rank in group:
                rank.post(C.DEVICE_COUNT)
                assert "no buffer has the handle" in rank.error()
                rank.post(C.LX_COMM_FREE, m.U32.pack(1))
            join(group)


def refuses_bare_streams(rank: Rank) -> None:
    """Anybody could send the zeros that a rank 1 of protocol 8 begins with."""
    port = rank.listen().port
    with socket.create_connection(("127.0.0.1", port), 5) as stream:
        stream.sendall(bytes(24))
        body = m.CommInit(0, 0, 2, port, b"").encode()
        assert rank.ask(C.COMM_INIT, body) == b"\0"


class TestTls:
    def test_a_server_with_tls(self, ranks: Ranks, keys: Keys) -> None:
        options = keys.ours.serving(token=False)
        with running_worker("--protocol", "8", *options) as secured, ExitStack() as s:
            context = client_context(keys.ours.client)
            group = [
                *ranks(1),
                *(s.enter_context(Rank(secured.endpoint, tls=context)) for _ in "ab"),
            ]
            for rank in group[1:]:
                rank.hello()
                rank.start()
            join(group)
            for count in (5, ONE_SHOT + 1, 4 * ROUND):
                values = numbers(count, 3)
                for found in sum_of(group, values):
                    assert found.tobytes() == in_order(values).tobytes()
            refuses_bare_streams(group[1])

    def test_a_server_with_a_token(self, keys: Keys) -> None:
        options = ("--protocol", "8", "--token-file", keys.ours.token_file)
        with running_worker(*options) as locked, Rank(locked.endpoint) as rank:
            rank.hello()
            rank.prove(keys.ours.token)
            rank.start()
            refuses_bare_streams(rank)


class TestFailures:
    """Nobody waits for ever, and everybody hears why."""

    @pytest.mark.parametrize("count", [8, 4 * ROUND])
    @pytest.mark.parametrize("size", [2, 3])
    def test_a_rank_dies(
        self, ranks: Ranks, workers: list[Worker], size: int, count: int
    ) -> None:
        group = ranks(size)
        join(group)
        placed = [rank.numbers(np.ones(count, np.float32)) for rank in group]
        for rank, t in zip(group[1:], placed[1:], strict=True):
            rank.allreduce(t)
            rank.post(C.DEVICE_COUNT)
        os.kill(workers[0].session_of(group[0].name), signal.SIGKILL)
        for rank, t in zip(group[1:], placed[1:], strict=True):
            assert "LX_ALLREDUCE" in rank.error()
            # The session lives, the communicator does not.
            rank.allreduce(t)
            rank.post(C.DEVICE_COUNT)
            assert "LX_ALLREDUCE" in rank.error()
            assert rank.device_count() == 1

    def test_a_client_leaves(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        join([a, b])
        t = b.numbers(np.ones(8, np.float32))
        b.allreduce(t)
        b.post(C.DEVICE_COUNT)
        a.close()
        assert "it closed the connection" in b.error()

    def test_an_earlier_command_failed(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        a = group[0]
        for body, words in [
            (LxAllreduce(2, 0, (bytes(296),)).encode(), "there is no communicator 2"),
            (None, "LX_ALLREDUCE: an earlier command failed: "),
        ]:
            if body is None:
                a.allreduce(a.numbers(np.ones(8, np.float32)))
            else:
                a.post(C.LX_ALLREDUCE, body)
            a.post(C.DEVICE_COUNT)
            assert words in a.error()

    def test_free_after_a_failure(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        for rank in group:
            rank.post(C.LX_UNLINK, m.U32.pack(99))
            rank.post(C.LX_COMM_FREE, m.U32.pack(1))
            rank.post(C.DEVICE_COUNT)
            assert "there is no link 99" in rank.error()
        join(group)

    def test_another_count(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        for count, rank in zip((8, 9), group, strict=True):
            rank.allreduce(rank.numbers(np.ones(count, np.float32)))
        errors = []
        for rank in group:
            rank.post(C.DEVICE_COUNT)
            errors.append(rank.error())
        assert any("bytes where" in error for error in errors), errors

    def test_a_link_that_is_in_use(self, ranks: Ranks) -> None:
        group = ranks(2)
        join(group)
        a = group[0]
        t = a.numbers(np.ones(8, np.float32))
        a.pass_on(C.LX_SEND, 1, t, 4)
        a.post(C.DEVICE_COUNT)
        assert "link 1 belongs to communicator 1" in a.error()

    def test_free_closes_the_links(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        join([a, b])
        b.allreduce(b.numbers(np.ones(8, np.float32)))
        b.post(C.DEVICE_COUNT)
        a.post(C.LX_COMM_FREE, m.U32.pack(1))
        assert "it closed the connection" in b.error()
        a.post(C.LX_UNLINK, m.U32.pack(1))
        a.post(C.DEVICE_COUNT)
        assert "there is no link 1" in a.error()

    def refused(self, rank: Rank, body: bytes, command: Command) -> str:
        rank.post(command, body)
        if command != C.LX_COMM_INIT:
            rank.post(C.DEVICE_COUNT)
        return rank.error()

    @pytest.mark.parametrize(
        ("request_", "words"),
        [
            (LxCommInit(1, 3, 0, 0, (0,), (0,)), "wire type 3 does not exist"),
            (LxCommInit(1, 0, 0, 1, (0,), (0,)), "rank 1 of 1, 1 devices"),
            (LxCommInit(1, 0, 0, 0, (), (0,)), "rank 0 of 0"),
            (LxCommInit(1, 0, 0, 0, (0,), ()), "rank 0 of 1, 0 devices"),
            (LxCommInit(1, 0, 0, 0, (0,), (1,)), "no device 1 of 1"),
            (LxCommInit(1, 0, 0, 0, (0, 7), (0,)), "there is no link 7"),
            (LxCommInit(1, 0, 0, 0, (0, 7, 7), (0,)), "one link to two servers"),
        ],
    )
    def test_no_communicator(
        self, ranks: Ranks, request_: LxCommInit, words: str
    ) -> None:
        (rank,) = ranks(1)
        assert words in self.refused(rank, request_.encode(), C.LX_COMM_INIT)
        # Nothing of it is left.
        join([rank])

    def test_numbers_of_communicators(self, ranks: Ranks) -> None:
        (rank,) = ranks(1)
        for comm in range(8):
            join([rank], comm=comm)
        body = LxCommInit(7, 0, 0, 0, (0,), (0,)).encode()
        assert "7 is there already" in self.refused(rank, body, C.LX_COMM_INIT)
        body = LxCommInit(8, 0, 0, 0, (0,), (0,)).encode()
        assert "there are 8" in self.refused(rank, body, C.LX_COMM_INIT)
        free = m.U32.pack(3)
        rank.post(C.LX_COMM_FREE, free)
        words = self.refused(rank, free, C.LX_COMM_FREE)
        assert "there is no communicator 3" in words
        join([rank], comm=8)

    def test_tensors_that_cannot_be_summed(self, ranks: Ranks) -> None:
        (rank,) = ranks(1)
        join([rank], devices=(0, 0))
        buffer = rank.alloc(4096)
        good = tensor(1, buffer, 0, (8, 4))
        for other, words in [
            (good._replace(ne=(8, 3, 1, 1)), r"tensors of \[24, 32\] numbers"),
            (tensor(1, buffer, 0, (32,), type_number=1), "type 1 where f32 is summed"),
            (good._replace(nb=(4, 64, 256, 256)), "not contiguous"),
            (good._replace(nb=(8, 32, 128, 128)), "not contiguous"),
            (good._replace(buffer=1), "no buffer has the handle"),
        ]:
            records = tuple(t.encode(wide=True) for t in (good, other))
            body = LxAllreduce(1, 0, records).encode()
            with pytest.raises(AssertionError, match=words):
                raise AssertionError(self.refused(rank, body, C.LX_ALLREDUCE))
        record = good.encode(wide=True)
        for body, words in [
            (LxAllreduce(1, 4, (record,) * 2), "absent 0x4 of 2 devices"),
            (LxAllreduce(1, 0, (record,)), "1 tensors for 2 devices"),
            (LxAllreduce(2, 0, (record,)), "there is no communicator 2"),
        ]:
            assert words in self.refused(rank, body.encode(), C.LX_ALLREDUCE)
        # Rows of one number have no stride that matters.
        rank.allreduce(*[tensor(1, buffer, 0, (8, 1))._replace(nb=(4, 99, 99, 99))] * 2)
        assert rank.device_count() == 1


class TestProtocol8:
    """What our server alone can show; with C++ servers: `tests/e2e/test_pairs.py`."""

    def test_an_earlier_command_failed_there(self, ranks: Ranks) -> None:
        a, b = ranks(2)
        port = a.listen().port
        for rank, client in enumerate((a, b)):
            host = b"127.0.0.1" if rank else b""
            client.post(C.COMM_INIT, m.CommInit(0, rank, 2, port, host).encode())
        assert a.answer() == b.answer() == b"\1"
        t = b.numbers(np.ones(8, np.float32))
        body = m.CommAllreduce(0, t.encode(wide=True)).encode()
        b.post(C.COMM_ALLREDUCE, body)
        b.post(C.DEVICE_COUNT)
        a.post(C.LX_UNLINK, m.U32.pack(99))
        # Not done any more, and the other end is not to wait for it.
        a.post(C.COMM_ALLREDUCE, body)
        assert "it closed the connection" in b.error()
        a.post(C.DEVICE_COUNT)
        assert "there is no link 99" in a.error()

    @pytest.fixture
    def client(self, workers: list[Worker]) -> Iterator[RawClient]:
        with RawClient(workers[0].endpoint, V8) as client:
            client.hello()
            yield client

    @pytest.mark.parametrize(
        "body",
        [
            m.CommInit(1, 1, 2, 1, b"127.0.0.1"),
            m.CommInit(0, 2, 2, 1, b"127.0.0.1"),
            m.CommInit(0, 1, 3, 1, b"127.0.0.1"),
            m.CommInit(0, 0, 2, 1, b""),
            m.CommInit(0, 1, 2, 0, b"127.0.0.1"),
            m.CommInit(0, 1, 2, U64_MAX >> 33, b"127.0.0.1"),
            m.CommInit(0, 1, 2, 80, b""),
            m.CommInit(0, 1, 2, 80, b"no.such.name.invalid"),
        ],
    )
    def test_none(self, client: RawClient, body: m.CommInit) -> None:
        assert client.ask(C.COMM_INIT, body.encode()) == b"\0"
        assert client.device_count() == 1


class Moving:
    """Tensors whose memory becomes another when the second is looked at."""

    def __init__(self) -> None:
        self.places = [np.ones(4, np.float32), np.ones(4, np.float32)]
        self.moved = False

    def check(self, record: bytes, command: str) -> CheckedTensor:
        number = record[0]
        if number and not self.moved:
            self.moved = True
            self.places[0] = self.places[0].copy()
        return cast(CheckedTensor, Placed(self.places[number]))


class Placed:
    """A checked tensor in host memory, as far as a sum looks at it."""

    def __init__(self, numbers: Floats) -> None:
        self.numbers = numbers
        self.nbytes = numbers.nbytes
        self.tensor = tensor(1, Buffer(1, 0, 0), 0, (len(numbers),))
        self.buffer = self
        self.device: object = None

    def bytes(self, offset: int, size: int) -> memoryview:
        return self.numbers.view(np.uint8).data[offset : offset + size]


def test_memory_that_moves_with_a_later_check() -> None:
    moving = Moving()
    communicator = Communicator(
        LxCommInit(1, 0, 0, 0, (0,), (0, 0)),
        [None],
        cast("list[ComputeDevice]", [None, None]),
        cast(TensorChecker, moving),
        lambda: False,
    )
    communicator.allreduce(
        LxAllreduce(1, 0, tuple(bytes([i]) * 296 for i in range(2))).encode()
    )
    assert [place.tolist() for place in moving.places] == [[2] * 4] * 2


def test_parts_are_all_of_it() -> None:
    for n in (1, 7, 64, 65, 1000):
        for size in (1, 2, 3, 64):
            parts = [part_of(n, size, rank) for rank in range(size)]
            assert [parts[0].start, parts[-1].stop] == [0, n]
            assert all(
                a.stop == b.start for a, b in zip(parts, parts[1:], strict=False)
            )


def test_links_are_counted_from_one(ranks: Ranks) -> None:
    a, b, c = ranks(3)
    assert [link(a, b), link(a, c), link(b, c)] == [(1, 1), (2, 1), (2, 2)]
