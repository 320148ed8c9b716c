"""Binding an address, and what has to be so before others can reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections.abc import Iterator

from longwire.errors import UsageError

__all__ = ["binding", "check_exposure"]

_log = logging.getLogger("longwire.cli")


@contextlib.contextmanager
def binding(host: str, port: int) -> Iterator[None]:
    """Turn what fails inside, in the system, into words.

    Raises:
        UsageError: the address cannot be bound, and why.
    """
    if not 0 <= port <= 65535:
        raise UsageError(f"port {port} is not between 0 and 65535")
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot bind {host}:{port}: {error.strerror or error}"
        ) from error


def check_exposure(host: str, *, guarded: bool, insecure: bool, remedy: str) -> None:
    """Refuse an address that others can reach, unless something keeps them out.

    Raises:
        UsageError: nothing does, and `insecure` does not say that this is wanted.
    """
    if guarded or _is_loopback(host):
        return
    danger = (
        f"{host} is not a loopback address: everybody who can reach it could use "
        "the devices behind it and read what is computed on them"
    )
    if not insecure:
        raise UsageError(f"{danger}. {remedy}")
    _log.warning("%s", danger)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
