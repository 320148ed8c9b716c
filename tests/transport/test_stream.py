"""Streams over sockets that take and give as little as they like."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.transport import stream as module
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream, connect, tune

KIB = 1024
BUFFER = 256 * KIB


class Grudging:
    """A socket that moves only so many bytes per call, in turn."""

    def __init__(self, steps: Iterable[int], incoming: bytes = b"") -> None:
        self.sent = bytearray()
        self.calls: list[list[int]] = []
        """Sizes of the pieces of each `sendmsg`."""
        self._incoming = memoryview(incoming)
        self._steps = iter(steps)

    def sendmsg(self, pieces: list[memoryview]) -> int:
        self.calls.append([len(piece) for piece in pieces])
        taken = b"".join(pieces)[: next(self._steps)]
        self.sent += taken
        return len(taken)

    def recv_into(self, target: memoryview) -> int:
        assert len(target) > 0, "asked for nothing: looks like the end"
        size = min(len(target), next(self._steps), len(self._incoming))
        target[:size] = self._incoming[:size]
        self._incoming = self._incoming[size:]
        return size


def over(sock: Grudging) -> Stream:
    return Stream(sock)  # type: ignore[arg-type]


def forever(steps: list[int]) -> Iterator[int]:
    while True:
        yield from steps


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours)
    stream.set_deadline(5)
    yield stream, theirs
    stream.close()
    theirs.close()


class TestSend:
    def test_all_pieces_in_one_call(self) -> None:
        sock = Grudging([1 << 30])
        over(sock).send([b"ab", bytearray(b"c"), b"", memoryview(b"def")])
        assert sock.sent == b"abcdef"
        assert sock.calls == [[2, 1, 3]]

    def test_nothing_at_all(self) -> None:
        sock = Grudging([])
        over(sock).send([])
        over(sock).send([b"", memoryview(b"")])
        assert sock.calls == []

    def test_wide_items_count_as_bytes(self) -> None:
        sock = Grudging([1 << 30])
        over(sock).send([memoryview(bytes(16)).cast("Q")])
        assert sock.calls == [[16]]

    def test_many_pieces_need_several_calls(self) -> None:
        sock = Grudging(forever([1 << 30]))
        pieces = [bytes([i % 251]) for i in range(1300)]
        over(sock).send(pieces)
        assert sock.sent == b"".join(pieces)
        assert [len(call) for call in sock.calls] == [512, 512, 276]

    @given(
        st.lists(st.binary(max_size=20), max_size=30),
        st.lists(st.integers(1, 25), min_size=1, max_size=5),
    )
    def test_partial_writes_go_on_where_they_stopped(
        self, pieces: list[bytes], steps: list[int]
    ) -> None:
        sock = Grudging(forever(steps))
        over(sock).send(pieces)
        assert sock.sent == b"".join(pieces)

    @given(
        st.lists(st.binary(max_size=20), max_size=30),
        st.lists(st.integers(1, 25), min_size=1, max_size=5),
    )
    def test_no_call_takes_more_than_the_limit(
        self, pieces: list[bytes], steps: list[int]
    ) -> None:
        sock = Grudging(forever(steps))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_MAX_CALL", 7)
            over(sock).send(pieces)
        assert sock.sent == b"".join(pieces)
        assert all(0 < sum(call) <= 7 for call in sock.calls)

    def test_the_other_end_is_gone(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, theirs = pair
        theirs.close()
        with pytest.raises(OSError):
            stream.send([bytes(16)])

    def test_a_deadline(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, _ = pair
        stream.set_deadline(0.1)
        with pytest.raises(TimeoutError):
            stream.send([bytes(64 << 20)])


TAKES = st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=40)


class TestReceive:
    @settings(max_examples=200)
    @given(TAKES, st.lists(st.integers(1, 60), min_size=1, max_size=5))
    def test_any_mix_of_calls_reads_the_stream(
        self, takes: list[tuple[bool, int]], steps: list[int]
    ) -> None:
        """With a buffer so small that every branch of it is used."""
        total = sum(size for _, size in takes)
        incoming = bytes(i % 251 for i in range(total))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_BUFFER", 32)
            stream = over(Grudging(forever(steps), incoming))
            at = 0
            for in_place, size in takes:
                if in_place:
                    taken = memoryview(bytearray(size))
                    stream.take_into(taken)
                else:
                    taken = stream.take(size)
                assert taken == incoming[at : at + size]
                at += size

    def test_a_header_reads_what_follows_ahead(self) -> None:
        sock = Grudging([108], bytes(8) + b"x" * 100)
        stream = over(sock)
        assert stream.take(8) == bytes(8)
        target = memoryview(bytearray(100))
        # The only step is used up: this must not ask the socket again.
        stream.take_into(target)
        assert target == b"x" * 100

    def test_more_than_the_buffer_holds(self) -> None:
        incoming = bytes(BUFFER) + b"tail"
        stream = over(Grudging(forever([100_000]), incoming))
        assert stream.take(BUFFER + 4) == incoming

    def test_bulk_goes_straight_into_the_target(self) -> None:
        steps = [8, 1 << 30]
        stream = over(Grudging(steps, bytes(8) + b"y" * (3 * BUFFER)))
        stream.take(8)
        target = memoryview(bytearray(3 * BUFFER))
        stream.take_into(target)
        assert target[-1] == ord("y")

    @pytest.mark.parametrize("size", [4, BUFFER + 1])
    def test_the_end_in_the_middle(
        self, pair: tuple[Stream, socket.socket], size: int
    ) -> None:
        stream, theirs = pair
        theirs.sendall(b"abc")
        theirs.close()
        with pytest.raises(EOFError, match="closed"):
            stream.take(size)

    def test_the_end_in_the_middle_of_a_target(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        stream, theirs = pair
        theirs.sendall(b"abc")
        theirs.close()
        with pytest.raises(EOFError, match="closed"):
            stream.take_into(memoryview(bytearray(4)))

    def test_a_deadline(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, theirs = pair
        stream.set_deadline(0.1)
        theirs.sendall(b"abc")
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            stream.take(4)
        assert time.monotonic() - started < 2


class TestClose:
    def test_twice(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, theirs = pair
        stream.close()
        stream.close()
        assert theirs.recv(1) == b""
        with pytest.raises(OSError):
            stream.send([b"x"])

    def test_it_ends_a_wait_in_another_thread(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        stream, _ = pair
        ended = threading.Event()

        def wait() -> None:
            with pytest.raises((EOFError, OSError)):
                stream.take(1)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        stream.close()
        assert ended.wait(4)
        thread.join(4)


class TestConnect:
    def test_the_options_of_a_connection(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
            stream = connect(endpoint, 5)
            sock = stream._sock
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.gettimeout() == 5
            stream.close()

    def test_nobody_listens(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
            with pytest.raises(ConnectionRefusedError):
                connect(endpoint, 5)

    def test_tune_leaves_other_families_alone(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        tune(pair[1])
