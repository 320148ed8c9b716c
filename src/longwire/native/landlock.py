"""Landlock: which files a process may change, and whom it may reach.

Reading stays free. The kernel's names and numbers are in its `landlock.h`; each
ABI version adds some.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from longwire.native.kernel import Syscall, other_threads, syscall

__all__ = ["restrict"]

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""The same on every machine."""

_ASK_VERSION = 1
_PATH_BENEATH = 1
_ALL_THREADS = 1 << 3

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_REMOVE_DIR = 1 << 4
_REMOVE_FILE = 1 << 5
_MAKE_DIR = 1 << 7
_MAKE_FILE = 1 << 8
_MAKE_ALL = 0b111_1111 << 6
"""Devices, folders, files, sockets, pipes, symbolic links."""
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_DEVICE_CONTROL = 1 << 15

_CHANGES = _EXECUTE | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_ALL

_STEPS = (
    (2, _REFER, 0, 0, "renaming between folders"),
    (3, _TRUNCATE, 0, 0, "truncation"),
    (4, 0, 0b11, 0, "TCP ports to bind and to connect to"),
    (5, _DEVICE_CONTROL, 0, 0, "control of devices"),
    (6, 0, 0, 0b11, "abstract sockets and signals"),
)
"""ABI version, what it brings for files, network and reaching others, in words."""

_FOR_ALL = 8
"""Before this version threads that exist already are not covered."""

# No symbolic links: others who trust a cache folder might follow them.
_IN_FOLDERS = (
    _WRITE_FILE
    | _TRUNCATE
    | _MAKE_DIR
    | _MAKE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _REFER
)
_ON_DEVICES = _WRITE_FILE | _TRUNCATE | _DEVICE_CONTROL


def restrict(
    folders: Sequence[Path], devices: Iterable[Path], syscall: Syscall = syscall
) -> list[str]:
    """Let this thread, and those it starts, change only what is below `folders`.

    `devices` may be written, not made. Nothing may be executed, and nobody outside
    is reached by signal or abstract socket; loading libraries is reading. Returns
    what is not covered here, in words.

    Raises:
        OSError: the kernel has no Landlock, or it is turned off.
    """
    abi = syscall(_CREATE_RULESET, 0, 0, _ASK_VERSION)
    gaps, files, ports, scopes = [], _CHANGES, 0, 0
    for since, rights, port, scope, words in _STEPS:
        if abi >= since:
            files, ports, scopes = files | rights, ports | port, scopes | scope
        elif since > 2:  # version 1 forbids that kind of rename anyway
            gaps.append(f"{words} (has ABI {abi}, not {since})")
    ruleset = syscall(_CREATE_RULESET, struct.pack("=QQQ", files, ports, scopes), 24, 0)
    try:
        for path in folders:
            gaps += _allow(ruleset, path, files & _IN_FOLDERS, syscall)
        for path in devices:
            gaps += _allow(ruleset, path, files & _ON_DEVICES, syscall)
        syscall(_RESTRICT_SELF, ruleset, _ALL_THREADS if abi >= _FOR_ALL else 0)
    finally:
        os.close(ruleset)
    if abi < _FOR_ALL and (older := other_threads()):
        gaps.append(f"{older} older threads (has ABI {abi}, not {_FOR_ALL})")
    return gaps


def _allow(ruleset: int, path: Path, rights: int, syscall: Syscall) -> list[str]:
    """Add one rule; returns why not, in words."""
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not path.is_dir():
                rights &= _ON_DEVICES
            rule = struct.pack("=Qi", rights, target)
            syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        finally:
            os.close(target)
    except OSError as error:
        return [f"{path} cannot be allowed: {error.strerror}"]
    return []
