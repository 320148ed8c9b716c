"""`bench allreduce`: sums from server to server, beside a bare swap of as many bytes.

Drives real servers from here, without a model: a chain of all-reduces on one tensor
each, so that every one waits for the one before.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longwire.bench.floor import Floor
from longwire.bench.report import Spread
from longwire.client import remote
from longwire.client.device import RemoteDevice
from longwire.client.group import Group, open_group
from longwire.errors import CallFailed
from longwire.host.workers import local_workers
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.tensors import Tensor
from longwire.wire.types import F32_TYPE

__all__ = ["COUNTS", "DEMANDED", "SIZES", "AllreduceReport", "measure_allreduce"]

SIZES = tuple(kib << 10 for kib in (8, 64, 256, 1024))
"""Bytes of f32."""

COUNTS = (2, 3, 4)
"""How many servers."""

DEMANDED = 1.5
"""Times the floor, at two servers."""

_TURNS = 5
"""Of each run: what else the machine does in between hits one of them."""

_AT_ONCE = 96 << 20
"""Bytes of one run, about."""

_LEAST, _MOST = 20, 200
"""All-reduces in one turn. Of more, queueing would take its share of the CPU."""

_WARM_UP = 5

_ids = itertools.count(1)


@dataclass(slots=True)
class AllreduceReport:
    """Seconds for one all-reduce, and for one swap, per run, by servers and bytes."""

    engine: str
    threads: int
    runs: int
    counts: Sequence[int]
    sums: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    swaps: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def ratios(self, count: int, size: int) -> Spread:
        """How many times the floor, within each run."""
        pairs = zip(self.sums[count, size], self.swaps[count, size], strict=True)
        return Spread.of_all([ours / floor for ours, floor in pairs])

    def seconds(self, count: int, size: int) -> Spread:
        """Of one all-reduce."""
        return Spread.of_all(self.sums[count, size])

    def floor(self, count: int, size: int) -> Spread:
        """Of one swap of as many bytes between two processes."""
        return Spread.of_all(self.swaps[count, size])

    def as_json(self) -> dict[str, Any]:
        """The whole report, for `json.dumps`."""
        return {
            "bench": "allreduce",
            "engine": self.engine,
            "threads": self.threads,
            "runs": self.runs,
            "demanded": {"ratio": DEMANDED, "servers": 2},
            "results": [
                {
                    "servers": count,
                    "bytes": size,
                    "us": [s * 1e6 for s in self.sums[count, size]],
                    "floor_us": [s * 1e6 for s in self.swaps[count, size]],
                    "ratio": self.ratios(count, size).median,
                    "mb_s": size / 1e6 / statistics.median(self.sums[count, size]),
                }
                for count, size in self.sums
            ],
        }


def measure_allreduce(
    engine: str,
    *,
    threads: int = 1,
    runs: int = 5,
    counts: Sequence[int] = COUNTS,
    sizes: Sequence[int] = SIZES,
    on_progress: Callable[[str], None] | None = None,
) -> AllreduceReport:
    """Measure; swaps and all-reduces in turn.

    Raises:
        NoLink: the servers do not reach each other.
        RemoteError: a server failed.
        CallFailed: a sum is wrong.
    """
    say = on_progress or (lambda text: None)
    report = AllreduceReport(engine, threads, runs, counts)
    options = ("--threads", str(threads), "--engine", engine)
    with ExitStack() as stack:
        floor = stack.enter_context(Floor())
        endpoints = stack.enter_context(local_workers(max(counts), options))
        devices = remote.connect(",".join(endpoints), engine=engine)
        stack.callback(remote.close, devices)
        for count in counts:
            with _Ring(devices[:count], max(sizes)) as ring:
                ring.check(min(sizes))
                for run in range(runs):
                    for size in sizes:
                        say(f"run {run + 1} of {runs}, {count} servers, {size} bytes")
                        _in_turn(report, floor, ring, size)
    return report


def _in_turn(report: AllreduceReport, floor: Floor, ring: _Ring, size: int) -> None:
    """One run of one size: swaps and all-reduces in short turns, and their medians."""
    times = max(_LEAST, min(_MOST, _AT_ONCE // size // _TURNS))
    swaps, sums = [], []
    for _ in range(_TURNS):
        swaps.append(floor.swap(size, times))
        sums.append(ring.chain(size, times))
    key = ring.count, size
    report.swaps.setdefault(key, []).append(statistics.median(swaps))
    report.sums.setdefault(key, []).append(statistics.median(sums))


class _Ring:
    """Some devices as one communicator, with a buffer on each. Use `with`."""

    def __init__(self, devices: Sequence[RemoteDevice], size: int) -> None:
        self._devices = devices
        self._size = size
        self._handles: list[tuple[RemoteDevice, int, int]] = []
        self._group: Group | None = None

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self._devices)

    def __enter__(self) -> _Ring:
        for device in self._devices:
            ask = device.connection.ask
            body = m.AllocBuffer(device.index, self._size).encode()
            answer = m.AllocBufferAnswer.decode(ask(Command.ALLOC_BUFFER, body))
            (base,) = m.U64.unpack(
                ask(Command.BUFFER_GET_BASE, m.U64.pack(answer.handle))
            )
            self._handles.append((device, answer.handle, base))
        self._group = open_group(self._devices)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._group is not None:
            self._group.free()
        for device, handle, _ in self._handles:
            if device.connection.healthy:
                body = m.U64.pack(handle)
                device.connection.post(Command.FREE_BUFFER, body)
                device.connection.flush()

    def chain(self, size: int, times: int) -> float:
        """Seconds for one of `times` all-reduces of `size` bytes in turn."""
        records = self._records(size)
        # Zeros stay what they are, however often they are summed.
        for device, handle, _ in self._handles:
            body = m.BufferClear(handle, 0).encode()
            device.connection.post(Command.BUFFER_CLEAR, body)
        self._run(records, _WARM_UP)
        started = time.perf_counter()
        self._run(records, times)
        return (time.perf_counter() - started) / times

    def check(self, size: int) -> None:
        """See that the sums are sums.

        Raises:
            CallFailed: they are not.
        """
        records = self._records(size)
        values = np.arange(size // 4, dtype="<f4")
        for rank, ((device, _, _), record) in enumerate(
            zip(self._handles, records, strict=True)
        ):
            head = m.SetTensor(record, 0, 0).encode()
            data = (values * 2.0**rank).astype("<f4").tobytes()
            device.connection.post(Command.SET_TENSOR, head, data)
        self._run(records, 1)
        expected = values * np.float32(2 ** len(records) - 1)
        for (device, _, _), record in zip(self._handles, records, strict=True):
            body = m.GetTensor(record, 0, size).encode()
            found = bytearray(size)
            device.connection.ask_into(Command.GET_TENSOR, body, memoryview(found))
            if not np.array_equal(np.frombuffer(found, "<f4"), expected):
                raise CallFailed("LX_ALLREDUCE", f"a wrong sum at {device.endpoint}")

    def _run(self, records: Sequence[bytes], times: int) -> None:
        """So many all-reduces; returns when every server has done the last."""
        assert self._group is not None
        posts = self._group.posts(records, [False] * len(records)) or []
        for _ in range(times):
            for connection, command, body in posts:
                connection.post(command, body)
        waited = []
        for (device, _, _), record in zip(self._handles, records, strict=True):
            target = memoryview(bytearray(4))
            body = m.GetTensor(record, 0, 4).encode()
            device.connection.queue_read(Command.GET_TENSOR, body, target)
            device.connection.flush()
            waited.append(device.connection)
        for connection in waited:
            connection.synchronize()

    def _records(self, size: int) -> list[bytes]:
        n = size // struct.calcsize("<f")
        return [
            Tensor(
                next(_ids), F32_TYPE, handle, (n, 1, 1, 1), (4, size, size, size),
                data=base,
            ).encode(wide=True)
            for _, handle, base in self._handles
        ]  # fmt: skip
