"""A remote device over a scripted server, as ggml's C functions see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from longwire.client.buffer import Session
from longwire.client.device import RemoteDevice
from longwire.native.abi import Cgraph, Usage
from longwire.native.plugin import Registry
from longwire.wire.constants import Command
from support.ggml import Ggml
from support.scripted import Scripted


class Rig:
    """One remote device, and what tests do to it."""

    def __init__(self, ggml: Ggml, pair: Scripted, index: int = 0) -> None:
        self.ggml = ggml
        self.pair = pair
        self.server = pair.server
        self.connection = pair.connection
        self.session = Session(pair.connection)
        self.device = RemoteDevice(Registry(ggml.engine), "RPC9", index, self.session)

    @property
    def buffer_type(self) -> int:
        kind: int = self.ggml.library.ggml_backend_dev_buffer_type(
            self.device.plugin.address
        )
        return kind

    @contextmanager
    def buffer(self, size: int = 1 << 16, usage: Usage = Usage.ANY) -> Iterator[int]:
        """A buffer on the device; its allocation is not in `requests`."""
        library = self.ggml.library
        buffer = library.ggml_backend_buft_alloc_buffer(self.buffer_type, size)
        assert buffer
        library.ggml_backend_buffer_set_usage(buffer, usage)
        library.ggml_backend_buffer_get_base(buffer)
        self.forget()
        try:
            yield buffer
        finally:
            library.ggml_backend_buffer_free(buffer)

    @contextmanager
    def backend(self) -> Iterator[int]:
        backend = self.ggml.library.ggml_backend_dev_init(
            self.device.plugin.address, None
        )
        try:
            yield backend
        finally:
            self.ggml.library.ggml_backend_free(backend)

    def alloc_size(self, tensor: int) -> int:
        size: int = self.ggml.library.ggml_backend_buft_get_alloc_size(
            self.buffer_type, tensor
        )
        return size

    def settle(self) -> list[str]:
        """Names of the requests since the last `forget`, all of them arrived."""
        self.connection.ask(Command.DEVICE_COUNT, b"")
        assert self.server.commands.pop() == "DEVICE_COUNT"
        del self.server.requests[-1]
        return self.server.commands

    def forget(self) -> None:
        self.settle()
        self.server.requests.clear()
        self.pair.stream.sends.clear()


def set_uid(graph: int, uid: int) -> int:
    """Give a graph a uid, as schedulers do."""
    Cgraph.from_address(graph).uid = uid
    return graph
