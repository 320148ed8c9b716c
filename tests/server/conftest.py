"""Workers and clients for the tests beside this file."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from longwire.wire.dialects import V7, V8, Dialect
from support.client import RawClient
from support.tensors import Sum
from support.worker import Worker, running_worker

Connect = Callable[[], RawClient]


@pytest.fixture(params=[V7, V8], ids=lambda dialect: dialect.version)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    found: Dialect = request.param
    return found


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[Dialect], Worker]]:
    """One worker per dialect and test module, started when first asked for."""
    with ExitStack() as stack:
        started: dict[int, Worker] = {}

        def worker(dialect: Dialect) -> Worker:
            major = dialect.major
            if major not in started:
                context = running_worker("--protocol", str(major))
                started[major] = stack.enter_context(context)
            return started[major]

        yield worker


@pytest.fixture
def worker(workers: Callable[[Dialect], Worker], dialect: Dialect) -> Worker:
    return workers(dialect)


@pytest.fixture
def connect(worker: Worker, dialect: Dialect) -> Iterator[Connect]:
    """Opens clients that have said HELLO; all leave when the test ends."""
    with ExitStack() as stack:

        def greeted() -> RawClient:
            client = stack.enter_context(RawClient(worker.endpoint, dialect))
            client.hello()
            return client

        yield greeted


@pytest.fixture(scope="module")
def shared_clients() -> Iterator[dict[int, RawClient]]:
    clients: dict[int, RawClient] = {}
    yield clients
    for client in clients.values():
        client.close()


@pytest.fixture
def client(
    worker: Worker, dialect: Dialect, shared_clients: dict[int, RawClient]
) -> Iterator[RawClient]:
    """One client for all tests of a module that leave its session alive."""
    major = dialect.major
    if major not in shared_clients:
        shared_clients[major] = RawClient(worker.endpoint, dialect)
        shared_clients[major].hello()
    yield shared_clients[major]
    # After a failure, the next test shall not wait for answers that never come.
    shared_clients[major].socket.settimeout(2)
    try:
        in_step = shared_clients[major].device_count() == 1
    except (OSError, EOFError, struct.error):
        in_step = False
    if in_step:
        shared_clients[major].socket.settimeout(10)
    else:
        shared_clients.pop(major).close()


@pytest.fixture(scope="module")
def neighbours(workers: Callable[[Dialect], Worker]) -> Iterator[Callable[..., Sum]]:
    """Per dialect a client that stays, with a graph and data to look after."""
    kept: dict[int, Sum] = {}

    def neighbour(dialect: Dialect) -> Sum:
        if dialect.major not in kept:
            client = RawClient(workers(dialect).endpoint, dialect)
            client.hello()
            kept[dialect.major] = Sum(client)
            kept[dialect.major].check()
        return kept[dialect.major]

    yield neighbour
    for total in kept.values():
        total.client.close()
