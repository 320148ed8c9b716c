"""What a GGUF file holds; its tensors are checked against the file they are in."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from longwire.errors import CallFailed, UsageError
from longwire.native.engine import NativeEngine
from longwire.native.gguf import HeadValue, file_head, tensor_places

__all__ = ["GgufHead", "GgufTensor", "gguf_head", "gguf_tensors"]

_Found = TypeVar("_Found")


class GgufTensor(NamedTuple):
    """Where one tensor's data lies."""

    name: str
    offset: int
    """From the start of the file."""
    size: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class GgufHead:
    """What a GGUF file says of its model."""

    values: Mapping[str, HeadValue]
    """Numbers, texts, and arrays of integers, by key."""
    types: Mapping[str, int]
    """ggml's number of each tensor's type, by name."""


def gguf_head(engine: NativeEngine, path: Path) -> GgufHead:
    """The head of a GGUF file.

    Raises:
        UsageError: it cannot be read, or is no GGUF file.
    """
    return GgufHead(*_read(file_head, engine, path))


def gguf_tensors(engine: NativeEngine, path: Path) -> list[GgufTensor]:
    """All tensors of a GGUF file, in its order; each lies wholly inside the file.

    Raises:
        UsageError: it cannot be read, is no GGUF file, or is not all there.
    """
    tensors = [GgufTensor(*place) for place in _read(tensor_places, engine, path)]
    size = path.stat().st_size
    for tensor in tensors:
        if tensor.offset + tensor.size > size:
            raise UsageError(
                f"{path} is not all there: {tensor.name} ends at "
                f"{tensor.offset + tensor.size}, the file at {size}"
            )
    return tensors


def _read(
    reader: Callable[[NativeEngine, Path], _Found], engine: NativeEngine, path: Path
) -> _Found:
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    # ggml would wait for ever for what somebody might write to a pipe.
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is no file")
    try:
        return reader(engine, path)
    except CallFailed as error:
        raise UsageError(f"{path} cannot be read as GGUF: {error.status}") from error
