"""How a connection begins: both ends prove who they are, or it does not begin."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from longwire.client.credentials import Credentials
from longwire.client.greeting import greet, open_connection
from longwire.client.health import Deadlines
from longwire.errors import (
    AuthenticationFailed,
    ConnectionLost,
    LongwireError,
    RemoteFailure,
    UsageError,
)
from longwire.transport.endpoint import Endpoint
from longwire.transport.tls import TlsFiles, client_context, server_context
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.proof import client_proof, server_proof
from support.keys import Keys, Team
from support.scripted import (
    PATIENCE_S,
    Instead,
    Listener,
    Raw,
    lx_server,
    refusal,
)

Listen = Callable[..., Listener]

TOKEN = b"correct horse battery staple"
WRONG = b"the token of somebody else"
KNOWING = Credentials(token=TOKEN)
DEADLINES = Deadlines(PATIENCE_S, PATIENCE_S, PATIENCE_S)
SOON_S = 3.0


def failure(port: Listener, credentials: Credentials, kind: type[LongwireError]) -> str:
    """What is said when a connection cannot be opened; it must not take long."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        open_connection(port.endpoint, DEADLINES, credentials)
    assert time.monotonic() - started < SOON_S
    assert type(caught.value) is kind
    text = str(caught.value)
    assert text.startswith(f"{port.endpoint}: ")
    for token in (TOKEN, WRONG):
        assert token.decode() not in f"{text}{caught.value!r}{caught.value.__cause__!r}"
    return text.removeprefix(f"{port.endpoint}: ")


def asked(port: Listener) -> list[str]:
    """The commands of the only connection, which has ended."""
    (server,) = port.servers
    server.stop()
    return server.commands


class TestToken:
    @pytest.mark.parametrize("dialect", [V7, V8], ids=lambda d: d.version)
    def test_both_know_it(self, listener: Listen, dialect: Dialect) -> None:
        port = listener(lx_server(TOKEN, dialect), dialect)
        with closing(open_connection(port.endpoint, DEADLINES, KNOWING)) as connection:
            assert connection.dialect.lx and connection.dialect.major == dialect.major
            assert not connection.dialect.has(Command.LX_AUTH)
            assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)
        expected = ["HELLO", "LX_AUTH", "LX_PROVE", "LX_START", "DEVICE_COUNT"]
        assert asked(port) == expected

    def test_it_is_never_sent(self, listener: Listen) -> None:
        port = listener(lx_server(TOKEN))
        open_connection(port.endpoint, DEADLINES, KNOWING).close()
        sent = b"".join(request.body for request in port.servers[0].stop())
        assert TOKEN not in sent and TOKEN[:8] not in sent

    def test_each_connection_has_a_nonce_of_its_own(self, listener: Listen) -> None:
        port = listener(lx_server(TOKEN))
        for _ in range(5):
            open_connection(port.endpoint, DEADLINES, KNOWING).close()
        sent = [s.of(Command.LX_AUTH, Command.LX_PROVE) for s in port.servers]
        assert len({nonce for nonce, _ in sent}) == 5
        assert len({proof for _, proof in sent}) == 5

    def test_greet_leaves_lx_to_others(self, listener: Listen) -> None:
        port = listener(lx_server(TOKEN))
        connection, hello = greet(port.endpoint, DEADLINES, KNOWING)
        assert hello.padding == 1
        assert connection.dialect is V8
        connection.close()
        assert asked(port) == ["HELLO", "LX_AUTH", "LX_PROVE"]


class TestServerRefuses:
    def test_a_wrong_token(self, listener: Listen) -> None:
        port = listener(lx_server(TOKEN))
        words = failure(port, Credentials(token=WRONG), AuthenticationFailed)
        assert words == "LX_PROVE: Unauthenticated: not the token"
        assert asked(port) == ["HELLO", "LX_AUTH", "LX_PROVE"]

    def test_no_token(self, listener: Listen) -> None:
        answers = dict(lx_server(TOKEN))
        answers[Command.LX_START] = refusal("Unauthenticated", "a token is needed")
        port = listener(answers)
        words = failure(port, Credentials(), AuthenticationFailed)
        assert words == "LX_START: Unauthenticated: a token is needed"

    def test_something_else_is_not_about_who(self, listener: Listen) -> None:
        answers = {**lx_server(TOKEN), Command.LX_AUTH: refusal("BadRequest", "odd")}
        words = failure(listener(answers), KNOWING, RemoteFailure)
        assert words == "LX_AUTH: BadRequest: odd"

    @pytest.mark.parametrize("command", [Command.LX_AUTH, Command.LX_PROVE])
    def test_without_a_word(self, listener: Listen, command: Command) -> None:
        port = listener({**lx_server(TOKEN), command: Instead.CLOSE})
        words = failure(port, KNOWING, ConnectionLost)
        assert words.startswith(f"{command.name}: the server closed the connection")

    @pytest.mark.parametrize("command", [Command.LX_AUTH, Command.LX_PROVE])
    def test_or_never(self, listener: Listen, command: Command) -> None:
        port = listener({**lx_server(TOKEN), command: Instead.SILENCE})
        started = time.monotonic()
        with pytest.raises(ConnectionLost, match="no answer before the deadline"):
            open_connection(port.endpoint, Deadlines(connect_s=0.2), KNOWING)
        assert 0.2 <= time.monotonic() - started < SOON_S


