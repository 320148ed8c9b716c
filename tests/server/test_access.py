"""Who may use a server: addresses, and what works before a token is proven."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longwire.errors import UsageError
from longwire.server.access import Access, AllowList
from longwire.server.session import serve_client
from longwire.server.state import SessionState
from longwire.transport.stream import Stream
from longwire.transport.tls import TlsFiles, TlsStream
from longwire.wire.constants import Command
from longwire.wire.dialects import LX_OFFER, LX_SHAPES, V7, V8, Dialect
from longwire.wire.proof import client_proof
from support.client import RawClient
from support.keys import Keys

TOKEN, NEW_TOKEN = b"an old but good token", b"the one that comes after it"
WRONG = b"the token of somebody else"


class TestAllowList:
    def test_none_admits_all(self) -> None:
        for allow in (AllowList(), AllowList([])):
            assert not allow
            assert allow.admits("10.1.2.3") and allow.admits("fd00::1")

    @pytest.mark.parametrize(
        ("networks", "inside", "outside"),
        [
            ("10.0.0.0/8", "10.255.0.1 ::ffff:10.0.0.1", "11.0.0.1 ::ffff:11.0.0.1"),
            ("192.168.1.7", "192.168.1.7", "192.168.1.8 ::1"),
            ("fd00::/8", "fd12::1 fdff::9", "fe80::1 10.0.0.1"),
            ("::1", "::1", "::2 127.0.0.1"),
            ("fe80::/10", "fe80::1%eth0 fe80::1", "fd00::1%eth0"),
            ("10.0.0.0/8 127.0.0.1", "127.0.0.1 10.0.0.1", "127.0.0.2"),
            ("0.0.0.0/0", "1.2.3.4 ::ffff:1.2.3.4", "2001:db8::1"),
            ("::/0", "2001:db8::1", "1.2.3.4 ::ffff:1.2.3.4"),
        ],
    )
    def test_networks(self, networks: str, inside: str, outside: str) -> None:
        allow = AllowList(networks.split())
        assert allow
        assert all(map(allow.admits, inside.split()))
        assert not any(map(allow.admits, outside.split()))

    @pytest.mark.parametrize("text", ["", "gpu1", "10.0.0.1/8", "10.0.0.0/33", "*"])
    def test_nonsense(self, text: str) -> None:
        with pytest.raises(UsageError, match=r"^--allow: "):
            AllowList(["10.0.0.0/8", text])


class TestAccess:
    def test_nothing_asked_for(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            access = Access.load(None, None)
            assert access == Access()
            stream = access.stream(ours)
            assert type(stream) is Stream
            stream.close()

    def test_both(self, keys: Keys) -> None:
        access = Access.load(keys.ours.token_file, keys.ours.server)
        assert access.tokens == (keys.ours.token,)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stream = access.stream(ours)
            assert isinstance(stream, TlsStream)
            stream.close()

    def test_it_does_not_show_its_tokens(self, keys: Keys) -> None:
        access = Access.load(keys.ours.token_file, keys.ours.server)
        keys.check_unspoken(f"{access!r} {access}")

    def test_files_that_are_none(self, keys: Keys, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="token file"):
            Access.load(str(tmp_path / "none"), None)
        with pytest.raises(UsageError, match="certificate"):
            Access.load(None, TlsFiles(str(tmp_path / "none"), keys.ours.server.key))


class Served:
    """A session in a thread, and its client. It lends no device."""

    def __init__(self, dialect: Dialect, tokens: tuple[bytes, ...]) -> None:
        ours, theirs = socket.socketpair()
        self.client = RawClient.over(ours, dialect)
        self.state = SessionState(dialect, [], 1, None, Stream(theirs), tokens)
        self._reason = "it goes on"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._reason = serve_client(self.state)
        self.state.stream.close()

    def reason(self) -> str:
        """Why the session has ended; nothing more comes from it."""
        self.client.expect_closed()
        self._thread.join(5)
        return self._reason

    def close(self) -> None:
        self.client.close()
        self._thread.join(5)
        assert not self._thread.is_alive()


Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(token, ...)` is such a session, after HELLO."""
    with ExitStack() as stack:

        def start(*tokens: bytes, dialect: Dialect = V8) -> Served:
            served = Served(dialect, tokens)
            stack.callback(served.close)
            assert served.client.hello().padding == 1
            return served

        yield start


