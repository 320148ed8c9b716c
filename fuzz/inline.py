"""A server for fuzzers alone: one process serves client after client.

`longwire serve` starts a new process after each client that held memory, and that
costs more than a sequence does. Here the engine is loaded once, and a child that
ggml has ended is replaced by a fork. What serves is the real thing: `serve_client`
on sockets, with the engine's own device.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
from pathlib import Path

from fuzz.contents import stocked
from longwire.native.compute import ComputeDevice, select_devices
from longwire.native.engine import load_engine, on_abort
from longwire.native.profiles import DEFAULT_ENGINE
from longwire.server.buffers import BufferTable
from longwire.server.cache import WeightCache
from longwire.server.limits import Ledger, Limits
from longwire.server.pool import exit_text
from longwire.server.session import serve_client
from longwire.server.state import SessionState
from longwire.transport.stream import Stream, tune
from longwire.wire.dialects import DIALECTS
from longwire.wire.frames import command_name

__all__ = ["LedgerQuota", "main"]

_GRACE_S = 10
"""What a client may take before SIGALRM ends the child, as `serve` would."""

_MEMORY = 1 << 28


class LedgerQuota:
    """The supervisor's ledger, without a supervisor between."""

    def __init__(self, memory: int) -> None:
        self.ledger = Ledger(Limits(memory=memory))

    def claim(self, size: int) -> str | None:
        return self.ledger.claim(self, size)

    def release(self, size: int) -> None:
        self.ledger.release(self, size)

    def room(self) -> tuple[int | None, int | None]:
        return self.ledger.room(self)


class _Child:
    """A process that serves one client after the other, until one ends it."""

    def __init__(
        self, listener: socket.socket, protocol: int, cache: WeightCache
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._cache = cache
        # Shared, so that the parent knows whom the child served when it died.
        self._peer = mmap.mmap(-1, 16)
        self._state: SessionState | None = None
        self.pid = os.fork()
        if not self.pid:
            self._run()

    @property
    def peer(self) -> str:
        """The address of the client that is, or was last, served."""
        return self._peer[:].rstrip(b"\0").decode()

    def _run(self) -> None:
        # A fork must not return into its parent's code, whatever happens.
        try:
            engine = load_engine(DEFAULT_ENGINE)
            devices = select_devices(engine, ["CPU"])
            on_abort(engine, self._last_words)
            while True:
                client, address = self._listener.accept()
                self._peer[:] = address[0].encode().ljust(16, b"\0")
                signal.alarm(_GRACE_S)
                self._serve(client, devices)
                signal.alarm(0)
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        finally:
            os._exit(1)

    def _serve(self, client: socket.socket, devices: list[ComputeDevice]) -> None:
        tune(client)
        quota = LedgerQuota(_MEMORY)
        self._state = state = SessionState(
            dialect=DIALECTS[self._protocol],
            devices=devices,
            n_threads=1,
            cache=self._cache,
            stream=Stream(client),
            buffers=BufferTable(quota),
        )
        reason = serve_client(state)
        state.stream.close()
        state.close()
        assert not quota.ledger.total and not len(state.buffers), reason

    def _last_words(self, words: str) -> None:
        command = command_name(self._state.command) if self._state else ""
        _report(event="aborted", peer=self.peer, command=command, words=words)


def _report(**facts: object) -> None:
    # One write, or lines of two children could mix.
    os.write(sys.stderr.fileno(), json.dumps(facts).encode() + b"\n")


def main() -> int:
    """Entry point: `python -m fuzz.inline LISTENING_FD PROTOCOL CHILDREN FOLDER`."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    protocol, count = int(sys.argv[2]), int(sys.argv[3])
    cache = stocked(Path(sys.argv[4]))
    load_engine(DEFAULT_ENGINE)
    children: dict[int, _Child] = {}
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True
        for pid in children:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    while not stopping:
        while len(children) < count:
            child = _Child(listener, protocol, cache)
            children[child.pid] = child
        _report(event="ready")
        pid, status = os.wait()
        child = children.pop(pid)
        if not stopping:
            how = exit_text(os.waitstatus_to_exitcode(status))
            _report(event="died", peer=child.peer, how=how)
    while children:
        pid, _ = os.wait()
        del children[pid]
    return 0


if __name__ == "__main__":
    sys.exit(main())
