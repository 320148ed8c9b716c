"""`longwire tunnel`: a local port for llama.cpp to a server with TLS or a token."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from longwire.cli.exposure import binding, check_exposure
from longwire.cli.options import (
    add_address,
    add_credentials,
    credentials,
    log_to_stderr,
)
from longwire.cli.signals import stopped_by_signals
from longwire.client.tunnel import Tunnel
from longwire.transport.endpoint import parse_endpoint

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tunnel",
        help="give llama.cpp programs a local port to a server with TLS or a token",
        description="Listen on a local port, and carry each connection to a Longwire "
        "server, encrypted and authenticated. llama.cpp's own --rpc, which knows "
        "neither, then uses the local port.",
    )
    parser.add_argument("server", metavar="HOST:PORT", help="the server")
    add_address(parser)
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="let everybody use the tunnel who can reach the address",
    )
    add_credentials(parser)
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="say who comes and goes"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry until SIGTERM or Ctrl-C."""
    log_to_stderr(arguments.verbose)
    remote = parse_endpoint(arguments.server)
    check_exposure(
        arguments.host,
        guarded=False,
        insecure=arguments.insecure,
        remedy="Give --insecure if the network itself is closed",
    )
    shown = credentials(arguments)
    with binding(arguments.host, arguments.port):
        tunnel = Tunnel(arguments.host, arguments.port, remote, shown)
    with contextlib.closing(tunnel), stopped_by_signals(tunnel.stop):
        print(f"server {remote}, protocol {tunnel.try_remote()}")
        # Scripts wait for this line.
        print(f"listening on {tunnel.address}", flush=True)
        tunnel.run()
    return 0
