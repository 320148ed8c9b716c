"""What every command does when it is used as PROTOCOL.md says."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from pathlib import Path

import numpy as np
import pytest

from longwire.wire import messages as m
from longwire.wire.constants import GRAPH_CACHE_MAX, NO_LIMIT, U64_MAX, Command
from longwire.wire.dialects import V8, Dialect
from longwire.wire.fnv import fnv1a_64
from longwire.wire.graphs import Graph
from longwire.wire.tensors import NULL_TENSOR, Tensor
from longwire.wire.types import TYPES, nbytes
from support.client import Buffer, RawClient
from support.tensors import COMPUTE, F32, Q4_0, Sum, graph, tensor
from support.worker import PROC, Worker, resident, running_worker

only_v8 = pytest.mark.parametrize(
    "dialect", [V8], ids=lambda dialect: dialect.version, indirect=True
)
needs_proc = pytest.mark.skipif(
    not (PROC / "self/maps").exists(), reason="needs Linux's /proc"
)

MUL, REPEAT, RMS_NORM, MUL_MAT, SCALE, RESHAPE, VIEW = 7, 20, 25, 29, 32, 36, 37
BASE_STEP = 1 << 32


def pattern(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def memset(client: RawClient, t: Tensor, offset: int, size: int, value: int) -> None:
    body = m.MemsetTensor(t.encode(), offset, size, value).encode()
    client.post(Command.MEMSET_TENSOR, body)


def copy(client: RawClient, src: Tensor, dst: Tensor) -> bytes:
    body = m.CopyTensor(src.encode(), dst.encode()).encode()
    return client.ask(Command.COPY_TENSOR, body)


def alloc_size(client: RawClient, t: Tensor, srcs: list[Tensor] | None = None) -> int:
    records = b"".join(source.encode() for source in srcs or [])
    body = m.GetAllocSize(0, t.encode(), records.ljust(10 * len(NULL_TENSOR), b"\0"))
    (size,) = m.U64.unpack(client.ask(Command.GET_ALLOC_SIZE, body.encode()))
    return int(size)


def floats(data: bytes) -> list[float]:
    values: list[float] = np.frombuffer(data, "<f4").tolist()
    return values


class TestHello:
    def test_answer(self, worker: Worker, dialect: Dialect) -> None:
        with RawClient(worker.endpoint, dialect) as client:
            answer = client.hello(caps=bytes(range(24)))
            version = (dialect.major, dialect.minor, dialect.patch)
            assert (answer[:3], answer.caps) == (version, bytes(24))
            assert client.device_count() == 1

    def test_device(self, client: RawClient) -> None:
        (alignment,) = m.U64.unpack(client.ask(Command.GET_ALIGNMENT, m.U32.pack(0)))
        assert alignment == 32
        (most,) = m.U64.unpack(client.ask(Command.GET_MAX_SIZE, m.U32.pack(0)))
        assert most == NO_LIMIT
        answer = client.ask(Command.GET_DEVICE_MEMORY, m.U32.pack(0))
        memory = m.DeviceMemory.decode(answer)
        assert 0 < memory.free <= memory.total

    def test_answers_come_in_request_order(self, client: RawClient) -> None:
        for command in (Command.GET_MAX_SIZE, Command.GET_ALIGNMENT) * 20:
            client.post(command, m.U32.pack(0))
        answers = [m.U64.unpack(client.answer())[0] for _ in range(40)]
        assert answers == [NO_LIMIT, 32] * 20


class TestBuffers:
    def test_ranges_are_disjoint_and_aligned(self, client: RawClient) -> None:
        buffers = [client.alloc(size) for size in (1, 31, 4096, 1 << 20)]
        assert [b.size >= n for b, n in zip(buffers, (1, 31, 4096), strict=False)]
        buffers.sort(key=lambda b: b.base)
        assert all(b.base and b.base % BASE_STEP == 0 for b in buffers)
        for before, after in zip(buffers, buffers[1:], strict=False):
            assert before.base + before.size < after.base
        assert [client.base(b.handle) for b in buffers] == [b.base for b in buffers]

    def test_nothing_comes_twice(self, client: RawClient) -> None:
        seen: set[int] = set()
        for _ in range(8):
            buffer = client.alloc(4096)
            assert not seen & {buffer.handle, buffer.base}
            seen |= {buffer.handle, buffer.base}
            client.free(buffer)

    def test_handles_are_random(self, connect: Callable[[], RawClient]) -> None:
        handles = [client.alloc(32).handle for client in (connect(), connect())]
        client = connect()
        handles += [client.alloc(32).handle for _ in range(64)]
        assert len(set(handles)) == len(handles)
        # Each of the 64 bits is set in some handle and clear in another.
        assert reduce(or_, handles) == U64_MAX
        assert reduce(and_, handles) == 0

    @needs_proc
    def test_no_number_is_an_address(self, worker: Worker, client: RawClient) -> None:
        buffers = [client.alloc(size) for size in (32, 4096, 1 << 22)]
        maps = (PROC / str(worker.session_of(client.name)) / "maps").read_text()
        assert "xllamacpp" in maps
        ranges = [line.split()[0].split("-") for line in maps.splitlines()]
        for start, end in ranges:
            for buffer in buffers:
                assert not int(start, 16) <= buffer.handle < int(end, 16)
                assert int(end, 16) <= buffer.base or (
                    buffer.base + buffer.size <= int(start, 16)
                )

    def test_a_new_buffer_tells_nothing_of_the_process(self, client: RawClient) -> None:
        for size in (64, 1000, 60_000, 1 << 20):
            buffer = client.alloc(size)
            whole = tensor(1, buffer, ne=(size // 4,))
            assert client.read(whole) == bytes(size)
            client.free(buffer)

    def test_clear_fills_all_of_it(self, client: RawClient) -> None:
        buffer = client.alloc(1000)
        client.post(Command.BUFFER_CLEAR, m.BufferClear(buffer.handle, 0xA5).encode())
        whole = tensor(1, buffer, ne=(buffer.size,), type_number=24)
        assert client.read(whole) == b"\xa5" * buffer.size

    def test_without_bytes(self, client: RawClient) -> None:
        buffer = client.alloc(0)
        assert buffer.handle and buffer.base and buffer.size == 0
        other = client.alloc(0)
        assert other.base != buffer.base
        client.post(Command.BUFFER_CLEAR, m.BufferClear(buffer.handle, 1).encode())
        empty = tensor(1, buffer, ne=(0,))
        client.write(empty, b"")
        assert client.read(empty) == b""
        memset(client, empty, 0, 0, 1)
        client.post(Command.INIT_TENSOR, empty.encode())
        assert len(copy(client, empty, tensor(2, other, ne=(0,)))) == 1
        client.free(buffer)
        assert client.device_count() == 1

    @pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1, 1 << 63, U64_MAX])
    def test_no_memory_is_an_answer(self, client: RawClient, size: int) -> None:
        assert client.alloc(size) == Buffer(0, 0, 0)
        Sum(client).check()

    @needs_proc
    def test_free_gives_memory_back(self, worker: Worker, client: RawClient) -> None:
        pid = worker.session_of(client.name)
        before = resident(pid)
        for _ in range(4):
            buffer = client.alloc(64 << 20)
            body = m.BufferClear(buffer.handle, 1).encode()
            client.post(Command.BUFFER_CLEAR, body)
            client.free(buffer)
        client.device_count()
        assert resident(pid) - before < 16 << 20


class TestTensors:
    def test_parts(self, client: RawClient) -> None:
        buffer = client.alloc(4096)
        t = tensor(1, buffer, 128, ne=(16, 4))
        data = bytearray(pattern(256))
        client.write(t, data)
        client.write(t, b"12345", offset=251)
        data[251:] = b"12345"
        client.write(t, b"x", offset=0)
        data[0:1] = b"x"
        assert client.read(t) == data
        assert client.read(t, 7, 13) == data[7:20]
        around = tensor(2, buffer, ne=(1024,))
        assert client.read(around, 0, 384) == bytes(128) + data

    def test_much_data(self, client: RawClient) -> None:
        size = 3 << 20
        t = tensor(1, client.alloc(size), ne=(size // 4,))
        data = pattern(size)
        client.write(t, data[: size // 2])
        client.write(t, data[size // 2 :], offset=size // 2)
        assert client.read(t) == data

    def test_no_bytes_anywhere_up_to_the_end(self, client: RawClient) -> None:
        t = tensor(1, client.alloc(64), ne=(16,))
        client.write(t, pattern(64))
        for offset in (0, 63, 64):
            client.write(t, b"", offset)
            memset(client, t, offset, 0, 9)
            assert client.read(t, offset, 0) == b""
        assert client.read(t) == pattern(64)
        at_the_end = tensor(2, client.alloc(64), 64, ne=(0, 5))
        client.write(at_the_end, b"")
        assert client.read(at_the_end) == b""

    def test_memset(self, client: RawClient) -> None:
        t = tensor(1, client.alloc(64), ne=(16,))
        memset(client, t, 3, 58, 0xEE)
        assert client.read(t) == bytes(3) + b"\xee" * 58 + bytes(3)

    def test_copy(self, client: RawClient) -> None:
        data = pattern(64)
        src = tensor(1, client.alloc(64), ne=(16,))
        target = client.alloc(256)
        client.write(src, data)
        assert copy(client, src, tensor(2, target, 128, ne=(16, 2))) == b"\1"
        found = client.read(tensor(3, target, ne=(64,)))
        assert found == bytes(128) + data + bytes(64)

    def test_copy_onto_itself(self, client: RawClient) -> None:
        buffer = client.alloc(128)
        data = pattern(128)
        whole = tensor(1, buffer, ne=(32,))
        client.write(whole, data)
        low, high = tensor(2, buffer, 0, ne=(24,)), tensor(3, buffer, 32, ne=(24,))
        assert copy(client, low, high) == b"\1"
        assert client.read(whole) == data[:32] + data[:96]

    def test_strides_count(self, client: RawClient) -> None:
        buffer = client.alloc(256)
        client.write(tensor(1, buffer, ne=(64,)), pattern(256))
        columns = tensor(2, buffer, ne=(4, 3))._replace(nb=(64, 4, 4, 4))
        assert nbytes(F32, columns.ne, columns.nb) == 204
        assert client.read(columns) == pattern(256)[:204]

    def test_blocks(self, client: RawClient) -> None:
        t = tensor(1, client.alloc(4096), ne=(64, 3), type_number=Q4_0)
        client.post(Command.INIT_TENSOR, t.encode())
        client.write(t, pattern(108))
        assert client.read(t) == pattern(108)

    @pytest.mark.parametrize("type_number", sorted(TYPES))
    def test_every_type(self, client: RawClient, type_number: int) -> None:
        ne = (TYPES[type_number].block, 2)
        t = tensor(1, client.alloc(4096), ne=ne, type_number=type_number)
        size = 2 * TYPES[type_number].size
        client.write(t, pattern(size))
        assert client.read(t) == pattern(size)
        assert alloc_size(client, t) == size

    def test_alloc_size_of_unplaced_tensors(self, client: RawClient) -> None:
        elsewhere = Buffer(0x1234, 64, 0x7F00_0000_0000)
        a = tensor(1, elsewhere, ne=(64, 4))
        b = tensor(2, elsewhere, ne=(64, 2), type_number=Q4_0)
        product = tensor(3, elsewhere, ne=(4, 2), op=MUL_MAT, src=[a, b])
        assert alloc_size(client, product, [a, b]) == 32
        assert alloc_size(client, product._replace(buffer=0, data=0)) == 32

    def test_hash_without_a_cache(self, client: RawClient) -> None:
        t = tensor(1, client.alloc(64), ne=(16,))
        body = m.SetTensorHash(t.encode(), 0, 1).encode()
        assert client.ask(Command.SET_TENSOR_HASH, body) == b"\0"

    def test_cache_flag_without_a_cache(self, client: RawClient) -> None:
        t = tensor(1, client.alloc(64), ne=(16,))
        head = m.SetTensor(t.encode(), 1, 0).encode()
        client.post(Command.SET_TENSOR, [head, pattern(64)])
        assert client.read(t) == pattern(64)


def test_cache(tmp_path: Path) -> None:
    data = pattern(4096)
    with running_worker("--cache", str(tmp_path)) as worker:
        for known in (0, 1):
            with RawClient(worker.endpoint, V8) as client:
                client.hello()
                t = tensor(1, client.alloc(8192), ne=(2048,))
                ask = m.SetTensorHash(t.encode(), 1000, fnv1a_64(memoryview(data)))
                answer = client.ask(Command.SET_TENSOR_HASH, ask.encode())
                assert answer == m.U8.pack(known)
                if not known:
                    head = m.SetTensor(t.encode(), 1, 1000).encode()
                    client.post(Command.SET_TENSOR, [head, data])
                assert client.read(t) == bytes(1000) + data + bytes(3096)


@only_v8
class TestRows:
    """SET_TENSOR_2D and GET_TENSOR_2D."""

    ROW = 16

    @pytest.fixture
    def matrix(self, client: RawClient) -> Tensor:
        """Eight rows of 16 bytes; byte i is i."""
        t = tensor(1, client.alloc(128), ne=(4, 8))
        client.write(t, bytes(range(128)))
        return t

    def write(
        self, client: RawClient, t: Tensor, at: int, data: bytes, n: int, stride: int
    ) -> None:
        head = m.SetTensor2D(t.encode(), at, len(data) // n, n, stride).encode()
        client.post(Command.SET_TENSOR_2D, [head, data])

    def read(
        self, client: RawClient, t: Tensor, at: int, size: int, n: int, stride: int
    ) -> bytes:
        body = m.GetTensor2D(t.encode(), at, size, n, stride).encode()
        return client.ask(Command.GET_TENSOR_2D, body)

    def test_a_block_of_columns(self, client: RawClient, matrix: Tensor) -> None:
        self.write(client, matrix, 20, b"abcdefghi", 3, self.ROW)
        expected = bytearray(range(128))
        for row, part in enumerate((b"abc", b"def", b"ghi")):
            expected[20 + 16 * row : 23 + 16 * row] = part
        assert client.read(matrix) == expected
        assert self.read(client, matrix, 20, 3, 3, self.ROW) == b"abcdefghi"
        assert self.read(client, matrix, 15, 1, 8, self.ROW) == bytes(
            range(15, 128, 16)
        )

    def test_stride_0(self, client: RawClient, matrix: Tensor) -> None:
        self.write(client, matrix, 126, b"aabbcc", 3, 0)
        assert client.read(matrix) == bytes(range(126)) + b"cc"
        assert self.read(client, matrix, 124, 4, 5, 0) == b"\x7c\x7dcc" * 5

    def test_overlapping_rows(self, client: RawClient, matrix: Tensor) -> None:
        self.write(client, matrix, 0, b"aaabbbccc", 3, 1)
        assert client.read(matrix) == b"abccc" + bytes(range(5, 128))
        assert self.read(client, matrix, 0, 3, 3, 1) == b"abcbccccc"

    def test_one_row_ignores_the_stride(
        self, client: RawClient, matrix: Tensor
    ) -> None:
        self.write(client, matrix, 0, pattern(128), 1, U64_MAX)
        assert self.read(client, matrix, 0, 128, 1, U64_MAX) == pattern(128)

    def test_the_last_row_may_reach_the_end(
        self, client: RawClient, matrix: Tensor
    ) -> None:
        self.write(client, matrix, 12, b"abcd" * 8, 8, self.ROW)
        assert self.read(client, matrix, 12, 4, 8, self.ROW) == b"abcd" * 8


class TestGraphs:
    def test_sum(self, client: RawClient) -> None:
        total = Sum(client)
        total.check()
        total.check(again=True)

    def test_again_with_other_data(self, client: RawClient) -> None:
        total = Sum(client, uid=11)
        total.check()
        client.write(total.a, np.full(8, 7, "<f4").tobytes())
        client.write(total.b, np.full(8, 2, "<f4").tobytes())
        client.recompute(11)
        assert floats(client.read(total.c)) == [9.0] * 8

    def test_product(self, client: RawClient) -> None:
        rng = np.random.default_rng(1)
        x = rng.standard_normal((3, 2, 5, 64), np.float32)
        y = rng.standard_normal((3, 4, 7, 64), np.float32)
        buffer = client.alloc(1 << 16)
        a = tensor(1, buffer, 0, ne=(64, 5, 2, 3))
        b = tensor(2, buffer, 1 << 13, ne=(64, 7, 4, 3))
        c = tensor(3, buffer, 1 << 15, ne=(5, 7, 4, 3), op=MUL_MAT, src=[a, b])
        client.write(a, x.tobytes())
        client.write(b, y.tobytes())
        client.compute(graph([c], [a, b]))
        found = np.frombuffer(client.read(c), "<f4").reshape(3, 4, 7, 5)
        # ggml broadcasts a's matrices: each serves two neighbours of b's.
        expected = y @ np.repeat(x, 2, axis=1).transpose(0, 1, 3, 2)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)

    def test_a_chain_through_views(self, client: RawClient) -> None:
        buffer = client.alloc(1024)
        a = tensor(1, buffer, 0, ne=(8, 2))
        twice = tensor(
            2, buffer, 64, (8, 2), op=SCALE, src=[a], params=struct.pack("<ff", 2, 0)
        )
        flat = tensor(3, buffer, 64, (16,), op=RESHAPE, src=[twice])
        flat = flat._replace(view_src=2)
        tail = tensor(4, buffer, 96, (8,), op=VIEW, src=[flat])
        tail = tail._replace(view_src=2, view_offs=32)
        total = tensor(5, buffer, 128, (8,), op=2, src=[tail, tail])
        client.write(a, np.arange(16, dtype="<f4").tobytes())
        client.compute(graph([twice, flat, tail, total], [a]))
        assert floats(client.read(total)) == [4.0 * i for i in range(8, 16)]

    @pytest.mark.parametrize("ancestry", ["full", "pruned"])
    def test_a_source_of_an_earlier_graph(
        self, client: RawClient, ancestry: str
    ) -> None:
        total = Sum(client)
        total.check()
        # The history of c must not run again.
        client.write(total.a, np.full(8, 1000, "<f4").tobytes())
        target = client.alloc(64)
        twice = tensor(9, target, op=2, src=[total.c, total.c])
        c = total.c
        if ancestry == "full":
            client.compute(graph([twice], [total.a, total.b, c]))
        else:
            client.compute(graph([twice], [c._replace(src=(0,) * 10)]))
        expected = 2 * np.frombuffer(total.expected[64:], "<f4")
        assert floats(client.read(twice)) == expected.tolist()

    def test_nodes_run_in_the_order_sent(self, client: RawClient) -> None:
        buffer = client.alloc(64)
        a = tensor(1, buffer, ne=(4,))
        client.write(a, np.ones(4, "<f4").tobytes())
        # Both write over a: (a + a) * a gives 4 and a * a + a * a gives 2.
        plus = tensor(2, buffer, ne=(4,), op=2, src=[a, a])
        times = tensor(3, buffer, ne=(4,), op=MUL, src=[a, a])
        client.compute(graph([plus, times], [a]))
        assert floats(client.read(a)) == [4.0] * 4
        client.write(a, np.ones(4, "<f4").tobytes())
        client.compute(graph([times, plus], [a]))
        assert floats(client.read(a)) == [2.0] * 4

    @pytest.mark.parametrize(("use_count", "written"), [(0, True), (1, False)])
    def test_use_counts_reach_the_backend(
        self, client: RawClient, use_count: int, written: bool
    ) -> None:
        # The CPU fuses a norm with the product that follows, and never writes the
        # norm itself, if nothing else uses it.
        self.fused(client, use_count, 0, written)

    def test_use_counts_of_many_nodes(self, client: RawClient) -> None:
        # A hash set that has no slot free around the node, or one that is wrong,
        # would show up here.
        for others in (1, 6, 7, 30, 63, 200):
            self.fused(client, 1, others, written=False)
            self.fused(client, 2, others, written=True)

    def fused(
        self, client: RawClient, use_count: int, others: int, written: bool
    ) -> None:
        buffer = client.alloc(1 << 16)
        x = tensor(1, buffer, 0, ne=(64,))
        weight = tensor(2, buffer, 256, ne=(64,))
        params = struct.pack("<f", 1e-6)
        norm = tensor(3, buffer, 512, (64,), op=RMS_NORM, src=[x], params=params)
        norm = norm._replace(use_count=use_count)
        out = tensor(4, buffer, 768, (64,), op=MUL, src=[norm, weight])
        more = [
            tensor(10 + i, buffer, 1024 + 256 * i, (64,), op=2, src=[x, x])
            for i in range(others)
        ]
        values = np.arange(64, dtype="<f4")
        client.write(x, values.tobytes())
        client.write(weight, np.full(64, 2, "<f4").tobytes())
        half = others // 2
        nodes = [*more[:half], norm, out, *more[half:]]
        client.compute(graph(nodes, [x, weight]))
        expected = values / np.sqrt(np.mean(values**2) + 1e-6)
        found = np.frombuffer(client.read(out), "<f4")
        np.testing.assert_allclose(found, 2 * expected, rtol=1e-5)
        between = np.frombuffer(client.read(norm), "<f4")
        np.testing.assert_allclose(between, expected if written else 0, rtol=1e-5)
        for extra in more:
            assert floats(client.read(extra)) == (2 * values).tolist()
        client.free(buffer)

    def test_the_first_record_of_an_id_wins(self, client: RawClient) -> None:
        total = Sum(client)
        impostor = total.a._replace(data=total.buffer.base + 64)
        g = graph([total.c], [total.a, total.b, impostor])
        client.compute(g)
        assert client.read(total.whole) == total.expected
        client.compute(graph([total.c], [impostor, total.b, total.a]))
        assert client.read(total.whole) != total.expected

    def test_without_the_flag_a_node_is_skipped(self, client: RawClient) -> None:
        total = Sum(client)
        before = client.read(total.whole)
        idle = total.c._replace(flags=total.c.flags & ~COMPUTE)
        client.compute(graph([idle], [total.a, total.b]))
        assert client.read(total.whole) == before

    def test_surplus_bytes_are_ignored(self, client: RawClient) -> None:
        total = Sum(client)
        body = b"".join(total.graph.encode(client.dialect)) + b"surplus"
        client.post(Command.GRAPH_COMPUTE, body)
        assert client.read(total.whole) == total.expected

    def test_unused_records_need_no_memory(self, client: RawClient) -> None:
        total = Sum(client)
        elsewhere = tensor(50, Buffer(0, 0, 0), ne=(1 << 20, 1 << 9))
        client.compute(graph([total.c], [total.a, total.b, elsewhere]))
        assert client.read(total.whole) == total.expected

    def test_empty_tensors_are_excused(self, client: RawClient) -> None:
        nowhere = Buffer(0, 0, 0)
        a = tensor(1, nowhere, ne=(0, 4))
        b = tensor(2, nowhere, ne=(0, 4), op=2, src=[a, a])
        client.compute(graph([b], [a]))
        Sum(client).check()

    def test_a_big_graph(self, client: RawClient) -> None:
        # More bytes than the receive buffer holds, and one of each kind of id.
        buffer = client.alloc(1 << 16)
        a = tensor(1 << 63, buffer, 0, ne=(4,))
        client.write(a, np.ones(4, "<f4").tobytes())
        nodes = [a]
        for i in range(1500):
            number = (i * 0x9E37_79B9_7F4A_7C15 + 1) & U64_MAX
            target = tensor(number, buffer, 32 * (i + 1), (4,), 0, 2, [nodes[-1], a])
            nodes.append(target)
        client.compute(graph(nodes[1:], [a]))
        assert floats(client.read(nodes[-1])) == [1501.0] * 4

    def test_free_leaves_graphs_of_other_buffers(self, client: RawClient) -> None:
        unrelated = client.alloc(64)
        total = Sum(client)
        total.check()
        client.free(unrelated)
        total.check(again=True)

    def test_free_ends_graphs_of_that_buffer(
        self, worker: Worker, connect: Callable[[], RawClient]
    ) -> None:
        client = connect()
        total = Sum(client)
        source = client.alloc(64)
        a = tensor(1, source)
        client.compute(graph([total.c], [a, total.b], total.uid))
        client.free(source)
        assert client.device_count() == 1
        client.recompute(total.uid)
        client.expect_closed()
        assert "GRAPH_RECOMPUTE: no graph" in worker.end_of(client.name)


class TestKeptGraphs:
    def variants(self, client: RawClient) -> tuple[Sum, Callable[[int], Graph]]:
        """A sum, and a graph per uid that writes uid times b to c."""
        total = Sum(client)

        def variant(uid: int) -> Graph:
            params = struct.pack("<ff", uid, 0)
            c = tensor(3, total.buffer, 64, op=SCALE, src=[total.b], params=params)
            return graph([c], [total.b], uid)

        client.write(total.b, np.ones(8, "<f4").tobytes())
        return total, variant

    def test_7_keeps_the_last(self, client: RawClient, dialect: Dialect) -> None:
        if dialect.graph_uid:
            pytest.skip("a rule of protocol 7")
        total, variant = self.variants(client)
        client.compute(variant(2))
        client.compute(variant(5))
        memset(client, total.c, 0, 32, 0)
        client.recompute(2)
        assert floats(client.read(total.c)) == [5.0] * 8

    @only_v8
    def test_8_keeps_all(self, client: RawClient) -> None:
        total, variant = self.variants(client)
        uids = [1, 2, 3, U64_MAX]
        for uid in uids:
            client.compute(variant(uid))
        client.compute(variant(0))
        for uid in (2, U64_MAX, 1, 2, 3):
            client.recompute(uid)
            assert floats(client.read(total.c)) == [float(np.float32(uid))] * 8
        client.compute(variant(9)._replace(uid=2))
        client.recompute(2)
        assert floats(client.read(total.c)) == [9.0] * 8

    @only_v8
    @pytest.mark.parametrize("last", ["another", "the same"])
    def test_1024_rule(
        self, worker: Worker, connect: Callable[[], RawClient], last: str
    ) -> None:
        client = connect()
        total, variant = self.variants(client)
        for uid in range(1, GRAPH_CACHE_MAX + 1):
            client.compute(variant(uid))
        client.compute(variant(0))
        client.recompute(1)
        assert floats(client.read(total.c)) == [1.0] * 8
        # The count is taken before the uid is looked up.
        newest = GRAPH_CACHE_MAX + (last == "another")
        client.compute(variant(newest))
        client.recompute(newest)
        assert floats(client.read(total.c)) == [float(newest)] * 8
        client.recompute(1)
        client.expect_closed()
        assert "GRAPH_RECOMPUTE: no graph 1 " in worker.end_of(client.name)

    @only_v8
    def test_dropped_graphs_count_towards_1024(
        self, connect: Callable[[], RawClient]
    ) -> None:
        client = connect()
        total, variant = self.variants(client)
        for uid in range(1, GRAPH_CACHE_MAX):
            client.compute(variant(uid))
        client.free(total.buffer)
        total, variant = self.variants(client)
        client.compute(variant(5000))
        client.recompute(5000)
        client.compute(variant(5001))
        assert floats(client.read(total.c)) == [5001.0] * 8
        client.recompute(5000)
        client.expect_closed()


@only_v8
class TestCollectives:
    """Where there is no peer; PROTOCOL.md, section 11."""

    @pytest.mark.parametrize("device", [0, 9])
    def test_init_answers_no(self, client: RawClient, device: int) -> None:
        body = m.CommInit(device, 1, 2, 51052, b"127.0.0.1").encode()
        assert client.ask(Command.COMM_INIT, body) == b"\0"

    def test_free_does_nothing(self, client: RawClient) -> None:
        client.post(Command.COMM_FREE, m.U32.pack(0))
        assert client.device_count() == 1


def test_the_end_is_logged(worker: Worker, connect: Callable[[], RawClient]) -> None:
    client = connect()
    Sum(client).check()
    client.close()
    line = worker.end_of(client.name)
    assert "the client left" in line
    assert re.search(r"'graphs': 1\b", line)
