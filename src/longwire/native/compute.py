"""The engine's own devices, as a server lends them out."""

from __future__ import annotations

import ctypes as C
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from longwire.errors import CallFailed, UsageError
from longwire.native.abi import GGML_TENSOR, DeviceType, Status
from longwire.native.engine import NativeEngine
from longwire.native.library import set_threads
from longwire.native.memory import use_huge_pages, view
from longwire.wire.constants import OP_COUNT

__all__ = [
    "default_threads",
    "ComputeDevice",
    "NativeBuffer",
    "list_devices",
    "select_devices",
]


@dataclass(slots=True)
class NativeBuffer:
    """Memory on one device. Owned: `free` once, by whoever allocated it."""

    address: int
    """Of the `ggml_backend_buffer`."""
    base: int
    size: int
    bytes: memoryview | None
    """The memory itself where the host can reach it, else None."""


@dataclass(slots=True)
class ComputeDevice:
    """One device of the engine: its memory at once, its backend when opened."""

    engine: NativeEngine
    address: int
    name: str
    description: str
    type: DeviceType
    _backend: int | None = field(default=None, repr=False)

    @property
    def accelerates(self) -> bool:
        """Whether this is more than the host's own CPU and its helpers."""
        return self.type not in (DeviceType.CPU, DeviceType.ACCEL)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, as the device reports them."""
        free, total = C.c_size_t(), C.c_size_t()
        self.engine.library.ggml_backend_dev_memory(
            self.address, C.byref(free), C.byref(total)
        )
        return free.value, total.value

    @property
    def buffer_type(self) -> int:
        """The default `ggml_backend_buffer_type` of this device."""
        address: int = self.engine.library.ggml_backend_dev_buffer_type(self.address)
        return address

    def alignment(self) -> int:
        """Alignment of tensor data, in bytes."""
        n: int = self.engine.library.ggml_backend_buft_get_alignment(self.buffer_type)
        return n

    def max_size(self) -> int:
        """Largest buffer the device allows, in bytes."""
        n: int = self.engine.library.ggml_backend_buft_get_max_size(self.buffer_type)
        return n

    def alloc_size(self, tensor: npt.NDArray[Any], buffer: int | None) -> int:
        """Bytes that a tensor (one `GGML_TENSOR` record) takes in a buffer's type."""
        library = self.engine.library
        buffer_type = self.buffer_type
        if buffer is not None:
            buffer_type = library.ggml_backend_buffer_get_type(buffer)
        n: int = library.ggml_backend_buft_get_alloc_size(
            buffer_type, tensor.ctypes.data
        )
        return n

    def alloc(self, size: int) -> NativeBuffer | None:
        """Allocate `size` bytes, or return None when the device has no room."""
        library = self.engine.library
        address = library.ggml_backend_buft_alloc_buffer(self.buffer_type, size)
        if not address:
            return None
        base = library.ggml_backend_buffer_get_base(address) or 0
        true_size = library.ggml_backend_buffer_get_size(address)
        host = library.ggml_backend_buft_is_host(self.buffer_type) and base
        if not host:
            return NativeBuffer(address, base, true_size, None)
        if self.type == DeviceType.CPU:
            use_huge_pages(base, true_size)
        return NativeBuffer(address, base, true_size, view(base, true_size))

    def free(self, buffer: NativeBuffer) -> None:
        """Give a buffer back; its `bytes` must not be used again."""
        buffer.bytes = None
        self.engine.library.ggml_backend_buffer_free(buffer.address)

    def clear(self, buffer: NativeBuffer, value: int) -> None:
        """Fill a whole buffer with one byte."""
        self.engine.library.ggml_backend_buffer_clear(buffer.address, value)

    def init_tensor(self, buffer: NativeBuffer, tensor: npt.NDArray[Any]) -> None:
        """Run the buffer's init hook (CUDA zeroes a quantised row's padding)."""
        self.engine.library.ggml_backend_buffer_init_tensor(
            buffer.address, tensor.ctypes.data
        )

    def set_tensor(
        self, tensor: npt.NDArray[Any], data: int, offset: int, size: int
    ) -> None:
        """Copy host bytes at address `data` into a tensor."""
        self.engine.library.ggml_backend_tensor_set(
            tensor.ctypes.data, data, offset, size
        )

    def get_tensor(
        self, tensor: npt.NDArray[Any], data: int, offset: int, size: int
    ) -> None:
        """Copy part of a tensor to host bytes at address `data`."""
        self.engine.library.ggml_backend_tensor_get(
            tensor.ctypes.data, data, offset, size
        )

    def memset_tensor(
        self, tensor: npt.NDArray[Any], value: int, offset: int, size: int
    ) -> None:
        """Fill part of a tensor with one byte."""
        self.engine.library.ggml_backend_tensor_memset(
            tensor.ctypes.data, value, offset, size
        )

    def supports_op(self, op: npt.NDArray[Any]) -> bool:
        """Whether the device can do an op (one linked `GGML_TENSOR` record)."""
        ok: bool = self.engine.library.ggml_backend_dev_supports_op(
            self.address, op.ctypes.data
        )
        return ok

    def copy_tensor(self, src: npt.NDArray[Any], dst: npt.NDArray[Any]) -> bool:
        """Copy between two tensors; False where the device cannot."""
        ok: bool = self.engine.library.ggml_backend_buffer_copy_tensor(
            src.ctypes.data, dst.ctypes.data
        )
        return ok

    def open(self, n_threads: int) -> None:
        """Create the backend that computes; a no-op when it is there."""
        if self._backend is not None:
            return
        library = self.engine.library
        self._backend = library.ggml_backend_dev_init(self.address, None)
        if not self._backend:
            raise CallFailed("ggml_backend_dev_init", f"no backend for {self.name}")
        set_threads(library, self.address, self._backend, n_threads)

    def close(self) -> None:
        """Free the backend; idempotent."""
        if self._backend is not None:
            backend, self._backend = self._backend, None
            self.engine.library.ggml_backend_free(backend)

    def compute(self, graph: int) -> Status:
        """Start a `ggml_cgraph`; a GPU may still be at work when this returns."""
        return Status(
            self.engine.library.ggml_backend_graph_compute_async(self._backend, graph)
        )

    def synchronize(self) -> None:
        """Wait for all that was started."""
        if self._backend is not None:
            self.engine.library.ggml_backend_synchronize(self._backend)


