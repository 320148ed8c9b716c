"""The digests of a model file's tensors, made once and kept beside the file.

An index is true of one state of one file: its name, size and time of change. It is
written whole or not at all, and carries a digest of itself, so that what is read
back is what was written.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3
from platformdirs import user_cache_path

from longwire.errors import UsageError
from longwire.models.gguf import GgufTensor, gguf_tensors
from longwire.native.engine import NativeEngine
from longwire.wire.constants import HASH_THRESHOLD
from longwire.wire.fnv import fnv1a_64

__all__ = ["IndexedTensor", "ModelIndex", "index_places", "load_index", "read_index"]

_log = logging.getLogger("longwire.models")

_FORMAT = 1
"""Counts up when what is written changes; other numbers are made anew."""

_SUFFIX = ".longwire.json"

_HEAD, _SEAM, _TAIL = b'{"blake3":"', b'","index":', b"}\n"
"""Around the digest of the index, and the index."""

_complaints: set[str] = set()


class IndexedTensor(NamedTuple):
    """One tensor of a model file, and how clients may ask for its data."""

    name: str
    offset: int
    """From the start of the file."""
    size: int
    """Bytes."""
    digest: bytes
    """BLAKE3 of the data, 32 bytes."""
    fnv: int | None
    """FNV-1a 64, where the data is over `HASH_THRESHOLD` and it was asked for."""


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """All tensors of one state of one model file, in the file's order."""

    path: Path
    size: int
    mtime_ns: int
    tensors: tuple[IndexedTensor, ...]

    @property
    def has_fnv(self) -> bool:
        """Whether the C++ clients' question can be answered from it."""
        return all(t.fnv is not None for t in self.tensors if t.size > HASH_THRESHOLD)

    @property
    def state(self) -> tuple[int, int]:
        """Size and time of change: what tells one state of a file from another."""
        return self.size, self.mtime_ns

    def is_of(self, found: os.stat_result) -> bool:
        """Whether a file in this state is the one indexed."""
        return self.state == (found.st_size, found.st_mtime_ns)


def load_index(
    engine: NativeEngine, path: Path, fnv: bool, threads: int | None = None
) -> ModelIndex:
    """The index of a GGUF file: read where it is kept, else made and kept.

    `fnv`: with the hashes that C++ clients ask by, too, which take some two seconds
    per gigabyte. `threads` is all processors without a number.

    Raises:
        UsageError: the file cannot be read, is no GGUF file, or keeps changing.
    """
    known = read_index(path)
    if known is not None and (known.has_fnv or not fnv):
        return known
    index = _make(engine, path, fnv, threads, known)
    _keep(index)
    return index


def read_index(path: Path) -> ModelIndex | None:
    """The kept index of a model file; None if there is none of the file as it is."""
    try:
        found = path.stat()
    except OSError:
        return None
    for place in index_places(path):
        try:
            index = _decode(path, place.read_bytes())
        except (OSError, ValueError, TypeError, LookupError):
            # Not there, or damaged; either way another one is made.
            continue
        if index is not None and index.is_of(found):
            return index
    return None


def index_places(path: Path) -> list[Path]:
    """Where the index of a model file may be kept, the best place first."""
    whole = blake3(os.fsencode(path.resolve())).hexdigest()[:32]
    elsewhere = user_cache_path("longwire", appauthor=False) / "indexes"
    return [path.with_name(path.name + _SUFFIX), elsewhere / (whole + _SUFFIX)]


# Making one.


def _make(
    engine: NativeEngine,
    path: Path,
    fnv: bool,
    threads: int | None,
    known: ModelIndex | None,
) -> ModelIndex:
    tensors = gguf_tensors(engine, path)
    digests = {t.name: t.digest for t in known.tensors} if known else {}
    try:
        with open(path, "rb") as file:
            before = os.fstat(file.fileno())
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            found = _hash(data, tensors, fnv, threads, digests)
            after = os.stat(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    index = ModelIndex(path, before.st_size, before.st_mtime_ns, found)
    if not index.is_of(after) or before.st_ino != after.st_ino:
        raise UsageError(f"{path} changed while it was read")
    return index


def _hash(
    data: memoryview,
    tensors: Iterable[GgufTensor],
    fnv: bool,
    threads: int | None,
    digests: dict[str, bytes],
) -> tuple[IndexedTensor, ...]:
    """Hash all tensors, several at a time: both hashes run without the GIL."""

    def hashed(tensor: GgufTensor) -> IndexedTensor:
        part = data[tensor.offset : tensor.offset + tensor.size]
        if len(part) != tensor.size:
            raise ValueError("it became shorter")
        digest = digests.get(tensor.name) or blake3(part).digest()
        asked = fnv and tensor.size > HASH_THRESHOLD
        return IndexedTensor(*tensor, digest, fnv1a_64(part) if asked else None)

    with ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        return tuple(pool.map(hashed, tensors))


# Keeping it.


def _keep(index: ModelIndex) -> None:
    """Write an index beside its file, or else into the user's cache folder."""
    text = _encode(index)
    beside, elsewhere = index_places(index.path)
    try:
        _write(beside, text)
        return
    except OSError as error:
        _complain(f"{beside.parent}: no place for indexes ({error.strerror or error})")
    try:
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        _write(elsewhere, text)
    except OSError as error:
        _complain(f"{elsewhere.parent}: nor here ({error.strerror or error})")


def _complain(complaint: str) -> None:
    if complaint not in _complaints:
        _complaints.add(complaint)
        _log.warning("%s", complaint)


def _write(target: Path, data: bytes) -> None:
    temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _encode(index: ModelIndex) -> bytes:
    body = json.dumps(
        {
            "format": _FORMAT,
            "name": index.path.name,
            "size": index.size,
            "mtime_ns": index.mtime_ns,
            "tensors": [
                [t.name, t.offset, t.size, t.digest.hex(), t.fnv] for t in index.tensors
            ],
        },
        separators=(",", ":"),
    ).encode()
    return b"".join([_HEAD, blake3(body).hexdigest().encode(), _SEAM, body, _TAIL])


def _decode(path: Path, data: bytes) -> ModelIndex | None:
    """The index in a file's bytes; None if it is not one of `path`, or damaged.

    Raises:
        ValueError, TypeError, LookupError: it is damaged in a way of its own.
    """
    start = len(_HEAD) + 64 + len(_SEAM)
    body = data[start : -len(_TAIL)]
    digest = data[len(_HEAD) : len(_HEAD) + 64]
    if digest != blake3(body).hexdigest().encode():
        return None
    fields: dict[str, Any] = json.loads(body)
    if fields["format"] != _FORMAT or fields["name"] != path.name:
        return None
    tensors = tuple(
        IndexedTensor(name, offset, size, bytes.fromhex(digest), fnv)
        for name, offset, size, digest, fnv in fields["tensors"]
    )
    # Whoever could write the index could make up its digest as well.
    if any(
        t.offset < 0 or not 0 <= t.size <= fields["size"] - t.offset for t in tensors
    ):
        return None
    return ModelIndex(path, fields["size"], fields["mtime_ns"], tensors)
