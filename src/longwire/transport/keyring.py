"""The folder that holds a team's credentials: which files, and how they get there.

    ca.pem      certificate of the CA; every machine has it
    ca.key      its key, which makes certificates and goes nowhere
    token       the secret that server and clients share
    NAME.pem    certificate of one server or client, NAME.key its key

No file is ever overwritten. What is in a certificate is `authority`'s.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from longwire.errors import UsageError
from longwire.transport.authority import (
    DAYS,
    Authority,
    Pair,
    Purpose,
    certificate_hosts,
)
from longwire.transport.newfiles import NewFile, publish

__all__ = ["CLIENT", "SERVER", "Issued", "issue"]

SERVER = "server"
"""Name of a server's files when nobody gave one."""

CLIENT = "client"
"""Name of a client's files when nobody gave one."""

_CA = "ca"
_TOKEN = "token"
_TOKEN_SIZE = 32
_MOST_DAYS = 3650

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What may stand in a file name and, by its length, in a certificate."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What one call of `issue` did."""

    folder: Path

    made: list[str]
    """Names of new files."""

    until: dict[str, datetime]
    """When each new certificate ends, by its file's name."""

    kept: list[str]
    """Certificates asked for that were there, and good."""

    server: str | None
    """Name of the server's pair, if one was asked for."""

    clients: list[str]
    """Names of the clients' pairs."""

    hosts: list[str]
    """Whom a new server certificate is for."""


def issue(
    folder: Path,
    hosts: Sequence[str] = (),
    clients: Sequence[str] = (),
    *,
    server: str | None = None,
    days: int = DAYS,
    now: datetime | None = None,
) -> Issued:
    """Make the credentials asked for in `folder`, and its CA and token if missing.

    `hosts` are what clients call the server whose files get the name `server`. A
    folder without a CA gets a server's and a client's pair in any case, and so does
    a call that asks for neither. All new files appear, or none.

    Raises:
        UsageError: a name is bad, a file is in the way, the folder's CA cannot
            issue, or the folder cannot be written.
    """
    now = now or datetime.now(timezone.utc)
    names = certificate_hosts(hosts)
    _check_request(hosts, clients, server, days)
    with _explained(folder):
        ca = _stored(folder, _CA, "bring it back, or begin in another folder")
        authority = _authority(folder, ca, now)
        owners = _owners(hosts, clients, server, is_new=ca is None)
        missing = [o for o in owners if not _is_kept(folder, o, authority, now)]
        pairs = {} if ca else {_CA: authority.pair}
        for name, purpose, _ in missing:
            subject = names if purpose is Purpose.SERVER else ()
            pairs[name] = authority.issue(name, purpose, now, days=days, hosts=subject)
        files = [file for item in pairs.items() for file in _pair_files(*item)]
        # Not exists(): a link to nowhere is in the way as well.
        if not os.path.lexists(folder / _TOKEN):
            files.append(_token_file())
        publish(folder, files)
    return Issued(
        folder,
        made=[file.name for file in files],
        until={f"{name}.pem": pair.until for name, pair in pairs.items()},
        kept=[f"{o.name}.pem" for o in owners if o not in missing],
        server=next((o.name for o in owners if o.purpose is Purpose.SERVER), None),
        clients=[o.name for o in owners if o.purpose is Purpose.CLIENT],
        hosts=names,
    )


class _Owner(NamedTuple):
    """Whoever a pair is asked for."""

    name: str
    purpose: Purpose

    is_new: bool
    """A pair that is there is in the way, rather than what was asked for."""


def _check_request(
    hosts: Sequence[str], clients: Sequence[str], server: str | None, days: int
) -> None:
    if not 1 <= days <= _MOST_DAYS:
        raise UsageError(f"{days} days: give 1 to {_MOST_DAYS}, the life of a CA")
    if server is not None and not hosts:
        raise UsageError(
            f"server {server!r} needs a host: what do clients write after --rpc?"
        )
    taken = {_CA, _TOKEN}
    for name in [server or SERVER, *clients]:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} cannot name a file and a certificate; use up to 64 "
                "letters, digits, dots, dashes and underscores"
            )
        # Some file systems do not tell upper and lower case apart.
        if name.lower() in taken:
            raise UsageError(f"the name {name!r} is taken; choose another one")
        taken.add(name.lower())


def _owners(
    hosts: Sequence[str], clients: Sequence[str], server: str | None, *, is_new: bool
) -> list[_Owner]:
    fill = is_new or not (hosts or clients)
    owners = [_Owner(client, Purpose.CLIENT, False) for client in clients]
    if fill and not clients:
        owners = [_Owner(CLIENT, Purpose.CLIENT, False)]
    if fill or hosts:
        owners.insert(0, _Owner(server or SERVER, Purpose.SERVER, bool(hosts)))
    return owners


def _authority(folder: Path, ca: Pair | None, now: datetime) -> Authority:
    if ca is None:
        return Authority.create(now)
    try:
        return Authority(ca, now)
    except ValueError as error:
        raise UsageError(
            f"{folder / _CA}.pem cannot issue: {error}; begin in another folder"
        ) from error


def _is_kept(folder: Path, owner: _Owner, authority: Authority, now: datetime) -> bool:
    """Whether a good pair is there; what is there and no good raises."""
    if owner.is_new:
        _refuse_existing(folder, owner.name)
        return False
    remedy = f"remove {owner.name}.pem and {owner.name}.key for new ones"
    pair = _stored(folder, owner.name, remedy)
    if pair is None:
        return False
    try:
        authority.check(pair, owner.purpose, now)
    except ValueError as error:
        raise UsageError(f"{folder / owner.name}.pem: {error}; {remedy}") from error
    return True


def _refuse_existing(folder: Path, name: str) -> None:
    for path in (folder / f"{name}.pem", folder / f"{name}.key"):
        if os.path.lexists(path):
            raise UsageError(
                f"{path} is there already, and never overwritten; choose another "
                f"name with --server, or remove {name}.pem and {name}.key (a copy "
                "that a server has stays good)"
            )


def _stored(folder: Path, name: str, remedy: str) -> Pair | None:
    """The pair of that name, or None if neither file is there."""
    paths = (folder / f"{name}.pem", folder / f"{name}.key")
    missing = [path for path in paths if not os.path.lexists(path)]
    if len(missing) == len(paths):
        return None
    if missing:
        raise UsageError(f"{missing[0]} is missing beside its other half; {remedy}")
    try:
        return Pair.load(*(path.read_bytes() for path in paths))
    except ValueError as error:
        raise UsageError(f"{paths[0]}: {error}; {remedy}") from error


def _pair_files(name: str, pair: Pair) -> list[NewFile]:
    return [
        NewFile(f"{name}.key", pair.key_pem(), is_secret=True),
        NewFile(f"{name}.pem", pair.certificate_pem(), is_secret=False),
    ]


def _token_file() -> NewFile:
    text = secrets.token_urlsafe(_TOKEN_SIZE) + "\n"
    return NewFile(_TOKEN, text.encode("ascii"), is_secret=True)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what the system refuses into a `UsageError`."""
    try:
        yield
    except FileExistsError as error:
        raise UsageError(
            f"{error.filename2 or error.filename} came into being meanwhile; is "
            "another keygen at work there?"
        ) from error
    except OSError as error:
        raise UsageError(
            f"folder {folder}: {error.strerror or error} "
            f"({error.filename or folder}); choose a folder that you can read and "
            "write, or that can be made"
        ) from error
