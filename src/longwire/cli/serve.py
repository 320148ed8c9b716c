"""`longwire serve`: lend this machine's devices out."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longwire.cli.exposure import binding, check_exposure
from longwire.cli.options import (
    add_address,
    add_engine,
    count,
    names,
    positive,
    seconds,
)
from longwire.cli.sizes import parse_size
from longwire.errors import UsageError
from longwire.native.compute import default_threads
from longwire.server.access import Access, AllowList
from longwire.server.config import SessionConfig
from longwire.server.limits import Limits
from longwire.server.logs import FORMATS, log_to_stderr
from longwire.server.metrics import Metrics, MetricsPage
from longwire.server.supervisor import Supervisor
from longwire.transport.tls import TlsFiles
from longwire.transport.tokens import warn_if_exposed

__all__ = ["add_parser"]

_DEFAULT_CACHE = ""


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="lend this machine's devices to other machines",
        description="Serve this machine's devices to llama.cpp on other machines. "
        "Several clients are served at once, each by a process of its own.",
        epilog="SIGTERM lets clients finish (see --drain-timeout) and ends the "
        "server; a second one, or Ctrl-C, ends it at once. SIGHUP reads tokens and "
        "certificates again, starts the warm sessions anew and looks for new model "
        "files. Exit codes: 0 stopped, 1 failed, 2 asked for what cannot be.",
    )
    add_address(parser)
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
        "--models",
        type=names,
        default=[],
        metavar="DIR[,DIR]",
        help="take weights from the GGUF files below these folders, if a client loads "
        "the same ones",
    )
    parser.add_argument(
        "--protocol",
        type=int,
        choices=(7, 8),
        default=8,
        help="version to speak; a client needs the same (%(default)s)",
    )
    add_engine(parser)
    _add_access(parser)
    _add_limits(parser)
    _add_operation(parser)
    parser.set_defaults(run=run)


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "access",
        "an address that other machines reach needs --token-file, --tls-client-ca "
        "or --allow; longwire keygen makes the files",
    )
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="serve only those who know one of its tokens (one per line)",
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="speak TLS 1.3 only, with this certificate"
    )
    group.add_argument("--tls-key", metavar="FILE", help="its key")
    group.add_argument(
        "--tls-client-ca",
        metavar="FILE",
        help="serve only those who show a certificate of this CA",
    )
    group.add_argument(
        "--allow",
        type=names,
        default=[],
        metavar="CIDR[,CIDR...]",
        help="serve only these addresses, as in 192.168.1.0/24",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="serve everybody who can reach the address",
    )


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
        "--peer-port",
        type=_peer_port,
        metavar="PORT|off",
        help="where other servers connect, to sum and copy among themselves "
        "(default: the port plus 1000)",
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
        "--no-sandbox",
        action="store_true",
        help="leave sessions all privileges, for a driver that needs more",
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
    if arguments.cache_limit is not None and arguments.cache is None:
        raise UsageError("--cache-limit needs --cache")
    config = SessionConfig(
        engine=arguments.engine,
        n_threads=arguments.threads,
        protocol=arguments.protocol,
        devices=arguments.device,
        cache_dir=_cache_dir(arguments.cache),
        cache_limit=_size(arguments.cache_limit),
        models=_folders(arguments.models),
        verbosity=arguments.verbose,
        token_file=arguments.token_file,
        tls=_tls(arguments),
        sandbox=not arguments.no_sandbox,
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
    allow = AllowList(arguments.allow)
    check_exposure(
        arguments.host,
        guarded=bool(arguments.token_file or arguments.tls_client_ca or allow),
        insecure=arguments.insecure,
        remedy="Give --token-file, --tls-client-ca or --allow, or --insecure if the "
        "network itself is closed",
    )
    # Here, so that a wrong file is the reason this command gives.
    Access.load(config.token_file, config.tls)
    if config.token_file is not None:
        warn_if_exposed("token file", config.token_file)
    if arguments.tls_key is not None:
        warn_if_exposed("key file", arguments.tls_key)
    with binding(arguments.host, arguments.port):
        supervisor = Supervisor(
            arguments.host,
            arguments.port,
            config,
            _announce,
            limits,
            allow,
            arguments.peer_port,
        )
    with _metrics_page(arguments, supervisor.metrics):
        supervisor.run()
    return 0


def _peer_port(text: str) -> int:
    """A port; 0 is none."""
    if text == "off":
        return 0
    port = int(text)
    if not 0 < port < 1 << 16:
        raise ValueError(text)
    return port


def _tls(arguments: argparse.Namespace) -> TlsFiles | None:
    cert, key = arguments.tls_cert, arguments.tls_key
    if cert is None and (key or arguments.tls_client_ca):
        raise UsageError("--tls-key and --tls-client-ca need --tls-cert")
    if cert is None:
        return None
    return TlsFiles(cert, key, arguments.tls_client_ca)


@contextlib.contextmanager
def _metrics_page(arguments: argparse.Namespace, metrics: Metrics) -> Iterator[None]:
    """Serve the metrics page, where one was asked for, while the body runs."""
    if arguments.metrics_port is None:
        yield
        return
    with binding(arguments.metrics_host, arguments.metrics_port):
        page = MetricsPage(arguments.metrics_host, arguments.metrics_port, metrics)
    with contextlib.closing(page):
        print(f"metrics on {_endpoint(*page.address)}", flush=True)
        yield


def _announce(address: tuple[str, int], report: dict[str, Any]) -> None:
    for device in report["devices"]:
        mib = 1 << 20
        print(
            f"device {device['name']}: {device['description']}, "
            f"{device['total'] // mib} MiB, {device['free'] // mib} MiB free"
        )
    print(f"engine {report['engine']}, protocol {report['protocol']}")
    if report["peer_port"] is not None:
        print(f"peers on {_endpoint(address[0], report['peer_port'])}")
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


def _folders(options: list[str]) -> list[str]:
    folders = [Path(option).expanduser().absolute() for option in options]
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--models: {folder} is no folder")
    return [str(folder) for folder in folders]


def _size(option: str | None) -> int | None:
    return None if option is None else parse_size(option)
