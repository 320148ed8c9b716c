"""TLS streams: who may speak, and that every byte arrives whole."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from longwire.errors import UsageError
from longwire.transport.stream import Stream
from longwire.transport.tls import (
    TlsFiles,
    TlsStream,
    client_context,
    explain,
    refuses_certificate,
    server_context,
)
from support.keys import Keys

MIB = 1 << 20
PATIENCE_S = 20.0
SHORT_S = 0.3


class Ends(NamedTuple):
    """Both ends of one connection."""

    client: TlsStream
    server: TlsStream


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), PATIENCE_S)
        server, _ = listener.accept()
    server.settimeout(PATIENCE_S)
    return client, server


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    """Streams to close at the end."""
    opened: list[Stream] = []
    yield opened
    for stream in opened:
        stream.close()


Connect = Callable[..., Ends]


@pytest.fixture
def connect(
    keys: Keys, pool: ThreadPoolExecutor, streams: list[Stream]
) -> Iterator[Connect]:
    """Ends that have shaken hands, and said a byte each way."""
    sockets = ExitStack()

    def make(stall_s: float = 0, buffer: int = 0) -> Ends:
        ours, theirs = tcp_pair()
        sockets.enter_context(ours)
        sockets.enter_context(theirs)
        if buffer:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        if stall_s:
            # What a session does to its client's socket.
            theirs.setblocking(True)
            patience = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1e6))
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        server = TlsStream(theirs, server_context(keys.ours.server), None)
        streams.append(server)
        first = pool.submit(lambda: bytes(server.take(1)))
        client = TlsStream(ours, client_context(keys.ours.client), "127.0.0.1")
        streams.append(client)
        client.send([b"c"])
        assert first.result(PATIENCE_S) == b"c"
        server.send([b"s"])
        assert client.take(1) == b"s"
        return Ends(client, server)

    with sockets:
        yield make


class TestBytes:
    @pytest.mark.parametrize("size", [1, 16 * 1024, MIB + 3, 40 * MIB])
    @pytest.mark.parametrize("upwards", [True, False])
    def test_a_tensor(
        self, connect: Connect, pool: ThreadPoolExecutor, size: int, upwards: bool
    ) -> None:
        ends = connect()
        source, sink = ends if upwards else (ends.server, ends.client)
        data = random.Random(size).randbytes(size)
        target = memoryview(bytearray(size))
        received = pool.submit(sink.take_into, target)
        source.send([data])
        received.result(PATIENCE_S)
        assert target == data
        assert sink.received == sink.taken == size + 1

    def test_many_small_pieces(
        self, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        source, sink = connect()
        rng = random.Random(5)
        sizes = [rng.choice([0, 1, 8, 300, 5000, 17_000]) for _ in range(2000)]
        pieces = [rng.randbytes(size) for size in sizes]
        whole = b"".join(pieces)
        received = pool.submit(lambda: bytes(sink.take(len(whole))))
        source.send(pieces)
        assert received.result(PATIENCE_S) == whole

    def test_small_pieces_share_a_record(self, connect: Connect) -> None:
        client, server = connect()
        pieces = [bytes([i]) * 50 for i in range(200)]
        client.send(pieces)
        # A record is handed out at once.
        assert server.take_some() == b"".join(pieces)

    def test_both_ways_at_once(
        self, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        """In turns, as requests and answers are."""
        client, server = connect()

        def echo() -> None:
            for size in sizes:
                server.send([bytes(server.take(size))])

        sizes = [3, 70_000, 1, 200_000, 4096, 4097]
        echoed = pool.submit(echo)
        for i, size in enumerate(sizes):
            data = bytes([i]) * size
            client.send([data])
            assert client.take(size) == data
        echoed.result(PATIENCE_S)

    def test_what_is_decrypted_already_is_told(self, connect: Connect) -> None:
        client, server = connect()
        assert not server.holds
        client.send([b"abcdef"])
        assert server.take(2) == b"ab"
        assert server.holds
        assert server.take_some() == b"cdef"
        assert not server.holds

    def test_the_wire_does_not_show_it(self, keys: Keys) -> None:
        ours, theirs = tcp_pair()
        with ours, theirs, ThreadPoolExecutor() as pool:
            relay = Relay(theirs)
            server = TlsStream(relay.inner, server_context(keys.ours.server), None)
            taken = pool.submit(lambda: bytes(server.take(1000)))
            client = TlsStream(ours, client_context(keys.ours.client), "127.0.0.1")
            client.send([b"secret " * 200])
            assert taken.result(PATIENCE_S) == (b"secret " * 200)[:1000]
            client.close()
            server.close()
            relay.close()
        assert b"secret" not in relay.seen and len(relay.seen) > 1400


class Relay:
    """Hands on what comes from a socket, and keeps it."""

    def __init__(self, outer: socket.socket) -> None:
        self.seen = bytearray()
        self.inner, self._mine = socket.socketpair()
        ends = ((outer, self._mine), (self._mine, outer))
        self._threads = [threading.Thread(target=self._run, args=pair) for pair in ends]
        for thread in self._threads:
            thread.start()

    def _run(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._mine.close()


class TestDeadlines:
    def test_a_reader_that_stalls(self, connect: Connect) -> None:
        _, server = connect(stall_s=SHORT_S)
        started = time.monotonic()
        with pytest.raises(BlockingIOError):
            server.send([bytes(64 * MIB)])
        assert SHORT_S * 0.9 < time.monotonic() - started < SHORT_S + 3

    @pytest.mark.parametrize("upwards", [True, False])
    def test_a_slow_reader_is_no_stalled_one(
        self, connect: Connect, pool: ThreadPoolExecutor, upwards: bool
    ) -> None:
        deadline_s = 2 * SHORT_S
        ends = connect(stall_s=deadline_s, buffer=64 * 1024)
        ends.client.set_deadline(deadline_s)
        source, sink = ends if upwards else (ends.server, ends.client)
        data = random.Random(1).randbytes(8 * MIB)
        started = time.monotonic()
        sent = pool.submit(source.send, [data])
        received = bytearray()
        pause = threading.Event()
        while len(received) < len(data):
            received += sink.take_some()
            pause.wait(deadline_s / 200)
        sent.result(PATIENCE_S)
        assert received == data
        assert time.monotonic() - started > 1.5 * deadline_s

    def test_what_bounds_sends_is_no_bound_for_a_wait(
        self, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        client, server = connect(stall_s=SHORT_S)
        server.send([b"an answer"])
        waiting = pool.submit(lambda: bytes(server.take(1)))
        threading.Event().wait(1.5 * SHORT_S)
        client.send([b"x"])
        assert waiting.result(PATIENCE_S) == b"x"

    def test_a_server_that_is_silent(self, connect: Connect) -> None:
        client, _ = connect()
        client.set_deadline(SHORT_S)
        with pytest.raises(TimeoutError):
            client.take(1)

    def test_a_send_waits_for_a_server_that_shows_life(
        self, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        client, server = connect()
        client.set_deadline(SHORT_S)
        data = random.Random(2).randbytes(20 * MIB)
        sent = pool.submit(client.send, [data])
        pause = threading.Event()
        for _ in range(12):
            server.offer(b"+")
            pause.wait(SHORT_S / 3)
        assert not sent.done()
        assert server.take(len(data)) == data
        sent.result(PATIENCE_S)
        assert client.take(12) == b"+" * 12

    def test_but_not_for_signs_of_long_ago(self, connect: Connect) -> None:
        """TLS hands out one record at a time: none of them may count twice."""
        client, server = connect()
        client.set_deadline(SHORT_S)
        for _ in range(30):
            server.offer(b"+")
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            client.send([bytes(64 * MIB)])
        assert time.monotonic() - started < 4 * SHORT_S + 2


class TestOffer:
    def test_it_is_a_record_like_any_other(self, connect: Connect) -> None:
        client, server = connect()
        assert server.offer(b"alive")
        server.send([b"more"])
        assert client.take(9) == b"alivemore"

    def test_nothing_gets_inside_of_a_message(
        self, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        client, server = connect(buffer=16 * 1024)
        data = bytes(4 * MIB)
        sent = pool.submit(server.send, [data])
        target = memoryview(bytearray(len(data)))
        received = pool.submit(client.take_into, target)
        offered = 0
        while not sent.done():
            offered += server.offer(b"\xff")
        sent.result(PATIENCE_S)
        if offered:
            # Before all of it, or after.
            assert set(client.take(offered)) <= {0, 255}
        received.result(PATIENCE_S)
        start = len(bytes(target)) - len(bytes(target).lstrip(b"\xff"))
        assert not any(target[start:])


class TestEnds:
    def test_close_is_an_end(self, connect: Connect) -> None:
        client, server = connect()
        client.close()
        client.close()
        with pytest.raises(EOFError):
            server.take(1)

    def test_a_send_to_nobody(self, connect: Connect) -> None:
        client, server = connect()
        server.close()
        with pytest.raises(BrokenPipeError):
            for _ in range(100):
                client.send([bytes(MIB)])

    def test_a_send_to_somebody_who_has_said_why(self, keys: Keys) -> None:
        """The alert is there; what is sent after it goes nowhere."""
        ours, theirs = tcp_pair()
        with ours, ThreadPoolExecutor() as pool:
            server = TlsStream(theirs, server_context(keys.ours.server), None)
            refusal = pool.submit(server.take, 1)
            client = TlsStream(ours, client_context(keys.ours.server), "127.0.0.1")
            assert isinstance(refusal.exception(PATIENCE_S), ssl.SSLError)
            server.close()
            with pytest.raises(ssl.SSLError, match="UNSUPPORTED_CERTIFICATE"):
                for _ in range(100):
                    client.send([b"x"])
            client.close()

    def test_hanging_up_ends_a_wait(
        self, connect: Connect, pool: ThreadPoolExecutor
    ) -> None:
        client, _ = connect()
        waiting: Future[object] = pool.submit(client.take, 1)
        while not client.waiting:
            assert not waiting.done()
        client.hang_up()
        with pytest.raises((EOFError, OSError)):
            waiting.result(PATIENCE_S)

    def test_nothing_encrypted_is_handed_out_after_it(self, connect: Connect) -> None:
        client, server = connect()
        server.send([b"secret"])
        until_readable(client)
        client.hang_up()
        with contextlib.suppress(EOFError, OSError):
            assert client.take_some() == b"secret"
        with pytest.raises((EOFError, OSError)):
            client.send([b"in plain"])
            client.take(1)


def until_readable(stream: Stream) -> None:
    import select

    assert select.select([stream.fileno()], [], [], PATIENCE_S)[0]


def shake(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str = "127.0.0.1"
) -> tuple[str, str]:
    """What each end says of a handshake and a byte each way; empty: all is well."""
    ours, theirs = tcp_pair()

    def serve() -> str:
        stream = TlsStream(theirs, server, None)
        try:
            stream.take(1)
            stream.send([b"s"])
        except (OSError, EOFError) as error:
            return explain(error)
        finally:
            stream.close()
        return ""

    with ours, theirs, ThreadPoolExecutor() as pool:
        said = pool.submit(serve)
        try:
            stream = TlsStream(ours, client, name)
            with contextlib.closing(stream):
                stream.send([b"c"])
                stream.take(1)
        except (OSError, EOFError) as error:
            return explain(error), said.result(PATIENCE_S)
        return "", said.result(PATIENCE_S)


class TestWho:
    def test_those_of_one_team(self, keys: Keys) -> None:
        server = server_context(keys.ours.server)
        client = client_context(keys.ours.client)
        for name in ("127.0.0.1", "localhost", "::1"):
            assert shake(server, client, name) == ("", "")

    def test_a_server_that_asks_for_nothing(self, keys: Keys) -> None:
        cert, key, ca = (getattr(keys.ours.server, n) for n in ("cert", "key", "ca"))
        server = server_context(TlsFiles(cert, key))
        assert shake(server, client_context(TlsFiles(ca=ca))) == ("", "")

    def test_a_server_of_another_team(self, keys: Keys) -> None:
        client, server = shake(
            server_context(keys.others.server), client_context(keys.ours.client)
        )
        assert client.startswith("its certificate is not accepted: ")
        assert "the other end does not know the CA" in server

    def test_a_client_of_another_team(self, keys: Keys) -> None:
        ca = keys.ours.server.ca
        stranger = TlsFiles(keys.others.client.cert, keys.others.client.key, ca)
        client, server = shake(
            server_context(keys.ours.server), client_context(stranger)
        )
        assert server.startswith("its certificate is not accepted: ")
        assert "does not know the CA of this end's certificate" in client

    def test_a_wrong_name(self, keys: Keys) -> None:
        server = server_context(keys.ours.server)
        client = client_context(keys.ours.client)
        for name in ("127.0.0.2", "gpu1"):
            words, log = shake(server, client, name)
            assert words.startswith("its certificate is not accepted: ")
            assert name in words
            assert "name" in log

    def test_no_certificate(self, keys: Keys) -> None:
        client, server = shake(
            server_context(keys.ours.server),
            client_context(TlsFiles(ca=keys.ours.client.ca)),
        )
        assert client == (
            "the server wants a client certificate (--tls-cert and --tls-key)"
        )
        assert server == "no client certificate"

    def test_a_servers_certificate_is_no_clients(self, keys: Keys) -> None:
        client, server = shake(
            server_context(keys.ours.server), client_context(keys.ours.server)
        )
        assert server.startswith("its certificate is not accepted: ")
        assert "purpose" in server
        assert "not made for what it is used for" in client

    def test_nor_the_other_way(self, keys: Keys) -> None:
        client, _ = shake(
            server_context(keys.ours.client), client_context(keys.ours.client)
        )
        assert client.startswith("its certificate is not accepted: ")

    def test_one_that_has_expired(self, keys: Keys) -> None:
        bygone = keys.bygone
        client, server = shake(
            server_context(bygone.server), client_context(bygone.client)
        )
        assert "expired" in client
        assert "expired" in server

    def test_an_old_version(self, keys: Keys) -> None:
        old = client_context(keys.ours.client)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        client, server = shake(server_context(keys.ours.server), old)
        assert client == server == "the other end does not speak TLS 1.3"
        old = server_context(keys.ours.server)
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        client, server = shake(old, client_context(keys.ours.client))
        assert client == server == "the other end does not speak TLS 1.3"


class TestWords:
    def test_of_a_refusal(self) -> None:
        refusal, other = ssl.SSLError(1, "x"), ssl.SSLError(1, "x")
        refusal.reason, other.reason = "SSLV3_ALERT_BAD_CERTIFICATE", "DECRYPT_ERROR"
        assert refuses_certificate(refusal)
        for error in (other, ssl.SSLError(1, "x"), OSError(5, "x"), None):
            assert not refuses_certificate(error)

    def test_of_anything_else(self) -> None:
        assert explain(ConnectionResetError(104, "Connection reset")) == (
            "Connection reset"
        )
        assert explain(ValueError("odd")) == "odd"
        assert explain(ssl.SSLError(1, "unheard of")) != ""


class TestFiles:
    def refusal(self, files: TlsFiles) -> str:
        words = set()
        for make in (server_context, client_context):
            with pytest.raises(UsageError) as caught:
                make(files)
            words.add(str(caught.value))
        (text,) = words
        return text

    def test_only_half(self, keys: Keys) -> None:
        cert, key = keys.ours.server.cert, keys.ours.server.key
        for files in (TlsFiles(cert, None), TlsFiles(None, key)):
            assert "give --tls-cert and --tls-key" in self.refusal(files)

    def test_of_different_owners(self, keys: Keys) -> None:
        files = TlsFiles(keys.ours.server.cert, keys.ours.client.key)
        assert self.refusal(files).endswith("the key is of another certificate")

    def test_missing_or_no_pem(self, keys: Keys, tmp_path: Path) -> None:
        cert, key = keys.ours.server.cert, keys.ours.server.key
        missing, text = str(tmp_path / "missing"), str(tmp_path / "text")
        Path(text).write_text("no certificate\n")
        assert "No such file" in self.refusal(TlsFiles(missing, key))
        assert "No such file" in self.refusal(TlsFiles(cert, missing))
        assert "No such file" in self.refusal(TlsFiles(ca=missing))
        for files in (TlsFiles(text, key), TlsFiles(cert, text), TlsFiles(ca=text)):
            words = self.refusal(files)
            assert text in words and "PEM" in words or "no certificate in it" in words

    def test_a_key_with_a_passphrase(self, keys: Keys, tmp_path: Path) -> None:
        """Nobody is asked for it."""
        locked = tmp_path / "locked.key"
        locked.write_bytes(encrypted(Path(str(keys.ours.server.key)).read_bytes()))
        files = TlsFiles(keys.ours.server.cert, str(locked))
        assert self.refusal(files).endswith(
            "the key has a passphrase; give one without"
        )


def encrypted(pem: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    key = s.load_pem_private_key(pem, None)
    lock = s.BestAvailableEncryption(b"passphrase")
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, lock)


def test_the_command_line_client_of_openssl(keys: Keys) -> None:
    """Somebody else's TLS, as far as it is installed."""
    ours, theirs = tcp_pair()
    ours.close()
    theirs.close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        files = keys.ours.client
        command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-quiet"]
        command += ["-CAfile", str(files.ca), "-cert", str(files.cert)]
        command += ["-key", str(files.key), "-verify_return_error"]
        try:
            client = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except FileNotFoundError:
            pytest.skip("openssl is not installed")
        with client:
            listener.settimeout(PATIENCE_S)
            sock, _ = listener.accept()
            sock.settimeout(PATIENCE_S)
            stream = TlsStream(sock, server_context(keys.ours.server), None)
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write(b"hello\n")
            client.stdin.flush()
            assert stream.take(6) == b"hello\n"
            stream.send([b"and goodbye\n"])
            assert client.stdout.readline() == b"and goodbye\n"
            stream.close()
            client.stdin.close()
            client.wait(PATIENCE_S)
