"""Client processes that play seed after seed to a server, as fast as they can."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from typing import Any

from fuzz.opgraphs import OpGraph
from fuzz.recording import Recording
from fuzz.rehearsal import Answers
from fuzz.script import record_script
from longwire.transport.endpoint import Endpoint

__all__ = ["Plan", "address_of", "client_process", "play", "recording_of", "seed_of"]

DEADLINE_S = 30.0
"""For one sequence. A kernel that a client makes endless gets 10 s of grace after
the client has left; the rest is for a machine that has other work."""

_LENGTHS = (16, 24, 32, 48, 64, 96, 160, 400, 800)
_ADDRESSES = 1 << 22
_FIRST = 0x7F40_0000
"""127.64.0.0: sequences have an address each, which the server's log then names."""

_PIECES = 9
"""Into how many sends a dribbling client cuts its bytes."""

_BATCH = 64
"""Sequences between two looks at whether to stop."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to play: `count` seeds from `first`."""

    endpoint: Endpoint
    protocol: int
    first: int
    count: int
    allocating: int
    """How many of a thousand allocate memory."""

    def allocates(self, seed: int) -> bool:
        """Whether that seed's sequence allocates."""
        # A factor without common divisors: the share is spread evenly.
        return seed * 617 % 1000 < self.allocating


def address_of(seed: int) -> str:
    """The loopback address that a seed's sequence comes from."""
    return socket.inet_ntoa((_FIRST + seed % _ADDRESSES).to_bytes(4, "big"))


def seed_of(address: str, plan: Plan) -> int | None:
    """The seed of the plan that has this address."""
    number = int.from_bytes(socket.inet_aton(address), "big") - _FIRST
    if not 0 <= number < _ADDRESSES:
        return None
    return plan.first + (number - plan.first) % _ADDRESSES


def recording_of(plan: Plan, seed: int, graphs: Sequence[OpGraph]) -> Recording:
    """What a seed stands for."""
    chance = random.Random(seed)
    data = chance.randbytes(chance.choice(_LENGTHS))
    return record_script(data, graphs, plan.protocol, plan.allocates(seed))


def play(recording: Recording, endpoint: Endpoint, source: str = "127.64.0.0") -> str:
    """Be this client once; returns how it ended.

    Raises:
        TimeoutError: the server is not done with it after `DEADLINE_S`.
    """
    with socket.socket() as sock:
        sock.settimeout(DEADLINE_S)
        sock.bind((source, 0))
        try:
            sock.connect((endpoint.host, endpoint.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _converse(sock, recording)
        except OSError as error:
            # A server that closes with bytes unread resets the connection. That a
            # server is gone is for who watches it to see.
            if isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN:
                return "closed early"
            raise


def _converse(sock: socket.socket, recording: Recording) -> str:
    answers = Answers()
    whole = recording.opening
    if recording.buffers:
        sock.sendall(whole)
        while len(answers.bodies) < recording.answers:
            if not (data := sock.recv(1 << 16)):
                return "closed early"
            answers.feed(data)
        whole = b""
    whole += recording.rest(answers.bodies)
    if recording.ending == "pieces":
        step = len(whole) // _PIECES + 1
        for i in range(0, len(whole), step):
            sock.sendall(whole[i : i + step])
    else:
        sock.sendall(whole)
    if recording.ending in ("reset", "leave"):
        if recording.ending == "reset":
            sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
        return recording.ending
    sock.shutdown(socket.SHUT_WR)
    while data := sock.recv(1 << 18):
        answers.feed(data)
    assert not answers.rest, "half an answer"
    return "answered"


def client_process(
    plan: Plan,
    share: tuple[int, int],
    threads: int,
    graphs: list[OpGraph],
    stop: Event,
    results: Any,
) -> None:
    """Play every seed of the share `(k, n)`: those that leave k when divided by n.

    Puts ("done", a counter of endings) to `results` now and then, and ("finding",
    seed, words) for a sequence that ended as none may.
    """

    def run(number: int) -> None:
        k, n = share[0] * threads + number, share[1] * threads
        ends: Counter[str] = Counter()
        for i, seed in enumerate(range(plan.first + k, plan.first + plan.count, n)):
            if i % _BATCH == _BATCH - 1:
                results.put(("done", ends))
                ends = Counter()
                if stop.is_set():
                    return
            recording = recording_of(plan, seed, graphs)
            try:
                ends[play(recording, plan.endpoint, address_of(seed))] += 1
            except (OSError, AssertionError) as error:
                results.put(("finding", seed, f"{type(error).__name__}: {error}"))
                break
            ends["allocating"] += bool(recording.buffers)
            ends["LX"] += recording.lx
        results.put(("done", ends))

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    results.put(("end",))
    with contextlib.suppress(ValueError):
        results.close()
