"""Workers on this machine: `longwire serve` as a child process."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import IO, TypeVar

from longwire.errors import NativeError

__all__ = ["ListeningProcess", "LocalWorker", "local_workers"]

_START_S = 60.0
_STOP_S = 10.0
_READY = "listening on "

_Process = TypeVar("_Process", bound="ListeningProcess")


class ListeningProcess:
    """A child process that says "listening on HOST:PORT". Close it, or use `with`."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        stderr: int | IO[str] | None = subprocess.DEVNULL,
    ) -> None:
        """Start `python -m module` and wait until it listens.

        Raises:
            NativeError: it ended, or said nothing for a minute.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            # Ctrl-C is for the program that started the worker.
            start_new_session=True,
        )
        try:
            self.endpoint = self._wait_ready(module)
        except BaseException:
            self.close()
            raise

    def __enter__(self: _Process) -> _Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process; idempotent."""
        self.process.terminate()
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()

    def _wait_ready(self, module: str) -> str:
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        reader.start()
        said = []
        with contextlib.suppress(queue.Empty):
            while (line := lines.get(timeout=_START_S)) is not None:
                if line.startswith(_READY):
                    reader.join()
                    return line.removeprefix(_READY).strip()
                said.append(line)
        raise NativeError(f"{module} did not start: {''.join(said) or 'no output'}")

    def _read(self, lines: queue.Queue[str | None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.put(line)
            if line.startswith(_READY):
                return
        lines.put(None)


class LocalWorker(ListeningProcess):
    """One `longwire serve` on a free loopback port; `options` are `serve`'s."""

    def __init__(
        self, *options: str, stderr: int | IO[str] | None = subprocess.DEVNULL
    ) -> None:
        super().__init__("longwire", "serve", "-p", "0", *options, stderr=stderr)


@contextlib.contextmanager
def local_workers(count: int, options: Sequence[str] = ()) -> Iterator[list[str]]:
    """The endpoints of `count` workers that live as long as the body runs."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(LocalWorker(*options)) for _ in range(count)]
        yield [worker.endpoint for worker in workers]
