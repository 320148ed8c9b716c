"""The weight file cache: what a client has sent once need not travel again.

One file per set of bytes, named by their FNV-1a 64, in a folder that C++ servers
can share (PROTOCOL.md, "File cache"). A sidecar holds the length and BLAKE3 of
its file, so that a hit is what was stored and not what a crash has left of it.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from longwire.errors import UsageError
from longwire.wire.fnv import fnv1a_64

__all__ = ["WeightCache", "default_cache_dir"]

_log = logging.getLogger(__name__)

_WEIGHTS = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = re.compile(r"[0-9a-f]{16}(\.blake3)?\.[0-9a-f]{16}\.tmp")

_ABANDONED_S = 3600
"""A temporary file this old has lost its writer: no tensor takes an hour."""


def default_cache_dir() -> Path:
    """The folder that the C++ server keeps its weights in.

    Raises:
        UsageError: neither the environment nor the system knows a home folder.
    """
    if own := os.environ.get("LLAMA_CACHE"):
        return Path(own, "rpc")
    return _user_cache_dir() / "llama.cpp" / "rpc"


def _user_cache_dir() -> Path:
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    if sys.platform != "darwin" and (named := os.environ.get(variable)):
        return Path(named)
    try:
        home = Path.home()
    except RuntimeError:
        raise UsageError("no home folder for the cache; set LLAMA_CACHE") from None
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return home / (r"AppData\Local" if sys.platform == "win32" else ".cache")


class WeightCache:
    """One folder of weights, used by any number of processes at once.

    I/O errors do not leave this class: each kind is logged once and counts as "not
    stored" or "not there", since a server can do without its cache.
    """

    def __init__(self, directory: Path, limit: int | None = None) -> None:
        """Use `directory`, made when needed, for at most `limit` bytes of weights."""
        self.directory = directory
        self.limit = limit
        self._complaints: set[str] = set()

    def store(self, data: memoryview) -> str:
        """Keep contiguous bytes, and return the file name that their hash gives."""
        name = f"{fnv1a_64(data):016x}"
        if self.limit is not None and data.nbytes > self.limit:
            self._complain(f"no room for a tensor over the limit of {self.limit} bytes")
        elif data.nbytes:
            with self._tolerance("store"):
                self.directory.mkdir(parents=True, exist_ok=True)
                # In this order no reader has to hash a new file the slow way.
                self._write(f"{name}.blake3", _record(data))
                self._write(name, data)
                self._tidy(kept=name)
        return name

    def fetch(self, key: int, size_limit: int) -> memoryview | None:
        """The bytes whose FNV-1a 64 is `key`: checked, mapped, read-only.

        None for nothing stored, and for more than `size_limit` bytes. The mapping
        lives as long as the view, even when the file is replaced or evicted.
        """
        name = f"{key:016x}"
        with self._tolerance("read"), suppress(FileNotFoundError):
            view = _map(self.directory / name)
            if view.nbytes > size_limit:
                return None
            if not self._is_whole(name, view):
                self._remove(name)
                _log.warning("%s: %s is damaged, removed", self.directory, name)
                return None
            with self._tolerance("mark a use"), suppress(FileNotFoundError):
                os.utime(self.directory / name)
            return view
        return None

    def _is_whole(self, name: str, view: memoryview) -> bool:
        if not view.nbytes:
            return False
        try:
            recorded = (self.directory / f"{name}.blake3").read_bytes()
        except FileNotFoundError:
            return self._adopt(name, view)
        return recorded == _record(view)

    def _adopt(self, name: str, view: memoryview) -> bool:
        """Give a C++ server's file a sidecar, if its content earns its name."""
        if fnv1a_64(view) != int(name, 16):
            return False
        with self._tolerance("store"):
            self._write(f"{name}.blake3", _record(view))
        return True

    def _write(self, name: str, data: bytes | memoryview) -> None:
        target = self.directory / name
        temporary = self.directory / f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _remove(self, name: str) -> None:
        (self.directory / name).unlink(missing_ok=True)
        (self.directory / f"{name}.blake3").unlink(missing_ok=True)

    def _tidy(self, kept: str) -> None:
        """Remove abandoned temporaries, and what was not used for longest."""
        files = self._scan()
        abandoned_ns = time.time_ns() - _ABANDONED_S * 1_000_000_000
        for file in files:
            if _TEMPORARY.fullmatch(file.name) and file.used_ns < abandoned_ns:
                with self._tolerance("evict"):
                    (self.directory / file.name).unlink(missing_ok=True)
        if self.limit is None:
            return
        weights = sorted(file for file in files if _WEIGHTS.fullmatch(file.name))
        excess = sum(file.size for file in weights) - self.limit
        for file in weights:
            if excess > 0 and file.name != kept:
                with self._tolerance("evict"):
                    self._remove(file.name)
                    excess -= file.size

    def _scan(self) -> list[_File]:
        files = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                try:
                    stat = entry.stat()
                except FileNotFoundError:
                    continue  # another process evicted it after it was listed
                files.append(_File(stat.st_mtime_ns, entry.name, stat.st_size))
        return files

    @contextmanager
    def _tolerance(self, action: str) -> Iterator[None]:
        """Go on after an I/O error."""
        try:
            yield
        except OSError as error:
            self._complain(f"cannot {action}: {error.strerror or error}")

    def _complain(self, complaint: str) -> None:
        if complaint not in self._complaints:
            self._complaints.add(complaint)
            _log.warning("%s: %s", self.directory, complaint)


class _File(NamedTuple):
    """What eviction sorts by comes first."""

    used_ns: int
    name: str
    size: int


def _record(data: memoryview) -> bytes:
    """The content of a sidecar: length and BLAKE3."""
    digest = blake3(data, max_threads=blake3.AUTO).hexdigest()
    return f"{data.nbytes} {digest}\n".encode()


def _map(path: Path) -> memoryview:
    # Our own writers replace files. A C++ server that cut this one short while it is
    # read would end this process with SIGBUS: one session, never the supervisor.
    with open(path, "rb") as file:
        try:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:
            return memoryview(b"")  # there are no empty mappings
