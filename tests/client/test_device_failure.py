"""What ggml gets from a remote device that fails, or that answers nonsense."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable

import numpy as np
import pytest

from longwire.client.buffer import Session
from longwire.errors import ConnectionLost, RemoteFailure
from longwire.native.abi import Status
from longwire.wire import messages as m
from longwire.wire.constants import Command
from support.rig import Rig, set_uid
from support.scripted import Instead, Scripted

Start = Callable[..., Scripted]
Make = Callable[..., Rig]


class TestAnswersNobodyCanUse:
    """ggml would abort, or divide by zero, if these got through to it."""

    @pytest.mark.parametrize("alignment", [0, 3, 96])
    def test_an_alignment(self, rig: Make, alignment: int) -> None:
        r = rig({Command.GET_ALIGNMENT: m.U64.pack(alignment)})
        got = r.ggml.library.ggml_backend_buft_get_alignment(r.buffer_type)
        assert got > 0
        assert got & (got - 1) == 0
        with pytest.raises(RemoteFailure, match=f"{alignment} is no power of two"):
            r.connection.check()

    def test_a_buffer_that_is_too_small(self, rig: Make) -> None:
        r = rig({Command.ALLOC_BUFFER: m.AllocBufferAnswer(5, 99).encode()})
        alloc = r.ggml.library.ggml_backend_buft_alloc_buffer
        assert alloc(r.buffer_type, 100) is None
        with pytest.raises(RemoteFailure, match="gave 99 bytes where 100 were asked"):
            r.connection.check()

    @pytest.mark.parametrize("base", [0, 2**64 - 100])
    def test_a_base(self, rig: Make, base: int) -> None:
        r = rig({Command.BUFFER_GET_BASE: m.U64.pack(base)})
        library = r.ggml.library
        buffer = library.ggml_backend_buft_alloc_buffer(r.buffer_type, 100)
        assert library.ggml_backend_buffer_get_base(buffer)
        with pytest.raises(RemoteFailure, match="is no base for 100 bytes"):
            r.connection.check()
        library.ggml_backend_buffer_free(buffer)

    @pytest.mark.parametrize(
        "command", [Command.GET_ALIGNMENT, Command.BUFFER_GET_BASE]
    )
    def test_none_at_all(self, rig: Make, context: int, command: Command) -> None:
        r = rig({command: Instead.CLOSE})
        library = r.ggml.library
        tensor = r.ggml.tensor(context, 16)
        buffer = library.ggml_backend_buft_alloc_buffer(r.buffer_type, 4096)
        assert library.ggml_backend_buffer_get_alignment(buffer) > 0
        assert library.ggml_backend_buffer_get_base(buffer)
        # ggml asserts that it fits, also after the connection is lost.
        r.ggml.place(buffer, tensor)
        with pytest.raises(ConnectionLost, match=command.name):
            r.connection.check()
        library.ggml_backend_buffer_free(buffer)
        assert r.device.plugin.buffers == {}

    def test_no_memory_report(self, rig: Make) -> None:
        r = rig({Command.GET_DEVICE_MEMORY: Instead.CLOSE})
        for _ in range(2):
            free, total = C.c_size_t(0xDEAD), C.c_size_t(0xDEAD)
            r.ggml.library.ggml_backend_dev_memory(
                r.device.plugin.address, C.byref(free), C.byref(total)
            )
            assert (free.value, total.value) == (0, 0)


class TestAfterALoss:
    def test_reads_give_zeros(self, rig: Make, context: int) -> None:
        r = rig()
        library = r.ggml.library
        tensor = r.ggml.tensor(context, 64)
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, tensor)
            r.connection.close()
            place = (tensor, np.full(4, 9, np.uint8).ctypes.data, 0, 4)
            library.ggml_backend_tensor_set(*place)
            library.ggml_backend_tensor_memset(tensor, 1, 0, 4)
            library.ggml_backend_buffer_clear(buffer, 1)
            outs = np.full((3, 8), 9, np.uint8)
            library.ggml_backend_tensor_get(tensor, outs[0].ctypes.data, 0, 8)
            library.ggml_backend_tensor_get_async(
                backend, tensor, outs[1].ctypes.data, 0, 8
            )
            rows = (tensor, outs[2].ctypes.data, 0, 4, 2, 64, 4)
            library.ggml_backend_tensor_get_2d(*rows)
            library.ggml_backend_synchronize(backend)
            assert not outs.any()

    def test_what_is_left_of_an_old_connection_harms_no_new_one(
        self, rig: Make, scripted: Start, context: int
    ) -> None:
        r = rig()
        library = r.ggml.library
        a = r.ggml.tensor(context, 16)
        total = library.ggml_add(context, a, a)
        graph = set_uid(r.ggml.graph(context, total), 99)
        out = np.full(16, 9, np.uint8)
        with r.buffer() as buffer, r.backend() as backend:
            r.ggml.place(buffer, a, total)
            assert library.ggml_backend_graph_compute(backend, graph) == 0
            r.connection.close()
            fresh = scripted()
            r.device.attach(Session(fresh.connection))

            status = library.ggml_backend_graph_compute(backend, graph)
            assert status == Status.FAILED
            place = (out.ctypes.data, 0, 16)
            library.ggml_backend_tensor_set(a, *place)
            library.ggml_backend_tensor_set_async(backend, a, *place)
            library.ggml_backend_tensor_get_async(backend, total, *place)
            library.ggml_backend_tensor_copy(a, total)
            library.ggml_backend_synchronize(backend)
            assert not out.any()
        fresh.connection.check()
        assert r.device.memory() == (1 << 30, 1 << 31)
        assert fresh.server.commands == ["GET_DEVICE_MEMORY"]
        assert r.device.plugin.buffers == {}

    def test_new_work_on_old_weights_is_refused_here(
        self, rig: Make, scripted: Start, context: int
    ) -> None:
        r = rig()
        library = r.ggml.library
        a = r.ggml.tensor(context, 16)
        total = library.ggml_add(context, a, a)
        graph = r.ggml.graph(context, total)
        with r.buffer() as old, r.backend() as backend:
            r.ggml.place(old, a)
            r.connection.close()
            fresh = scripted()
            r.device.attach(Session(fresh.connection))
            new = library.ggml_backend_buft_alloc_buffer(r.buffer_type, 4096)
            r.ggml.place(new, total)
            status = library.ggml_backend_graph_compute(backend, graph)
            assert status == Status.FAILED
            library.ggml_backend_buffer_free(new)
        fresh.connection.ask(Command.DEVICE_COUNT, b"")
        assert not fresh.server.of(Command.GRAPH_COMPUTE)

    def test_new_buffers_work_beside_old_ones(
        self, rig: Make, scripted: Start, context: int
    ) -> None:
        r = rig()
        library = r.ggml.library
        with r.buffer(), r.backend() as backend:
            r.connection.close()
            fresh = scripted()
            r.device.attach(Session(fresh.connection))
            a = r.ggml.tensor(context, 16)
            total = library.ggml_add(context, a, a)
            graph = r.ggml.graph(context, total)
            kind = r.buffer_type
            buffer = library.ggml_backend_buft_alloc_buffer(kind, 4096)
            r.ggml.place(buffer, a, total)
            assert library.ggml_backend_graph_compute(backend, graph) == 0
            library.ggml_backend_buffer_free(buffer)
        fresh.connection.ask(Command.DEVICE_COUNT, b"")
        assert fresh.server.of(Command.GRAPH_COMPUTE)

    def test_an_odd_exception_is_latched_with_its_cause(self, rig: Make) -> None:
        r = rig()
        r.device.failed(ValueError("odd"))
        with pytest.raises(ConnectionLost, match="worker:50052: callback: odd") as e:
            r.connection.check()
        assert isinstance(e.value.__cause__, ValueError)
