"""A remote device, driven by ggml's C functions, with a script at the far end."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from longwire.client import memo
from longwire.errors import ConnectionLost, RemoteFailure, UsageError
from longwire.native.abi import Status, Usage
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, OP_COUNT, Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.fnv import fnv1a_64
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.tensors import NULL_TENSOR, TENSOR_SIZE, Tensor
from support.ggml import F32, I8, MUL_MAT, Q4_0, Q8_0, change
from support.rig import Rig, set_uid
from support.scripted import Instead, content

both = pytest.mark.parametrize("dialect", [V7, V8], ids=["v7", "v8"])

Make = Callable[..., Rig]

KIB = 1024


class TestDevice:
    def test_what_ggml_learns(self, rig: Make) -> None:
        r = rig()
        library, address = r.ggml.library, r.device.plugin.address
        assert library.ggml_backend_dev_name(address) == b"RPC9"
        assert library.ggml_backend_dev_description(address) == b"worker:50052"
        free, total = C.c_size_t(1), C.c_size_t(1)
        library.ggml_backend_dev_memory(address, C.byref(free), C.byref(total))
        assert (free.value, total.value) == (1 << 30, 1 << 31)
        assert not library.ggml_backend_buft_is_host(r.buffer_type)

    def test_limits_are_asked_once(self, rig: Make) -> None:
        r = rig(
            {
                Command.GET_ALIGNMENT: m.U64.pack(128),
                Command.GET_MAX_SIZE: m.U64.pack(2**64 - 1),
            },
            index=3,
        )
        for _ in range(3):
            alignment = r.ggml.library.ggml_backend_buft_get_alignment(r.buffer_type)
            most = r.ggml.library.ggml_backend_buft_get_max_size(r.buffer_type)
            assert (alignment, most) == (128, 2**64 - 1)
        assert r.server.commands == ["GET_ALIGNMENT", "GET_MAX_SIZE"]
        assert r.server.requests[0].body == m.U32.pack(3)

    def test_free_memory_is_never_over_total(self, rig: Make) -> None:
        r = rig({Command.GET_DEVICE_MEMORY: m.DeviceMemory(9, 5).encode()})
        assert r.device.memory() == (5, 5)

    def test_supports_all_that_the_wire_carries(self, rig: Make, context: int) -> None:
        r = rig()
        library, address = r.ggml.library, r.device.plugin.address
        tensor = r.ggml.tensor(context, 64)
        for op in range(OP_COUNT):
            change(tensor, "op", op)
            supported = library.ggml_backend_dev_supports_op(address, tensor)
            # These hold a function pointer in their parameters.
            assert supported is (op not in {92, 93, 94, 95}), op
        assert r.server.requests == []

    @pytest.mark.parametrize("position", ["op", "source"])
    def test_wide_strides_stay_local(
        self, rig: Make, context: int, position: str
    ) -> None:
        r = rig()
        a, b = r.ggml.tensor(context, 4, 4), r.ggml.tensor(context, 4, 4)
        total = r.ggml.library.ggml_add(context, a, b)
        supports = r.ggml.library.ggml_backend_dev_supports_op
        assert supports(r.device.plugin.address, total)
        change(total if position == "op" else b, "nb", [2**32, 16, 64, 64])
        assert not supports(r.device.plugin.address, total)
        assert r.connection.healthy

    def test_a_lost_server_can_do_no_more_than_before(
        self, rig: Make, context: int
    ) -> None:
        r = rig()
        address = r.device.plugin.address
        supports = r.ggml.library.ggml_backend_dev_supports_op
        tensor = r.ggml.tensor(context, 64)
        r.connection.close()
        assert supports(address, tensor)
        change(tensor, "op", 92)
        assert not supports(address, tensor)

    @pytest.mark.parametrize(
        ("who", "field", "value"),
        [
            ("op", "op_params", np.arange(16)),
            ("op", "nb", [4, 20, 80, 80]),
            ("source", "type", Q4_0),
            ("source", "ne", [4, 4, 2, 1]),
            ("source", "nb", [4, 20, 80, 80]),
            ("op", "src", [0] * 10),
        ],
    )
    def test_what_looks_alike_is_asked_about_once(
        self, rig: Make, context: int, who: str, field: str, value: Any
    ) -> None:
        r = rig()
        seen: list[int] = []

        def can_do(op: int) -> bool:
            seen.append(op)
            return True

        r.device._can_do = can_do  # type: ignore[method-assign]
        a, b, c = (r.ggml.tensor(context, 4, 4) for _ in range(3))
        library = r.ggml.library
        sums = [library.ggml_add(context, a, other) for other in (b, c)]
        for total in [*sums, *sums]:
            assert r.device.supports_op(total)
        assert seen == sums[:1]
        change(sums[1] if who == "op" else c, field, value)
        r.device.supports_op(sums[1])
        assert seen == sums
        r.device.attach(r.session)
        r.device.supports_op(sums[1])
        assert seen == [*sums, sums[1]]


class TestAllocSize:
    def test_an_answer_is_kept_whatever_else_is_looked_at(
        self, rig: Make, context: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memo, "LIMIT", 4)
        r = rig({Command.GET_ALLOC_SIZE: m.U64.pack(1000)})
        asked = r.ggml.tensor(context, 64, 3, type=Q4_0)
        plain = [r.ggml.tensor(context, 64, n) for n in range(1, 9)]
        for tensor in [asked, *plain, asked, *plain]:
            assert r.alloc_size(tensor) == max(
                1000 if tensor == asked else 0, r.ggml.library.ggml_nbytes(tensor)
            )
        assert r.server.commands == ["GET_ALLOC_SIZE"]

    def test_asked_once_per_key(self, rig: Make, context: int) -> None:
        answers = {Command.GET_ALLOC_SIZE: m.U64.pack(1000)}
        r = rig(answers, index=2)
        first = r.ggml.tensor(context, 64, 3, type=Q4_0, name="first")
        assert [r.alloc_size(first) for _ in range(3)] == [1000] * 3
        alike = r.ggml.tensor(context, 64, 3, type=Q4_0, name="alike")
        assert r.alloc_size(alike) == 1000
        assert r.server.commands == ["GET_ALLOC_SIZE"]
        asked = m.GetAllocSize.decode(r.server.requests[0].body)
        assert asked.device == 2
        assert Tensor.decode(asked.tensor).name == b"first"
        assert asked.srcs == NULL_TENSOR * 10

    def test_of_nothing_it_is_known(self, rig: Make, context: int) -> None:
        """Of a prompt's parts but the last nobody wants logits."""
        r = rig()
        tensor = r.ggml.tensor(context, 64, 0)
        change(tensor, "op", MUL_MAT)
        assert r.alloc_size(tensor) == 0
        assert r.server.requests == []

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("type", Q8_0),
            ("op", MUL_MAT),
            ("op_params", np.arange(16)),
            ("ne", [64, 4, 1, 1]),
            ("nb", [18, 72, 216, 216]),
        ],
    )
    def test_the_key(self, rig: Make, context: int, field: str, value: Any) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, 64, 3, type=Q4_0)
        r.alloc_size(tensor)
        change(tensor, field, value)
        r.alloc_size(tensor)
        assert r.server.commands == ["GET_ALLOC_SIZE"] * 2

    @pytest.mark.parametrize(
        ("kind", "ne", "asks"),
        [
            (F32, 64, False),
            (F32, 512, False),
            (Q4_0, 64, True),
            (Q4_0, 480, True),
            (Q4_0, 512, False),
            (Q8_0, 1024, False),
            (Q8_0, 1056, True),
        ],
    )
    def test_quantised_rows(
        self, rig: Make, context: int, kind: int, ne: int, asks: bool
    ) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, ne, 2, type=kind)
        assert r.alloc_size(tensor) == r.ggml.library.ggml_nbytes(tensor)
        assert len(r.server.requests) == asks

    def test_no_view_is_asked_for(self, rig: Make, context: int) -> None:
        r = rig()
        base = r.ggml.tensor(context, 64, 4, type=Q4_0)
        view = r.ggml.library.ggml_view_2d(context, base, 64, 2, 36, 0)
        assert r.alloc_size(view) == 72
        assert r.server.requests == []

    def test_six_operations(self, rig: Make, context: int) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, 512)
        asked = set()
        for op in range(OP_COUNT):
            change(tensor, "op", op)
            before = len(r.server.requests)
            r.alloc_size(tensor)
            if len(r.server.requests) > before:
                asked.add(op)
        # CUMSUM, MUL_MAT, MUL_MAT_ID, ARGSORT, TOP_K, FLASH_ATTN_EXT
        assert asked == {16, 29, 30, 69, 70, 74}

    def test_sources_go_along_but_not_into_the_key(
        self, rig: Make, context: int
    ) -> None:
        r = rig({Command.GET_ALLOC_SIZE: m.U64.pack(64)})
        a = r.ggml.tensor(context, 64, 4, name="a")
        for length in (2, 3):
            b = r.ggml.tensor(context, 64, 2, name="b")
            product = r.ggml.library.ggml_mul_mat(context, a, b)
            change(b, "ne", [64, length, 1, 1])
            r.alloc_size(product)
        (body,) = r.server.of(Command.GET_ALLOC_SIZE)
        srcs = m.GetAllocSize.decode(body).srcs
        records = [
            Tensor.decode(srcs[i : i + TENSOR_SIZE])
            for i in range(0, len(srcs), TENSOR_SIZE)
        ]
        assert [record.name for record in records] == [b"a", b"b", *[b""] * 8]
        assert records[0].id != records[1].id != 0
        assert {record.id for record in records[2:]} == {0}

    def test_never_less_than_the_tensor(self, rig: Make, context: int) -> None:
        r = rig({Command.GET_ALLOC_SIZE: m.U64.pack(5)})
        tensor = r.ggml.tensor(context, 64, 3, type=Q4_0)
        assert [r.alloc_size(tensor) for _ in range(2)] == [108, 108]
        assert len(r.server.requests) == 1

    def test_a_wide_tensor_is_not_asked_for(self, rig: Make, context: int) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, 64, 2**27, 2, type=Q4_0)
        assert r.alloc_size(tensor) == 72 << 27
        assert r.server.requests == []
        assert r.connection.healthy

    def test_a_lost_connection_gives_the_least(self, rig: Make, context: int) -> None:
        r = rig({Command.GET_ALLOC_SIZE: Instead.CLOSE})
        tensor = r.ggml.tensor(context, 64, 3, type=Q4_0)
        assert r.alloc_size(tensor) == 108
        assert not r.connection.healthy
        assert r.alloc_size(tensor) == 108


