"""A live server to play to: `longwire serve`, or the inline one."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fuzz.contents import stocked
from fuzz.health import Finding, LogWatch
from longwire.transport.endpoint import Endpoint, parse_endpoint
from support.worker import serve_command, until

__all__ = ["KINDS", "Server", "serving"]

KINDS = ("serve", "inline")

_LOG = Path(__file__).parents[1] / "build" / "fuzz" / "live.log"
"""Where the end of the last log is kept."""

_SPARES = 8
"""More warm sessions than clients at once, or each rush would start new ones."""

_CHILDREN = 2
"""Of the inline server: a kernel that goes on for long keeps one of them busy."""

_START_S, _STOP_S = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, and what is known of it."""

    kind: str
    process: subprocess.Popen[bytes]
    endpoint: Endpoint
    log: LogWatch
    metrics_port: int | None = None


@contextmanager
def serving(kind: str, protocol: int) -> Iterator[Server]:
    """A server of that kind; if it does not end cleanly, its log has a finding."""
    start = _serve if kind == "serve" else _inline
    with ExitStack() as stack:
        server = start(protocol, stack)
        yield server


def _serve(protocol: int, stack: ExitStack) -> Server:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    output, cache = Path(folder, "stdout"), Path(folder, "cache")
    stocked(cache)
    command = serve_command(
        *("-v", "-t", "1", "--drain-timeout", "0", "--metrics-port", "0"),
        *("--spares", str(_SPARES), "--memory-limit", "1G"),
        *("--protocol", str(protocol), "--cache", str(cache)),
        *("--cache-limit", "1M"),
    )
    with output.open("wb") as out:
        process, log = _start(command, stack, stdout=out.fileno())

    def said(pattern: str) -> re.Match[str] | None:
        assert process.poll() is None, "the server did not start"
        return re.search(pattern, output.read_text(), re.MULTILINE)

    found = until(lambda: said(r"^listening on (\S+)$"), _START_S)
    metrics = until(lambda: said(r"^metrics on \S+:(\d+)$"))
    endpoint = parse_endpoint(found[1])
    return Server("serve", process, endpoint, log, int(metrics[1]))


def _inline(protocol: int, stack: ExitStack) -> Server:
    cache = stack.enter_context(tempfile.TemporaryDirectory())
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    # Whoever is in the backlog when the server ends shall not wait for ever.
    with listener:
        fd = listener.fileno()
        command = [sys.executable, "-m", "fuzz.inline"]
        command += [str(fd), str(protocol), str(_CHILDREN), cache]
        process, log = _start(command, stack, pass_fds=(fd,))
        endpoint = Endpoint(*listener.getsockname())
    return Server("inline", process, endpoint, log)


def _start(
    command: list[str],
    stack: ExitStack,
    stdout: int = subprocess.DEVNULL,
    pass_fds: tuple[int, ...] = (),
) -> tuple[subprocess.Popen[bytes], LogWatch]:
    """Start it, and have the stack end it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=True,
    )
    assert process.stderr is not None
    _LOG.parent.mkdir(parents=True, exist_ok=True)
    log = LogWatch(process.stderr, _LOG)
    stack.callback(_end, process, log)
    return process, log


def _end(process: subprocess.Popen[bytes], log: LogWatch) -> None:
    code = process.poll()
    if code is None:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    log.join()
    if code:
        log.findings.append(Finding(None, f"the server's exit code is {code}"))