def list_devices(engine: NativeEngine) -> list[ComputeDevice]:
    """All devices the engine offers, in its own order."""
    library = engine.library
    devices = []
    for i in range(library.ggml_backend_dev_count()):
        address = library.ggml_backend_dev_get(i)
        devices.append(
            ComputeDevice(
                engine,
                address,
                library.ggml_backend_dev_name(address).decode(),
                library.ggml_backend_dev_description(address).decode(),
                DeviceType(library.ggml_backend_dev_type(address)),
            )
        )
    return devices


def select_devices(engine: NativeEngine, names: list[str]) -> list[ComputeDevice]:
    """The named devices; without names all accelerators, else the CPU.

    That is the C++ server's rule (`tools/rpc/rpc-server.cpp`).

    Raises:
        UsageError: a name the engine does not have; lists those it has.
    """
    devices = list_devices(engine)
    if not names:
        return [d for d in devices if d.accelerates] or [
            d for d in devices if d.type == DeviceType.CPU
        ]
    by_name = {d.name.lower(): d for d in devices}
    missing = [name for name in names if name.lower() not in by_name]
    if missing:
        known = ", ".join(d.name for d in devices)
        raise UsageError(f"no device named {missing[0]!r}; this engine has: {known}")
    return [by_name[name.lower()] for name in names]


def op_names(engine: NativeEngine) -> tuple[str, ...]:
    """The engine's op names by number."""
    name = engine.library.ggml_op_name
    return tuple(name(number).decode() for number in range(OP_COUNT))


def default_threads() -> int:
    """The C++ server's default: half the hardware threads, at least one."""
    return max(1, (os.cpu_count() or 1) // 2)


def tensor_record() -> npt.NDArray[Any]:
    """One empty `ggml_tensor` in memory of ours, as a one-element array."""
    return np.zeros(1, GGML_TENSOR)
