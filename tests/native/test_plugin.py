"""A Python device under ggml's public functions: a device of host memory."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from longwire.native.abi import DeviceProps, DeviceType, Status, Usage
from longwire.native.contract import HostBuffer, HostDevice, Rows
from longwire.native.graph import graph_nodes
from longwire.native.memory import copy, fill, read
from longwire.native.plugin import DevicePlugin, Registry, device_array
from support.ggml import Ggml, fields


class Boom(Exception):
    """What the device below raises when told to."""


class Calls:
    """Remembers calls, and raises in the one that is set to fail."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.fails = ""
        self.error: BaseException = Boom()

    def note(self, name: str, *arguments: Any) -> None:
        self.made.append((name, *arguments))
        if name == self.fails:
            raise self.error


class MemoryBuffer:
    """A buffer of this process's memory."""

    def __init__(self, device: MemoryDevice, size: int) -> None:
        self.device: HostDevice = device
        self.address = 0
        self.memory = np.zeros(size, np.uint8)
        self._note = device.calls.note
        self._memory_device = device

    def free(self) -> None:
        self._note("free_buffer", self.address)

    def base(self) -> int:
        self._note("get_base")
        return int(self.memory.ctypes.data)

    def init_tensor(self, tensor: int) -> bool:
        self._note("init_tensor", tensor)
        return self._memory_device.accepts

    def memset_tensor(self, tensor: int, value: int, offset: int, size: int) -> None:
        self._note("memset_tensor", tensor, value, offset, size)
        fill(int(fields(tensor)["data"]) + offset, value, size)

    def set_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._note("set_tensor", tensor, data, offset, size)
        copy(int(fields(tensor)["data"]) + offset, data, size)

    def get_tensor(self, tensor: int, data: int, offset: int, size: int) -> None:
        self._note("get_tensor", tensor, data, offset, size)
        copy(data, int(fields(tensor)["data"]) + offset, size)

    def set_tensor_2d(self, tensor: int, rows: Rows) -> None:
        self._note("set_tensor_2d", tensor, *rows)
        data, offset, size, n, stride_tensor, stride_data = rows
        to = int(fields(tensor)["data"]) + offset
        for i in range(n):
            copy(to + i * stride_tensor, data + i * stride_data, size)

    def get_tensor_2d(self, tensor: int, rows: Rows) -> None:
        self._note("get_tensor_2d", tensor, *rows)
        data, offset, size, n, stride_tensor, stride_data = rows
        from_ = int(fields(tensor)["data"]) + offset
        for i in range(n):
            copy(data + i * stride_data, from_ + i * stride_tensor, size)

    def cpy_tensor(self, src: int, dst: int) -> bool:
        self._note("cpy_tensor", src, dst)
        if self._memory_device.accepts:
            copy(int(fields(dst)["data"]), int(fields(src)["data"]), 16)
        return self._memory_device.accepts

    def clear(self, value: int) -> None:
        self._note("clear", value)
        self.memory[:] = value


class MemoryDevice:
    """A device that keeps its tensors in this process."""

    name = "MEM0"
    description = "memory of this process"

    def __init__(self) -> None:
        self.calls = Calls()
        self.failures: list[BaseException] = []
        self.accepts = True
        self.fails_to_fail = False

    def memory(self) -> tuple[int, int]:
        self.calls.note("get_memory")
        return 3 << 40, 5 << 40

    def alignment(self) -> int:
        self.calls.note("get_alignment")
        return 64

    def max_size(self) -> int:
        self.calls.note("get_max_size")
        return 1 << 20

    def alloc_size(self, tensor: int) -> int:
        self.calls.note("get_alloc_size", tensor)
        return 128

    def alloc_buffer(self, size: int) -> tuple[HostBuffer, int] | None:
        self.calls.note("alloc_buffer", size)
        if size > 1 << 20:
            return None
        return MemoryBuffer(self, size + 32), size + 32

    def lacks(self, size: int) -> None:
        self.calls.note("lacks", size)

    def supports_op(self, op: int) -> bool:
        self.calls.note("supports_op", op)
        return self.accepts

    def set_tensor_async(self, tensor: int, data: int, offset: int, size: int) -> None:
        self.calls.note("set_tensor_async", tensor, data, offset, size)

    def get_tensor_async(self, tensor: int, data: int, offset: int, size: int) -> None:
        self.calls.note("get_tensor_async", tensor, data, offset, size)

    def cpy_tensor_async(self, src: int, dst: int) -> bool:
        self.calls.note("cpy_tensor_async", src, dst)
        return self.accepts

    def synchronize(self) -> None:
        self.calls.note("synchronize")

    def graph_compute(self, graph: int) -> bool:
        self.calls.note("graph_compute", graph)
        return self.accepts

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)
        if self.fails_to_fail:
            raise RuntimeError("and again")


