"""The floor under an all-reduce: two processes that swap bytes over a socket.

`python -m longwire.bench.floor [PEER]` is one of the two. It swaps with its peer
whenever a third process asks for it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from collections.abc import Iterator

from longwire.errors import CallFailed
from longwire.host.workers import ListeningProcess
from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.transport.stream import connect, tune

__all__ = ["Floor", "main"]

_PIECE = 128 << 10
"""What a socket's buffers take in without a reader: both sides send first."""

_PEER, _ASKER = b"p", b"a"
"""What a connection begins with."""

_QUESTION = struct.Struct("<QQ")
"""Bytes to swap, and how many times."""

_ANSWER = struct.Struct("<d")
_TIMEOUT_S = 60.0


class Floor:
    """Both processes, and the way to ask them. Close it, or use `with`."""

    def __init__(self) -> None:
        """Raises: NativeError: one of them does not start."""
        with contextlib.ExitStack() as stack:
            module = "longwire.bench.floor"
            first = stack.enter_context(ListeningProcess(module))
            second = stack.enter_context(ListeningProcess(module, first.endpoint))
            self._askers = []
            for process in (first, second):
                asker = _connect(parse_endpoint(process.endpoint), _ASKER)
                self._askers.append(stack.enter_context(asker))
            self._stack = stack.pop_all()

    def __enter__(self) -> Floor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop both processes; idempotent."""
        self._stack.close()

    def swap(self, size: int, count: int) -> float:
        """Seconds that one swap of `size` bytes takes, both ways, of `count` in turn.

        Raises:
            CallFailed: a process is gone.
        """
        try:
            for asker in self._askers:
                asker.sendall(_QUESTION.pack(size, count))
            answers = [_receive(asker, _ANSWER.size) for asker in self._askers]
        except (OSError, EOFError) as error:
            reason = str(error) or "one has ended"
            raise CallFailed("the processes of the floor", reason) from error
        return max(float(_ANSWER.unpack(answer)[0]) for answer in answers) / count


def _connect(endpoint: Endpoint, kind: bytes) -> socket.socket:
    connection = connect(endpoint, _TIMEOUT_S)
    connection.sendall(kind)
    return connection


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def _accepted(listener: socket.socket) -> Iterator[tuple[bytes, socket.socket]]:
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_TIMEOUT_S)
        tune(connection)
        yield bytes(_receive(connection, 1)), connection


def main() -> int:
    """Swap whenever asked to, until the asker is gone."""
    with contextlib.ExitStack() as stack, contextlib.suppress(EOFError, OSError):
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        print(f"listening on {Endpoint(*listener.getsockname())}", flush=True)
        found: dict[bytes, socket.socket] = {}
        if len(sys.argv) > 1:
            found[_PEER] = _connect(parse_endpoint(sys.argv[1]), _PEER)
        for kind, connection in _accepted(listener):
            found[kind] = stack.enter_context(connection)
            if len(found) == 2:
                break
        # The next question may be long in coming.
        found[_ASKER].settimeout(None)
        while True:
            question = _receive(found[_ASKER], _QUESTION.size)
            answer = _swap(found[_PEER], *_QUESTION.unpack(question))
            found[_ASKER].sendall(_ANSWER.pack(answer))
    return 0


def _swap(peer: socket.socket, size: int, count: int) -> float:
    sent, received = memoryview(bytes(size)), memoryview(bytearray(size))
    # Neither begins before the other is there.
    peer.sendall(_PEER)
    _receive(peer, 1)
    started = time.perf_counter()
    for _ in range(count):
        for at in range(0, size, _PIECE):
            peer.sendall(sent[at : at + _PIECE])
            _fill(peer, received[at : at + _PIECE])
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
