"""Files that appear together or not at all, each whole, none in place of another."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["NewFile", "publish"]


class NewFile(NamedTuple):
    """What a file is to be."""

    name: str
    content: bytes

    is_secret: bool
    """Only its owner may read it, from its first moment on."""


def publish(folder: Path, files: list[NewFile]) -> None:
    """Let all of `files` appear in `folder`, made if need be, or none of them.

    Raises:
        OSError: the system refused, or one of the files is there already
            (`FileExistsError`).
    """
    # What can fail, such as a full disk, does so before the first name is taken.
    # A link, unlike a rename, never takes the place of a file that is there.
    suffix = f".{secrets.token_hex(8)}.tmp"
    moves = [(folder / f".{f.name}{suffix}", folder / f.name) for f in files]
    with _made_folder(folder):
        try:
            for file, (temporary, _) in zip(files, moves, strict=True):
                _write(temporary, file)
            for temporary, target in moves:
                os.link(temporary, target)
            _flush_folder(folder)
        except BaseException:
            for temporary, target in moves:
                _unlink_same(temporary, target)
            raise
        finally:
            for temporary, _ in moves:
                temporary.unlink(missing_ok=True)


@contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """Make `folder` if need be, and take it back if the body fails."""
    is_new = not os.path.lexists(folder)
    if is_new:
        folder.mkdir(mode=0o700)
    try:
        yield
    except BaseException:
        if is_new:
            # It stays if another process has put a file in it meanwhile.
            with suppress(OSError):
                folder.rmdir()
        raise


def _write(path: Path, file: NewFile) -> None:
    mode = 0o600 if file.is_secret else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as stream:
        stream.write(file.content)
        stream.flush()
        os.fsync(stream.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink_same(temporary: Path, target: Path) -> None:
    """Remove `target` if it is our file, and not one that was there first."""
    with suppress(FileNotFoundError):
        if os.path.samestat(temporary.lstat(), target.lstat()):
            target.unlink()
