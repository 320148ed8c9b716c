"""Workers on this machine: `longwire serve` as a child process."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, TypeVar

from longwire.errors import NativeError

__all__ = ["ListeningProcess", "LocalWorker", "local_workers", "spawned"]

_START_S = 60.0
_STOP_S = 10.0
_READY = "listening on "

_Process = TypeVar("_Process", bound="ListeningProcess")


@contextlib.contextmanager
def spawned(
    command: Sequence[str],
    stderr: int | IO[str] | None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A child process, with a pipe for its output, that does not outlive the body."""
    process = None
    try:
        with _signals_held():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                # Ctrl-C is for the program that started the process.
                start_new_session=True,
            )
        yield process
    finally:
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the body is done.

    An exception inside of `Popen` would leave a process that nobody knows of.
    """
    held: list[int] = []
    previous = {}
    # Only the main thread sets handlers, and only there do they raise anything.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # What is ignored must stay so, for the child inherits that.
            if handler is not None and handler != signal.SIG_IGN:
                signal.signal(number, lambda number, frame: held.append(number))
                previous[number] = handler
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


class ListeningProcess:
    """A child process that says "listening on HOST:PORT". Close it, or use `with`."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        stderr: int | IO[str] | None = subprocess.DEVNULL,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `python -m module` and wait until it listens.

        Raises:
            NativeError: it ended, or said nothing for a minute.
        """
        with contextlib.ExitStack() as stack:
            self.process = stack.enter_context(
                spawned([sys.executable, "-m", module, *arguments], stderr, environment)
            )
            self.endpoint = self._wait_ready(module)
            self._stack = stack.pop_all()

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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_S)
        self._stack.close()

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
    """One `longwire serve` on a free loopback port; `options` are `serve`'s.

    Its log goes nowhere unless `stderr` says where; should it not start, the
    log's last line is in the error.
    """

    def __init__(self, *options: str, stderr: int | IO[str] | None = -1) -> None:
        # Whoever closes a worker wants it gone, with its clients.
        serve = ("longwire", "serve", "-p", "0", "--drain-timeout", "0", *options)
        if stderr != -1:
            super().__init__(*serve, stderr=stderr)
            return
        with tempfile.TemporaryFile("w+") as log:
            try:
                super().__init__(*serve, stderr=log)
            except NativeError as error:
                log.seek(0)
                last = [line for line in log.read().split("\n") if line.strip()][-1:]
                raise NativeError(f"a worker did not start: {''.join(last)}") from error


@contextlib.contextmanager
def local_workers(count: int, options: Sequence[str] = ()) -> Iterator[list[str]]:
    """The endpoints of `count` workers that live as long as the body runs."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(LocalWorker(*options)) for _ in range(count)]
        yield [worker.endpoint for worker in workers]