class Rig:
    """The device, its native face, and the things tests make on it."""

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml
        self.library = ggml.library
        self.device = MemoryDevice()
        self.registry = Registry(ggml.engine)
        self.plugin: DevicePlugin = self.registry.add(self.device)
        self.address = self.plugin.address
        self.kind = self.library.ggml_backend_dev_buffer_type(self.address)
        self._stack = ExitStack()
        self.context = self._stack.enter_context(ggml.context())

    @property
    def calls(self) -> Calls:
        return self.device.calls

    def close(self) -> None:
        self._stack.close()

    @contextmanager
    def buffer(self) -> Iterator[int]:
        buffer = self.library.ggml_backend_buft_alloc_buffer(self.kind, 4096)
        self.calls.made.clear()
        yield buffer
        self.library.ggml_backend_buffer_free(buffer)

    @contextmanager
    def backend(self) -> Iterator[int]:
        backend = self.library.ggml_backend_dev_init(self.address, None)
        yield backend
        self.library.ggml_backend_free(backend)

    def placed(self, buffer: int, *ne: int, offset: int = 0) -> int:
        """A tensor in the buffer; its placement is not among the calls."""
        tensor = self.ggml.tensor(self.context, *ne)
        self.ggml.place(buffer, tensor, offset=offset)
        self.calls.made.clear()
        return tensor


@pytest.fixture
def rig(ggml: Ggml) -> Iterator[Rig]:
    rig = Rig(ggml)
    yield rig
    rig.close()
    assert rig.plugin.buffers == {}


class TestRegistry:
    def test_its_devices(self, rig: Rig) -> None:
        library, reg = rig.library, rig.registry.address
        other = rig.registry.add(MemoryDevice())
        assert library.ggml_backend_reg_name(reg) == b"RPC"
        assert library.ggml_backend_reg_dev_count(reg) == 2
        devices = [library.ggml_backend_reg_dev_get(reg, i) for i in range(2)]
        assert devices == [rig.address, other.address]
        assert library.ggml_backend_dev_backend_reg(rig.address) == reg
        lookup = library.ggml_backend_reg_get_proc_address
        assert lookup(reg, b"ggml_backend_set_n_threads") is None

    def test_a_device_that_is_not_there(
        self, rig: Rig, caplog: pytest.LogCaptureFixture
    ) -> None:
        get = rig.library.ggml_backend_reg_dev_get
        assert get(rig.registry.address, 1) is None
        assert "IndexError" in caplog.text

    def test_an_array_of_devices_ends_with_null(self) -> None:
        array = device_array([16, 32])
        assert list(array) == [16, 32, None]


class TestDevice:
    def test_what_ggml_learns(self, rig: Rig) -> None:
        library = rig.library
        assert library.ggml_backend_dev_name(rig.address) == b"MEM0"
        description = library.ggml_backend_dev_description(rig.address)
        assert description == b"memory of this process"
        assert library.ggml_backend_dev_type(rig.address) == DeviceType.GPU
        free, total = C.c_size_t(), C.c_size_t()
        library.ggml_backend_dev_memory(rig.address, C.byref(free), C.byref(total))
        assert (free.value, total.value) == (3 << 40, 5 << 40)

    def test_properties(self, rig: Rig) -> None:
        props = DeviceProps()
        rig.library.ggml_backend_dev_get_props(rig.address, C.byref(props))
        assert C.string_at(props.name) == b"MEM0"
        assert C.string_at(props.description) == b"memory of this process"
        assert (props.memory_free, props.memory_total) == (3 << 40, 5 << 40)
        assert props.type == DeviceType.GPU
        assert props.device_id is None
        assert [props.async_, props.events, props.mmap_support] == [True] * 3
        assert [props.host_buffer, props.buffer_from_host_ptr] == [False] * 2

    def test_supports_its_own_buffers_only(self, rig: Rig) -> None:
        cpu = rig.library.ggml_backend_dev_by_name(b"CPU")
        foreign = rig.library.ggml_backend_dev_buffer_type(cpu)
        supports = rig.library.ggml_backend_dev_supports_buft
        assert supports(rig.address, rig.kind)
        assert not supports(rig.address, foreign)

    @pytest.mark.parametrize("accepts", [True, False])
    def test_supports_what_the_device_says(self, rig: Rig, accepts: bool) -> None:
        rig.device.accepts = accepts
        op = rig.ggml.tensor(rig.context, 4)
        supported = rig.library.ggml_backend_dev_supports_op(rig.address, op)
        assert supported is accepts
        assert rig.calls.made == [("supports_op", op)]

    def test_events_synchronize_the_device(self, rig: Rig) -> None:
        library = rig.library
        with rig.backend() as backend:
            events = [library.ggml_backend_event_new(rig.address) for _ in range(3)]
            assert len(set(events)) == 3
            library.ggml_backend_event_record(events[0], backend)
            library.ggml_backend_event_wait(backend, events[0])
            assert rig.calls.made == []
            library.ggml_backend_event_synchronize(events[0])
            assert rig.calls.made == [("synchronize",)]
            for event in events:
                library.ggml_backend_event_free(event)
        assert rig.plugin._events == {}