class TestBuffer:
    def test_life(self, rig: Make) -> None:
        answer = m.AllocBufferAnswer(77, 5000).encode()
        r = rig({Command.ALLOC_BUFFER: answer}, index=1)
        library = r.ggml.library
        buffer = library.ggml_backend_buft_alloc_buffer(r.buffer_type, 4096)
        assert library.ggml_backend_buffer_get_size(buffer) == 5000
        assert r.device.allocated == 5000
        for _ in range(3):
            assert library.ggml_backend_buffer_get_base(buffer) == 77 << 32
        library.ggml_backend_buffer_clear(buffer, 0xA5)
        library.ggml_backend_buffer_free(buffer)
        # FREE_BUFFER must not wait for somebody to ask something.
        assert len(r.pair.stream.sends) == 4
        assert r.settle() == [
            "ALLOC_BUFFER",
            "BUFFER_GET_BASE",
            "BUFFER_CLEAR",
            "FREE_BUFFER",
        ]
        bodies = [request.body for request in r.server.requests]
        assert bodies[0] == m.AllocBuffer(1, 4096).encode()
        assert bodies[2] == m.BufferClear(77, 0xA5).encode()
        assert bodies[1] == bodies[3] == m.U64.pack(77)
        assert r.device.allocated == 0
        assert not r.session.buffers
        assert not r.device.plugin.buffers

    def test_no_room(self, rig: Make, caplog: pytest.LogCaptureFixture) -> None:
        r = rig({Command.ALLOC_BUFFER: m.AllocBufferAnswer(0, 0).encode()})
        alloc = r.ggml.library.ggml_backend_buft_alloc_buffer
        assert alloc(r.buffer_type, 4096) is None
        assert r.connection.healthy
        assert "RPC9 (worker:50052): no room for 4096 bytes" in caplog.text

    def test_no_room_where_ggml_would_end_the_process(
        self, rig: Make, context: int
    ) -> None:
        r = rig({Command.ALLOC_BUFFER: m.AllocBufferAnswer(0, 0).encode()})
        r.device.plugin.demanding = 1
        library = r.ggml.library
        buffer = library.ggml_backend_buft_alloc_buffer(r.buffer_type, 4096)
        tensor = r.ggml.tensor(context, 4)
        r.ggml.place(buffer, tensor)
        graph = r.ggml.graph(context, library.ggml_add(context, tensor, tensor))
        with r.backend() as backend:
            status = library.ggml_backend_graph_compute(backend, graph)
        assert status == Status.FAILED
        library.ggml_backend_buffer_free(buffer)
        with pytest.raises(RemoteFailure, match="RPC9 has no room for 4096 bytes"):
            r.connection.check()
        # The connection has other models, too.
        assert r.settle() == ["ALLOC_BUFFER"]

    @pytest.mark.parametrize(
        ("kind", "ne", "inits"),
        [
            (F32, 64, False),
            (Q4_0, 512, False),
            (Q4_0, 64, True),
            (Q8_0, 1056, True),
        ],
    )
    def test_padded_rows_are_initialised(
        self, rig: Make, context: int, kind: int, ne: int, inits: bool
    ) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, ne, 2, type=kind, name="w")
        with r.buffer() as buffer:
            r.ggml.place(buffer, tensor)
            r.settle()
            bodies = r.server.of(Command.INIT_TENSOR)
        assert len(bodies) == inits
        for body in bodies:
            record = Tensor.decode(body)
            assert (record.name, record.buffer) == (b"w", 1)
            assert record.data == 1 << 32

    def test_no_view_is_initialised(self, rig: Make, context: int) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, 64, 4, type=Q4_0)
        view = r.ggml.library.ggml_view_2d(context, tensor, 64, 2, 36, 0)
        with r.buffer() as buffer:
            r.ggml.place(buffer, tensor)
            r.forget()
            assert r.ggml.library.ggml_backend_view_init(view) == 0
            assert r.settle() == []


