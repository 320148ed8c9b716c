"""Files with shared secrets."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from longwire.errors import UsageError
from longwire.wire.proof import LEAST_TOKEN

__all__ = ["read_tokens", "warn_if_exposed"]

_log = logging.getLogger("longwire.tokens")

_MOST = 1 << 16
"""Bytes of a file that holds a few tokens; a larger one is another file."""


def read_tokens(path: str) -> list[bytes]:
    """The tokens of a file: one per line; empty lines and those with a # in front
    do not count. A server accepts each of them, a client uses the first.

    Raises:
        UsageError: no such file, none in it, or one that is easily guessed.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MOST + 1)
    except OSError as error:
        raise UsageError(f"token file {path}: {error.strerror or error}") from error
    if len(text) > _MOST:
        raise UsageError(f"token file {path}: over {_MOST} bytes, not a token file")
    lines = (line.strip() for line in text.splitlines())
    tokens = [line for line in lines if line and not line.startswith(b"#")]
    if not tokens:
        raise UsageError(f"token file {path}: no token in it (longwire keygen)")
    if min(map(len, tokens)) < LEAST_TOKEN:
        raise UsageError(
            f"token file {path}: a token of under {LEAST_TOKEN} characters can be "
            "guessed (longwire keygen makes good ones)"
        )
    return tokens


def warn_if_exposed(what: str, path: str) -> None:
    """Log a warning if other users of this machine may read a secret file."""
    try:
        mode = Path(path).stat().st_mode
    except OSError as error:
        _log.debug("%s %s: %s", what, path, error)
        return
    if os.name == "posix" and mode & 0o077:
        _log.warning("%s %s: others may read it (chmod 600)", what, path)
