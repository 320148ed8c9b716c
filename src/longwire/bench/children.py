"""The processes of a bench: servers of both kinds, relays, and their last words."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from longwire.bench.client import Job, Measurement
from longwire.bench.cpp_server import free_port
from longwire.bench.settings import Plan, Settings
from longwire.errors import CallFailed, LongwireError
from longwire.host.workers import ListeningProcess, spawned
from longwire.server.pool import exit_text
from longwire.transport.keyring import issue

__all__ = ["Worker", "Workers", "run_job"]

_SESSION_END_S = 5.0
"""How long a server may take to notice that a client has left."""

_RECEIVED = re.compile(r"^longwire_bytes_total{direction=\"in\"} (\S+)$", re.MULTILINE)
_SERVING = re.compile(r"^longwire_sessions{state=\"serving\"} (\S+)$", re.MULTILINE)

_POLL_S = 0.01

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
"""Has malloc ask for huge pages; since glibc 2.35."""

_TAIL = 4096
"""Bytes of a log that are searched for its last line."""


class Worker:
    """One server, and the relay in front of it where one is wanted."""

    def __init__(self, kind: str, settings: Settings, plan: Plan, folder: Path) -> None:
        """Start it; `folder` is its own, and keeps the cache when it restarts.

        Raises:
            CallFailed: it did not start; says why.
        """
        self._folder = folder
        self._children: dict[str, ListeningProcess] = {}
        self.keys: Path | None = None
        """Where its CA is, if it speaks TLS."""
        self._metrics: int | None = None
        """The port that tells what it has received, if it does."""
        folder.mkdir(exist_ok=True)
        try:
            environment = _environment(kind, settings)
            command = self._server_command(kind, settings, plan)
            self._start(f"{kind} server", command, environment)
            if settings.relayed:
                self._start("relay", _relay_command(self.endpoint, settings))
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        """Where clients connect: to the last process started."""
        return list(self._children.values())[-1].endpoint

    def _server_command(self, kind: str, settings: Settings, plan: Plan) -> list[str]:
        options = ["--threads", str(settings.threads)]
        if settings.cache:
            cache = self._folder / "cache"
            cache.mkdir(exist_ok=True)
            options += ["--cache", str(cache)]
        options += ["--engine", plan.engine]
        if kind == "cpp":
            return ["longwire.bench.cpp_server", *options]
        options += ["--protocol", str(plan.protocol)]
        if kind == "unverified":
            return ["longwire.bench.unverified_server", *options]
        if kind == "tls":
            self.keys = self._folder / "keys"
            issue(self.keys)
            options += ["--tls-cert", str(self.keys / "server.pem")]
            options += ["--tls-key", str(self.keys / "server.key")]
        if settings.relayed:
            # What servers exchange directly would pass no relay.
            options += ["--peer-port", "off"]
        if settings.models:
            options += ["--models", str(Path(settings.model or "").absolute().parent)]
            self._metrics = free_port()
            options += ["--metrics-port", str(self._metrics)]
        return ["longwire", "serve", "--port", "0", *options]

    def _start(
        self, what: str, command: list[str], environment: dict[str, str] | None = None
    ) -> None:
        log = self._log(what)
        with log.open("w") as stderr:
            try:
                self._children[what] = ListeningProcess(
                    *command, stderr=stderr, environment=environment
                )
            except LongwireError as error:
                reason = f"did not start: {last_words(log)}"
                raise CallFailed(f"the {what}", reason) from error

    def _log(self, what: str) -> Path:
        return self._folder / f"{what}.log"

    def close(self) -> None:
        """Stop the processes; idempotent."""
        with contextlib.ExitStack() as stack:
            for child in self._children.values():
                stack.callback(child.close)

    @property
    def alive(self) -> bool:
        return all(child.process.poll() is None for child in self._children.values())

    def received(self) -> int | None:
        """Bytes of messages that have reached it so far; None where it does not tell.

        Waits until no client is there any more.

        Raises:
            CallFailed: one does not leave.
        """
        if self._metrics is None:
            return None
        deadline = time.monotonic() + _SESSION_END_S
        while time.monotonic() < deadline:
            page = self._page(self._metrics)
            if all(float(count) == 0 for count in _SERVING.findall(page)):
                return sum(int(float(count)) for count in _RECEIVED.findall(page))
            time.sleep(_POLL_S)
        raise CallFailed("the server", f"has a client after {_SESSION_END_S:g} s")

    def _page(self, port: int) -> str:
        try:
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=_SESSION_END_S) as answer:
                return str(answer.read(), "utf-8")
        except OSError as error:
            raise CallFailed("the server's metrics", str(error)) from error

    def condition(self) -> list[str]:
        """How each process fares, in words, for the report of a failure."""
        return [
            f"the {what} {_ending(child.process.poll())}: {last_words(self._log(what))}"
            for what, child in self._children.items()
        ]


def _environment(kind: str, settings: Settings) -> dict[str, str] | None:
    """Of a server; None for this process's."""
    if kind != "cpp" or not settings.huge_pages:
        return None
    given = os.environ.get(_TUNABLES)
    return {
        **os.environ,
        _TUNABLES: f"{given}:{_HUGE_PAGES}" if given else _HUGE_PAGES,
    }


def _relay_command(target: str, settings: Settings) -> list[str]:
    options = ["--delay-ms", str(settings.relay_delay_ms)]
    if settings.relay_rate_mbit is not None:
        options += ["--rate-mbit", str(settings.relay_rate_mbit)]
    return ["longwire.bench.relay", target, *options]


class Workers:
    """The servers of a bench: started when first wanted, and again when dead."""

    def __init__(self, settings: Settings, plan: Plan, folder: Path) -> None:
        self._settings = settings
        self._plan = plan
        self._folder = folder
        self._workers: dict[tuple[str, int], Worker] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.ExitStack() as stack:
            for worker in self._workers.values():
                stack.callback(worker.close)

    def of(self, kind: str, count: int) -> list[Worker]:
        """So many workers of one kind, alive.

        Raises:
            CallFailed: one does not start; says why.
        """
        return [self._living(kind, i) for i in range(count)]

    def _living(self, kind: str, index: int) -> Worker:
        worker = self._workers.get((kind, index))
        if worker is not None and not worker.alive:
            worker.close()
            worker = None
        if worker is None:
            folder = self._folder / f"{kind}-{index}"
            worker = Worker(kind, self._settings, self._plan, folder)
            self._workers[kind, index] = worker
        return worker


_numbers = itertools.count()


def run_job(job: Job, folder: Path, timeout_s: float) -> Measurement:
    """Do a job in a fresh process.

    Raises:
        CallFailed: the process failed, died or took too long; says which.
    """
    log = folder / f"client-{next(_numbers)}"
    command = [sys.executable, "-m", "longwire.bench.client", job.encode()]
    with log.open("w") as stderr, spawned(command, stderr) as process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            reason = f"not done after {timeout_s:g} s"
            raise CallFailed(f"the {job.client} client", reason) from error
    if process.returncode != 0:
        reason = f"{_ending(process.returncode)}: {last_words(log)}"
        raise CallFailed(f"the {job.client} client", reason)
    return Measurement.decode(output.splitlines()[-1])


def _ending(status: int | None) -> str:
    if status is None:
        return "lives"
    return f"{'ended with' if status >= 0 else 'died of'} {exit_text(status)}"


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        text = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