class TestBufferType:
    def test_numbers(self, rig: Rig) -> None:
        library = rig.library
        tensor = rig.ggml.tensor(rig.context, 4)
        assert library.ggml_backend_buft_name(rig.kind) == b"MEM0"
        assert library.ggml_backend_buft_get_alignment(rig.kind) == 64
        assert library.ggml_backend_buft_get_max_size(rig.kind) == 1 << 20
        assert library.ggml_backend_buft_get_device(rig.kind) == rig.address
        assert not library.ggml_backend_buft_is_host(rig.kind)
        rig.library.ggml_backend_buft_get_alloc_size(rig.kind, tensor)
        assert rig.calls.made[-1] == ("get_alloc_size", tensor)

    def test_a_buffer(self, rig: Rig) -> None:
        library = rig.library
        buffer = library.ggml_backend_buft_alloc_buffer(rig.kind, 1000)
        assert list(rig.plugin.buffers) == [buffer]
        ours = rig.plugin.buffers[buffer]
        assert isinstance(ours, MemoryBuffer)
        assert ours.address == buffer
        assert library.ggml_backend_buffer_get_size(buffer) == 1032
        assert library.ggml_backend_buffer_get_type(buffer) == rig.kind
        assert library.ggml_backend_buffer_get_base(buffer) == ours.memory.ctypes.data
        assert rig.plugin.usage(buffer) == Usage.ANY
        library.ggml_backend_buffer_set_usage(buffer, Usage.WEIGHTS)
        assert rig.plugin.usage(buffer) == Usage.WEIGHTS
        library.ggml_backend_buffer_reset(buffer)
        library.ggml_backend_buffer_free(buffer)
        assert rig.calls.made[-1] == ("free_buffer", buffer)
        assert rig.plugin.buffers == {}

    def test_no_memory(self, rig: Rig) -> None:
        assert not rig.library.ggml_backend_buft_alloc_buffer(rig.kind, 1 << 30)
        assert rig.plugin.buffers == {}
        assert rig.device.failures == []

    def test_no_memory_where_ggml_would_end_the_process(self, rig: Rig) -> None:
        library = rig.library
        rig.plugin.demanding = 1
        buffer = library.ggml_backend_buft_alloc_buffer(rig.kind, 1 << 30)
        assert rig.calls.made == [("alloc_buffer", 1 << 30), ("lacks", 1 << 30)]
        assert rig.device.failures == []
        assert library.ggml_backend_buffer_get_size(buffer) == 1 << 30
        tensor = rig.placed(buffer, 16)
        data = np.full(64, 7, np.uint8)
        at = data.ctypes.data
        library.ggml_backend_tensor_set(tensor, at, 0, 64)
        library.ggml_backend_tensor_get(tensor, at, 16, 32)
        assert data.tolist() == [0] * 32 + [7] * 32
        library.ggml_backend_tensor_get_2d(tensor, at + 32, 0, 4, 2, 8, 16)
        assert data[32:].tolist() == ([0] * 4 + [7] * 12) * 2
        library.ggml_backend_buffer_free(buffer)

    def test_a_failed_allocation_where_ggml_would_end_the_process(
        self, rig: Rig
    ) -> None:
        rig.plugin.demanding = 1
        rig.calls.fails = "alloc_buffer"
        buffer = rig.library.ggml_backend_buft_alloc_buffer(rig.kind, 64)
        assert buffer and rig.device.failures == [rig.calls.error]
        rig.library.ggml_backend_buffer_free(buffer)

    def test_many_buffers_are_kept_apart(self, rig: Rig) -> None:
        library = rig.library
        alloc = library.ggml_backend_buft_alloc_buffer
        buffers = [alloc(rig.kind, 100 + i) for i in range(20)]
        for i, buffer in enumerate(buffers):
            library.ggml_backend_buffer_clear(buffer, i)
        for i, buffer in enumerate(buffers):
            ours = rig.plugin.buffers[buffer]
            assert isinstance(ours, MemoryBuffer)
            assert set(ours.memory.tolist()) == {i}
            assert len(ours.memory) == 132 + i
        for buffer in buffers:
            library.ggml_backend_buffer_free(buffer)


