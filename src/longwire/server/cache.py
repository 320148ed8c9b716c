"""The weight file cache: what a client has sent once need not travel again.

One file per set of bytes. Those that C++ clients ask for are named by their FNV-1a
64, in a folder that C++ servers can share (PROTOCOL.md, "File cache"); a sidecar
holds the length and BLAKE3 of its file, so that a hit is what was stored and not
what a crash has left of it. Below `blake3/` are those that LX clients ask for, named
by their BLAKE3; what is stored under both names is stored once.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from longwire.errors import UsageError
from longwire.native.mapping import map_part
from longwire.server.stamps import age, put_stamp, stamp, touch
from longwire.wire.fnv import fnv1a_64

__all__ = ["Kept", "WeightCache", "default_cache_dir"]

_log = logging.getLogger(__name__)

_DIGESTS = "blake3"
"""The folder of those named by BLAKE3."""

_WEIGHTS = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")
_TEMPORARY = re.compile(r"([0-9a-f]{16}(\.blake3)?|[0-9a-f]{64})\.[0-9a-f]{16}\.tmp")

_UNNAMED = "0" * 64
"""In the place of a digest that is not known yet."""

_ABANDONED_S = 3600
"""A temporary file this old has lost its writer: no tensor takes an hour."""

_TIDY_SHARE = 64
"""The folder is looked through once per this share of the limit that is stored: a
look costs a call per file, and small tensors are many."""

_PARALLEL = 1 << 20
"""Bytes that several threads hash faster than one."""


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


@dataclass(frozen=True, slots=True)
class Kept:
    """Data that a cache has, checked and mapped. The mapping lives as long as its
    views, even when the file is replaced or evicted."""

    data: memoryview
    digest: str
    """BLAKE3 of the data, computed or from a stamp."""
    _path: Path
    _state: tuple[int, int, int]

    @property
    def current(self) -> bool:
        """Whether the data still is what was asked for: files here never change."""
        return True

    def private(self) -> memoryview | None:
        """A mapping of its own to write to; None when the file is gone."""
        try:
            with open(self._path, "rb") as file:
                if _state(file.fileno()) != self._state:
                    return None
                return map_part(file.fileno(), 0, len(self.data), writable=True)
        except OSError:
            # Evicted since, or no mapping to be had; the data can be copied.
            return None


class WeightCache:
    """One folder of weights, used by any number of processes at once.

    I/O errors do not leave this class: each kind is logged once and counts as "not
    stored" or "not there", since a server can do without its cache.
    """

    def __init__(self, directory: Path, limit: int | None = None) -> None:
        """Use `directory`, made when needed, for at most `limit` bytes of weights,
        or a little more while several sessions store."""
        self.directory = directory
        self.limit = limit
        self._digests = directory / _DIGESTS
        self._complaints: set[str] = set()
        self._unseen: int | None = None
        """Bytes stored since the folder was last looked through."""

    def store(self, data: memoryview, by_hash: bool = True) -> None:
        """Keep contiguous bytes for LX clients and (`by_hash`) for C++ clients."""
        if self.limit is not None and data.nbytes > self.limit:
            self._complain(f"no room for a tensor over the limit of {self.limit} bytes")
        elif data.nbytes:
            with self._tolerance("store"):
                self._digests.mkdir(parents=True, exist_ok=True)
                self._store(data, by_hash)

    def _store(self, data: memoryview, by_hash: bool) -> None:
        temporary = _temporary(self._digests / _UNNAMED)
        try:
            temporary.write_bytes(data)
            age(temporary)
            with open(temporary, "rb") as file:
                # Names are of what is in the file: `data` may be changed meanwhile.
                written = map_part(file.fileno(), 0, data.nbytes, writable=False)
                digest = _digest(written)
                put_stamp(file.fileno(), digest)
            path = self._digests / digest
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if by_hash:
            path = self.directory / f"{fnv1a_64(written):016x}"
            # In this order no reader has to hash a new file the slow way.
            self._write(_sidecar(path), _record(data.nbytes, digest))
            self._link(self._digests / digest, path, written)
        self._stored(path, data.nbytes)

    def find(self, key: int, size_limit: int) -> Kept | None:
        """The bytes whose FNV-1a 64 is `key`; None for nothing stored, and for more
        than `size_limit` bytes."""
        path = self.directory / f"{key:016x}"
        with self._tolerance("read"), suppress(FileNotFoundError):
            if path.stat().st_size > size_limit:
                return None
            kept = _open(path)
            if self._is_whole(path, kept):
                return self._used(path, kept)
            self._damaged(path)
        return None

    def find_digest(self, digest: bytes) -> Kept | None:
        """The bytes with that BLAKE3; None for nothing stored. Any thread may ask."""
        path = self._digests / digest.hex()
        with self._tolerance("read"), suppress(FileNotFoundError):
            kept = _open(path)
            if kept.data.nbytes and kept.digest == path.name:
                return self._used(path, kept)
            self._damaged(path)
        return None

    def _used(self, path: Path, kept: Kept) -> Kept:
        with self._tolerance("mark a use"), suppress(FileNotFoundError):
            touch(path)
        return kept

    def _is_whole(self, path: Path, kept: Kept) -> bool:
        if not kept.data.nbytes:
            return False
        try:
            recorded = _sidecar(path).read_bytes()
        except FileNotFoundError:
            return self._adopt(path, kept)
        return recorded == _record(kept.data.nbytes, kept.digest)

    def _adopt(self, path: Path, kept: Kept) -> bool:
        """Give a C++ server's file a sidecar, if its content earns its name."""
        if fnv1a_64(kept.data) != int(path.name, 16):
            return False
        with self._tolerance("store"):
            self._write(_sidecar(path), _record(kept.data.nbytes, kept.digest))
        return True

    def _write(self, target: Path, data: bytes | memoryview) -> None:
        temporary = _temporary(target)
        try:
            with open(temporary, "xb") as file:
                file.write(data)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _link(self, path: Path, other: Path, data: memoryview) -> None:
        """Have a file under another name too, as a copy where there are no links."""
        temporary = _temporary(other)
        try:
            os.link(path, temporary)
        except OSError:
            self._write(other, data)
            return
        try:
            os.replace(temporary, other)
        finally:
            # Renaming a name of a file to another of its names does nothing.
            temporary.unlink(missing_ok=True)

    def _damaged(self, path: Path) -> None:
        _remove(path)
        _log.warning("%s: %s is damaged, removed", path.parent, path.name)

    # Eviction.

    def _stored(self, path: Path, size: int) -> None:
        if self._unseen is None:
            self._tidy(path)
            self._unseen = 0
            return
        self._unseen += size
        if self.limit is not None and self._unseen >= self.limit // _TIDY_SHARE:
            self._tidy(path)
            self._unseen = 0

    def _tidy(self, newest: Path) -> None:
        """Remove abandoned temporaries, and what was not used for longest."""
        kept = newest.stat().st_ino
        abandoned_ns = time.time_ns() - _ABANDONED_S * 1_000_000_000
        files: dict[int, _File] = {}
        for entry, stat in self._scan():
            if _WEIGHTS.fullmatch(entry.name):
                file = files.setdefault(
                    stat.st_ino, _File(_last_use(stat), entry.name, stat.st_size)
                )
                file.paths.append(Path(entry.path))
            elif _TEMPORARY.fullmatch(entry.name) and stat.st_mtime_ns < abandoned_ns:
                with self._tolerance("evict"):
                    Path(entry.path).unlink(missing_ok=True)
        if self.limit is None:
            return
        excess = sum(file.size for file in files.values()) - self.limit
        for inode, file in sorted(files.items(), key=lambda item: item[1].order):
            if excess > 0 and inode != kept:
                with self._tolerance("evict"):
                    for path in file.paths:
                        _remove(path)
                    excess -= file.size

    def _scan(self) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        for folder in (self.directory, self._digests):
            with os.scandir(folder) as entries:
                for entry in entries:
                    # Another process may evict it after it was listed.
                    with suppress(FileNotFoundError):
                        yield entry, entry.stat()

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


