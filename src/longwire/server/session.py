"""One session process: a fresh interpreter that serves one client at a time.

Started by the supervisor with one end of a control socket. It loads the
engine, reports READY, and waits to be handed a client. A session that held no
memory when its client left is as good as new and reports IDLE; any other ends,
and with it everything it had.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longwire.errors import LongwireError
from longwire.native.compute import ComputeDevice, select_devices
from longwire.native.engine import NativeEngine, load_engine, on_abort
from longwire.server.cache import WeightCache
from longwire.server.config import SessionConfig
from longwire.server.handlers import HANDLERS, STREAMED, SessionState
from longwire.transport.stream import Stream, tune
from longwire.wire.dialects import DIALECTS
from longwire.wire.frames import (
    ANSWER_HEADER,
    REQUEST_HEADER,
    ServerOrder,
    command_name,
)

__all__ = ["main", "serve_client"]

_log = logging.getLogger("longwire.session")


def serve_client(state: SessionState) -> str:
    """Answer one client until it leaves or breaks a rule; returns the reason."""
    stream, served = state.stream, state.served
    order = ServerOrder(state.dialect)
    trace = _log.isEnabledFor(logging.DEBUG)
    number = -1
    try:
        while True:
            number = -1
            number, length = REQUEST_HEADER.unpack(stream.take(REQUEST_HEADER.size))
            shape = order.admit(number, length)
            if trace:
                _log.debug("%s, %d bytes", command_name(number), length)
            body = stream.take(STREAMED.get(number, length))
            if shape.drains and state.running:
                state.drain()
            answer = HANDLERS[number](state, body, length)
            served.commands += 1
            served.bytes_in += REQUEST_HEADER.size + length
            if answer is not None:
                size = sum(map(len, answer))
                stream.send([ANSWER_HEADER.pack(size), *answer])
                served.bytes_out += ANSWER_HEADER.size + size
    except EOFError:
        if number == -1:
            return "the client left"
        return f"the client left in the middle of {command_name(number)}"
    except OSError as error:
        return f"the connection broke: {error}"
    except LongwireError as error:
        return f"refused: {error}"


class _Control:
    """This process's end of the supervisor's control socket."""

    def __init__(self, fd: int) -> None:
        self._sock = socket.socket(fileno=fd)

    def report(self, event: str, **facts: Any) -> None:
        """Send one event as a line of JSON, if there still is a supervisor."""
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps({"event": event, **facts}).encode() + b"\n")

    def next_client(self) -> socket.socket | None:
        """Wait for the next client; None when the supervisor is gone or done."""
        try:
            message, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
        except ConnectionError:
            return None
        if not message or not fds:
            return None
        return socket.socket(fileno=fds[0])


def main() -> int:
    """Entry point: `python -m longwire.server.session CONTROL_FD CONFIG`."""
    control = _Control(int(sys.argv[1]))
    config = SessionConfig.decode(sys.argv[2])
    # After a crash in a kernel the log has the command that led there.
    faulthandler.enable()
    logging.basicConfig(
        stream=sys.stderr,
        level={0: logging.WARNING, 1: logging.INFO}.get(
            config.verbosity, logging.DEBUG
        ),
        format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s",
    )
    if config.verbosity < 3:
        logging.getLogger("longwire.engine").setLevel(logging.WARNING)
    try:
        engine = load_engine(config.engine)
        devices = select_devices(engine, config.devices)
    except LongwireError as error:
        control.report("failed", reason=str(error))
        return 1
    on_abort(engine, lambda words: control.report("aborted", reason=words))
    control.report(
        "ready",
        engine=engine.profile.label,
        protocol=DIALECTS[config.protocol].version,
        devices=_describe(devices),
    )
    while (client := control.next_client()) is not None:
        if not _serve(client, engine, devices, config, control):
            return 0
    return 0


def _describe(devices: list[ComputeDevice]) -> list[dict[str, Any]]:
    described = []
    for device in devices:
        free, total = device.memory()
        described.append(
            {
                "name": device.name,
                "description": device.description,
                "free": free,
                "total": total,
            }
        )
    return described


def _serve(
    client: socket.socket,
    engine: NativeEngine,
    devices: list[ComputeDevice],
    config: SessionConfig,
    control: _Control,
) -> bool:
    """Serve one client; True when this process may take another."""
    started = time.monotonic()
    client.setblocking(True)
    tune(client)
    cache = (
        WeightCache(Path(config.cache_dir), config.cache_limit)
        if config.cache_dir
        else None
    )
    state = SessionState(
        dialect=DIALECTS[config.protocol],
        devices=devices,
        n_threads=config.n_threads,
        cache=cache,
        stream=Stream(client),
    )
    with _leaving_ends(client, config.grace_s, control):
        reason = serve_client(state)
    used = state.buffers.opened > 0
    served = state.served
    state.stream.close()
    state.close()
    control.report(
        "ended" if used else "idle",
        reason=reason,
        seconds=round(time.monotonic() - started, 3),
        commands=served.commands,
        graphs=served.graphs,
        graph_time_s=round(served.graph_time_s, 6),
        bytes_in=served.bytes_in,
        bytes_out=served.bytes_out,
    )
    return not used


@contextlib.contextmanager
def _leaving_ends(
    client: socket.socket, grace_s: float, control: _Control
) -> Iterator[None]:
    """End this process if the body goes on after the client has left.

    Else a kernel that a client made endless would keep a core busy for ever.
    """
    done = threading.Event()
    watched = client.dup()

    def watch() -> None:
        with watched:
            poll = select.poll()
            # Linux tells this apart from bytes to read; others only see a reset.
            poll.register(watched, getattr(select, "POLLRDHUP", 0))
            poll.poll()
        if not done.wait(grace_s):
            control.report(
                "ended",
                reason=f"the client left, its last command took over {grace_s} s",
            )
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        # Also wakes the thread, where it was not the client who ended this.
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