class TestData:
    def test_write_fill_and_read(self, rig: Rig) -> None:
        data = np.arange(64, dtype=np.uint8)
        out = np.zeros(64, np.uint8)
        with rig.buffer() as buffer:
            tensor = rig.placed(buffer, 16, offset=128)
            rig.library.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, 64)
            rig.library.ggml_backend_tensor_memset(tensor, 0xEE, 8, 16)
            rig.library.ggml_backend_tensor_get(tensor, out.ctypes.data, 4, 40)
            assert rig.calls.made == [
                ("set_tensor", tensor, data.ctypes.data, 0, 64),
                ("memset_tensor", tensor, 0xEE, 8, 16),
                ("get_tensor", tensor, out.ctypes.data, 4, 40),
            ]
        data[8:24] = 0xEE
        assert out[:40].tolist() == data[4:44].tolist()

    def test_rows(self, rig: Rig) -> None:
        data = np.arange(40, dtype=np.uint8)
        out = np.zeros((3, 16), np.uint8)
        with rig.buffer() as buffer:
            tensor = rig.placed(buffer, 8, 4)
            rows = (tensor, data.ctypes.data, 4, 10, 3, 32, 15)
            rig.library.ggml_backend_tensor_set_2d(*rows)
            assert rig.calls.made == [("set_tensor_2d", *rows)]
            back = (tensor, out.ctypes.data, 4, 10, 3, 32, 16)
            rig.library.ggml_backend_tensor_get_2d(*back)
            assert rig.calls.made[1:] == [("get_tensor_2d", *back)]
        for i in range(3):
            row = data[15 * i : 15 * i + 10].tolist()
            assert out[i].tolist() == row + [0] * 6

    @pytest.mark.parametrize("accepts", [True, False])
    def test_copies(self, rig: Rig, accepts: bool) -> None:
        """ggml carries the data itself where the buffer does not."""
        out = np.zeros(16, np.uint8)
        with rig.buffer() as buffer:
            src, dst = rig.placed(buffer, 4), rig.placed(buffer, 4, offset=64)
            rig.library.ggml_backend_tensor_memset(src, 7, 0, 16)
            rig.calls.made.clear()
            rig.device.accepts = accepts
            rig.library.ggml_backend_tensor_copy(src, dst)
            names = [call[0] for call in rig.calls.made]
            assert rig.calls.made[0] == ("cpy_tensor", src, dst)
            assert names[1:] == ([] if accepts else ["get_tensor", "set_tensor"])
            rig.library.ggml_backend_tensor_get(dst, out.ctypes.data, 0, 16)
            assert out.tolist() == [7] * 16
            rig.device.accepts = True

    @pytest.mark.parametrize("accepts", [True, False])
    def test_placing_a_tensor(self, rig: Rig, accepts: bool) -> None:
        rig.device.accepts = accepts
        tensor = rig.ggml.tensor(rig.context, 4)
        with rig.buffer() as buffer:
            base = rig.library.ggml_backend_buffer_get_base(buffer)
            place = rig.library.ggml_backend_tensor_alloc
            status = place(buffer, tensor, base)
            assert status == (Status.SUCCESS if accepts else Status.FAILED)
            assert rig.calls.made[-1] == ("init_tensor", tensor)


