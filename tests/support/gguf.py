"""GGUF files of a few tensors, written byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

__all__ = ["gguf_bytes", "make_gguf", "make_sparse_gguf"]

_ALIGNMENT = 32
_I8, _U32 = 24, 4


def make_gguf(
    path: Path, tensors: Mapping[str, bytes], alignment: int = _ALIGNMENT
) -> Path:
    """Write a file with these tensors, each a row of bytes; returns `path`."""
    path.write_bytes(gguf_bytes(tensors, alignment=alignment))
    return path


def make_sparse_gguf(path: Path, size: int) -> Path:
    """A file with one tensor of zeros that takes no room on disk."""
    head = _padded(_head(1, _ALIGNMENT) + _tensor("zeros", size, 0), _ALIGNMENT)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return path


def gguf_bytes(
    tensors: Mapping[str, bytes], count: int | None = None, alignment: int = _ALIGNMENT
) -> bytes:
    """The file's content; `count` is how many tensors it says it has."""
    head = _head(len(tensors) if count is None else count, alignment)
    data = b""
    for name, content in tensors.items():
        head += _tensor(name, len(content), len(data))
        data += _padded(content, alignment)
    return _padded(head, alignment) + data


def _head(count: int, alignment: int) -> bytes:
    n_keys = int(alignment != _ALIGNMENT)
    head = struct.pack("<4sIqq", b"GGUF", 3, count, n_keys)
    if n_keys:
        head += _text("general.alignment") + struct.pack("<iI", _U32, alignment)
    return head


def _tensor(name: str, size: int, offset: int) -> bytes:
    return _text(name) + struct.pack("<IqiQ", 1, size, _I8, offset)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(data: bytes, alignment: int) -> bytes:
    return data + bytes(-len(data) % alignment)
