"""Option types and groups that several commands share."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import IO

from longwire.client.credentials import Credentials
from longwire.errors import UsageError
from longwire.native.profiles import DEFAULT_ENGINE
from longwire.wire.constants import DEFAULT_PORT

__all__ = [
    "add_address",
    "add_credentials",
    "add_engine",
    "count",
    "created",
    "credentials",
    "log_to_stderr",
    "names",
    "positive",
    "positive_seconds",
    "positives",
    "seconds",
    "shares",
]


def add_address(parser: argparse.ArgumentParser) -> None:
    """`--host` and `--port`: where to listen."""
    parser.add_argument(
        "-H", "--host", default="127.0.0.1", help="address to bind (%(default)s)"
    )
    parser.add_argument(
        "-p",
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port to bind, 0 for any free one (%(default)s)",
    )


def add_engine(parser: argparse.ArgumentParser) -> None:
    """`--engine`: whose ggml does the computing."""
    parser.add_argument(
        "--engine",
        default=DEFAULT_ENGINE,
        metavar="NAME|PATH",
        help="xllamacpp, llama-cpp-python, or a folder with llama.cpp's libraries "
        "(default: %(default)s)",
    )


def add_credentials(parser: argparse.ArgumentParser, *, token: bool = True) -> None:
    """What a client shows to servers, and asks of them; all of it, or TLS alone."""
    group = parser.add_argument_group(
        "security", "for all servers of the command; longwire keygen makes the files"
    )
    if token:
        group.add_argument(
            "--token-file", metavar="FILE", help="the secret that the servers share"
        )
    else:
        parser.set_defaults(token_file=None)
    group.add_argument(
        "--tls",
        action="store_true",
        help="connect with TLS; without --tls-ca, the CAs of this system count",
    )
    group.add_argument(
        "--tls-ca", metavar="FILE", help="CA of the servers' certificates"
    )
    group.add_argument(
        "--tls-cert", metavar="FILE", help="certificate to show to the servers"
    )
    group.add_argument("--tls-key", metavar="FILE", help="its key")


def credentials(arguments: argparse.Namespace) -> Credentials:
    """What the options of `add_credentials` name.

    Raises:
        UsageError: a file is missing, or not what it should be.
    """
    return Credentials.load(
        token_file=arguments.token_file,
        tls=arguments.tls,
        tls_ca=arguments.tls_ca,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
    )


def created(path: str) -> IO[str]:
    """A new file for what a command writes beside its output.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def positive(text: str) -> int:
    """An integer above 0."""
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def positives(text: str) -> list[int]:
    """Integers above 0, separated by commas."""
    return [positive(number) for number in text.split(",")]


def count(text: str) -> int:
    """An integer, 0 or above."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def seconds(text: str) -> float:
    """A length of time, 0 or above."""
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value


def positive_seconds(text: str) -> float:
    """A time above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def shares(text: str) -> list[float]:
    """Shares separated by commas: none below 0, and not all 0."""
    found = [float(number) for number in text.split(",")]
    if not all(0 <= share < float("inf") for share in found) or not any(found):
        raise argparse.ArgumentTypeError(f"{text!r} are no shares")
    return found


def names(text: str) -> list[str]:
    """Names separated by commas."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name in it")
    return found


def log_to_stderr(verbosity: int) -> None:
    """Warnings always; -v also what happens, -vv each step, -vvv the engine's log."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # llama.cpp warns about harmless things on every load.
    # What makes a call fail is in our own error.
    engine_level = logging.DEBUG if verbosity >= 3 else logging.CRITICAL
    logging.getLogger("longwire.engine").setLevel(engine_level)