class TestBackend:
    def test_life(self, rig: Rig) -> None:
        with rig.backend() as first, rig.backend() as second:
            assert first != second
            assert rig.library.ggml_backend_name(first) == b"MEM0"
            assert rig.plugin._backends.keys() == {first, second}
        assert rig.plugin._backends == {}

    def test_transfers(self, rig: Rig) -> None:
        data = np.zeros(16, np.uint8).ctypes.data
        with rig.buffer() as buffer, rig.backend() as backend:
            tensor = rig.placed(buffer, 4)
            library = rig.library
            library.ggml_backend_tensor_set_async(backend, tensor, data, 4, 8)
            library.ggml_backend_tensor_get_async(backend, tensor, data, 8, 4)
            library.ggml_backend_synchronize(backend)
            assert rig.calls.made == [
                ("set_tensor_async", tensor, data, 4, 8),
                ("get_tensor_async", tensor, data, 8, 4),
                ("synchronize",),
            ]

    @pytest.mark.parametrize("accepts", [True, False])
    def test_copies(self, rig: Rig, accepts: bool) -> None:
        with rig.buffer() as buffer, rig.backend() as backend:
            src, dst = rig.placed(buffer, 4), rig.placed(buffer, 4, offset=64)
            rig.device.accepts = accepts
            copy_async = rig.library.ggml_backend_tensor_copy_async
            copy_async(backend, backend, src, dst)
            assert rig.calls.made[0] == ("cpy_tensor_async", src, dst)
            blocking = ("cpy_tensor", src, dst) in rig.calls.made
            assert blocking is not accepts
            rig.device.accepts = True

    @pytest.mark.parametrize("accepts", [True, False])
    def test_a_graph(self, rig: Rig, accepts: bool) -> None:
        rig.device.accepts = accepts
        a = rig.ggml.tensor(rig.context, 4)
        b = rig.library.ggml_add(rig.context, a, a)
        graph = rig.ggml.graph(rig.context, b)
        with rig.backend() as backend:
            status = rig.library.ggml_backend_graph_compute(backend, graph)
        assert status == (Status.SUCCESS if accepts else Status.FAILED)
        assert rig.calls.made[0] == ("graph_compute", graph)
        assert graph_nodes(graph).tolist() == [b]


def act(rig: Rig, slot: str) -> Any:
    """Reach a slot through ggml; what C got from it."""
    library = rig.library
    data = np.zeros(64, np.uint8)
    at = data.ctypes.data
    free, total = C.c_size_t(0xDEAD), C.c_size_t(0xDEAD)

    def memory() -> tuple[int, int]:
        library.ggml_backend_dev_memory(rig.address, C.byref(free), C.byref(total))
        return free.value, total.value

    def on_tensor(call: Callable[[int, int, int, int], Any]) -> Any:
        rig.calls.fails = ""
        with rig.buffer() as buffer, rig.backend() as backend:
            tensor, other = rig.placed(buffer, 4), rig.placed(buffer, 4, offset=64)
            rig.calls.fails = slot
            result = call(buffer, backend, tensor, other)
            rig.calls.fails = ""
        return result

    tensor = rig.ggml.tensor(rig.context, 4)
    graph = rig.ggml.graph(rig.context, library.ggml_add(rig.context, tensor, tensor))
    kind = rig.kind
    actions: dict[str, Callable[[], Any]] = {
        "get_memory": memory,
        "supports_op": lambda: library.ggml_backend_dev_supports_op(
            rig.address, tensor
        ),
        "get_alignment": lambda: library.ggml_backend_buft_get_alignment(kind),
        "get_max_size": lambda: library.ggml_backend_buft_get_max_size(kind),
        "get_alloc_size": lambda: library.ggml_backend_buft_get_alloc_size(
            kind, tensor
        ),
        "alloc_buffer": lambda: library.ggml_backend_buft_alloc_buffer(kind, 64),
    }
    if slot in actions:
        return actions[slot]()
    on_buffer: dict[str, Callable[[int, int, int, int], Any]] = {
        "get_base": lambda b, k, t, u: library.ggml_backend_buffer_get_base(b),
        "init_tensor": lambda b, k, t, u: library.ggml_backend_buffer_init_tensor(b, t),
        "memset_tensor": lambda b, k, t, u: library.ggml_backend_tensor_memset(
            t, 1, 0, 4
        ),
        "set_tensor": lambda b, k, t, u: library.ggml_backend_tensor_set(t, at, 0, 4),
        "get_tensor": lambda b, k, t, u: library.ggml_backend_tensor_get(t, at, 0, 4),
        "set_tensor_2d": lambda b, k, t, u: library.ggml_backend_tensor_set_2d(
            t, at, 0, 4, 2, 8, 8
        ),
        "get_tensor_2d": lambda b, k, t, u: library.ggml_backend_tensor_get_2d(
            t, at, 0, 4, 2, 8, 8
        ),
        "cpy_tensor": lambda b, k, t, u: library.ggml_backend_buffer_copy_tensor(t, u),
        "clear": lambda b, k, t, u: library.ggml_backend_buffer_clear(b, 1),
        "set_tensor_async": lambda b, k, t, u: library.ggml_backend_tensor_set_async(
            k, t, at, 0, 4
        ),
        "get_tensor_async": lambda b, k, t, u: library.ggml_backend_tensor_get_async(
            k, t, at, 0, 4
        ),
        "cpy_tensor_async": lambda b, k, t, u: library.ggml_backend_tensor_copy_async(
            k, k, t, u
        ),
        "synchronize": lambda b, k, t, u: library.ggml_backend_synchronize(k),
        "graph_compute": lambda b, k, t, u: library.ggml_backend_graph_compute_async(
            k, graph
        ),
    }
    return on_tensor(on_buffer[slot])


