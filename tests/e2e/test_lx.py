"""What LX adds: a device's true abilities, and errors that cost one command."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from longwire.client import remote
from longwire.client.connection import Connection, Deadlines
from longwire.errors import RemoteFailure
from longwire.native.compute import ComputeDevice, select_devices
from longwire.native.engine import load_engine
from longwire.server.session import serve_client
from longwire.server.state import SessionState
from longwire.transport.endpoint import parse_endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.graphs import GraphRecompute
from support.client import RawClient
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
    opened = Connection.open(parse_endpoint(worker()), Deadlines())
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
