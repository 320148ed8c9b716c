"""How a connection begins: TCP, TLS, HELLO, proof of the token, LX."""

from __future__ import annotations

import hmac
import secrets
import ssl

from longwire.client.connection import Connection
from longwire.client.credentials import Credentials
from longwire.client.health import Deadlines, reason_of
from longwire.errors import AuthenticationFailed, ConnectionLost, VersionMismatch
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream, connect
from longwire.transport.tls import refuses_certificate
from longwire.wire import messages as m
from longwire.wire.constants import LX_OFFERS, LX_VERSION, Command
from longwire.wire.dialects import DIALECTS, V8, Dialect
from longwire.wire.lx import LxStart, LxStartAnswer
from longwire.wire.proof import NONCE_SIZE, client_proof, server_proof

__all__ = ["greet", "open_connection"]


def open_connection(
    endpoint: Endpoint,
    deadlines: Deadlines | None = None,
    credentials: Credentials | None = None,
) -> Connection:
    """Connect, have both ends prove who they are, and agree on a dialect.

    Raises:
        ConnectionLost: no connection, or no answer in time.
        AuthenticationFailed: one end does not accept the other.
        VersionMismatch: the server speaks another protocol.
    """
    deadlines = deadlines or Deadlines()
    credentials = credentials or Credentials()
    connection, hello = greet(endpoint, deadlines, credentials)
    try:
        if hello.padding in LX_OFFERS:
            _start_lx(connection)
    except BaseException:
        connection.close()
        raise
    connection.credentials = credentials
    lives = connection.dialect.lx
    connection.set_patience(deadlines.silence_s if lives else deadlines.answer_s)
    return connection


def greet(
    endpoint: Endpoint, deadlines: Deadlines, credentials: Credentials
) -> tuple[Connection, m.HelloAnswer]:
    """The first half of `open_connection`: all but LX.

    Raises: as that.
    """
    stream = _open_stream(endpoint, deadlines, credentials)
    # The dialect is known only after HELLO, which is the same in all.
    connection = Connection(endpoint, stream, V8, deadlines)
    try:
        hello = _hello(connection, encrypted=credentials.tls is not None)
        connection.dialect = _dialect(endpoint, hello)
        if credentials.token is not None:
            _authenticate(connection, hello, credentials.token)
    except BaseException:
        connection.close()
        raise
    return connection, hello


def _open_stream(
    endpoint: Endpoint, deadlines: Deadlines, credentials: Credentials
) -> Stream:
    step = "connect"
    sock = None
    try:
        sock = connect(endpoint, deadlines.connect_s)
        step = "TLS handshake"
        return credentials.stream(sock, endpoint)
    except OSError as error:
        if sock is not None:
            sock.close()
        kind: type[AuthenticationFailed | ConnectionLost] = ConnectionLost
        if isinstance(error, ssl.SSLCertVerificationError):
            kind = AuthenticationFailed
        raise kind(str(endpoint), step, reason_of(error)) from error


def _hello(connection: Connection, encrypted: bool) -> m.HelloAnswer:
    try:
        answer = connection.ask(Command.HELLO, m.Hello().encode())
    except ConnectionLost as error:
        # In TLS 1.3 a client is done with its handshake before the server is.
        if refuses_certificate(error.__cause__):
            raise AuthenticationFailed(*error.args) from error
        if isinstance(error.__cause__, (EOFError, ConnectionError)) and not encrypted:
            hint = "a server with TLS wants --tls-ca or --tls; its log says why"
            reason = f"the server closed the connection ({hint})"
            raise ConnectionLost(error.endpoint, "HELLO", reason) from error
        raise
    return m.HelloAnswer.decode(answer)


def _dialect(endpoint: Endpoint, hello: m.HelloAnswer) -> Dialect:
    dialect = DIALECTS.get(hello.major)
    if dialect is None or hello.minor > dialect.minor:
        supported = " and ".join(d.version for d in DIALECTS.values())
        found = f"{hello.major}.{hello.minor}.{hello.patch}"
        raise VersionMismatch(str(endpoint), found, supported)
    return dialect


def _authenticate(connection: Connection, hello: m.HelloAnswer, token: bytes) -> None:
    """Prove to each other that both ends know the token."""
    endpoint, dialect = str(connection.endpoint), connection.dialect
    if hello.padding not in LX_OFFERS:
        reason = "not a Longwire server, it knows no tokens"
        raise AuthenticationFailed(endpoint, "HELLO", reason)
    connection.dialect = dialect.offering_lx()
    nonce = secrets.token_bytes(NONCE_SIZE)
    theirs = connection.ask(Command.LX_AUTH, nonce)
    proof = connection.ask(Command.LX_PROVE, client_proof(token, nonce, theirs))
    if not hmac.compare_digest(proof, server_proof(token, nonce, theirs)):
        reason = "the server does not know the token that it asked for"
        raise AuthenticationFailed(endpoint, "LX_PROVE", reason)
    connection.dialect = dialect


def _start_lx(connection: Connection) -> None:
    dialect = connection.dialect
    connection.dialect = dialect.offering_lx()
    body = LxStart(LX_VERSION).encode()
    decode = LxStartAnswer.decode
    connection.server = connection.ask_message(Command.LX_START, body, decode)
    connection.dialect = dialect.with_lx()
