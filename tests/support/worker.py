"""A real worker: `longwire serve` on the CPU, started and stopped by a test."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from longwire.transport.endpoint import Endpoint, parse_endpoint

__all__ = [
    "PROC",
    "Worker",
    "alive",
    "resident",
    "running_worker",
    "serve_command",
    "until",
]

T = TypeVar("T")

PROC = Path("/proc")

_START_S = 30.0
_STOP_S = 6.0
"""Sessions get five seconds; the rest is for the supervisor itself."""


def until(check: Callable[[], T | None], timeout_s: float = 5.0) -> T:
    """What `check` returns once that is true; it is asked again until then."""
    deadline = time.monotonic() + timeout_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"nothing for {timeout_s} s"
        time.sleep(0.005)
    return found


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def resident(pid: int) -> int:
    """Bytes of memory that a process occupies; 0 when it is gone."""
    try:
        pages = int((PROC / str(pid) / "statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Worker:
    """A running supervisor with its sessions."""

    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    log_file: Path

    @property
    def log(self) -> str:
        """All that the supervisor and its sessions have written to stderr."""
        return self.log_file.read_text(errors="replace")

    def logged(self, pattern: str, timeout_s: float = 2.0) -> re.Match[str]:
        """Wait for a line of the log that matches."""
        try:
            return until(lambda: re.search(pattern, self.log), timeout_s)
        except AssertionError:
            raise AssertionError(
                f"no line matches {pattern!r} in:\n{self.log}"
            ) from None

    def session_of(self, client: str) -> int:
        """The process that serves the client of that name."""
        pattern = rf"\(pid (\d+)\) serves {re.escape(client)}\n"
        self.logged(pattern)
        return int(re.findall(pattern, self.log)[-1])

    def end_of(self, client: str) -> str:
        """The line on how that client's session ended; it has to be over."""

        def line() -> str | None:
            # Port numbers come again: only the last client of that name counts.
            since = self.log.rpartition(f" serves {client}\n")[2]
            found = re.search(rf"session \d+ of {re.escape(client)}.*\n", since)
            return found and found[0]

        return until(line, 2.0)

    def sessions(self) -> list[int]:
        """The processes of all sessions, spare ones included."""
        found = []
        for stat in PROC.glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid:
                found.append(int(stat.parent.name))
        return [pid for pid in found if alive(pid)]

    def resident(self) -> int:
        """Bytes of memory that all processes of this worker occupy."""
        return sum(map(resident, [self.process.pid, *self.sessions()]))

    def ended(self, timeout_s: float = _STOP_S) -> int:
        """Wait for the end; returns the exit code. No session may outlive it."""
        sessions = self.sessions()
        code = self.process.wait(timeout_s)
        until(lambda: not any(map(alive, sessions)), 1.0)
        return code


def serve_command(*options: str) -> list[str]:
    """The command line of a worker on any free port."""
    return [sys.executable, "-m", "longwire", "serve", "-p", "0", *options]


@contextmanager
def running_worker(*options: str, exit_code: int = 0) -> Iterator[Worker]:
    """A worker with these options of `serve`; it must end cleanly afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "stdout"), Path(folder, "stderr")
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(
                serve_command("-v", "-t", "1", "--drain-timeout", "0", *options),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                # A Ctrl-C that a test sends to the group must not reach pytest.
                start_new_session=True,
            )
        try:
            yield Worker(process, _address(process, output, log), log)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            # `ended` needs the endpoint no more.
            code = Worker(process, Endpoint("", 1), log).ended()
            assert code == exit_code, log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _address(process: subprocess.Popen[bytes], output: Path, log: Path) -> Endpoint:
    def listening() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(r"^listening on (\S+)\n", output.read_text(), re.MULTILINE)

    return parse_endpoint(until(listening, _START_S)[1])
