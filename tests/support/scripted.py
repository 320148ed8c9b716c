"""A server that answers by script and remembers what it was sent."""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.client.health import Deadlines
from longwire.errors import WIRE_CODES
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import LX_VERSION, Command
from longwire.wire.dialects import LX_OFFER, LX_SHAPES, V8, Dialect
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER
from longwire.wire.lx import (
    ERROR_BIT,
    KEEP_ALIVE,
    ErrorAnswer,
    Have,
    LxStartAnswer,
)
from longwire.wire.proof import NONCE_SIZE, client_proof, server_proof

ENDPOINT = Endpoint("worker", 50052)
PATIENCE_S = 10.0
"""Longest wait of a test; only one that fails waits for so long."""


class Request(NamedTuple):
    command: Command
    body: bytes


class Instead(Enum):
    """What a server may do in place of an answer."""

    CLOSE = "close the connection"
    RESET = "drop the connection with a reset"
    SILENCE = "never answer"


@dataclass(frozen=True)
class Partial:
    """The first bytes of an answer, header included; then the connection closes."""

    raw: bytes


@dataclass(frozen=True)
class Raw:
    """An answer in pieces, header included, with a pause before each."""

    pieces: Sequence[bytes]
    pause_s: float = 0


def refusal(name: str, sentence: str) -> Raw:
    """An LX error answer."""
    body = ErrorAnswer(WIRE_CODES[name], name, sentence).encode()
    return Raw([ANSWER_HEADER.pack(ERROR_BIT | len(body)) + body])


def held(answer: bytes, n: int = 3, pause_s: float = 0) -> Raw:
    """An answer behind `n` keep-alives."""
    alive = ANSWER_HEADER.pack(KEEP_ALIVE)
    return Raw([*[alive] * n, ANSWER_HEADER.pack(len(answer)) + answer], pause_s)


def lx_server(token: bytes | None = None, dialect: Dialect = V8) -> Answers:
    """Answers of a server that speaks LX, to those who know the token."""
    nonces: list[bytes] = []
    nonce = secrets.token_bytes(NONCE_SIZE)
    hello = m.HelloAnswer(dialect.major, 0, 0, padding=LX_VERSION)
    start = LxStartAnswer(LX_VERSION, "scripted", ("NONE", "DUP", "ADD"))

    def auth(body: bytes) -> Answer:
        if token is None:
            return refusal("Unauthenticated", "LX_AUTH: this server has no token")
        nonces[:] = [body, nonce]
        return nonce

    def prove(body: bytes) -> Answer:
        if token is None or body != client_proof(token, *nonces):
            return refusal("Unauthenticated", "LX_PROVE: not the token")
        return server_proof(token, *nonces)

    return {
        Command.HELLO: hello.encode(),
        Command.LX_AUTH: auth,
        Command.LX_PROVE: prove,
        Command.LX_START: start.encode(),
    }


def having(*digests: bytes, gate: threading.Event | None = None) -> Answers:
    """Answers of a server that has such data; to LX_HAVE once the gate is open."""

    def have(body: bytes) -> Answer:
        if gate is not None:
            assert gate.wait(PATIENCE_S)
        return bytes(digest in digests for digest in Have.decode(body).digests)

    return {Command.LX_HAVE: have}


Answer = bytes | Instead | Partial | Raw
Answers = Mapping[Command, Answer | Callable[[bytes], Answer]]


def frames(data: bytes) -> Iterator[Request]:
    """The requests in `data`, which must be whole ones."""
    at = 0
    while at < len(data):
        number, size = REQUEST_HEADER.unpack_from(data, at)
        at += REQUEST_HEADER.size
        body = data[at : at + size]
        assert len(body) == size, f"{Command(number).name} is cut off"
        yield Request(Command(number), body)
        at += size


def content(offset: int, size: int) -> bytes:
    """What `GET_TENSOR` answers unless told otherwise."""
    return bytes([offset % 251]) * size