# What C gets from a slot that failed.
FAILURES: dict[str, Any] = {
    "get_memory": (0, 0),
    "supports_op": False,
    "get_alignment": 128,
    "get_max_size": 2**64 - 1,
    "get_alloc_size": 16,
    "alloc_buffer": None,
    "get_base": 1 << 60,
    "init_tensor": Status.FAILED,
    "memset_tensor": None,
    "set_tensor": None,
    "get_tensor": None,
    "set_tensor_2d": None,
    "get_tensor_2d": None,
    "cpy_tensor": False,
    "clear": None,
    "set_tensor_async": None,
    "get_tensor_async": None,
    "cpy_tensor_async": None,
    "synchronize": None,
    "graph_compute": Status.FAILED,
}


class TestFailures:
    """An exception that got past a slot would be a warning, and fail the test."""

    @pytest.mark.parametrize("error", [Boom("no"), KeyboardInterrupt(), SystemExit(1)])
    @pytest.mark.parametrize("slot", FAILURES)
    def test_each_slot(self, rig: Rig, slot: str, error: BaseException) -> None:
        rig.calls.fails, rig.calls.error = slot, error
        assert act(rig, slot) == FAILURES[slot]
        assert rig.device.failures == [error]

    @pytest.mark.parametrize("slot", FAILURES)
    def test_a_device_that_cannot_even_fail(
        self, rig: Rig, slot: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        rig.calls.fails = slot
        rig.device.fails_to_fail = True
        act(rig, slot)
        assert "and again" in caplog.text

    def test_properties_keep_what_is_known(self, rig: Rig) -> None:
        rig.calls.fails = "get_memory"
        props = DeviceProps()
        rig.library.ggml_backend_dev_get_props(rig.address, C.byref(props))
        assert (props.memory_free, props.memory_total) == (0, 0)
        assert props.type == DeviceType.GPU
        assert C.string_at(props.name) == b"MEM0"
        assert len(rig.device.failures) == 1

    def test_a_failed_free_still_forgets_the_buffer(self, rig: Rig) -> None:
        buffer = rig.library.ggml_backend_buft_alloc_buffer(rig.kind, 64)
        rig.calls.fails = "free_buffer"
        rig.library.ggml_backend_buffer_free(buffer)
        assert rig.plugin.buffers == {}
        assert len(rig.device.failures) == 1

    def test_a_copy_that_fails_is_made_by_ggml(self, rig: Rig) -> None:
        rig.calls.fails = "cpy_tensor_async"
        act(rig, "cpy_tensor_async")
        names = [call[0] for call in rig.calls.made]
        assert "cpy_tensor" in names


def test_names_stay_where_they_are(ggml: Ggml) -> None:
    """C holds on to them long after the Python device is gone."""
    registry = Registry(ggml.engine)
    address = registry.add(MemoryDevice()).address
    name = ggml.library.ggml_backend_dev_name(address)
    for _ in range(100):
        bytearray(5)
    assert ggml.library.ggml_backend_dev_name(address) == name == b"MEM0"
    assert read(ggml.library.ggml_backend_dev_buffer_type(address), 8) != bytes(8)
