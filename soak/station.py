"""A worker that can be struck, behind a relay whose endpoint stays the same."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from fuzz.health import held_memory
from longwire.transport.endpoint import Endpoint, parse_endpoint
from soak.relay import Relay
from support.worker import PROC, Worker, alive, resident, serve_command, until

__all__ = ["SPARES", "Station", "station"]

SPARES = 2
"""Warm sessions of a worker; after a rush it keeps twice as many."""

_GROWTH = 16 << 20
"""Bytes that a process may grow by: what the allocator and an interpreter keep."""

_START_S, _SETTLE_S, _STOP_S = 60.0, 15.0, 10.0
"""Two seconds would do to settle, on a machine that has nothing else to do."""

_BAD = re.compile(
    r"Traceback \(most recent|Fatal Python error|reports nonsense|took no client"
    r"|SIGSEGV|SIGBUS|SIGABRT|ggml aborted"
)


class Sizes(NamedTuple):
    """Bytes of memory: what is there when nobody is served."""

    first: int
    session: int


class Station:
    """One worker, replaced when it is gone."""

    def __init__(self, name: str, relay: Relay, folder: Path) -> None:
        self.name = name
        self.relay = relay
        self.settled_s = 0.0
        """How long it took the last time."""
        self._folder = folder
        self._count = 0
        self._start()

    @property
    def endpoint(self) -> Endpoint:
        """Where a host connects; the same for all workers that were here."""
        return self.relay.endpoint

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.worker.process.pid

    def serving(self) -> int | None:
        """The session process that was handed a client last, if it still is there."""
        pids = re.findall(r"\(pid (\d+)\) serves ", self.worker.log)
        return int(pids[-1]) if pids and alive(int(pids[-1])) else None

    def settle(self) -> list[str]:
        """Wait until nothing is left of the last host; returns what is wrong.

        A worker that is gone is replaced by a new one.
        """
        wrong, begun = [], time.monotonic()
        try:
            until(lambda: not self._left(), _SETTLE_S)
        except AssertionError:
            wrong = self._left()
        self.settled_s = time.monotonic() - begun
        log = self.worker.log[self._read :]
        self._read += len(log)
        wrong += [line for line in log.split("\n") if _BAD.search(line)]
        if self._is_gone:
            self._kill()
            self._start()
        return [f"{self.name}: {words}" for words in wrong]

    def close(self) -> list[str]:
        """Stop the worker; returns what was wrong with that. Idempotent."""
        if self._is_gone:
            self._kill()
            return []
        os.killpg(self.pid, signal.SIGCONT)
        self.worker.process.terminate()
        try:
            code = self.worker.ended(_STOP_S)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self._kill()
            return [f"{self.name}: does not stop: {error}"]
        return [f"{self.name}: exit code {code}"] if code else []

    @property
    def _is_gone(self) -> bool:
        return self.worker.process.poll() is not None

    def _left(self) -> list[str]:
        return self._outlive() if self._is_gone else self._left_over()

    def _left_over(self) -> list[str]:
        try:
            memory = held_memory(self._metrics_port)
        except OSError as error:
            return [f"no metrics: {error}"]
        sessions = self.worker.sessions()
        wrong = []
        if memory:
            wrong.append(f"{memory:.0f} bytes are held, and nobody is there")
        if not SPARES <= len(sessions) <= 2 * SPARES:
            wrong.append(f"{len(sessions)} sessions, and nobody is there")
        sizes = self._sizes(sessions)
        if sizes.first > self._usual.first + _GROWTH:
            wrong.append(f"the supervisor takes {sizes.first} bytes")
        if sizes.session > self._usual.session + _GROWTH:
            wrong.append(f"a session takes {sizes.session} bytes, and serves nobody")
        return wrong

    def _outlive(self) -> list[str]:
        """The sessions of a killed supervisor go with their host at the latest."""
        left = _group(self.pid)
        return [f"{left} outlive their supervisor, and nobody is there"] if left else []

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.worker.process.wait()

    def _sizes(self, sessions: list[int]) -> Sizes:
        return Sizes(resident(self.pid), max(map(resident, sessions), default=0))

    def _start(self) -> None:
        self._count += 1
        output = self._folder / f"{self.name}-{self._count}.out"
        log = self._folder / f"{self.name}-{self._count}.log"
        command = serve_command(
            *("-v", "-t", "1", "--drain-timeout", "0", "--metrics-port", "0"),
            *("--spares", str(SPARES)),
        )
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

        def said(pattern: str) -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(pattern, output.read_text(), re.MULTILINE)

        try:
            found = until(lambda: said(r"^listening on (\S+)$"), _START_S)
            endpoint = parse_endpoint(found[1])
            self._metrics_port = int(until(lambda: said(r"^metrics on \S+:(\d+)$"))[1])
            self.worker = Worker(process, endpoint, log)
            until(self._is_warm, _START_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        self._read = 0
        self._usual = self._sizes(self.worker.sessions())
        self.relay.target = endpoint

    def _is_warm(self) -> bool:
        """All spares have loaded the engine: their sizes are what is usual."""
        url = f"http://127.0.0.1:{self._metrics_port}/healthz"
        with urllib.request.urlopen(url, timeout=5) as page:
            return bool(json.load(page)["spares"] >= SPARES)


def _group(leader: int) -> list[int]:
    """The processes of a group that are alive."""
    found = []
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@contextmanager
def station(name: str, folder: Path) -> Iterator[Station]:
    """A station; its worker is stopped at the end."""
    with Relay(Endpoint("127.0.0.1", 1)) as relay:
        made = Station(name, relay, folder)
        try:
            yield made
        finally:
            made.close()
