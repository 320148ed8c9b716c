"""A client of single messages, for sending what a correct client would not."""

from __future__ import annotations

import itertools
import secrets
import socket
import ssl
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import NamedTuple

from longwire.client.connection import Connection
from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import Dialect
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.lx import ERROR_BIT, ErrorAnswer
from longwire.wire.proof import NONCE_SIZE, client_proof, server_proof
from longwire.wire.tensors import Tensor
from longwire.wire.types import nbytes

__all__ = ["Buffer", "ConnectionClient", "RawClient"]


class Buffer(NamedTuple):
    """A buffer as its client knows it."""

    handle: int
    size: int
    base: int


_numbers = itertools.count(1)


def _own_address() -> tuple[str, int] | None:
    """A loopback address for this client alone, where all of 127/8 is ours.

    Ports come again, and a test could find another client's line in a log.
    """
    if sys.platform != "linux":
        return None
    number = next(_numbers)
    return f"127.1.{number // 250 % 250}.{number % 250 + 1}", 0


class RawClient:
    """One connection. Every wait has a limit; nothing is checked before sending."""

    def __init__(
        self,
        endpoint: Endpoint,
        dialect: Dialect,
        timeout_s: float = 10.0,
        *,
        tls: ssl.SSLContext | None = None,
        source: str | None = None,
    ) -> None:
        """Connect: with `tls` after its handshake, from `source` if that is given."""
        self.dialect = dialect
        self._timeout_s = timeout_s
        self.socket = socket.create_connection(
            (endpoint.host, endpoint.port),
            timeout_s,
            source_address=(source, 0) if source else _own_address(),
        )
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port = self.socket.getsockname()[:2]
        self.name = f"{host}:{port}"
        """What the worker's log calls this client."""
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=endpoint.host)

    @classmethod
    def over(cls, sock: socket.socket, dialect: Dialect) -> RawClient:
        """A client on a socket that is connected already."""
        client = cls.__new__(cls)
        client.dialect, client.socket, client.name = dialect, sock, "a socket"
        client._timeout_s = 10.0
        sock.settimeout(client._timeout_s)
        return client

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave; idempotent."""
        self.socket.close()

    # Frames.

    def send(self, data: m.Bytes) -> None:
        """Write raw bytes."""
        self.socket.sendall(data)

    def post(self, command: int, body: m.Bytes | Iterable[m.Bytes] = b"") -> None:
        """Send a request."""
        body = _joined(body)
        self.send(REQUEST_HEADER.pack(command, len(body)) + body)

    def answer(self) -> bytes:
        """Read the next answer's body."""
        (size,) = ANSWER_HEADER.unpack(self._receive(ANSWER_HEADER.size))
        return self._receive(size)

    def ask(self, command: int, body: m.Bytes | Iterable[m.Bytes] = b"") -> bytes:
        """Send a request and read its answer."""
        self.post(command, body)
        return self.answer()

    def refusal(self) -> ErrorAnswer:
        """Read the next answer, which is an error."""
        (size,) = ANSWER_HEADER.unpack(self._receive(ANSWER_HEADER.size))
        assert size & ERROR_BIT, size
        return ErrorAnswer.decode(self._receive(size & ~ERROR_BIT))

    def expect_closed(self, timeout_s: float = 2.0) -> None:
        """The server closes within the time, and says nothing before."""
        self.socket.settimeout(timeout_s)
        try:
            data = self.socket.recv(4096)
        except ConnectionError:
            # What the server had not read turns its close into a reset.
            data = b""
        finally:
            self.socket.settimeout(self._timeout_s)
        assert data == b"", data

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError(f"closed after {len(data)} of {size} bytes")
            data += part
        return bytes(data)

    # Commands.

    def hello(self, caps: bytes = bytes(24)) -> m.HelloAnswer:
        return m.HelloAnswer.decode(self.ask(Command.HELLO, m.Hello(caps).encode()))

    def auth(self) -> tuple[bytes, bytes]:
        """Exchange nonces: this client's and the server's."""
        nonce = secrets.token_bytes(NONCE_SIZE)
        return nonce, self.ask(Command.LX_AUTH, nonce)

    def prove(self, token: bytes) -> None:
        """Show that this client knows the token, and see that the server does."""
        nonces = self.auth()
        proof = self.ask(Command.LX_PROVE, client_proof(token, *nonces))
        assert proof == server_proof(token, *nonces)

    def device_count(self) -> int:
        """Also the cheapest way to see that all before it was accepted."""
        (count,) = m.U32.unpack(self.ask(Command.DEVICE_COUNT))
        return int(count)

    def alloc(self, size: int, device: int = 0) -> Buffer:
        """A buffer, with its base; handle 0 where there is no memory."""
        body = m.AllocBuffer(device, size).encode()
        found = m.AllocBufferAnswer.decode(self.ask(Command.ALLOC_BUFFER, body))
        base = self.base(found.handle) if found.handle else 0
        return Buffer(found.handle, found.size, base)

    def base(self, handle: int) -> int:
        (base,) = m.U64.unpack(self.ask(Command.BUFFER_GET_BASE, m.U64.pack(handle)))
        return int(base)

    def free(self, buffer: Buffer) -> None:
        self.post(Command.FREE_BUFFER, m.U64.pack(buffer.handle))

    def write(self, tensor: Tensor, data: m.Bytes, offset: int = 0) -> None:
        head = m.SetTensor(tensor.encode(), 0, offset).encode()
        self.post(Command.SET_TENSOR, [head, data])

    def read(self, tensor: Tensor, offset: int = 0, size: int | None = None) -> bytes:
        """Part of a tensor, all of it without `size`."""
        if size is None:
            size = nbytes(tensor.type, tensor.ne, tensor.nb) - offset
        body = m.GetTensor(tensor.encode(), offset, size).encode()
        return self.ask(Command.GET_TENSOR, body)

    def compute(self, graph: Graph) -> None:
        self.post(Command.GRAPH_COMPUTE, graph.encode(self.dialect))

    def recompute(self, uid: int, device: int = 0) -> None:
        body = GraphRecompute(device, uid).encode(self.dialect)
        self.post(Command.GRAPH_RECOMPUTE, body)


class ConnectionClient(RawClient):
    """The same messages over a connection of the library."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.dialect = connection.dialect

    def close(self) -> None:
        self.connection.close()

    def post(self, command: int, body: m.Bytes | Iterable[m.Bytes] = b"") -> None:
        self.connection.post(Command(command), _joined(body))

    def ask(self, command: int, body: m.Bytes | Iterable[m.Bytes] = b"") -> bytes:
        return self.connection.ask(Command(command), _joined(body))

    def read(self, tensor: Tensor, offset: int = 0, size: int | None = None) -> bytes:
        if size is None:
            size = nbytes(tensor.type, tensor.ne, tensor.nb) - offset
        target = bytearray(size)
        body = m.GetTensor(tensor.encode(), offset, size).encode()
        self.connection.ask_into(Command.GET_TENSOR, body, memoryview(target))
        return bytes(target)


def _joined(body: m.Bytes | Iterable[m.Bytes]) -> bytes:
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    return b"".join(body)