class TestClientRefuses:
    """A client with a token gives no work to a server that does not know it."""

    def test_a_server_without_a_token(self, listener: Listen) -> None:
        port = listener(lx_server(None))
        words = failure(port, KNOWING, AuthenticationFailed)
        assert words == "LX_AUTH: Unauthenticated: this server has no token"
        assert asked(port) == ["HELLO", "LX_AUTH"]

    @pytest.mark.parametrize("padding", [0, 16, 255])
    def test_a_server_that_knows_of_none(self, listener: Listen, padding: int) -> None:
        """llama.cpp's, or one that pretends to be."""
        answer = m.HelloAnswer(8, 0, 0, padding=padding).encode()
        port = listener({**lx_server(TOKEN), Command.HELLO: answer})
        words = failure(port, KNOWING, AuthenticationFailed)
        assert words == "HELLO: not a Longwire server, it knows no tokens"
        assert asked(port) == ["HELLO"]

    @pytest.mark.parametrize("kind", ["zeros", "another's", "the client's own"])
    def test_a_proof_that_is_none(self, listener: Listen, kind: str) -> None:
        nonces: list[bytes] = []

        def auth(body: bytes) -> bytes:
            nonces[:] = [body, b"s" * 32]
            return nonces[1]

        def prove(body: bytes) -> bytes:
            assert body == client_proof(TOKEN, *nonces)
            others = server_proof(WRONG, *nonces)
            return {"zeros": bytes(32), "another's": others}.get(kind, body)

        answers = {**lx_server(), Command.LX_AUTH: auth, Command.LX_PROVE: prove}
        port = listener(answers)
        words = failure(port, KNOWING, AuthenticationFailed)
        assert words == "LX_PROVE: the server does not know the token that it asked for"
        assert asked(port) == ["HELLO", "LX_AUTH", "LX_PROVE"]

    @pytest.mark.parametrize("command", [Command.LX_AUTH, Command.LX_PROVE])
    def test_answers_of_a_wrong_length(
        self, listener: Listen, command: Command
    ) -> None:
        port = listener({**lx_server(TOKEN), command: bytes(31)})
        assert "answered 31 bytes where 32" in failure(port, KNOWING, RemoteFailure)

    def test_an_endless_error(self, listener: Listen) -> None:
        raw = Raw([(1 << 63 | 1 << 40).to_bytes(8, "little")])
        port = listener({**lx_server(TOKEN), Command.LX_AUTH: raw})
        assert "an error of 1099511627776 bytes" in failure(
            port, KNOWING, RemoteFailure
        )


def team(files: TlsFiles, token: bytes | None = None) -> Credentials:
    return Credentials(token, client_context(files))


