"""The C++ server in a process of its own: `python -m longwire.bench.cpp_server`."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time

from longwire.errors import LongwireError
from longwire.native.cpp_rpc import CPP_ENGINE, serve_cpp
from longwire.native.engine import load_engine

__all__ = ["free_port", "main"]

_POLL_S = 0.01


def main() -> int:
    """Serve on a free loopback port, and say which once clients can connect."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", default=CPP_ENGINE)
    parser.add_argument("--cache", metavar="DIR")
    arguments = parser.parse_args()
    # An abort prints a page of addresses otherwise, and its reason is lost.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    port = free_port()
    announcement = _take_stdout()
    threading.Thread(target=_announce, args=(port, announcement), daemon=True).start()
    try:
        engine = load_engine(arguments.engine)
        serve_cpp(engine, f"127.0.0.1:{port}", arguments.threads, arguments.cache)
    except LongwireError as error:
        print(error, file=sys.stderr)
    return 1


def free_port() -> int:
    """A port of loopback that nobody listens on at the moment."""
    # Somebody may take it before the server does. The server then returns,
    # and whoever started this process hears of it.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _take_stdout() -> int:
    """Keep stdout for the announcement; what C++ prints goes to stderr."""
    announcement = os.dup(1)
    os.dup2(2, 1)
    return announcement


def _announce(port: int, to: int) -> None:
    """Say that the server listens, once it does: it has no way to tell."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            os.write(to, f"listening on 127.0.0.1:{port}\n".encode())
            return


if __name__ == "__main__":
    sys.exit(main())
