"""`longwire`: the argument parser and exit codes. A file per command beside it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import FrameType

from longwire.cli import bench, demo, devices, keygen, run, serve, tap, tunnel
from longwire.errors import EndpointError, LongwireError, UsageError

__all__ = ["main"]

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 success, 1 failure, 2 a request that makes no sense, 130 interrupted, 143
    terminated.
    """
    parser = argparse.ArgumentParser(
        prog="longwire",
        description="Use the devices of other machines with llama.cpp.",
    )
    parser.add_argument(
        "--version", action="version", version=f"longwire {version('longwire')}"
    )
    commands = parser.add_subparsers(title="commands", required=True)
    for command in (serve, run, devices, tunnel, tap, keygen, demo, bench):
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        with _terminable():
            code: int = arguments.run(arguments)
        return code
    except (UsageError, EndpointError) as error:
        print(f"longwire: {error}", file=sys.stderr)
        return EXIT_USAGE
    except LongwireError as error:
        print(f"longwire: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. Leave nothing for the exit to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack: its default would leave child processes behind."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(EXIT_TERMINATED)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


if __name__ == "__main__":
    sys.exit(main())
