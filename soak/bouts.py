"""Sums among several servers whose result is known: what one communicator is put
through, drawn from a seed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longwire.server.reduce import ROUND
from longwire.transport.endpoint import Endpoint
from longwire.wire.collectives import WireType
from longwire.wire.lx import ERROR_BIT, ErrorAnswer
from longwire.wire.tensors import Tensor
from support.links import Rank, join

__all__ = ["ONE_SHOT", "SIZES", "Member", "Plan", "Refused", "bout", "draw_plan"]
__all__ += ["enter", "take_part"]

Floats = npt.NDArray[np.float32]
Burst = list[tuple[int, int]]
"""Tensors, and what is in them, of sums that nobody waits for in between."""

SIZES = (2, 3, 4)

ONE_SHOT = 16 * 1024
"""Numbers up to which all goes to everybody at once."""

_RANGES = (
    (1, 2048),
    (2049, 8192),
    (8193, ONE_SHOT),
    (ONE_SHOT + 1, 1 << 16),
    (1 << 16, ROUND),
    (ROUND + 1, 400_000),
)
_CHANCES = (45, 20, 10, 12, 6, 7)
"""Of these element counts: the short way, at once, in parts, in several rounds."""

_TENSORS, _CASES = 8, 3

_SLOW_S, _HASTE_S = 0.02, 0.001
"""Longest delays, of the slow rank and of any."""


class Refused(Exception):
    """The server answered with an error."""


class Case(NamedTuple):
    """What is summed, and the sum."""

    values: list[list[Floats]]
    """By rank and device."""
    absent: list[int]
    """By rank."""
    expected: bytes


@dataclass(frozen=True)
class Plan:
    """A communicator, and what it is to sum."""

    seed: int
    size: int
    devices: int
    wire: WireType
    least: int
    counts: list[int]
    """Of the tensors."""
    cases: list[list[Case]]
    """By tensor."""

    def bursts(self) -> Iterator[Burst]:
        """The same for each rank, without an end."""
        draw = random.Random(self.seed)
        while True:
            length = 1 if draw.random() < 0.7 else draw.randint(2, 8)
            yield [
                (draw.randrange(_TENSORS), draw.randrange(_CASES))
                for _ in range(length)
            ]


def draw_plan(seed: int, size: int) -> Plan:
    """Draw what a communicator of so many servers is to do."""
    draw = random.Random(f"{seed}/{size}")
    devices = 2 if draw.random() < 0.2 else 1
    wire = draw.choices((WireType.F32, WireType.BF16, WireType.F16), (7, 2, 1))[0]
    least = draw.choice((0, 4096, 1 << 17))
    counts = [
        draw.randint(*span) for span in draw.choices(_RANGES, _CHANCES, k=_TENSORS)
    ]
    numbers = np.random.default_rng(seed)

    def case(count: int) -> Case:
        shape = (size, devices, count)
        # Of several magnitudes: summed in another order they give other bits.
        powers = 10.0 ** numbers.integers(-3, 4, shape)
        values = (numbers.standard_normal(shape) * powers).astype(np.float32)
        absent = [0] * size
        if draw.random() < 0.2:
            absent = [draw.randrange(1 << devices) for _ in absent]
        narrow = wire if 4 * count >= least else WireType.F32
        expected = _sum(values, absent, narrow).tobytes()
        return Case([list(parts) for parts in values], absent, expected)

    cases = [[case(count) for _ in range(_CASES)] for count in counts]
    return Plan(seed, size, devices, wire, least, counts, cases)


def _sum(values: npt.NDArray[np.float32], absent: list[int], wire: WireType) -> Floats:
    own = []
    for parts, gone in zip(values, absent, strict=True):
        present = [part for i, part in enumerate(parts) if not gone >> i & 1]
        own.append(_in_order(present) if present else np.zeros_like(parts[0]))
    total = _in_order([_rounded(part, wire) for part in own])
    for at in range(0, len(total), ROUND):
        part = total[at : at + ROUND]
        # Summed in parts, each of which is rounded on its way back.
        if len(values) > 2 and len(part) > ONE_SHOT:
            part[:] = _rounded(part, wire)
    return total


def _in_order(parts: Sequence[Floats]) -> Floats:
    total: Floats = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def _rounded(values: Floats, wire: WireType) -> Floats:
    if wire == WireType.F16:
        return values.astype(np.float16).astype(np.float32)
    if wire == WireType.F32:
        return values
    words: npt.NDArray[Any] = values.view(np.uint32).astype(np.uint64)
    words = (words + 0x7FFF + (words >> 16 & 1)) >> 16 << 16
    return words.astype(np.uint32).view(np.float32)


class Member(Rank):
    """One rank: an answer that is an error is raised."""

    def answer(self) -> bytes:
        size = self._length()
        if size & ERROR_BIT:
            raise Refused(ErrorAnswer.decode(self._receive(size ^ ERROR_BIT)).sentence)
        return self._receive(size)


def enter(
    stack: ExitStack, endpoints: Sequence[Endpoint], plan: Plan
) -> tuple[list[Member], list[list[list[Tensor]]]]:
    """Have clients of these servers make a communicator; returns them by rank, and
    their tensors by rank, number and device."""
    members = [Member(endpoint) for endpoint in endpoints]
    for member in members:
        stack.callback(member.close)
        member.hello()
        member.start()
    join(members, wire=plan.wire, least=plan.least, devices=(0,) * plan.devices)
    placed = [
        [
            [member.numbers(np.zeros(count, np.float32)) for _ in range(plan.devices)]
            for count in plan.counts
        ]
        for member in members
    ]
    return members, placed


def take_part(
    member: Member,
    rank: int,
    plan: Plan,
    placed: list[list[Tensor]],
    bursts: Iterator[Burst],
    slow: bool,
    wrong: list[str],
) -> None:
    """Do one rank's share of these sums, and note what is wrong with the results.

    Raises:
        Refused, EOFError, OSError: the server refused, closed or hangs.
    """
    draw = random.Random(f"{plan.seed}/{rank}")
    for burst in bursts:
        for number, turn in burst:
            if draw.random() < (0.3 if slow else 0.1):
                time.sleep(draw.uniform(0, _SLOW_S if slow else _HASTE_S))
            case, tensors = plan.cases[number][turn], placed[number]
            for tensor, values in zip(tensors, case.values[rank], strict=True):
                member.write(tensor, values.data)
            member.allreduce(*tensors, absent=case.absent[rank])
        for number, turn in dict(burst).items():
            for i, tensor in enumerate(placed[number]):
                if member.read(tensor) != plan.cases[number][turn].expected:
                    what = f"{plan.counts[number]} numbers, {plan.wire.name}"
                    wrong.append(f"rank {rank}.{i} of {plan.size}, {what}: not the sum")


def bout(
    endpoints: Sequence[Endpoint], plan: Plan, sums: int
) -> tuple[list[int], list[str]]:
    """Have one communicator do so many sums, one rank being slow; returns their
    element counts, and what is wrong."""
    bursts, done = [], 0
    for burst in plan.bursts():
        bursts.append(burst[: sums - done])
        done += len(bursts[-1])
        if done == sums:
            break
    slow = random.Random(plan.seed).randrange(plan.size)
    with ExitStack() as stack:
        members, placed = enter(stack, endpoints, plan)
        pool = stack.enter_context(ThreadPoolExecutor(plan.size))
        wrong: list[str] = []

        def share(rank: int, member: Member) -> None:
            mine, is_slow = placed[rank], rank == slow
            take_part(member, rank, plan, mine, iter(bursts), is_slow, wrong)

        shares = [
            pool.submit(share, rank, member) for rank, member in enumerate(members)
        ]
        for rank, future in enumerate(shares):
            error = future.exception()
            if error is not None:
                wrong.append(f"rank {rank} of {plan.size}: {error!r}")
    counts = [plan.counts[number] for number, _ in itertools.chain(*bursts)]
    return counts, wrong
