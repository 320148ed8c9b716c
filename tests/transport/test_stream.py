"""Streams over sockets that take and give as little as they like."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.transport import stream as module
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream, connect, tune
from support.worker import until

KIB = 1024
BUFFER = 256 * KIB
PATIENCE_S = 10.0


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


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class TestSend:
    def test_all_pieces_in_one_call(self) -> None:
        sock = Grudging([1 << 30])
        bulk = bytes(8192)
        over(sock).send([b"ab", bytearray(b"c"), b"", memoryview(bulk)])
        assert sock.sent == b"abc" + bulk
        assert sock.calls == [[2, 1, 8192]]

    def test_a_little_goes_as_one_piece(self) -> None:
        sock = Grudging([4, 1 << 30])
        over(sock).send([b"ab", bytearray(b"c"), b"", memoryview(b"def")])
        assert sock.sent == b"abcdef"
        assert sock.calls == [[6], [2]]

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
        pieces = [bytes([i % 251]) * 4 for i in range(1300)]
        over(sock).send(pieces)
        assert sock.sent == b"".join(pieces)
        assert [len(call) for call in sock.calls] == [512, 512, 276]

    @given(
        st.lists(st.binary(max_size=20), max_size=30),
        st.lists(st.integers(1, 25), min_size=1, max_size=5),
        st.sampled_from([0, 100, 4096]),
    )
    def test_partial_writes_go_on_where_they_stopped(
        self, pieces: list[bytes], steps: list[int], joined: int
    ) -> None:
        sock = Grudging(forever(steps))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_JOINED", joined)
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
            patch.setattr(module, "MAX_CALL", 7)
            patch.setattr(module, "_JOINED", 0)
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


class TestSignsOfLife:
    """A send that nobody takes in goes on for as long as something comes back."""

    DEADLINE_S = 0.3
    BULK = bytes(16 << 20)

    def sending(self, stream: Stream, pool: ThreadPoolExecutor) -> Future[None]:
        stream.set_deadline(self.DEADLINE_S)
        return pool.submit(stream.send, [b"head", self.BULK])

    def test_it_waits(
        self, pair: tuple[Stream, socket.socket], pool: ThreadPoolExecutor
    ) -> None:
        stream, theirs = pair
        sent = self.sending(stream, pool)
        for i in range(12):
            theirs.sendall(bytes([i]))
            pause(self.DEADLINE_S / 3)
        assert not sent.done()
        received = 0
        while received < len(self.BULK) + 4:
            received += len(theirs.recv(1 << 20))
        sent.result(PATIENCE_S)
        # They are still there, for whoever receives next.
        assert stream.take(12) == bytes(range(12))
        assert stream.received == stream.taken == 12

    @pytest.mark.parametrize("signs", [0, 1, 5000])
    def test_not_for_what_came_long_ago(
        self, pair: tuple[Stream, socket.socket], pool: ThreadPoolExecutor, signs: int
    ) -> None:
        stream, theirs = pair
        theirs.sendall(bytes(signs))
        started = time.monotonic()
        sent = self.sending(stream, pool)
        assert isinstance(sent.exception(PATIENCE_S), TimeoutError)
        assert time.monotonic() - started < 2 * self.DEADLINE_S + 2

    def test_nor_for_one_who_has_left(
        self, pair: tuple[Stream, socket.socket], pool: ThreadPoolExecutor
    ) -> None:
        stream, theirs = pair
        sent = self.sending(stream, pool)
        pause(self.DEADLINE_S / 3)
        theirs.shutdown(socket.SHUT_WR)
        assert isinstance(sent.exception(PATIENCE_S), OSError)

    def test_behind_a_buffer_that_was_full(
        self, pair: tuple[Stream, socket.socket], pool: ThreadPoolExecutor
    ) -> None:
        """All taken out, its end is where it was."""
        stream, theirs = pair
        filled = pool.submit(theirs.sendall, bytes(BUFFER))
        stream.skip(BUFFER)
        filled.result(PATIENCE_S)
        sent = self.sending(stream, pool)
        for _ in range(6):
            theirs.sendall(b"+")
            pause(self.DEADLINE_S / 2)
        assert not sent.done()
        stream.hang_up()
        assert sent.exception(PATIENCE_S) is not None

    def test_the_deadline_stays_the_same(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        stream, theirs = pair
        theirs.sendall(b"+")
        stream.set_deadline(0.1)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                stream.send([self.BULK])
        assert stream.take(1) == b"+"
        with pytest.raises(TimeoutError):
            stream.take(1)


class Offering:
    """A lock that has something offered whenever its owner lets go of it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
        assert self._stream.offer(b"!")