class TestData:
    @both
    def test_write_and_read(self, rig: Make, context: int, dialect: Dialect) -> None:
        r = rig(None, dialect)
        tensor = r.ggml.tensor(context, 16, name="x")
        data, out = np.arange(40, dtype=np.uint8), np.zeros(24, np.uint8)
        with r.buffer() as buffer:
            r.ggml.place(buffer, tensor, offset=256)
            r.ggml.library.ggml_backend_tensor_set(tensor, data.ctypes.data, 8, 40)
            r.ggml.library.ggml_backend_tensor_memset(tensor, 7, 4, 60)
            r.ggml.library.ggml_backend_tensor_get(tensor, out.ctypes.data, 12, 24)
            assert out.tobytes() == content(12, 24)
            # What comes first wakes the server.
            assert [len(sent) for sent in r.pair.stream.sends] == [1, 2]
            written, filled, read = (request.body for request in r.server.requests)
        head = m.SetTensor.decode(written[:305])
        record = Tensor.decode(head.tensor)
        assert (record.name, record.data) == (b"x", (1 << 32) + 256)
        assert (head.cache_flag, head.offset) == (0, 8)
        assert written[305:] == data.tobytes()
        assert m.MemsetTensor.decode(filled) == (head.tensor, 4, 60, 7)
        assert m.GetTensor.decode(read) == (head.tensor, 12, 24)

    @pytest.mark.parametrize(
        ("size", "steps"),
        [
            (256, [256]),
            (300, [256, 44]),
            (1024, [256] * 4),
            (4096, [1024] * 4),
            (4100, [1025] * 4),
        ],
    )
    def test_a_large_read_is_in_parts(
        self, rig: Make, context: int, size: int, steps: list[int]
    ) -> None:
        """KiB; a C++ server copies one part while the one before is received."""
        r = rig()
        tensor = r.ggml.tensor(context, size * KIB // 4)
        out = np.zeros(size * KIB, np.uint8)
        with r.buffer(size * KIB + 256) as buffer:
            r.ggml.place(buffer, tensor)
            before = r.connection.traffic.round_trips
            r.ggml.library.ggml_backend_tensor_get(tensor, out.ctypes.data, 0, len(out))
            assert r.connection.traffic.round_trips == before + 1
            reads = [m.GetTensor.decode(request.body) for request in r.server.requests]
        offsets = [sum(steps[:i]) * KIB for i in range(len(steps))]
        assert [read.offset for read in reads] == offsets
        assert [read.size for read in reads] == [step * KIB for step in steps]
        parts = [
            content(at, step * KIB) for at, step in zip(offsets, steps, strict=True)
        ]
        assert out.tobytes() == b"".join(parts)

    @pytest.mark.parametrize(("lx_flags", "type"), [(0, F32), (None, Q8_0)])
    def test_a_large_read_of_one_part(
        self, rig: Make, context: int, lx_flags: int | None, type: int
    ) -> None:
        """By a server of ours, and of what a device may have repacked."""
        r = rig(lx_flags=lx_flags)
        tensor = r.ggml.tensor(context, 512, 1024, type=type)
        size = r.ggml.library.ggml_nbytes(tensor)
        out = np.zeros(size, np.uint8)
        with r.buffer(2 * size) as buffer:
            r.ggml.place(buffer, tensor)
            r.ggml.library.ggml_backend_tensor_get(tensor, out.ctypes.data, 0, size)
            assert r.settle() == ["GET_TENSOR"]
        assert out.tobytes() == content(0, size)

    def test_of_a_read_that_failed_half_way_nothing_is_left(
        self, rig: Make, context: int
    ) -> None:
        def until_the_third(body: bytes) -> bytes | Instead:
            read = m.GetTensor.decode(body)
            if read.offset >= 512 * KIB:
                return Instead.CLOSE
            return b"x" * read.size

        r = rig({Command.GET_TENSOR: until_the_third})
        library, out = r.ggml.library, np.ones(1024 * KIB, np.uint8)
        tensor = r.ggml.tensor(context, 256 * KIB)
        with r.buffer(2048 * KIB) as buffer, r.backend() as backend:
            r.ggml.place(buffer, tensor)
            place = out.ctypes.data, 0, len(out)
            library.ggml_backend_tensor_get_async(backend, tensor, *place)
            library.ggml_backend_synchronize(backend)
        assert not r.connection.healthy
        assert not out.any()

    def test_reads_through_a_backend_share_a_round_trip(
        self, rig: Make, context: int
    ) -> None:
        r = rig()
        library = r.ggml.library
        tensor = r.ggml.tensor(context, 64)
        out = np.zeros((4, 32), np.uint8)
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, tensor)
            for i, row in enumerate(out):
                library.ggml_backend_tensor_get_async(
                    backend, tensor, row.ctypes.data, 32 * i, 32
                )
            library.ggml_backend_tensor_set_async(
                backend, tensor, bytes_at(b"abcd"), 0, 4
            )
            before = r.connection.traffic.round_trips
            assert not out.any()
            library.ggml_backend_synchronize(backend)
            assert [row.tobytes() for row in out] == [
                content(32 * i, 32) for i in range(4)
            ]
            assert r.connection.traffic.round_trips == before + 1
            assert r.settle() == [*["GET_TENSOR"] * 4, "SET_TENSOR"]

    def test_strided_in_protocol_8(self, rig: Make, context: int) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, 64, 4, name="w")
        data = np.arange(3 * 20, dtype=np.uint8)
        out = np.full(3 * 32, 9, np.uint8)
        with r.buffer() as buffer:
            r.ggml.place(buffer, tensor)
            rows = (tensor, data.ctypes.data, 16, 12, 3, 256, 20)
            r.ggml.library.ggml_backend_tensor_set_2d(*rows)
            rows = (tensor, out.ctypes.data, 4, 8, 3, 256, 32)
            r.ggml.library.ggml_backend_tensor_get_2d(*rows)
            written, read = (request.body for request in r.server.requests)
            assert r.server.commands == ["SET_TENSOR_2D", "GET_TENSOR_2D"]
        head = m.SetTensor2D.decode(written[:328])
        assert Tensor.decode(head.tensor).name == b"w"
        assert head[1:] == (16, 12, 3, 256)
        rows_sent = [data[20 * i : 20 * i + 12].tobytes() for i in range(3)]
        assert written[328:] == b"".join(rows_sent)
        assert m.GetTensor2D.decode(read)[1:] == (4, 8, 3, 256)
        assert out.tobytes() == b"".join(
            content(4 + 256 * i, 8) + b"\t" * 24 for i in range(3)
        )

    def test_strided_in_protocol_7_is_row_by_row(self, rig: Make, context: int) -> None:
        r = rig(None, V7)
        tensor = r.ggml.tensor(context, 64, 4)
        data = np.arange(3 * 20, dtype=np.uint8)
        out = np.full(3 * 32, 9, np.uint8)
        with r.buffer() as buffer:
            r.ggml.place(buffer, tensor)
            before = r.connection.traffic.round_trips
            rows = (tensor, data.ctypes.data, 16, 12, 3, 256, 20)
            r.ggml.library.ggml_backend_tensor_set_2d(*rows)
            rows = (tensor, out.ctypes.data, 4, 8, 3, 256, 32)
            r.ggml.library.ggml_backend_tensor_get_2d(*rows)
            assert r.server.commands == ["SET_TENSOR"] * 3 + ["GET_TENSOR"] * 3
            assert r.connection.traffic.round_trips == before + 1
            written = r.server.of(Command.SET_TENSOR)
            read = r.server.of(Command.GET_TENSOR)
        for i in range(3):
            assert m.SetTensor.decode(written[i][:305])[1:] == (0, 16 + 256 * i)
            assert written[i][305:] == data[20 * i : 20 * i + 12].tobytes()
            assert m.GetTensor.decode(read[i])[1:] == (4 + 256 * i, 8)
        assert out.tobytes() == b"".join(
            content(4 + 256 * i, 8) + b"\t" * 24 for i in range(3)
        )


