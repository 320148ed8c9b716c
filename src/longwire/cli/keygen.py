"""`longwire keygen`: what servers and clients need to know each other."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longwire.cli.options import names, positive

if TYPE_CHECKING:
    from longwire.transport.keyring import Issued

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "keygen",
        help="make the certificates and token of authenticated, encrypted use",
        description="Make a CA, a token, and certificates of servers and clients in "
        "a folder. A later call with the same folder keeps CA and token and makes "
        "what else is asked for; no file is ever overwritten. Without options: a "
        "server's certificate for this machine alone, and one client's.",
        epilog="One certificate may serve several machines, if --host names all of "
        "them. A machine that comes later gets one of its own, with --server and "
        "--host; clients need nothing new. Certificates cannot be taken back: when a "
        "key has leaked, make all anew in another folder.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where they are kept")
    parser.add_argument(
        "--host",
        type=names,
        action="extend",
        default=[],
        metavar="NAME_OR_IP[,...]",
        help="what clients write after --rpc; localhost, 127.0.0.1 and ::1 are always "
        "in a server's certificate",
    )
    parser.add_argument(
        "--server",
        metavar="NAME",
        help="files of the server that --host is about: NAME.pem, NAME.key (server)",
    )
    parser.add_argument(
        "--client",
        type=names,
        action="extend",
        default=[],
        metavar="NAME[,...]",
        help="clients to make NAME.pem and NAME.key for, where they are not there "
        "(in a new folder: client)",
    )
    parser.add_argument(
        "--days",
        type=positive,
        default=825,
        metavar="N",
        help="how long certificates are good for (%(default)s); the CA is for ten "
        "years, and none outlives it",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Make what is missing, and say what is what."""
    # Read here: no other command needs `cryptography`, which takes its time.
    from longwire.transport.keyring import issue

    issued = issue(
        arguments.folder,
        arguments.host,
        arguments.client,
        server=arguments.server,
        days=arguments.days,
    )
    _print_files(issued)
    _print_places(issued)
    _print_commands(issued, arguments.host)
    return 0


def _print_files(issued: Issued) -> None:
    print(f"{issued.folder}:" if issued.made else f"{issued.folder}: nothing to make")
    width = max(map(len, [*issued.made, *issued.kept]))
    for name in issued.made:
        until = issued.until.get(name)
        notes = [f"until {until:%Y-%m-%d}"] if until else []
        if name == f"{issued.server}.pem":
            notes.append("for " + ", ".join(issued.hosts))
        print(f"  {name:{width}}  {', '.join(['made', *notes])}")
    for name in issued.kept:
        print(f"  {name:{width}}  kept")


def _print_places(issued: Issued) -> None:
    print()
    if name := issued.server:
        print(f"to the server: {name}.pem, {name}.key, ca.pem, token")
    for name in issued.clients:
        print(f"to {_article(name)}: ca.pem, {name}.pem, {name}.key, token")
    print("ca.key stays here: whoever has it can make certificates")


def _article(client: str) -> str:
    return "the client" if client == "client" else f"the client {client}"


def _print_commands(issued: Issued, hosts: list[str]) -> None:
    """The command lines that use the files, of the first client only."""
    local = f"{issued.server}.pem" in issued.made and not hosts
    host = hosts[0].strip("[]") if hosts else "127.0.0.1" if local else "HOST"

    def path(name: str) -> str:
        return str(issued.folder / name)

    if name := issued.server:
        serve = ["longwire", "serve", "-H", host]
        serve += ["--tls-cert", path(f"{name}.pem"), "--tls-key", path(f"{name}.key")]
        serve += ["--tls-client-ca", path("ca.pem"), "--token-file", path("token")]
        print(f"\n{shlex.join(serve)}")
    for name in issued.clients[:1]:
        rpc = f"[{host}]" if ":" in host else host
        run = ["longwire", "run", "-m", "MODEL", "--rpc", rpc]
        run += ["--tls-ca", path("ca.pem"), "--tls-cert", path(f"{name}.pem")]
        run += ["--tls-key", path(f"{name}.key"), "--token-file", path("token")]
        print(f"\n{shlex.join(run)}")
