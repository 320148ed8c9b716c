"""Where model files are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["model_files"]

_SUFFIX = ".gguf"


def model_files(folders: Iterable[Path]) -> list[Path]:
    """All GGUF files below some folders, in order of their names.

    A link counts as a file if what it names lies below the same folder; links to
    folders are not followed. What cannot be read is passed over.
    """
    return [path for folder in folders for path in sorted(_below(folder))]


def _below(folder: Path) -> Iterator[Path]:
    root = folder.resolve()
    for place, _, names in os.walk(root):
        for name in names:
            path = Path(place, name)
            if name.endswith(_SUFFIX) and _is_inside(path, root):
                yield path


def _is_inside(path: Path, root: Path) -> bool:
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        # A link to nowhere, or in a circle.
        return False
    return real.is_file() and real.is_relative_to(root)
