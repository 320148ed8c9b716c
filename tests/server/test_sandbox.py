"""A server's sessions have given up what serving does not need."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from longwire.native.seccomp import MACHINES
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.fnv import fnv1a_64
from support.client import RawClient
from support.tensors import Sum, tensor
from support.worker import PROC, Worker, resident, running_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """A folder that is not there yet, outside of what is temporary to a session."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder, "not", "yet")


@pytest.fixture(scope="module")
def worker(cache: Path) -> Iterator[Worker]:
    with running_worker("-t", "2", "-d", "CPU", "-c", str(cache)) as worker:
        yield worker


@pytest.fixture
def client(worker: Worker) -> Iterator[RawClient]:
    with RawClient(worker.endpoint, V8) as client:
        client.hello()
        yield client


@pytest.fixture
def session(worker: Worker, client: RawClient) -> int:
    return worker.session_of(client.name)


def values(pid: int, name: str) -> set[str]:
    """What that field of `status` says for the threads of a process."""
    threads = (path.read_text() for path in PROC.glob(f"{pid}/task/*/status"))
    return {text.partition(f"\n{name}:")[2].split()[0] for text in threads}


def test_privileges(session: int) -> None:
    assert values(session, "NoNewPrivs") == {"1"}
    assert {int(bits, 16) & ~0x4002 for bits in values(session, "CapEff")} == {0}


@pytest.mark.skipif(os.uname().machine not in MACHINES, reason="no filter")
def test_filter(session: int) -> None:
    assert values(session, "Seccomp") == {"2"}


def test_cores(session: int) -> None:
    limits = (PROC / str(session) / "limits").read_text()
    assert limits.partition("Max core file size")[2].split()[:2] == ["0", "0"]


def test_no_thread_is_older(worker: Worker, session: int) -> None:
    """Landlock before ABI 8 would not cover it."""
    assert "older threads" not in worker.log


def test_serving(client: RawClient) -> None:
    Sum(client).check()


def test_cache(client: RawClient, cache: Path) -> None:
    data = bytes(range(256)) * 16
    t = tensor(1, client.alloc(4096), ne=(1024,))
    client.post(Command.SET_TENSOR, [m.SetTensor(t.encode(), 1, 0).encode(), data])
    assert client.read(t) == data
    name = f"{fnv1a_64(memoryview(data)):016x}"
    assert (cache / name).read_bytes() == data


def test_memory_can_be_watched(session: int) -> None:
    assert resident(session) > 0
