"""`longwire serve`: lend this machine's devices out."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longwire.cli.options import add_engine, count, names, positive, seconds
from longwire.cli.sizes import parse_size
from longwire.errors import UsageError
from longwire.native.compute import default_threads
from longwire.server.config import SessionConfig
from longwire.server.limits import Limits
from longwire.server.logs import FORMATS, log_to_stderr
from longwire.server.metrics import Metrics, MetricsPage
from longwire.server.supervisor import Supervisor
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
        epilog="SIGTERM lets clients finish (see --drain-timeout) and ends the "
        "server; a second one, or Ctrl-C, ends it at once. SIGHUP starts the warm "
        "sessions anew. Exit codes: 0 stopped, 1 failed, 2 asked for what cannot be.",
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
    _add_limits(parser)
    _add_operation(parser)
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits, group = Limits(), parser.add_argument_group("limits")
    group.add_argument(
        "--max-clients",
        type=positive,
        default=limits.clients,
        metavar="N",
        help="clients served at once; more wait in line (%(default)s)",
    )
    group.add_argument(
        "--spares",
        type=count,
        default=limits.spares,
        metavar="N",
        help="warm sessions kept ready for the next clients (%(default)s)",
    )
    group.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="most memory that all clients together may allocate, as in 20G",
    )
    group.add_argument(
        "--client-memory-limit",
        metavar="SIZE",
        help="most memory that one client may allocate",
    )
    for option, default, text in (
        ("handshake", limits.handshake_s, "close a client that has not said HELLO"),
        ("idle", 0.0, "close a client that sends no command"),
        ("stall", 60.0, "close a client that stops within a message"),
    ):
        group.add_argument(
            f"--{option}-timeout",
            type=seconds,
            default=default,
            metavar="SECONDS",
            help=f"{text} for so long; 0 is never (%(default)g)",
        )


def _add_operation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("operation")
    group.add_argument(
        "--drain-timeout",
        type=seconds,
        default=Limits().drain_s,
        metavar="SECONDS",
        help="how long clients may go on after SIGTERM (%(default)g)",
    )
    group.add_argument(
        "--metrics-port",
        type=count,
        metavar="PORT",
        help="serve /metrics (for Prometheus) and /healthz there",
    )
    group.add_argument(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the metrics port (%(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default=FORMATS[0],
        help="log lines as text, or each as a JSON object (%(default)s)",
    )
    group.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="say what happens; -vv each command, -vvv the engine's log too",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    log_to_stderr(arguments.log_format, max(1, arguments.verbose))
    for port in (arguments.port, arguments.metrics_port):
        if port is not None and not 0 <= port <= 65535:
            raise UsageError(f"port {port} is not between 0 and 65535")
    if arguments.cache_limit is not None and arguments.cache is None:
        raise UsageError("--cache-limit needs --cache")
    config = SessionConfig(
        engine=arguments.engine,
        n_threads=arguments.threads,
        protocol=arguments.protocol,
        devices=arguments.device,
        cache_dir=_cache_dir(arguments.cache),
        cache_limit=_size(arguments.cache_limit),
        verbosity=arguments.verbose,
        idle_timeout_s=arguments.idle_timeout,
        stall_timeout_s=arguments.stall_timeout,
        log_format=arguments.log_format,
        live_figures=arguments.metrics_port is not None,
    )
    limits = Limits(
        clients=arguments.max_clients,
        spares=arguments.spares,
        memory=_size(arguments.memory_limit),
        client_memory=_size(arguments.client_memory_limit),
        handshake_s=arguments.handshake_timeout,
        drain_s=arguments.drain_timeout,
    )
    if not _is_loopback(arguments.host):
        _log.warning(
            "%s is not a loopback address: everybody who can reach it can use "
            "this machine's devices and read what is computed on them",
            arguments.host,
        )
    with _binding(arguments.host, arguments.port):
        supervisor = Supervisor(
            arguments.host, arguments.port, config, _announce, limits
        )
    with _metrics_page(arguments, supervisor.metrics):
        supervisor.run()
    return 0


@contextlib.contextmanager
def _metrics_page(arguments: argparse.Namespace, metrics: Metrics) -> Iterator[None]:
    """Serve the metrics page, where one was asked for, while the body runs."""
    if arguments.metrics_port is None:
        yield
        return
    with _binding(arguments.metrics_host, arguments.metrics_port):
        page = MetricsPage(arguments.metrics_host, arguments.metrics_port, metrics)
    with contextlib.closing(page):
        print(f"metrics on {_endpoint(*page.address)}", flush=True)
        yield


@contextlib.contextmanager
def _binding(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot bind {host}:{port}: {error.strerror or error}"
        ) from error


def _announce(address: tuple[str, int], report: dict[str, Any]) -> None:
    for device in report["devices"]:
        mib = 1 << 20
        print(
            f"device {device['name']}: {device['description']}, "
            f"{device['total'] // mib} MiB, {device['free'] // mib} MiB free"
        )
    print(f"engine {report['engine']}, protocol {report['protocol']}")
    # Scripts wait for this line.
    print(f"listening on {_endpoint(*address)}", flush=True)


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cache_dir(option: str | None) -> str | None:
    if option is None:
        return None
    if option != _DEFAULT_CACHE:
        return str(Path(option).expanduser())
    # Read here: the supervisor needs nothing of the cache.
    from longwire.server.cache import default_cache_dir

    return str(default_cache_dir())


def _size(option: str | None) -> int | None:
    return None if option is None else parse_size(option)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
