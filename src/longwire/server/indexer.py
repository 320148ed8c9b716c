"""The process that indexes a server's own model files, and its supervisor's handle.

One pass over the folders of `--models`, at low priority, then it ends. Sessions
look for the indexes themselves, whenever a client asks for weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from longwire.errors import LongwireError, UsageError
from longwire.models.index import load_index, read_index
from longwire.models.places import model_files
from longwire.native.engine import NativeEngine, load_engine
from longwire.native.kernel import prctl
from longwire.server.config import SessionConfig
from longwire.server.logs import log_to_stderr
from longwire.server.pool import exit_text, interrupts_blocked

__all__ = ["Indexer", "index_models", "main"]

_log = logging.getLogger("longwire.serve")

_STOP_S = 5.0
"""How long it gets to end, before SIGKILL."""

_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG`: a supervisor that is killed takes its indexer along."""

_LEAST_URGENT = 19


class Indexer:
    """Runs the process, one at a time, for whoever turns a selector's loop."""

    def __init__(self, config: SessionConfig, selector: selectors.BaseSelector) -> None:
        """Nothing runs before `start`; `selector` tells by `pipe` when it has ended."""
        self._config = config
        self._selector = selector
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pipe(self) -> IO[bytes] | None:
        """Readable when the process has ended; `reap` is then due."""
        return self._process.stdout if self._process else None

    def start(self) -> None:
        """Index whatever is new, from the beginning if a process is at it already."""
        self.stop()
        if not self._config.models:
            return
        command = [sys.executable, "-m", "longwire.server.indexer"]
        try:
            with interrupts_blocked():
                self._process = subprocess.Popen(
                    [*command, self._config.encode(), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    # Nothing is written there, but its end tells of the process's.
                    stdout=subprocess.PIPE,
                )
        except OSError as error:
            _log.error("cannot start the indexer: %s", error)
            return
        assert self._process.stdout is not None
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def reap(self) -> None:
        """Take leave of a process that has ended by itself."""
        if self._process is not None:
            status = self._leave()
            if status:
                _log.error("the indexer died: %s", exit_text(status))

    def stop(self) -> None:
        """End the process; idempotent."""
        if self._process is not None:
            self._process.terminate()
            self._leave()

    def _leave(self) -> int:
        process, self._process = self._process, None
        assert process is not None and process.stdout is not None
        self._selector.unregister(process.stdout)
        try:
            status = process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        process.stdout.close()
        return status


def index_models(engine: NativeEngine, folders: Sequence[str]) -> None:
    """Index all model files below `folders` that have no index, one after the other."""
    threads = max(1, (os.cpu_count() or 1) // 2)
    for path in model_files(map(Path, folders)):
        known = read_index(path)
        if known is not None and known.has_fnv:
            _log.info("%s: %d tensors, indexed before", path, len(known.tensors))
            continue
        started = time.monotonic()
        try:
            index = load_index(engine, path, fnv=True, threads=threads)
        except UsageError as error:
            _log.warning("not indexed: %s", error)
            continue
        _log.info(
            "%s: %d tensors, %.0f MB, indexed in %.1f s",
            path,
            len(index.tensors),
            index.size / 1e6,
            time.monotonic() - started,
        )


def main() -> int:
    """Entry point: `python -m longwire.server.indexer CONFIG SUPERVISOR_PID`."""
    config = SessionConfig.decode(sys.argv[1])
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != int(sys.argv[2]):
        return 0
    os.nice(_LEAST_URGENT)
    log_to_stderr(config.log_format, config.verbosity)
    try:
        engine = load_engine(config.engine)
    except LongwireError as error:
        _log.error("no model file is indexed: %s", error)
        return 1
    index_models(engine, config.models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