def before_the_proof() -> list[tuple[Dialect, int]]:
    return [(d, n) for d in (V7, V8) for n in d.shapes if n != Command.HELLO]


class TestLocked:
    @pytest.mark.parametrize(
        ("dialect", "command"),
        before_the_proof(),
        ids=lambda value: value.version if isinstance(value, Dialect) else value.name,
    )
    @pytest.mark.parametrize("halfway", [False, True])
    def test_no_command(
        self, serve: Serve, dialect: Dialect, command: Command, halfway: bool
    ) -> None:
        served = serve(TOKEN, dialect=dialect)
        if halfway:
            served.client.auth()
        served.client.post(command, bytes(dialect.shapes[command].least))
        reason = served.reason()
        assert reason == (
            f"refused: {command.name}: a token is needed first "
            "(llama.cpp: through longwire tunnel)"
        )
        assert served.state.refused == "authentication"
        assert served.state.served.commands == 1 + halfway

    @pytest.mark.parametrize("command", [*LX_SHAPES, 0x86, 0xFF])
    def test_nor_one_of_lx(self, serve: Serve, command: int) -> None:
        served = serve(TOKEN)
        served.client.post(command, bytes(8))
        assert "is not part of protocol 8.0.0" in served.reason()
        assert served.state.refused == "protocol"

    def test_nor_lx_itself(self, serve: Serve) -> None:
        served = serve(TOKEN)
        served.client.post(Command.LX_START, bytes(4))
        refusal = served.client.refusal()
        assert (refusal.code, refusal.name) == (6, "Unauthenticated")
        assert "a token is needed" in refusal.sentence
        assert "a token is needed" in served.reason()
        assert served.state.refused == "authentication"

    def test_a_header_is_enough(self, serve: Serve) -> None:
        """No body of a stranger is taken in."""
        served = serve(TOKEN)
        served.client.send(
            bytes([Command.SET_TENSOR]) + (1 << 40).to_bytes(8, "little")
        )
        assert "SET_TENSOR: a token is needed" in served.reason()

    @pytest.mark.parametrize("command", list(LX_OFFER))
    @pytest.mark.parametrize("more", [-1, 1, 1 << 40])
    def test_a_wrong_length(self, serve: Serve, command: Command, more: int) -> None:
        served = serve(TOKEN)
        size = LX_OFFER[command].least + more
        served.client.send(bytes([command]) + size.to_bytes(8, "little"))
        assert f"{command.name}: length {size}, expected" in served.reason()
        assert served.state.refused == "protocol"

    def test_before_hello(self) -> None:
        for command in LX_OFFER:
            served = Served(V8, (TOKEN,))
            served.client.post(command, bytes(LX_OFFER[command].least))
            assert "no HELLO" in served.reason()
            served.close()


