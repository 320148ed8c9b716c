"""Marks on files of the cache: what is in this one was checked since the last boot.

A crash of the system can leave a file that was written whole with other content, and
then its mark is of an earlier boot. Whoever changes a file later changes its time.
Where the file system has no attributes to put marks in, each use checks anew.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

__all__ = ["age", "put_stamp", "stamp", "touch"]

_NAME = "user.longwire.checked"

_AGE_NS = 10_000_000_000
"""File systems count time in ticks: a file that seems older than its mark cannot be
changed within the same tick."""


def age(path: Path) -> None:
    """Make a file that was just written look older than whatever happens to it next.

    Raises:
        OSError: it is not ours.
    """
    now = time.time_ns()
    os.utime(path, ns=(now, now - _AGE_NS))


def touch(path: Path) -> None:
    """Note a use, and leave the time of the last change.

    Raises:
        OSError: the file is gone, or not ours.
    """
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def put_stamp(fd: int, digest: str) -> None:
    """Mark an open file: its content has that digest. Nothing happens if it cannot."""
    found = os.fstat(fd)
    if time.time_ns() - found.st_mtime_ns < _AGE_NS // 2 or not _boot():
        return
    # No room for attributes, or no right to set them.
    with suppress(OSError, AttributeError):
        os.setxattr(fd, _NAME, _mark(found, digest))


def stamp(fd: int) -> str | None:
    """The digest of an open file's content; None if it has to be computed."""
    try:
        mark = os.getxattr(fd, _NAME)
    except (OSError, AttributeError):
        return None
    digest = mark.rpartition(b" ")[2].decode("ascii", "replace")
    return digest if _boot() and mark == _mark(os.fstat(fd), digest) else None


def _mark(found: os.stat_result, digest: str) -> bytes:
    return f"{_boot()} {found.st_size} {found.st_mtime_ns} {digest}".encode()


@lru_cache(maxsize=1)
def _boot() -> str:
    """What is different after each boot; empty where nobody says."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