def bytes_at(data: bytes) -> int:
    """Where some bytes lie; for as long as the caller holds them."""
    address = C.cast(C.c_char_p(data), C.c_void_p).value
    assert address is not None
    return address


class TestWeights:
    @pytest.mark.parametrize(
        ("size", "usage", "probes"),
        [
            (HASH_THRESHOLD + 1, Usage.WEIGHTS, True),
            (HASH_THRESHOLD, Usage.WEIGHTS, False),
            (HASH_THRESHOLD + 1, Usage.COMPUTE, False),
            (HASH_THRESHOLD + 1, Usage.ANY, False),
        ],
    )
    def test_only_large_ones_are_asked_for_by_hash(
        self, rig: Make, context: int, size: int, usage: Usage, probes: bool
    ) -> None:
        r = rig()
        tensor = r.ggml.tensor(context, size + 64, type=I8)
        data = np.zeros(size, np.uint8)
        with r.buffer(size + 64, usage) as buffer:
            r.ggml.place(buffer, tensor)
            r.ggml.library.ggml_backend_tensor_set(tensor, data.ctypes.data, 64, size)
            commands = r.settle()
            requests = list(r.server.requests)
        if probes:
            assert commands == ["SET_TENSOR_HASH", "SET_TENSOR"]
            probe = m.SetTensorHash.decode(requests[0].body)
            assert probe.offset == 64
            assert probe.hash == fnv1a_64(data.data)
        else:
            assert commands == ["SET_TENSOR"]
        head = m.SetTensor.decode(requests[-1].body[:305])
        assert (head.cache_flag, head.offset) == (int(probes), 64)
        assert len(requests[-1].body) == 305 + size

    def test_a_hit_sends_nothing(self, rig: Make, context: int) -> None:
        r = rig({Command.SET_TENSOR_HASH: b"\x01"})
        size = HASH_THRESHOLD + 1
        tensor = r.ggml.tensor(context, size, type=I8)
        data = np.zeros(size, np.uint8)
        with r.buffer(size, Usage.WEIGHTS) as buffer:
            r.ggml.place(buffer, tensor)
            sent = r.connection.traffic.bytes_sent
            r.ggml.library.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, size)
            assert r.settle() == ["SET_TENSOR_HASH"]
            assert r.connection.traffic.bytes_sent - sent < 1000

    def test_strided_writes_never_are(self, rig: Make, context: int) -> None:
        r = rig()
        row = HASH_THRESHOLD + 64
        tensor = r.ggml.tensor(context, row, 2, type=I8)
        data = np.zeros(2 * row, np.uint8)
        with r.buffer(2 * row, Usage.WEIGHTS) as buffer:
            r.ggml.place(buffer, tensor)
            rows = (tensor, data.ctypes.data, 0, row, 2, row, row)
            r.ggml.library.ggml_backend_tensor_set_2d(*rows)
            assert r.settle() == ["SET_TENSOR_2D"]

    def test_layers_are_counted_by_name(self, rig: Make, context: int) -> None:
        r = rig()
        names = ["blk.0.attn_q", "blk.0.ffn", "blk.11.ffn", "output", "x.blk.7.y"]
        data = np.zeros(64, np.uint8)
        with r.buffer(usage=Usage.WEIGHTS) as buffer:
            for i, name in enumerate(names):
                tensor = r.ggml.tensor(context, 16, name=name)
                r.ggml.place(buffer, tensor, offset=64 * i)
                r.ggml.library.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, 64)
            assert r.device.layers == {0, 11}