class TestProof:
    @pytest.mark.parametrize("dialect", [V7, V8], ids=lambda d: d.version)
    def test_it_opens_the_dialect(self, serve: Serve, dialect: Dialect) -> None:
        served = serve(TOKEN, dialect=dialect)
        assert not served.state.admitted
        served.client.prove(TOKEN)
        assert served.client.device_count() == 0
        assert served.state.admitted
        served.client.close()

    @pytest.mark.parametrize("token", [TOKEN, NEW_TOKEN])
    def test_each_token_of_several(self, serve: Serve, token: bytes) -> None:
        served = serve(TOKEN, NEW_TOKEN)
        served.client.prove(token)
        assert served.client.device_count() == 0

    def refused(self, served: Served, proof: bytes, why: str) -> None:
        served.client.post(Command.LX_PROVE, proof)
        refusal = served.client.refusal()
        assert (refusal.code, refusal.name) == (6, "Unauthenticated")
        assert why in refusal.sentence
        assert why in served.reason()
        assert served.state.refused == "authentication"
        assert served.state.locked

    def test_a_wrong_token(self, serve: Serve) -> None:
        served = serve(TOKEN, NEW_TOKEN)
        nonces = served.client.auth()
        self.refused(served, client_proof(WRONG, *nonces), "not the token of this")

    def test_nonces_the_wrong_way_round(self, serve: Serve) -> None:
        served = serve(TOKEN)
        ours, theirs = served.client.auth()
        self.refused(served, client_proof(TOKEN, theirs, ours), "not the token")

    def test_without_nonces(self, serve: Serve) -> None:
        served = serve(TOKEN)
        proof = client_proof(TOKEN, bytes(32), bytes(32))
        self.refused(served, proof, "no LX_AUTH before it")

    def test_of_another_connection(self, serve: Serve) -> None:
        """Heard on the wire, and sent once more."""
        first, second = serve(TOKEN), serve(TOKEN)
        ours, theirs = first.client.auth()
        proof = client_proof(TOKEN, ours, theirs)
        first.client.ask(Command.LX_PROVE, proof)
        assert second.client.ask(Command.LX_AUTH, ours) != theirs
        self.refused(second, proof, "not the token")

    def test_a_second_challenge_before_the_proof(self, serve: Serve) -> None:
        """Else a client could keep its place for ever, and never come in."""
        served = serve(TOKEN)
        served.client.auth()
        served.client.post(Command.LX_AUTH, bytes(32))
        assert "a second one before LX_PROVE" in served.client.refusal().sentence
        assert "a second one before LX_PROVE" in served.reason()

    def test_twice(self, serve: Serve) -> None:
        served = serve(TOKEN)
        proof = client_proof(TOKEN, *served.client.auth())
        served.client.ask(Command.LX_PROVE, proof)
        served.client.post(Command.LX_PROVE, proof)
        assert "no LX_AUTH before it" in served.client.refusal().sentence
        assert "no LX_AUTH before it" in served.reason()

    def test_a_second_one_has_to_be_right_as_well(self, serve: Serve) -> None:
        served = serve(TOKEN)
        served.client.prove(TOKEN)
        served.client.prove(TOKEN)
        proof = client_proof(WRONG, *served.client.auth())
        served.client.post(Command.LX_PROVE, proof)
        assert "not the token" in served.client.refusal().sentence
        assert "not the token" in served.reason()

    def test_sent_ahead(self, serve: Serve) -> None:
        """What follows a wrong proof in the same write is not done."""
        served = serve(TOKEN)
        served.client.auth()
        served.client.send(
            bytes([Command.LX_PROVE])
            + (32).to_bytes(8, "little")
            + bytes(32)
            + bytes([Command.DEVICE_COUNT])
            + bytes(8)
        )
        assert "not the token" in served.client.refusal().sentence
        assert "not the token" in served.reason()
        assert served.state.served.commands == 3

    def test_nonces_do_not_repeat(self, serve: Serve) -> None:
        served = serve(TOKEN)
        nonces = []
        for _ in range(50):
            ours, theirs = served.client.auth()
            served.client.ask(Command.LX_PROVE, client_proof(TOKEN, ours, theirs))
            nonces.append(theirs)
        assert len(set(nonces)) == 50
        assert {len(nonce) for nonce in nonces} == {32}

    def test_a_server_without_a_token_says_so(self, serve: Serve) -> None:
        """Whoever was given a token wants to know his server by it."""
        served = serve()
        assert served.client.device_count() == 0
        served.client.post(Command.LX_AUTH, bytes(32))
        refusal = served.client.refusal()
        assert (refusal.code, refusal.name) == (6, "Unauthenticated")
        assert "no token" in refusal.sentence
        assert "no token" in served.reason()
