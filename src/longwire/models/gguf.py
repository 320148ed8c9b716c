"""The tensors of a GGUF file, checked against the file they are in."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NamedTuple

from longwire.errors import CallFailed, UsageError
from longwire.native.engine import NativeEngine
from longwire.native.gguf import tensor_places

__all__ = ["GgufTensor", "gguf_tensors"]


class GgufTensor(NamedTuple):
    """Where one tensor's data lies."""

    name: str
    offset: int
    """From the start of the file."""
    size: int
    """Bytes."""


def gguf_tensors(engine: NativeEngine, path: Path) -> list[GgufTensor]:
    """All tensors of a GGUF file, in its order; each lies wholly inside the file.

    Raises:
        UsageError: it cannot be read, is no GGUF file, or is not all there.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    # ggml would wait for ever for what somebody might write to a pipe.
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is no file")
    try:
        tensors = [GgufTensor(*place) for place in tensor_places(engine, path)]
    except CallFailed as error:
        raise UsageError(f"{path} cannot be read as GGUF: {error.status}") from error
    for tensor in tensors:
        if tensor.offset + tensor.size > found.st_size:
            raise UsageError(
                f"{path} is not all there: {tensor.name} ends at "
                f"{tensor.offset + tensor.size}, the file at {found.st_size}"
            )
    return tensors