class TestCopy:
    @pytest.mark.parametrize("done", [True, False])
    def test_on_one_server(self, rig: Make, context: int, done: bool) -> None:
        r = rig({Command.COPY_TENSOR: bytes([done])})
        src, dst = (r.ggml.tensor(context, 16, name=name) for name in "ab")
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, src, dst)
            r.ggml.library.ggml_backend_tensor_copy_async(backend, backend, src, dst)
            commands = r.settle()
            (body, *_) = r.server.of(Command.COPY_TENSOR)
            written = r.server.of(Command.SET_TENSOR)
        names = [Tensor.decode(part).name for part in m.CopyTensor.decode(body)]
        assert names == [b"a", b"b"]
        if done:
            assert commands == ["COPY_TENSOR"]
        else:
            # ggml asks once more, then carries the data itself.
            assert commands == [*["COPY_TENSOR"] * 2, "GET_TENSOR", "SET_TENSOR"]
            assert written[0][305:] == content(0, 64)

    def test_between_servers_the_host_relays(self, rig: Make, context: int) -> None:
        a, b = rig(), rig()
        src, dst = (a.ggml.tensor(context, 16, name=name) for name in "ab")
        with ExitStack() as stack:
            a.ggml.place(stack.enter_context(a.buffer()), src)
            b.ggml.place(stack.enter_context(b.buffer()), dst)
            from_, to = (stack.enter_context(side.backend()) for side in (a, b))
            a.ggml.library.ggml_backend_tensor_copy_async(from_, to, src, dst)
            assert a.settle() == ["GET_TENSOR"]
            assert b.settle() == ["SET_TENSOR"]
            (body,) = b.server.of(Command.SET_TENSOR)
        head = m.SetTensor.decode(body[:305])
        assert Tensor.decode(head.tensor).name == b"b"
        assert head[1:] == (0, 0)
        assert body[305:] == content(0, 64)

    def test_from_host_memory_it_is_a_write(self, rig: Make, context: int) -> None:
        r = rig()
        src, dst = r.ggml.tensor(context, 16), r.ggml.tensor(context, 16)
        with r.ggml.cpu_buffer() as host, r.buffer() as buffer:
            r.ggml.place(host, src)
            r.ggml.place(buffer, dst)
            r.ggml.library.ggml_backend_tensor_memset(src, 3, 0, 64)
            assert not r.device.cpy_tensor_async(src, dst)
            r.ggml.library.ggml_backend_tensor_copy(src, dst)
            assert r.settle() == ["SET_TENSOR"]
            assert r.server.requests[0].body[305:] == b"\x03" * 64

    def test_one_broken_server_does_not_take_the_other_along(
        self, rig: Make, context: int
    ) -> None:
        a, b = rig(), rig()
        src, dst = a.ggml.tensor(context, 16), a.ggml.tensor(context, 16)
        with ExitStack() as stack:
            a.ggml.place(stack.enter_context(a.buffer()), src)
            b.ggml.place(stack.enter_context(b.buffer()), dst)
            from_, to = (stack.enter_context(side.backend()) for side in (a, b))
            a.server.answers[Command.GET_TENSOR] = Instead.CLOSE
            a.ggml.library.ggml_backend_tensor_copy_async(from_, to, src, dst)
            with pytest.raises(ConnectionLost):
                a.connection.check()
            b.connection.check()
            # What could not be read is written as zeros, not as garbage.
            assert b.settle() == ["SET_TENSOR"]
            assert b.server.requests[0].body[305:] == bytes(64)


