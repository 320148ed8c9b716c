"""What a Python device and its buffers do when ggml asks (`native/plugin.py`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from longwire.native.memory import view

__all__ = ["HostBuffer", "HostDevice", "Rows"]


class Rows(NamedTuple):
    """Rows of one strided transfer, in the order of ggml's arguments."""

    data: int
    """Address of the first row on the host."""
    offset: int
    """Of the first row in the tensor."""
    size: int
    n_copies: int
    stride_tensor: int
    stride_data: int

    def views(self) -> list[memoryview]:
        """The rows on the host; the caller of ggml keeps them alive."""
        starts = (self.data + i * self.stride_data for i in range(self.n_copies))
        return [view(start, self.size) for start in starts]


class HostBuffer(Protocol):
    """A buffer as ggml drives it. Tensors and data are native addresses."""

    address: int
    """Of the `ggml_backend_buffer` that stands for this one."""

    def free(self) -> None: ...
    def base(self) -> int: ...
    def init_tensor(self, tensor: int) -> bool: ...
    def memset_tensor(
        self, tensor: int, value: int, offset: int, size: int
    ) -> None: ...
    def set_tensor(self, tensor: int, data: int, offset: int, size: int) -> None: ...
    def get_tensor(self, tensor: int, data: int, offset: int, size: int) -> None: ...
    def set_tensor_2d(self, tensor: int, rows: Rows) -> None: ...
    def get_tensor_2d(self, tensor: int, rows: Rows) -> None: ...
    def cpy_tensor(self, src: int, dst: int) -> bool: ...
    def clear(self, value: int) -> None: ...


class HostDevice(Protocol):
    """A device as ggml drives it."""

    name: str
    description: str

    def memory(self) -> tuple[int, int]: ...
    def alignment(self) -> int: ...
    def max_size(self) -> int: ...
    def alloc_size(self, tensor: int) -> int: ...
    def alloc_buffer(self, size: int) -> tuple[HostBuffer, int] | None:
        """A new buffer and its true size, or None when there is no memory."""

    def lacks(self, size: int) -> None:
        """ggml goes on as if there were a buffer of so many bytes, and is not to
        compute with it."""

    def supports_op(self, op: int) -> bool: ...
    def set_tensor_async(
        self, tensor: int, data: int, offset: int, size: int
    ) -> None: ...
    def get_tensor_async(
        self, tensor: int, data: int, offset: int, size: int
    ) -> None: ...
    def set_tensor_2d_async(self, tensor: int, rows: Rows) -> None: ...
    def get_tensor_2d_async(self, tensor: int, rows: Rows) -> None: ...
    def cpy_tensor_async(self, src: int, dst: int) -> bool: ...
    def synchronize(self) -> None: ...
    def graph_compute(self, graph: int) -> bool: ...
    def failed(self, error: BaseException) -> None: ...
