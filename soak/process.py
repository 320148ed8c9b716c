"""A `soak.host` that runs, as those see it who want to strike it."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["HostProcess", "Usual"]

_BOUND_S = 120.0
"""For the host to end, on a busy machine: the deadline that a forgotten wait would
have is half an hour."""


class HostProcess:
    """A running `soak.host`; killed at the end of a `with`."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._log = tempfile.TemporaryFile("w+", dir=folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "soak.host", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.marks: list[tuple[str, float]] = []
        """Phases, and when they began."""
        self.tokens: list[int] | None = None
        self._news: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="host output")
        self._reader.start()

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self._log.close()

    @property
    def said(self) -> str:
        """What is on its stderr so far."""
        self._log.seek(0)
        return self._log.read()

    def reach(self, phase: str) -> None:
        """Wait until a phase begins, or the host is at its end."""
        while self._news.get(timeout=_BOUND_S) not in (phase, ""):
            continue

    def phase_at(self, moment: float) -> str:
        """The phase that it was in."""
        return next((p for p, t in reversed(self.marks) if t <= moment), "connect")

    def end(self) -> int | None:
        """Wait for its exit code; None if it does not end in time."""
        try:
            code = self.process.wait(_BOUND_S)
        except subprocess.TimeoutExpired:
            # Has it say where it is.
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
            return None
        self._reader.join()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self.tokens = json.loads(line)["tokens"]
                    continue
                phase, at = line.split()
                self.marks.append((phase, float(at)))
                self._news.put(phase)
        self._news.put("")


@dataclass(frozen=True, slots=True)
class Usual:
    """A run that nobody disturbed."""

    tokens: list[int]
    marks: list[tuple[str, float]]

    def lasts(self, phase: str) -> float:
        """Seconds that a phase takes."""
        begun = dict(self.marks)
        after = [t for _, t in self.marks if t > begun[phase]]
        return min(after) - begun[phase]