class TestTls:
    @pytest.fixture
    def encrypted(self, keys: Keys, listener: Listen) -> Listener:
        server = server_context(keys.ours.server)
        return listener(lx_server(TOKEN), V8, server)

    def test_with_a_token(self, keys: Keys, encrypted: Listener) -> None:
        credentials = team(keys.ours.client, TOKEN)
        opened = open_connection(encrypted.endpoint, DEADLINES, credentials)
        with closing(opened) as connection:
            assert connection.dialect.lx
            target = memoryview(bytearray(300_000))
            body = m.GetTensor(bytes(296), 5, len(target)).encode()
            connection.ask_into(Command.GET_TENSOR, body, target)
            assert target == b"\5" * len(target)
            data = bytes(2 << 20)
            connection.post(Command.SET_TENSOR, bytes(305), data)
            assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)
        assert encrypted.servers[0].of(Command.SET_TENSOR) == [bytes(305) + data]

    def test_a_server_of_another_team(self, keys: Keys, encrypted: Listener) -> None:
        words = failure(encrypted, team(keys.others.client), AuthenticationFailed)
        assert words.startswith("TLS handshake: its certificate is not accepted: ")

    def test_a_wrong_name(self, keys: Keys, listener: Listen) -> None:
        """An address of this machine that is not in the certificate."""
        server = server_context(keys.ours.server)
        port = listener(lx_server(), V8, server, "127.0.0.2")
        words = failure(port, team(keys.ours.client), AuthenticationFailed)
        assert words.startswith("TLS handshake: its certificate is not accepted: ")
        assert "127.0.0.2" in words

    def test_no_certificate(self, keys: Keys, encrypted: Listener) -> None:
        stranger = team(TlsFiles(ca=keys.ours.client.ca))
        words = failure(encrypted, stranger, AuthenticationFailed)
        assert words == (
            "HELLO: the server wants a client certificate (--tls-cert and --tls-key)"
        )

    def test_a_certificate_of_another_team(
        self, keys: Keys, encrypted: Listener
    ) -> None:
        others = keys.others.client
        stranger = team(TlsFiles(others.cert, others.key, keys.ours.client.ca))
        words = failure(encrypted, stranger, AuthenticationFailed)
        assert "does not know the CA of this end's certificate" in words

    def test_a_servers_certificate(self, keys: Keys, encrypted: Listener) -> None:
        words = failure(encrypted, team(keys.ours.server), AuthenticationFailed)
        assert "this end's certificate is not made for" in words

    def test_a_plain_client(self, encrypted: Listener) -> None:
        words = failure(encrypted, KNOWING, ConnectionLost)
        assert words.startswith("HELLO: the server closed the connection")
        assert "a server with TLS wants --tls-ca or --tls" in words

    def test_a_server_that_does_not_answer(self, keys: Keys) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
            started = time.monotonic()
            with pytest.raises(ConnectionLost) as caught:
                open_connection(endpoint, Deadlines(0.3), team(keys.ours.client))
            assert 0.3 <= time.monotonic() - started < SOON_S
        expected = f"{endpoint}: TLS handshake: no answer before the deadline"
        assert str(caught.value) == expected

    def test_an_old_server(self, keys: Keys, listener: Listen) -> None:
        old = server_context(keys.ours.server)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        port = listener(lx_server(TOKEN), V8, old)
        words = failure(port, team(keys.ours.client), ConnectionLost)
        assert words == "TLS handshake: the other end does not speak TLS 1.3"


class TestCredentials:
    def load(self, files: Team, **names: str | None) -> Credentials:
        given = {k: v and files.path(v) for k, v in names.items()}
        return Credentials.load(**given)  # type: ignore[arg-type]

    def test_nothing(self) -> None:
        nothing = Credentials.load()
        assert nothing == Credentials()
        assert nothing.token is None and nothing.tls is None

    def test_any_file_of_tls_means_tls(self, keys: Keys) -> None:
        ours = keys.ours
        pair = {"tls_cert": "client.pem", "tls_key": "client.key"}
        assert self.load(ours, token_file="token").tls is None
        assert self.load(ours, tls_ca="ca.pem").tls is not None
        assert self.load(ours, **pair).tls is not None
        assert Credentials.load(tls=True).tls is not None

    def test_without_a_ca_those_of_the_system_count(
        self, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SSL_CERT_FILE", keys.ours.path("ca.pem"))
        monkeypatch.setenv("SSL_CERT_DIR", str(keys.ours.folder / "none"))
        context = Credentials.load(tls=True).tls
        assert context is not None
        (ca,) = context.get_ca_certs()
        assert ca["subject"] == ca["issuer"]

    def test_the_first_of_several_tokens(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_bytes(TOKEN + b"\n" + WRONG + b"\n")
        file.chmod(0o600)
        assert Credentials.load(token_file=str(file)).token == TOKEN

    def test_a_file_that_others_may_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "token"
        file.write_bytes(TOKEN)
        file.chmod(0o644)
        caplog.set_level(logging.WARNING, "longwire")
        Credentials.load(token_file=str(file))
        assert "others may read it" in caplog.text
        assert TOKEN.decode() not in caplog.text

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        none = str(tmp_path / "none")
        for name in ("token_file", "tls_ca", "tls_cert"):
            with pytest.raises(UsageError):
                Credentials.load(**{name: none})  # type: ignore[arg-type]

    def test_nothing_of_it_is_shown(self, keys: Keys) -> None:
        credentials = keys.ours.credentials()
        assert credentials.token == keys.ours.token
        keys.check_unspoken(f"{credentials!r} {credentials} {credentials.tls!r}")


def test_the_log_of_it_all_has_no_token(
    listener: Listen, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    port = listener(lx_server(TOKEN))
    open_connection(port.endpoint, DEADLINES, KNOWING).close()
    with pytest.raises(AuthenticationFailed):
        open_connection(port.endpoint, DEADLINES, Credentials(token=WRONG))
    for token in (TOKEN, WRONG):
        assert token.decode() not in caplog.text
        assert token.hex() not in caplog.text
