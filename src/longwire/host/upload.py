"""Where the data of a load comes from: the model file, mapped once more.

A model may be cut into several files. What this machine knows of a file's digests is
kept beside it (`models/index.py`) and made only where a server may be asked by them.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from longwire.client.connection import Connection
from longwire.client.upload import Upload
from longwire.client.writes import Source, keeps_data
from longwire.errors import UsageError
from longwire.models.gguf import GgufTensor, gguf_tensors
from longwire.models.index import IndexedTensor, load_index, read_index
from longwire.native.engine import NativeEngine
from longwire.wire.constants import HASH_THRESHOLD

__all__ = ["split_files", "model_upload"]

_log = logging.getLogger("longwire.host")

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def split_files(path: Path) -> list[Path]:
    """The files of a model; `path` is the only one, or the first of several."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    prefix, _, count = match.groups()
    numbers = range(1, int(count) + 1)
    return [path.with_name(f"{prefix}-{n:05}-of-{count}.gguf") for n in numbers]


def model_upload(
    engine: NativeEngine, path: Path, connections: Sequence[Connection]
) -> Upload:
    """A load of this model over these connections, ready to start.

    Makes what is missing of the files' indexes, if a server may be asked by them.
    """
    sources: dict[bytes, Source] = {}
    if connections:
        try:
            for file in split_files(path):
                sources |= _sources(engine, file, connections)
        except UsageError as error:
            # Whether it is a model after all is for llama.cpp to say.
            _log.info("%s; it is loaded without digests", error)
    return Upload(sources, connections)


def _sources(
    engine: NativeEngine, file: Path, connections: Sequence[Connection]
) -> Mapping[bytes, Source]:
    """The tensors of one file by name."""
    data = _mapped(file)
    by_hash = any(connection.server is None for connection in connections)
    if not any(map(keeps_data, connections)):
        places = gguf_tensors(engine, file)
        if not by_hash or all(place.size <= HASH_THRESHOLD for place in places):
            return {p.name.encode(): Source(_part(data, p)) for p in places}
    if read_index(file) is None:
        _log.info("making the index of %s, which takes a while and is done once", file)
    return {
        t.name.encode(): Source(_part(data, t), t.digest, t.fnv)
        for t in load_index(engine, file, fnv=by_hash).tensors
    }


def _part(data: memoryview, tensor: GgufTensor | IndexedTensor) -> memoryview:
    return data[tensor.offset : tensor.offset + tensor.size]


def _mapped(file: Path) -> memoryview:
    """The bytes of a file; mapped for as long as any slice of them is there.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with file.open("rb") as opened:
            mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    return memoryview(mapping)