class TestOffer:
    """Bytes from a thread that does not own the stream."""

    def test_they_leave_when_nothing_else_does(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        stream, theirs = pair
        assert stream.offer(b"alive")
        stream.send([b"answer"])
        assert theirs.recv(99) == b"aliveanswer"

    def test_not_while_the_owner_receives(
        self, pair: tuple[Stream, socket.socket], pool: ThreadPoolExecutor
    ) -> None:
        stream, theirs = pair
        taken = pool.submit(lambda: bytes(stream.take(1)))
        until(lambda: stream.waiting)
        assert not stream.offer(b"alive")
        theirs.sendall(b"x")
        assert taken.result(PATIENCE_S) == b"x"
        assert not stream.waiting
        assert stream.offer(b"alive")
        assert theirs.recv(99) == b"alive"

    def test_not_when_they_would_not_leave(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        stream, theirs = pair
        stream.set_deadline(0.1)
        with pytest.raises(TimeoutError):
            stream.send([bytes(64 << 20)])
        assert not stream.offer(b"alive")

    def test_nothing_gets_inside_of_a_message(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        """Which leaves in as many portions as the other end likes."""
        sock = Grudging(forever([4]))
        sock.fileno = pair[0].fileno  # type: ignore[attr-defined]
        stream = over(sock)
        stream._turn = Offering(stream)  # type: ignore[assignment]
        stream.send([b"header", b"and a body"])
        assert sock.sent == b"headerand a body!"

    def test_a_closed_stream(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, theirs = pair
        theirs.close()
        with pytest.raises(OSError):
            for _ in range(3):
                stream.offer(b"alive")
        stream.close()
        with pytest.raises(OSError, match="closed"):
            stream.offer(b"alive")


class TestSome:
    def test_what_there_is(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, theirs = pair
        assert not stream.holds
        theirs.sendall(b"abcdef")
        assert stream.take(2) == b"ab"
        assert stream.holds
        assert stream.take_some() == b"cdef"
        assert not stream.holds
        theirs.sendall(b"more")
        assert stream.take_some() == b"more"
        assert stream.taken == stream.received == 10

    def test_the_end(self, pair: tuple[Stream, socket.socket]) -> None:
        stream, theirs = pair
        theirs.sendall(b"last")
        theirs.close()
        assert stream.take_some() == b"last"
        with pytest.raises(EOFError):
            stream.take_some()


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


TAKES = st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=40)


class TestReceive:
    @settings(max_examples=200, deadline=None)
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

    def test_ahead_but_not_more_than_the_limit(self) -> None:
        asked: list[int] = []

        class Sock(Grudging):
            def recvmsg_into(self, targets: list[memoryview]) -> tuple[int, ...]:
                asked.extend(map(len, targets))
                return (self.recv_into(targets[0]),)

        stream = over(Sock([8], bytes(8)))
        head, target = memoryview(bytearray(8)), memoryview(bytearray(100))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "MAX_CALL", 70)
            assert stream.take_ahead(head, target) == 0
        assert asked == [8, 70]

    def test_more_than_the_buffer_holds(self) -> None:
        incoming = bytes(BUFFER) + b"tail"
        stream = over(Grudging(forever([100_000]), incoming))
        assert stream.take(BUFFER + 4) == incoming

    def test_eager_where_nobody_can_be_asked(
        self, pair: tuple[Stream, socket.socket], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr(select, "poll")
        stream, theirs = pair
        stream.be_eager()
        theirs.sendall(b"x")
        assert stream.take(1) == b"x"

    @pytest.mark.parametrize("answers_only", [False, True])
    def test_eager_for_the_first_of_an_answer(
        self,
        pair: tuple[Stream, socket.socket],
        monkeypatch: pytest.MonkeyPatch,
        answers_only: bool,
    ) -> None:
        looks = []

        class Poll:
            def register(self, sock: socket.socket, events: int) -> None:
                pass

            def poll(self, timeout: float) -> list[tuple[int, int]]:
                looks.append(timeout)
                return [(0, select.POLLIN)]

        monkeypatch.setattr(select, "poll", Poll)
        monkeypatch.setattr(module, "_EAGER_S", PATIENCE_S)
        stream, theirs = pair
        stream.be_eager(answers_only)
        for _ in range(2):
            stream.send([b"?"])
            theirs.sendall(b"a")
            assert stream.take(1) == b"a"
        assert looks == [0]
        theirs.sendall(b"more of it")
        stream.take(10)
        assert looks == ([0] if answers_only else [0, 0])

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
            with connect(endpoint, 5) as sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert sock.gettimeout() == 5

    def test_nobody_listens(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
            with pytest.raises(ConnectionRefusedError):
                connect(endpoint, 5)

    def test_a_duplicate_outlives_the_stream(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        stream, theirs = pair
        with stream.duplicate() as bare:
            assert bare.fileno() != stream.fileno()
            bare.shutdown(socket.SHUT_RDWR)
            with pytest.raises(EOFError):
                stream.take(1)
            stream.close()
            assert bare.recv(1) == b""

    def test_tune_leaves_other_families_alone(
        self, pair: tuple[Stream, socket.socket]
    ) -> None:
        tune(pair[1])
