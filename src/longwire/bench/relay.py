"""A slow network in user space: a TCP relay that adds delay and limits the rate.

Each direction of each connection is a line of its own. Its reader stamps every
piece with the moment at which the last byte would come out of a real line, and
its writer sends the piece on at that moment. Many pieces are under way at
once, so the delay takes nothing from the throughput.

Only bytes are delayed; a connection is made at once.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import threading
import time
from collections import deque

from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.transport.stream import tune

__all__ = ["MAX_HELD", "Relay", "main"]

_PIECE = 256 * 1024
"""Most bytes taken in one go."""

_LEAST_PIECE = 1460
"""What one Ethernet frame carries."""

_PIECE_S = 0.001
"""A rate-limited line forwards in pieces that take about so long: a piece
leaves when its last byte has come through."""

MAX_HELD = 64 << 20
"""Most bytes under way in one direction of one connection, where no rate says
how many fit the line: 10 Gbit/s and 50 ms."""

_LEAST_HELD = 1 << 20

_PIECE_COST = 256
"""What a piece takes beside its bytes; keeps a flood of tiny ones bounded."""

_MAX_CONNECTIONS = 128
"""Four threads each; further ones wait in the kernel's queue."""

_CONNECT_S = 5.0


class Relay:
    """Forwards connections made to `endpoint` to `target`.

    A rate limit is a token bucket of depth zero: an idle line saves nothing up.
    """

    def __init__(
        self, target: Endpoint, delay_s: float = 0.0, bytes_per_s: float | None = None
    ) -> None:
        """Listen on a free loopback port; `serve` does the rest."""
        self._target = target
        self._delay_s = delay_s
        self._rate = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    @property
    def endpoint(self) -> Endpoint:
        """Where clients connect."""
        host, port = self._listener.getsockname()
        return Endpoint(host, port)

    def serve(self) -> None:
        """Relay until `close` is called from another thread."""
        while True:
            self._room.acquire()
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are open go on."""
        # Closing alone does not wake a thread that waits in accept.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _connect(self, client: socket.socket) -> None:
        try:
            with client, self._open_target() as server:
                tune(client)
                tune(server)
                self._run_lines(client, server)
        except OSError:
            # The client sees its connection closed, as by a dead server.
            return
        finally:
            self._room.release()

    def _open_target(self) -> socket.socket:
        address = (self._target.host, self._target.port)
        server = socket.create_connection(address, _CONNECT_S)
        server.settimeout(None)
        return server

    def _run_lines(self, client: socket.socket, server: socket.socket) -> None:
        there = _Line(client, server, self._delay_s, self._rate)
        back = _Line(server, client, self._delay_s, self._rate)
        tasks = (there.read, there.write, back.read, back.write)
        threads = [threading.Thread(target=task, daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _Line:
    """One direction of one connection: a reader and a writer, one thread each."""

    def __init__(
        self,
        source: socket.socket,
        sink: socket.socket,
        delay_s: float,
        rate: float | None,
    ) -> None:
        self._source = source
        self._sink = sink
        self._delay_s = delay_s
        self._byte_s = 1 / rate if rate else 0.0
        self._piece = _PIECE
        self._limit = MAX_HELD
        if rate:
            self._piece = min(_PIECE, max(_LEAST_PIECE, int(rate * _PIECE_S)))
            self._limit = max(_LEAST_HELD, min(MAX_HELD, int(2 * rate * delay_s)))
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._held = 0
        self._broken = False
        self._changed = threading.Condition()

    def read(self) -> None:
        """Take bytes from the source until it ends; an empty piece is the end."""
        while True:
            try:
                piece = self._source.recv(self._piece)
            except OSError:
                piece = b""
            if not self._put(piece) or not piece:
                return

    def write(self) -> None:
        """Send each piece on when it is due; pass the end on as a half-close."""
        try:
            while True:
                due, piece = self._next()
                time.sleep(max(0.0, due - time.monotonic()))
                if not piece:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(piece)
                self._sent(piece)
        except OSError:
            self._break()

    def _put(self, piece: bytes) -> bool:
        """Put a piece on the line; False when nobody takes any more."""
        self._free_at = max(self._free_at, time.monotonic())
        self._free_at += len(piece) * self._byte_s
        with self._changed:
            while self._held >= self._limit and not self._broken:
                self._changed.wait()
            self._held += len(piece) + _PIECE_COST
            self._under_way.append((self._free_at + self._delay_s, piece))
            self._changed.notify_all()
            return not self._broken

    def _next(self) -> tuple[float, bytes]:
        with self._changed:
            while not self._under_way:
                self._changed.wait()
            return self._under_way.popleft()

    def _sent(self, piece: bytes) -> None:
        with self._changed:
            self._held -= len(piece) + _PIECE_COST
            self._changed.notify_all()

    def _break(self) -> None:
        """The sink is gone: end both directions."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()
        for sock in (self._source, self._sink):
            # One that is closed already refuses.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def main() -> None:
    """Entry point: `python -m longwire.bench.relay HOST:PORT [options]`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=parse_endpoint)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rate-mbit", type=float)
    arguments = parser.parse_args()
    rate = arguments.rate_mbit * 1e6 / 8 if arguments.rate_mbit else None
    relay = Relay(arguments.target, arguments.delay_ms / 1e3, rate)
    print(f"listening on {relay.endpoint}", flush=True)
    relay.serve()


if __name__ == "__main__":
    main()
