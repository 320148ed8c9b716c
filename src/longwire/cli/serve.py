"""`longwire serve`: lend this machine's devices out."""

from __future__ import annotations

import argparse
import ipaddress
import logging
from pathlib import Path
from typing import Any

from longwire.cli.options import add_engine, log_to_stderr, names, positive
from longwire.cli.sizes import parse_size
from longwire.errors import UsageError
from longwire.server.config import SessionConfig
from longwire.server.supervisor import Supervisor, default_threads
from longwire.wire.constants import DEFAULT_PORT

__all__ = ["add_parser"]

_log = logging.getLogger("longwire.serve")

_DEFAULT_CACHE = ""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="lend this machine's devices to other machines",
        description="Serve this machine's devices to llama.cpp on other machines. "
        "Several clients are served at once, each by a process of its own.",
    )
    parser.add_argument(
        "-H", "--host", default="127.0.0.1", help="address to bind (%(default)s)"
    )
    parser.add_argument(
        "-p",
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port to bind, 0 for any free one (%(default)s)",
    )
    parser.add_argument(
        "-d",
        "--device",
        type=names,
        default=[],
        metavar="NAME[,NAME]",
        help="devices to serve (default: all accelerators, else the CPU)",
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=positive,
        default=default_threads(),
        help="threads of a CPU device (%(default)s)",
    )
    parser.add_argument(
        "-c",
        "--cache",
        nargs="?",
        const=_DEFAULT_CACHE,
        metavar="DIR",
        help="keep large weights in files, so that a second load need not send them",
    )
    parser.add_argument(
        "--cache-limit",
        metavar="SIZE",
        help="most bytes to keep, as in 20G; the least recently used go first",
    )
    parser.add_argument(
        "--protocol",
        type=int,
        choices=(7, 8),
        default=8,
        help="version to speak; a client needs the same (%(default)s)",
    )
    add_engine(parser)
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="say what happens; -vv each command, -vvv the engine's log too",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    log_to_stderr(max(1, arguments.verbose))
    if not 0 <= arguments.port <= 65535:
        raise UsageError(f"port {arguments.port} is not between 0 and 65535")
    if arguments.cache_limit is not None and arguments.cache is None:
        raise UsageError("--cache-limit needs --cache")
    config = SessionConfig(
        engine=arguments.engine,
        n_threads=arguments.threads,
        protocol=arguments.protocol,
        devices=arguments.device,
        cache_dir=_cache_dir(arguments.cache),
        cache_limit=_cache_limit(arguments.cache_limit),
        verbosity=arguments.verbose,
    )
    if not _is_loopback(arguments.host):
        _log.warning(
            "%s is not a loopback address: everybody who can reach it can use "
            "this machine's devices and read what is computed on them",
            arguments.host,
        )
    try:
        supervisor = Supervisor(arguments.host, arguments.port, config, _announce)
    except OSError as error:
        raise UsageError(
            f"cannot bind {arguments.host}:{arguments.port}: {error.strerror}"
        ) from error
    supervisor.run()
    return 0


def _announce(address: tuple[str, int], report: dict[str, Any]) -> None:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    for device in report["devices"]:
        mib = 1 << 20
        print(
            f"device {device['name']}: {device['description']}, "
            f"{device['total'] // mib} MiB, {device['free'] // mib} MiB free"
        )
    print(f"engine {report['engine']}, protocol {report['protocol']}")
    # Scripts wait for this line.
    print(f"listening on {host}:{address[1]}", flush=True)


def _cache_dir(option: str | None) -> str | None:
    if option is None:
        return None
    if option != _DEFAULT_CACHE:
        return str(Path(option).expanduser())
    # Read here: the supervisor needs nothing of the cache.
    from longwire.server.cache import default_cache_dir

    return str(default_cache_dir())


def _cache_limit(option: str | None) -> int | None:
    return None if option is None else parse_size(option)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
