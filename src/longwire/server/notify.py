"""What a service manager is told: systemd's readiness protocol (`sd_notify(3)`)."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["notify"]


def notify(state: str) -> None:
    """Send `READY=1` or the like, if somebody started us that wants to know."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    # A leading @ stands for the zero byte of an abstract address.
    address = "\0" + path[1:] if path[0] == "@" else path
    # Who does not listen misses the news; serving is more important.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        sock.setblocking(False)
        sock.sendto(state.encode(), address)
