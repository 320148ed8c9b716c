"""The processes of a bench: servers of both kinds, relays, and their last words."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from longwire.bench.client import Job, Measurement
from longwire.bench.settings import Plan, Settings
from longwire.errors import CallFailed, LongwireError
from longwire.host.workers import ListeningProcess, LocalWorker

__all__ = ["Worker", "Workers", "run_job"]

_TAIL = 4096
"""Bytes of a log that are searched for its last line."""


class Worker:
    """One server, and the relay in front of it where one is wanted."""

    def __init__(self, kind: str, settings: Settings, plan: Plan, folder: Path) -> None:
        """Start it; `folder` is its own, and keeps the cache when it restarts.

        Raises:
            CallFailed: it did not start; says why.
        """
        self.kind = kind
        folder.mkdir(exist_ok=True)
        self._log = folder / "stderr"
        self._stack = contextlib.ExitStack()
        options = ["--threads", str(settings.threads)]
        if settings.cache:
            options += ["--cache", str(folder / "cache")]
            (folder / "cache").mkdir(exist_ok=True)
        if kind == "longwire":
            options += ["--engine", plan.engine, "--protocol", str(plan.protocol)]
        try:
            self._server = self._start(options)
            self.endpoint = self._server.endpoint
            self._relay = self._start_relay(settings)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, options: list[str]) -> ListeningProcess:
        with self._log.open("w") as log:
            try:
                if self.kind == "longwire":
                    server: ListeningProcess = LocalWorker(*options, stderr=log)
                else:
                    module = "longwire.bench.cpp_server"
                    server = ListeningProcess(module, *options, stderr=log)
            except LongwireError as error:
                words = last_words(self._log)
                raise CallFailed(f"{self.kind} server", f"{error}; {words}") from error
        return self._stack.enter_context(server)

    def _start_relay(self, settings: Settings) -> ListeningProcess | None:
        if not settings.relayed:
            return None
        options = ["--delay-ms", str(settings.relay_delay_ms)]
        if settings.relay_rate_mbit is not None:
            options += ["--rate-mbit", str(settings.relay_rate_mbit)]
        module = "longwire.bench.relay"
        relay = ListeningProcess(module, self.endpoint, *options, stderr=None)
        self.endpoint = relay.endpoint
        return self._stack.enter_context(relay)

    def close(self) -> None:
        """Stop the processes; idempotent."""
        self._stack.close()

    def obituary(self) -> str | None:
        """How the server or its relay ended, or None while both live."""
        status = self._server.process.poll()
        if status is not None:
            return f"the {self.kind} server {ending(status)}: {last_words(self._log)}"
        status = self._relay.process.poll() if self._relay else None
        return None if status is None else f"the relay {ending(status)}"


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

    def of(self, kind: str) -> list[Worker]:
        """All workers of one kind, alive.

        Raises:
            CallFailed: one does not start; says why.
        """
        return [self._living(kind, i) for i in range(self._settings.workers)]

    def _living(self, kind: str, index: int) -> Worker:
        worker = self._workers.get((kind, index))
        if worker is not None and worker.obituary() is not None:
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
    with log.open("w") as stderr:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                timeout=timeout_s,
                text=True,
                # Ctrl-C is for the bench, which then kills this process.
                start_new_session=True,
            )
        except subprocess.TimeoutExpired as error:
            reason = f"not done after {timeout_s:g} s"
            raise CallFailed(f"the {job.client} client", reason) from error
    if done.returncode != 0:
        reason = f"{ending(done.returncode)}: {last_words(log)}"
        raise CallFailed(f"the {job.client} client", reason)
    return Measurement.decode(done.stdout.splitlines()[-1])


def ending(status: int) -> str:
    """How a process ended, from its exit status."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"


def last_words(log: Path) -> str:
    """The last line of a log that says something."""
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL))
        text = file.read().decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