class TestGraphs:
    @both
    def test_the_second_run_is_a_recompute(
        self, rig: Make, context: int, dialect: Dialect
    ) -> None:
        r = rig(None, dialect, index=4)
        library = r.ggml.library
        a = r.ggml.tensor(context, 16)
        total = library.ggml_add(context, a, a)
        graph = set_uid(r.ggml.graph(context, total), 99)
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, a, total)
            for _ in range(3):
                assert library.ggml_backend_graph_compute(backend, graph) == 0
            assert r.settle() == ["GRAPH_COMPUTE", *["GRAPH_RECOMPUTE"] * 2]
            whole, again, _ = (request.body for request in r.server.requests)
            traffic = r.connection.traffic
            assert (traffic.graphs, traffic.recomputes) == (1, 2)
        decoded = Graph.decode(dialect, whole)
        uid = 99 if dialect is V8 else 0
        assert (decoded.device, decoded.uid) == (4, uid)
        assert (len(decoded.nodes), len(decoded.tensors)) == (1, 2)
        assert set(decoded.tensors["buffer"].tolist()) == {1}
        assert GraphRecompute.decode(dialect, again) == (4, uid)

    @both
    def test_a_free_forgets_graphs(
        self, rig: Make, context: int, dialect: Dialect
    ) -> None:
        r = rig(None, dialect)
        library = r.ggml.library
        a = r.ggml.tensor(context, 16)
        graph = set_uid(r.ggml.graph(context, library.ggml_add(context, a, a)), 99)
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, a, *r.ggml.nodes(graph))
            other = library.ggml_backend_buft_alloc_buffer(r.buffer_type, 64)
            r.forget()
            library.ggml_backend_graph_compute(backend, graph)
            library.ggml_backend_buffer_free(other)
            library.ggml_backend_graph_compute(backend, graph)
            assert r.settle() == ["GRAPH_COMPUTE", "FREE_BUFFER", "GRAPH_COMPUTE"]

    def test_without_a_uid_it_is_sent_each_time(self, rig: Make, context: int) -> None:
        r = rig()
        a = r.ggml.tensor(context, 16)
        graph = r.ggml.graph(context, r.ggml.library.ggml_add(context, a, a))
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, a, *r.ggml.nodes(graph))
            for _ in range(2):
                r.ggml.library.ggml_backend_graph_compute(backend, graph)
            assert r.settle() == ["GRAPH_COMPUTE"] * 2

    def test_a_graph_the_wire_cannot_carry(self, rig: Make, context: int) -> None:
        r = rig()
        a = r.ggml.tensor(context, 16)
        graph = r.ggml.graph(context, r.ggml.library.ggml_add(context, a, a))
        change(a, "nb", [2**32, 2**32, 2**32, 2**32])
        with r.backend() as backend:
            status = r.ggml.library.ggml_backend_graph_compute(backend, graph)
        assert status == Status.FAILED
        with pytest.raises(UsageError, match="32 bits"):
            r.connection.check()

    def test_a_device_that_is_lost_fails_the_graph(
        self, rig: Make, context: int
    ) -> None:
        r = rig()
        a = r.ggml.tensor(context, 16)
        graph = r.ggml.graph(context, r.ggml.library.ggml_add(context, a, a))
        r.connection.close()
        with r.backend() as backend:
            status = r.ggml.library.ggml_backend_graph_compute(backend, graph)
        assert status == Status.FAILED