@dataclass(slots=True)
class _File:
    """One set of bytes, under all its names."""

    used_ns: int
    name: str
    size: int
    paths: list[Path] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, str]:
        """What goes first comes first."""
        return self.used_ns, self.name


def _digest(data: memoryview) -> str:
    threads = blake3.AUTO if data.nbytes > _PARALLEL else 1
    return blake3(data, max_threads=threads).hexdigest()


def _record(size: int, digest: str) -> bytes:
    """The content of a sidecar: length and BLAKE3."""
    return f"{size} {digest}\n".encode()


def _sidecar(path: Path) -> Path:
    return path.with_name(f"{path.name}.blake3")


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sidecar(path).unlink(missing_ok=True)


def _last_use(found: os.stat_result) -> int:
    return max(found.st_atime_ns, found.st_mtime_ns)


def _state(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size


def _open(path: Path) -> Kept:
    # Our own writers replace files. A C++ server that cut this one short while it is
    # read would end this process with SIGBUS: one session, never the supervisor.
    with open(path, "rb") as file:
        fd = file.fileno()
        state = _state(fd)
        size = state[2]
        if not size:
            # There are no empty mappings.
            return Kept(memoryview(b""), "", path, state)
        digest = stamp(fd)
        if digest is None:
            # In a mapping that goes: of the one that stays no page is in memory yet.
            digest = _digest(map_part(fd, 0, size, writable=False))
            put_stamp(fd, digest)
        return Kept(map_part(fd, 0, size, writable=False), digest, path, state)
