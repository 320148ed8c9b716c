"""What LX adds: a device's true abilities, and errors that cost one command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longwire.client import remote
from longwire.client.buffer import Session
from longwire.client.connection import Connection
from longwire.client.device import RemoteDevice
from longwire.client.greeting import open_connection
from longwire.client.health import Deadlines
from longwire.errors import RemoteFailure
from longwire.native.compute import ComputeDevice, select_devices
from longwire.native.engine import load_engine
from longwire.native.plugin import Registry
from longwire.server.session import serve_client
from longwire.server.state import SessionState
from longwire.transport.endpoint import parse_endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.graphs import GraphRecompute
from support.client import RawClient
from support.ggml import F32, Ggml, f32, open_ggml
from support.models import GREEDY, N_TOKENS, PROMPT, exact_engine

Worker = Callable[..., str]

FLASH_ATTN_EXT = 74
TOP_K = 70


class LimitedDevice(ComputeDevice):
    """A device without flash attention, and with TOP_K up to 1,024 columns."""

    asked = 0

    def supports_op(self, op: Any) -> bool:
        LimitedDevice.asked += 1
        number, columns = int(op["op"][0]), int(op["ne"][0, 0])
        if number == FLASH_ATTN_EXT or (number == TOP_K and columns > 1024):
            return False
        return super().supports_op(op)


@contextmanager
def limited_worker() -> Iterator[str]:
    """A session in this process that lends such a device to one client."""
    engine = load_engine("xllamacpp")
    (cpu,) = select_devices(engine, [])
    device = LimitedDevice(engine, cpu.address, cpu.name, cpu.description, cpu.type)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client, _ = listener.accept()
        state = SessionState(V8, [device], 1, None, Stream(client))
        serve_client(state)
        state.close()
        state.stream.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


def test_a_device_that_lacks_an_op_runs_the_model_all_the_same(model: Path) -> None:
    with exact_engine(model, "xllamacpp", flash_attention="on") as local:
        expected = local.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
        tokens = expected.finish().tokens
    with limited_worker() as rpc:
        with exact_engine(model, "xllamacpp", rpc, flash_attention="on") as far:
            generation = far.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
            steps = iter(generation)
            next(steps), next(steps), next(steps)
            asked = LimitedDevice.asked
            assert asked > 20
            for _ in steps:
                continue
            assert generation.tokens == tokens
            assert LimitedDevice.asked == asked, "asked again in steady decode"
            # Attention came home, so there is more than one read per token.
            assert generation.decode.total().round_trips > len(tokens)


def test_a_worker_says_what_its_device_is(worker: Worker) -> None:
    devices = remote.connect(worker(), engine="xllamacpp")
    (device,) = devices
    assert device.info is not None and device.info.name == "CPU"
    assert device.info.type == 0
    assert device.description.startswith(worker()) and "CPU" in device.description
    assert device.connection.server is not None
    assert device.connection.server.ops[2] == "ADD"
    remote.close(devices)


@pytest.fixture
def connection(worker: Worker) -> Iterator[Connection]:
    opened = open_connection(parse_endpoint(worker()), Deadlines())
    yield opened
    opened.close()


def test_a_refused_command_costs_that_command(connection: Connection) -> None:
    assert connection.dialect.lx
    with pytest.raises(RemoteFailure, match="BUFFER_GET_BASE: BadRequest: .*handle"):
        connection.ask(Command.BUFFER_GET_BASE, m.U64.pack(12345))
    assert connection.healthy
    with pytest.raises(RemoteFailure):
        connection.check()
    connection.check()
    assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)


def test_an_error_waits_for_the_next_answer(connection: Connection) -> None:
    body = GraphRecompute(0, 99).encode(connection.dialect)
    connection.post(Command.GRAPH_RECOMPUTE, body)
    # Not done either: it was sent in the belief that the graph had run.
    connection.post(Command.BUFFER_CLEAR, m.BufferClear(7, 1).encode())
    with pytest.raises(RemoteFailure, match="no graph 99"):
        connection.ask(Command.LX_PING, b"")
    assert connection.ask(Command.LX_PING, b"") == b""


def test_bulk_data_of_a_refused_write_is_read_over(connection: Connection) -> None:
    head = m.SetTensor(bytes(296), 0, 0).encode()
    connection.post(Command.SET_TENSOR, head, bytes(1 << 20))
    with pytest.raises(RemoteFailure, match="SET_TENSOR"):
        connection.ask(Command.DEVICE_COUNT, b"")
    assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)


def test_without_lx_start_a_refusal_still_ends_the_session(worker: Worker) -> None:
    with RawClient(parse_endpoint(worker()), V8) as client:
        client.hello()
        client.post(Command.BUFFER_GET_BASE, m.U64.pack(12345))
        client.expect_closed()


GIB = 1 << 30


class FarRows:
    """The sum of two rows that lie 5 GiB apart and two that do not.

    In memory of 6 GiB, of which the system gives the few pages that are written to.
    """

    def __init__(self, ggml: Ggml, context: int) -> None:
        self.ggml = ggml
        # An extent has 32 bits: this many floats fit, and their bytes need not.
        self.base = ggml.tensor(context, 6 * GIB // 4 - 1024, type=F32)
        self.b = ggml.tensor(context, 4, 2)
        far = ggml.library.ggml_view_2d(context, self.base, 4, 2, 5 * GIB, 64)
        self.sum = ggml.library.ggml_add(context, far, self.b)
        self.graph = ggml.graph(context, self.sum)
        self.view = far

    def computed_on(self, device: int) -> bytes:
        """Place everything on a device, compute, and read the sum."""
        library = self.ggml.library
        kind = library.ggml_backend_dev_buffer_type(device)
        buffer = library.ggml_backend_buft_alloc_buffer(kind, 6 * GIB)
        backend = library.ggml_backend_dev_init(device, None)
        try:
            self.ggml.place(buffer, self.base)
            self.ggml.place(buffer, self.b, self.sum, offset=6 * GIB - 4096)
            assert library.ggml_backend_view_init(self.view) == 0
            x = f32(range(8))
            for tensor, data, offset in (
                (self.base, x[:4], 64),
                (self.view, x[4:], 5 * GIB),
                (self.b, x, 0),
            ):
                library.ggml_backend_tensor_set(
                    tensor, data.ctypes.data, offset, data.nbytes
                )
            assert library.ggml_backend_graph_compute(backend, self.graph) == 0
            found = np.zeros(8, np.float32)
            library.ggml_backend_tensor_get(self.sum, found.ctypes.data, 0, 32)
            return found.tobytes()
        finally:
            library.ggml_backend_free(backend)
            library.ggml_backend_buffer_free(buffer)


def test_rows_5_gib_apart_travel(worker: Worker) -> None:
    ggml = open_ggml("xllamacpp")
    library = ggml.library
    devices = remote.connect(worker(), engine="xllamacpp")
    address = devices[0].plugin.address
    results = []
    for device in (library.ggml_backend_dev_by_name(b"CPU"), address):
        with ggml.context() as context:
            rows = FarRows(ggml, context)
            assert library.ggml_backend_dev_supports_op(device, rows.sum)
            results.append(rows.computed_on(device))
    devices[0].connection.check()
    remote.close(devices)
    assert results == [(2 * f32(range(8))).tobytes()] * 2


def test_rows_5_gib_apart_stay_here_without_lx(worker: Worker) -> None:
    ggml = open_ggml("xllamacpp")
    endpoint = parse_endpoint(worker())
    stream = Stream(socket.create_connection((endpoint.host, endpoint.port), 10))
    connection = Connection(endpoint, stream, V8)
    connection.ask(Command.HELLO, m.Hello().encode())
    device = RemoteDevice(Registry(ggml.engine), "PLAIN0", 0, Session(connection))
    supports = ggml.library.ggml_backend_dev_supports_op
    with ggml.context() as context:
        rows = FarRows(ggml, context)
        assert not supports(device.plugin.address, rows.sum)
        near = ggml.library.ggml_add(context, rows.b, rows.b)
        assert supports(device.plugin.address, near)
    assert connection.healthy
    connection.close()