class ScriptedServer:
    """Serves one socket in a thread of its own until the client leaves."""

    def __init__(
        self, sock: socket.socket, answers: Answers, dialect: Dialect = V8
    ) -> None:
        self.dialect = dialect
        self.answers = dict(answers)
        self.requests: list[Request] = []
        self._shapes = {**dialect.shapes, **LX_OFFER, **LX_SHAPES}
        self._sock = sock
        self._handles = iter(range(1, 1 << 30))
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> ScriptedServer:
        self._thread.start()
        return self

    def stop(self) -> list[Request]:
        """Wait for the client's end of the stream; everything that arrived."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.requests

    def of(self, *commands: Command) -> list[bytes]:
        """Bodies of the requests of some commands, so far."""
        return [r.body for r in list(self.requests) if r.command in commands]

    @property
    def commands(self) -> list[str]:
        """Names of the requests so far, in order."""
        return [request.command.name for request in list(self.requests)]

    def _run(self) -> None:
        # The client may leave, or reset, at any point.
        with self._sock, contextlib.suppress(OSError, EOFError):
            while True:
                number, size = REQUEST_HEADER.unpack(self._take(REQUEST_HEADER.size))
                request = Request(Command(number), self._take(size))
                self.requests.append(request)
                if self._shapes[request.command].answer is not None:
                    self._answer(request)

    def _take(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            piece = self._sock.recv(min(size - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _answer(self, request: Request) -> None:
        answer = self.answers.get(request.command)
        if answer is None:
            answer = self._plausible(request)
        if callable(answer):
            answer = answer(request.body)
        if answer is Instead.SILENCE:
            self._take(1 << 40)
        if isinstance(answer, Partial):
            self._sock.sendall(answer.raw)
            raise EOFError
        if isinstance(answer, Raw):
            for piece in answer.pieces:
                threading.Event().wait(answer.pause_s)
                self._sock.sendall(piece)
            return
        if isinstance(answer, Instead):
            if answer is Instead.RESET:
                linger = struct.pack("ii", 1, 0)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            raise EOFError
        self._sock.sendall(ANSWER_HEADER.pack(len(answer)) + answer)

    def _plausible(self, request: Request) -> bytes:
        command, body = request
        if command == Command.HELLO:
            return m.HelloAnswer(self.dialect.major, 0, 0).encode()
        if command == Command.DEVICE_COUNT:
            return m.U32.pack(1)
        if command == Command.ALLOC_BUFFER:
            size = m.AllocBuffer.decode(body).size
            return m.AllocBufferAnswer(next(self._handles), size).encode()
        if command == Command.BUFFER_GET_BASE:
            return m.U64.pack(m.U64.unpack(body)[0] << 32)
        if command == Command.GET_ALIGNMENT:
            return m.U64.pack(64)
        if command == Command.GET_DEVICE_MEMORY:
            return m.DeviceMemory(1 << 30, 1 << 31).encode()
        if command == Command.GET_TENSOR:
            read = m.GetTensor.decode(body)
            return content(read.offset, read.size)
        if command == Command.GET_TENSOR_2D:
            rows = m.GetTensor2D.decode(body)
            offsets = range(rows.offset, 1 << 40, rows.stride or 1)
            packed = [content(offsets[i], rows.size) for i in range(rows.n_copies)]
            return b"".join(packed)
        return bytes(self._shapes[command].answer or 0)


_TAKEN = {Command.LX_START, Command.LX_DEVICE, Command.LX_SUPPORTS_OPS}
_TAKEN |= {Command.LX_HAVE, Command.LX_TRACE}
"""Their answers have a size of their own and are not received in place."""


class RecordingStream(Stream):
    """Keeps what every `send` wrote, and insists that no answer is owed then."""

    def __init__(self, sock: socket.socket, dialect: Dialect) -> None:
        super().__init__(sock)
        self.sends: list[list[Request]] = []
        self.pieces: list[object] = []
        """The objects behind the last write."""
        self.owed = 0
        self.used = 0
        """Calls that would touch the socket."""
        self._shapes = {**dialect.shapes, **LX_OFFER, **LX_SHAPES}

    def send(self, pieces: Sequence[m.Bytes]) -> None:
        self.used += 1
        assert self.owed == 0, "sent while an answer is owed"
        requests = list(frames(b"".join(pieces)))
        self.sends.append(requests)
        self.pieces = [memoryview(piece).obj for piece in pieces]
        asks = [r.command for r in requests if r.command not in _TAKEN]
        self.owed = sum(self._shapes[ask].answer is not None for ask in asks)
        super().send(pieces)

    def take(self, size: int) -> memoryview:
        self.used += 1
        taken = super().take(size)
        if (
            size == ANSWER_HEADER.size
            and ERROR_BIT <= int.from_bytes(taken, "little") < KEEP_ALIVE
        ):
            # An error, which goes into no target.
            self.owed -= 1
        return taken

    def take_into(self, target: memoryview) -> None:
        super().take_into(target)
        self.owed -= 1


class Scripted(NamedTuple):
    """A client's connection, its stream, and the server behind it."""

    connection: Connection
    stream: RecordingStream
    server: ScriptedServer

    def close(self) -> None:
        self.connection.close()
        self.server.stop()


def start_scripted(
    answers: Answers | None = None,
    dialect: Dialect = V8,
    *,
    endpoint: Endpoint = ENDPOINT,
    deadline_s: float = PATIENCE_S,
    deadlines: Deadlines | None = None,
    socket_buffer: int | None = None,
    lx_flags: int | None = None,
) -> Scripted:
    """A greeted connection to a scripted server, over a socket pair.

    With `lx_flags` it speaks LX, with a server of those flags.
    """
    ours, theirs = socket.socketpair()
    if socket_buffer is not None:
        for sock in (ours, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, socket_buffer)
    stream = RecordingStream(ours, dialect)
    stream.set_deadline(deadline_s)
    server = ScriptedServer(theirs, answers or {}, dialect).start()
    connection = Connection(endpoint, stream, dialect, deadlines)
    if lx_flags is not None:
        connection.dialect = dialect.with_lx()
        # No op names, like the rig's own session: numbers stay as they are.
        connection.server = LxStartAnswer(LX_VERSION, "scripted", (), lx_flags)
    return Scripted(connection, stream, server)


class Listener:
    """A loopback port; each connection gets a scripted server."""

    def __init__(
        self,
        answers: Answers | None = None,
        dialect: Dialect = V8,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.servers: list[ScriptedServer] = []
        self._answers, self._dialect, self._tls = answers or {}, dialect, tls
        self._sock = socket.create_server((host, 0))
        self.endpoint = Endpoint(host, self._sock.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections; those that exist go on."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._sock.accept()
                if self._tls is not None:
                    # The server's first read shakes hands.
                    sock = self._tls.wrap_socket(
                        sock, server_side=True, do_handshake_on_connect=False
                    )
                server = ScriptedServer(sock, self._answers, self._dialect)
                self.servers.append(server)
                server.start()
