"""`longwire tap`: look at what passes between a client and a server."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from longwire.cli.exposure import binding, check_exposure
from longwire.cli.options import (
    add_credentials,
    created,
    credentials,
    log_to_stderr,
    positive_seconds,
)
from longwire.cli.signals import stopped_by_signals
from longwire.errors import UsageError
from longwire.tap.lines import Lines
from longwire.tap.proxy import Tap
from longwire.tap.spans import Spans
from longwire.tap.table import TableView
from longwire.tap.views import View, Views
from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.transport.stream import Stream, connect

__all__ = ["add_parser"]

_SWITCH_S = 0.0002
"""How long the thread that draws may keep one that passes bytes from running."""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tap",
        help="show what passes between a client and a server, of whichever make",
        description="Listen on a local address, carry each connection to a server "
        "unchanged, and show what passes: commands, bytes and waiting times. Works "
        "with llama.cpp's clients and servers of protocol 7 and 8 as well.",
    )
    parser.add_argument(
        "listen",
        metavar="LISTEN",
        help="address to bind, [HOST:]PORT; port 0 for any free one",
    )
    parser.add_argument("upstream", metavar="UPSTREAM", help="the server, HOST[:PORT]")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a line of JSON for each message in place of the table",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="also write a timeline to FILE, for https://ui.perfetto.dev",
    )
    parser.add_argument(
        "--connect-timeout",
        type=positive_seconds,
        default=5.0,
        metavar="S",
        help="seconds for a connection to the server (%(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let everybody use the tap who can reach the address",
    )
    add_credentials(parser, token=False)
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="say who comes and goes"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry and show until SIGTERM or Ctrl-C."""
    log_to_stderr(arguments.verbose)
    listen = _address(arguments.listen)
    upstream = parse_endpoint(arguments.upstream)
    check_exposure(
        listen.host,
        guarded=False,
        insecure=arguments.insecure,
        remedy="Give --insecure if the network itself is closed",
    )
    shown = credentials(arguments)

    def reach() -> Stream:
        sock = connect(upstream, arguments.connect_timeout)
        try:
            return shown.stream(sock, upstream)
        except OSError:
            sock.close()
            raise

    sys.setswitchinterval(_SWITCH_S)
    try:
        with contextlib.ExitStack() as stack:
            _serve(arguments, listen, reach, stack)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"the output cannot be written: {error}") from error
    return 0


def _serve(
    arguments: argparse.Namespace,
    listen: Endpoint,
    reach: Callable[[], Stream],
    stack: contextlib.ExitStack,
) -> None:
    """Carry and show; what is left to do then is for the end of `stack`."""
    views = Views(_views(arguments, stack))
    with binding(listen.host, listen.port):
        tap = Tap(listen.host, listen.port, reach, views.note)
    stack.callback(tap.close)
    # Scripts wait for this line.
    to = sys.stderr if arguments.json else sys.stdout
    print(f"listening on {tap.address}", file=to, flush=True)
    # The last connections are shown as they close, before the views do.
    stack.enter_context(views)
    stack.callback(tap.close)
    stack.enter_context(stopped_by_signals(tap.stop))
    tap.run()


def _views(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> list[View]:
    """What is to be shown; files are closed with `stack`."""
    views: list[View] = []
    if arguments.trace is not None:
        file = stack.enter_context(created(arguments.trace))
        views.append(Spans(file, time.perf_counter()))
    if arguments.json:
        views.append(Lines(sys.stdout, time.time() - time.perf_counter()))
    else:
        views.append(TableView(Console()))
    return views


def _address(text: str) -> Endpoint:
    """Where to listen: `parse_endpoint`, but for a bare port and for port 0."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        return parse_endpoint(text)
    if port == "0":
        return Endpoint(parse_endpoint(host).host if host else "127.0.0.1", 0)
    return parse_endpoint(text if host else f"127.0.0.1:{port}")
