"""COMM_* of protocol 8: two servers sum a tensor, each ours or llama.cpp's own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.tensors import Tensor
from support.client import RawClient
from support.peers import cpp_server
from support.tensors import tensor
from support.worker import running_worker

Floats = npt.NDArray[np.float32]

NARROW = 32768


class Side(NamedTuple):
    """One rank, and its client."""

    client: RawClient
    endpoint: Endpoint

    def place(self, values: Floats) -> Tensor:
        buffer = self.client.alloc(4 * len(values))
        placed = tensor(1, buffer, 0, (len(values),))
        self.client.write(placed, values.tobytes())
        return placed

    def begin(self, rank: int, there: Endpoint, device: int = 0) -> None:
        """Send COMM_INIT; `there` is rank 0."""
        host = there.host.encode().ljust(64, b"\0") if rank else bytes(64)
        port = there.port + 1000
        self.client.post(
            Command.COMM_INIT, m.CommInit(device, rank, 2, port, host).encode()
        )

    def begun(self) -> int:
        return self.client.answer()[0]

    def allreduce(self, placed: Tensor) -> None:
        body = m.CommAllreduce(0, placed.encode()).encode()
        self.client.post(Command.COMM_ALLREDUCE, body)

    def values(self, placed: Tensor) -> Floats:
        return np.frombuffer(self.client.read(placed), "<f4")


def free_ports() -> int:
    """A port that is free, and so is the one 1000 above."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        try:
            socket.create_server(("127.0.0.1", port + 1000)).close()
        except (OSError, OverflowError):
            continue
        return port


def bf16(values: Floats) -> Floats:
    """Rounded to the nearest bf16, of two the even one."""
    words = values.view(np.uint32).astype(np.uint64)
    words = (words + 0x7FFF + (words >> 16 & 1)) >> 16 << 16
    return words.astype(np.uint32).view(np.float32)


@pytest.fixture(params=["ours ours", "ours cpp", "cpp ours"])
def sides(request: pytest.FixtureRequest) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        found = []
        for kind in request.param.split():
            if kind == "ours":
                options = ("--protocol", "8", "-p", str(free_ports()))
                endpoint = stack.enter_context(running_worker(*options)).endpoint
            else:
                endpoint = parse_endpoint(stack.enter_context(cpp_server(8)))
            client = stack.enter_context(RawClient(endpoint, V8))
            client.hello()
            found.append(Side(client, endpoint))
        yield found


def join(sides: list[Side]) -> None:
    for rank, side in enumerate(sides):
        side.begin(rank, sides[0].endpoint)
    assert [side.begun() for side in sides] == [1, 1]


@pytest.mark.parametrize("count", [1, 2048, NARROW - 1, NARROW, 700_001])
def test_sums_are_those_of_cpp(sides: list[Side], count: int) -> None:
    join(sides)
    numbers = np.random.default_rng(count)
    a, b = (numbers.standard_normal(count, np.float32) for _ in sides)
    placed = [side.place(v) for side, v in zip(sides, (a, b), strict=True)]
    for _ in range(2):
        for side, t in zip(sides, placed, strict=True):
            side.allreduce(t)
        if count < NARROW:
            a, b = a + b, a + b
        else:
            a, b = a + bf16(b), b + bf16(a)
    found = [side.values(t) for side, t in zip(sides, placed, strict=True)]
    assert found[0].tobytes() == a.tobytes()
    assert found[1].tobytes() == b.tobytes()
