"""Data by digest: what this server has on file, of its own or of earlier clients.

Own model files are known by their indexes, which a process of its own makes
(`indexer`); what clients have sent is in the weight cache. Paths come from the
server's options and folders alone: a client names digests, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from longwire.models.index import IndexedTensor, ModelIndex, read_index
from longwire.models.places import model_files
from longwire.native.mapping import map_part
from longwire.server.cache import WeightCache

__all__ = ["Data", "DataStore"]

_log = logging.getLogger("longwire.session")

_MOST_PINS = 1 << 15
"""Digests that one session may have at hand: as many as one question may name."""

_CHECKERS = 8
"""Threads that check files of the cache: several digests at a time."""


class Data(Protocol):
    """The data of one tensor, on file here."""

    @property
    def data(self) -> memoryview:
        """All of it, mapped and read-only, for as long as the view is kept."""

    @property
    def current(self) -> bool:
        """Whether it still is what was asked for."""

    def private(self) -> memoryview | None:
        """A mapping of its own to write to; None if there is none to be had."""


class DataStore:
    """What one session may take from files. `close` it when the client has left."""

    def __init__(self, folders: Sequence[str], cache: WeightCache | None) -> None:
        """Look for model files below `folders`, then into `cache`."""
        self._models = _Models(folders)
        self._cache = cache
        self._pinned: dict[bytes, Data] = {}
        self.keeps = bool(folders) or cache is not None
        """Whether a question may ever be answered with yes."""

    def pin(self, digests: Sequence[bytes]) -> list[bool]:
        """Whether each digest's data is here; what is stays at hand until `close`."""
        self._models.refresh()
        wanted = [d for d in dict.fromkeys(digests) if d not in self._pinned]
        wanted = wanted[: max(0, _MOST_PINS - len(self._pinned))]
        missing = []
        for digest in wanted:
            part = self._models.by_digest(digest)
            if part is not None:
                self._pinned[digest] = part
            else:
                missing.append(digest)
        if self._cache is not None and missing:
            with ThreadPoolExecutor(min(_CHECKERS, os.cpu_count() or 1)) as pool:
                kept = pool.map(self._cache.find_digest, missing)
                for digest, data in zip(missing, kept, strict=True):
                    if data is not None:
                        self._pinned[digest] = data
        return [digest in self._pinned for digest in digests]

    def pinned(self, digest: bytes) -> Data | None:
        """The data of a digest that `pin` has said yes to."""
        return self._pinned.get(digest)

    def find(self, key: int, size_limit: int) -> Data | None:
        """The data whose FNV-1a 64 is `key`, of at most `size_limit` bytes."""
        part = self._models.by_fnv(key)
        if part is not None and len(part.data) <= size_limit:
            return part
        return self._cache.find(key, size_limit) if self._cache else None

    def close(self) -> None:
        """Let everything go; idempotent."""
        self._pinned.clear()
        self._models.close()


class _ModelFile:
    """An open model file that is as its index says."""

    def __init__(self, index: ModelIndex) -> None:
        """Raises: OSError: it cannot be read, or has changed."""
        self.index = index
        self.fd = os.open(index.path.resolve(), os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not self.current:
                raise OSError(None, "changed since it was indexed")
            self.data = map_part(self.fd, 0, index.size, writable=False)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def current(self) -> bool:
        return self.index.is_of(os.fstat(self.fd))

    def close(self) -> None:
        os.close(self.fd)


class _ModelPart(NamedTuple):
    """One tensor in a model file."""

    file: _ModelFile
    tensor: IndexedTensor

    @property
    def data(self) -> memoryview:
        _, offset, size, *_ = self.tensor
        return self.file.data[offset : offset + size]

    @property
    def current(self) -> bool:
        return self.file.current

    def private(self) -> memoryview | None:
        _, offset, size, *_ = self.tensor
        try:
            return map_part(self.file.fd, offset, size, writable=True)
        except OSError:
            # No mapping to be had; the data can be copied.
            return None


_Place = tuple[ModelIndex, IndexedTensor]


class _Models:
    """The indexed model files below some folders."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._indexes: dict[Path, ModelIndex] | None = None
        self._by_digest: dict[bytes, _Place] = {}
        self._by_fnv: dict[int, _Place] = {}
        self._open: dict[Path, _ModelFile] = {}
        self._complaints: set[Path] = set()

    def refresh(self) -> None:
        """See the files and indexes that are there now."""
        found = map(self._index, model_files(self._folders))
        self._indexes = {index.path: index for index in found if index is not None}
        # Of equal data the first is taken, so that files are as few as can be.
        self._by_digest = {t.digest: (i, t) for i, t in self._tensors()}
        self._by_fnv = {t.fnv: (i, t) for i, t in self._tensors() if t.fnv is not None}

    def by_digest(self, digest: bytes) -> _ModelPart | None:
        return self._part(self._by_digest.get(digest))

    def by_fnv(self, key: int) -> _ModelPart | None:
        if self._indexes is None:
            self.refresh()
        return self._part(self._by_fnv.get(key))

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _index(self, path: Path) -> ModelIndex | None:
        known = (self._indexes or {}).get(path)
        with contextlib.suppress(OSError):
            # One without hashes may have got them since.
            if known is not None and known.has_fnv and known.is_of(path.stat()):
                return known
        return read_index(path)

    def _tensors(self) -> Iterable[_Place]:
        for index in reversed((self._indexes or {}).values()):
            for tensor in index.tensors:
                if tensor.size:
                    yield index, tensor

    def _part(self, place: _Place | None) -> _ModelPart | None:
        if place is None:
            return None
        index, tensor = place
        file = self._open.get(index.path)
        if file is not None and file.index.state != index.state:
            # Another file has its name now; what is pinned is still the old one's.
            return None
        try:
            if file is None:
                file = self._open[index.path] = _ModelFile(index)
            return _ModelPart(file, tensor) if file.current else None
        except OSError as error:
            if index.path not in self._complaints:
                self._complaints.add(index.path)
                _log.warning("%s: %s", index.path, error.strerror or error)
            return None
