"""The short way of a small all-reduce, and whatever has it fall back on the general."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pytest

from longwire.errors import RemoteFailure
from longwire.native.compute import ComputeDevice
from longwire.server import communicator as module
from longwire.server import swift as spins
from longwire.server.communicator import Communicator
from longwire.server.exchange import Flow, exchange
from longwire.server.links import Link
from longwire.server.tensors import CheckedTensor, TensorChecker
from longwire.transport.duplex import Duplex
from longwire.wire.collectives import LxAllreduce, LxCommInit, WireType
from longwire.wire.links import FRAME_HEADER, SIGN_OF_LIFE
from longwire.wire.tensors import WIDE_TENSOR
from longwire.wire.types import F32_TYPE

Floats = npt.NDArray[np.float32]
Make = Callable[..., "Group"]

COUNT = 500
FRAME = FRAME_HEADER.size + 4 * COUNT
LARGEST = 16 * 1024
"""Numbers that still go the short way."""

_BOUND_S = 10.0
"""Only a test that fails waits for so long."""


class _Described(NamedTuple):
    type: int
    ne: tuple[int, ...]
    nb: tuple[int, ...]


class Placed:
    """A checked tensor in host memory, as far as a sum looks at it."""

    def __init__(self, numbers: Floats, device: object) -> None:
        self.numbers = numbers
        self.nbytes = numbers.nbytes
        self.tensor = _Described(F32_TYPE, (len(numbers), 1), (4, numbers.nbytes))
        self.device = device
        self.buffer = self

    def bytes(self, offset: int, size: int) -> memoryview:
        return self.numbers.view(np.uint8).data[offset : offset + size]


class Slow(Duplex):
    """Moves at most so many bytes at a time; None: as many as go."""

    to_send: int | None = None
    to_receive: int | None = None

    def send_some(self, pieces: Sequence[memoryview]) -> int:
        if self.to_send is not None:
            pieces = [memoryview(b"".join(pieces))[: self.to_send]]
        return super().send_some(pieces) if pieces[0] else 0

    def receive_some(self, target: memoryview) -> int:
        return super().receive_some(target[: self.to_receive])


class Group:
    """One rank, and the other ends of its links, which the test has."""

    def __init__(
        self,
        stack: ExitStack,
        own: int = 0,
        size: int = 2,
        wire: int = 0,
        least: int = 0,
    ) -> None:
        self.own = own
        pairs = [socket.socketpair() for _ in range(size - 1)]
        self.peers = [stack.enter_context(theirs) for _, theirs in pairs]
        for peer in self.peers:
            peer.settimeout(_BOUND_S)
        self.slow = [Slow(ours) for ours, _ in pairs]
        self.links = [Link(i + 1, d, f"peer{i}:1") for i, d in enumerate(self.slow)]
        self._device = object()
        self._placed: list[Placed] = []
        ranks: list[Link | None] = [*self.links]
        ranks.insert(own, None)
        links = tuple(0 if link is None else link.number for link in ranks)
        self.communicator = Communicator(
            LxCommInit(1, wire, least, own, links, (0,)),
            ranks,
            [cast("ComputeDevice", self._device)],
            cast("TensorChecker", self),
            lambda: False,
        )
        for slow in self.slow:
            stack.callback(slow.close)

    def check(self, record: bytes, command: str) -> CheckedTensor:
        """Stands for the session's checker: a record is a number here."""
        return cast("CheckedTensor", self._placed[record[0]])

    def place(self, numbers: Floats) -> bytes:
        """The request for a sum of these numbers, in place."""
        self._placed.append(Placed(numbers, self._device))
        record = bytes([len(self._placed) - 1]).ljust(WIDE_TENSOR.itemsize, b"\0")
        return LxAllreduce(1, 0, (record,)).encode()

    def meet(self, numbers: Floats) -> bytes:
        """The same, after a first sum, which always goes the general way."""
        request = self.place(numbers)
        for peer in self.peers:
            peer.sendall(frame(numbers))
        self.sum(request)
        for peer in self.peers:
            received(peer, FRAME_HEADER.size + numbers.nbytes)
        return request

    def sum(self, request: bytes) -> None:
        """One all-reduce. It may not hang."""
        errors: list[RemoteFailure] = []

        def work() -> None:
            try:
                self.communicator.allreduce(request)
            except RemoteFailure as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(_BOUND_S)
        assert not thread.is_alive(), "it hangs"
        for error in errors:
            raise error


class General:
    """How many links still had something to do, each time the general way was taken."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.before: Callable[[], None] = lambda: None
        """What the world does right before."""

    def exchange(self, flows: Sequence[Flow], *others: object) -> None:
        self.seen.append(sum(1 for flow in flows if flow.awaited or flow.unsent))
        self.before()
        exchange(flows, *others)  # type: ignore[arg-type]


@pytest.fixture
def general(monkeypatch: pytest.MonkeyPatch) -> General:
    made = General()
    monkeypatch.setattr(module, "exchange", made.exchange)
    return made


@pytest.fixture
def make(general: General) -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda *options, **named: Group(stack, *options, **named)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way does not run out of time, however slow this machine is."""
    monkeypatch.setattr(spins, "SPIN_S", _BOUND_S)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way looks once."""
    monkeypatch.setattr(spins, "SPIN_S", -1.0)


def numbers(count: int, ranks: int, seed: int = 0) -> list[Floats]:
    # Of many magnitudes: summed in another order they give other bits.
    random = np.random.default_rng(seed)
    powers = 10.0 ** random.integers(-6, 7, (ranks, count))
    return list((random.standard_normal((ranks, count)) * powers).astype(np.float32))


def in_order(values: Sequence[Floats]) -> Floats:
    total = values[0].copy()
    for value in values[1:]:
        total = total + value
    return total


def frame(values: Floats) -> bytes:
    return FRAME_HEADER.pack(values.nbytes) + values.tobytes()


def received(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or what there is before the end."""
    found = b""
    # An end that had not read everything is a reset.
    with contextlib.suppress(ConnectionResetError):
        while len(found) < size and (part := sock.recv(size - len(found))):
            found += part
    return found


PLACES = [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3), (1, 4)]


@pytest.mark.usefixtures("patient")
class TestSums:
    @pytest.mark.parametrize("count", [1, 5, COUNT, LARGEST])
    @pytest.mark.parametrize(("own", "size"), PLACES)
    def test_in_the_order_of_ranks(
        self, make: Make, general: General, own: int, size: int, count: int
    ) -> None:
        made, mine = make(own, size), np.zeros(count, np.float32)
        request = made.meet(mine)
        general.seen.clear()
        for turn in range(3):
            values = numbers(count, size, turn)
            mine[:] = values[own]
            others = values[:own] + values[own + 1 :]
            for peer, theirs in zip(made.peers, others, strict=True):
                peer.sendall(frame(theirs))
            made.sum(request)
            assert mine.tobytes() == in_order(values).tobytes()
            for peer in made.peers:
                assert received(peer, 8 + 4 * count) == frame(values[own])
        assert general.seen == []

    def test_the_order_can_be_told_from_another(self) -> None:
        values = numbers(COUNT, 3)
        assert in_order(values).tobytes() != in_order(values[::-1]).tobytes()

    def test_tensors_take_turns(self, make: Make, general: General) -> None:
        made = make(1, 3)
        placed = [np.zeros(n, np.float32) for n in (7, COUNT, 3)]
        requests = [made.meet(mine) for mine in placed]
        general.seen.clear()
        for turn in (0, 1, 2, 1, 0, 2):
            mine = placed[turn]
            a, b, c = numbers(len(mine), 3, turn)
            mine[:] = b
            made.peers[0].sendall(frame(a))
            made.peers[1].sendall(frame(c))
            made.sum(requests[turn])
            assert mine.tobytes() == in_order([a, b, c]).tobytes()
        assert general.seen == []

    @pytest.mark.parametrize("size", [1, 3, 8, 11, FRAME - 1])
    def test_a_frame_may_come_in_parts(
        self, make: Make, general: General, size: int
    ) -> None:
        made = make(0, 3)
        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        general.seen.clear()
        values = numbers(COUNT, 3)
        mine[:] = values[0]
        for peer, theirs, slow in zip(made.peers, values[1:], made.slow, strict=True):
            peer.sendall(frame(theirs))
            slow.to_receive = size
        made.sum(request)
        assert mine.tobytes() == in_order(values).tobytes()
        assert general.seen == []


class TestGeneral:
    """What goes the general way from the start."""

    def first(self, made: Group, general: General, mine: Floats) -> bytes:
        request = made.meet(mine)
        general.seen.clear()
        return request

    def sums(
        self, made: Group, general: General, request: bytes, mine: Floats
    ) -> list[int]:
        """Do one of two ranks; which way it took."""
        a, b = numbers(len(mine), 2, 9)
        mine[:] = a
        made.peers[0].sendall(frame(b))
        made.sum(request)
        assert mine.tobytes() == in_order([a, b]).tobytes()
        assert received(made.peers[0], 8 + a.nbytes) == frame(a)
        seen, general.seen = general.seen, []
        return seen

    @pytest.mark.usefixtures("patient")
    def test_by_size(self, make: Make, general: General) -> None:
        made = make()
        for count, way in [(LARGEST, []), (LARGEST + 1, [1])]:
            mine = np.zeros(count, np.float32)
            request = self.first(made, general, mine)
            assert self.sums(made, general, request, mine) == way

    @pytest.mark.usefixtures("patient")
    def test_what_may_be_rounded(self, make: Make, general: General) -> None:
        made = make(wire=WireType.BF16, least=4 * COUNT)
        mine = np.zeros(COUNT - 1, np.float32)
        request = self.first(made, general, mine)
        assert self.sums(made, general, request, mine) == []
        mine = np.ones(COUNT, np.float32)
        narrow = (mine.view(np.uint32) >> 16).astype(np.uint16)
        request = made.place(mine)
        for turn in range(2):
            mine[:] = 1
            made.peers[0].sendall(FRAME_HEADER.pack(narrow.nbytes) + narrow.tobytes())
            made.sum(request)
            assert mine.tolist() == [2.0] * COUNT
            assert general.seen == [1] * (turn + 1)

    @pytest.mark.usefixtures("patient")
    def test_memory_that_may_be_another(self, make: Make, general: General) -> None:
        made, mine = make(), np.zeros(COUNT, np.float32)
        request = self.first(made, general, mine)
        made.communicator.forget()
        assert self.sums(made, general, request, mine) == [1]
        assert self.sums(made, general, request, mine) == []

    def test_nobody_else_and_nothing_to_sum(self, make: Make, general: General) -> None:
        alone, mine = make(size=1), np.ones(3, np.float32)
        request = alone.place(mine)
        empty = make()
        nothing = empty.place(np.zeros(0, np.float32))
        for _ in range(2):
            alone.sum(request)
            empty.sum(nothing)
        assert mine.tolist() == [1.0] * 3 and general.seen == []

    @pytest.mark.usefixtures("patient")
    def test_a_frame_that_came_ahead(self, make: Make, general: General) -> None:
        made = make()
        a, b, c = numbers(COUNT, 3)
        mine = a.copy()
        request = made.place(mine)
        # The general way reads on, and has some of the next frame.
        made.peers[0].sendall(frame(b) + frame(c)[:100])
        made.sum(request)
        assert not made.links[0].idle
        made.peers[0].sendall(frame(c)[100:])
        made.sum(request)
        assert mine.tobytes() == in_order([a, b, c]).tobytes()
        assert general.seen == [1, 1]
        # Nothing is ahead any more.
        assert self.sums_after(made, general, request, mine) == []

    def sums_after(
        self, made: Group, general: General, request: bytes, mine: Floats
    ) -> list[int]:
        received(made.peers[0], 2 * FRAME)
        general.seen.clear()
        return self.sums(made, general, request, mine)

    @pytest.mark.usefixtures("patient")
    def test_a_sign_of_life_that_left_by_half(
        self, make: Make, general: General
    ) -> None:
        made, mine = make(0, 3), np.zeros(COUNT, np.float32)
        request = self.first(made, general, mine)
        made.slow[1].to_send = 3
        made.links[1].offer()
        made.slow[1].to_send = None
        values = numbers(COUNT, 3)
        mine[:] = values[0]
        for peer, theirs in zip(made.peers, values[1:], strict=True):
            peer.sendall(frame(theirs))
        made.sum(request)
        assert mine.tobytes() == in_order(values).tobytes()
        assert general.seen == [2]
        whole = frame(values[0])
        assert received(made.peers[0], FRAME) == whole
        assert received(made.peers[1], 8 + FRAME) == SIGN_OF_LIFE + whole

    @pytest.mark.usefixtures("patient")
    @pytest.mark.parametrize("to_send", [None, 3, 5, 8])
    def test_a_sign_of_life_that_begins_right_then(
        self, make: Make, general: General, to_send: int | None
    ) -> None:
        """From the other thread, after the look at the links and before the frame."""
        made, mine = make(), np.zeros(COUNT, np.float32)
        request = self.first(made, general, mine)
        (link,), (slow,) = made.links, made.slow
        a, b = numbers(COUNT, 2)
        mine[:] = a
        send_now = link.send_now

        def later(pieces: list[memoryview], size: int) -> None:
            slow.to_send = 3
            link.offer()
            slow.to_send = to_send
            send_now(pieces, size)
            slow.to_send = None

        link.send_now = later  # type: ignore[method-assign]
        made.peers[0].sendall(frame(b))
        made.sum(request)
        assert mine.tobytes() == in_order([a, b]).tobytes()
        assert received(made.peers[0], 8 + FRAME) == SIGN_OF_LIFE + frame(a)
        # Its turn is over: a sign of life may leave.
        link.offer()
        assert received(made.peers[0], 8) == SIGN_OF_LIFE


class TestFallBacks:
    """What begins in the short way, and ends in the general."""

    def sums(
        self,
        made: Group,
        general: General,
        stream: Callable[[Floats], bytes],
        late: Callable[[Floats], bytes] = lambda theirs: b"",
    ) -> list[int]:
        """Do one of three ranks, in which a peer sends `stream`, and `late` once the
        general way has begun; then another one, which nothing is the matter with."""
        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        general.seen.clear()
        values = numbers(COUNT, 3)
        mine[:] = values[0]
        made.peers[0].sendall(frame(values[1]))
        made.peers[1].sendall(stream(values[2]))
        general.before = lambda: made.peers[1].sendall(late(values[2]))
        made.sum(request)
        general.before = lambda: None
        assert mine.tobytes() == in_order(values).tobytes()
        seen = list(general.seen)
        mine[:] = values[0]
        for peer, theirs in zip(made.peers, values[1:], strict=True):
            peer.sendall(frame(theirs))
        made.sum(request)
        assert mine.tobytes() == in_order(values).tobytes()
        assert general.seen == seen
        for peer in made.peers:
            assert received(peer, 2 * FRAME) == 2 * frame(values[0])
        return seen

    @pytest.mark.usefixtures("hasty")
    @pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, FRAME - 1])
    def test_what_comes_too_late(self, make: Make, general: General, cut: int) -> None:
        seen = self.sums(
            make(0, 3),
            general,
            lambda theirs: frame(theirs)[:cut],
            lambda theirs: frame(theirs)[cut:],
        )
        assert seen == [1]

    @pytest.mark.usefixtures("patient")
    @pytest.mark.parametrize("signs", [1, 2, 100, COUNT])
    def test_signs_of_life_before_it(
        self, make: Make, general: General, signs: int
    ) -> None:
        seen = self.sums(
            make(0, 3), general, lambda theirs: SIGN_OF_LIFE * signs + frame(theirs)
        )
        assert seen == [1]

    @pytest.mark.usefixtures("hasty")
    @pytest.mark.parametrize("cut", [3, 8, 12, FRAME])
    def test_a_sign_of_life_in_parts(
        self, make: Make, general: General, cut: int
    ) -> None:
        def stream(theirs: Floats) -> bytes:
            return SIGN_OF_LIFE + frame(theirs)

        seen = self.sums(
            make(0, 3),
            general,
            lambda theirs: stream(theirs)[:cut],
            lambda theirs: stream(theirs)[cut:],
        )
        assert seen == [1]

    @pytest.mark.usefixtures("patient")
    @pytest.mark.parametrize("to_send", [0, 1, 8, 9, FRAME - 1])
    def test_what_does_not_leave_at_once(
        self, make: Make, general: General, to_send: int
    ) -> None:
        made = make(0, 3)

        def gets_room() -> None:
            made.slow[1].to_send = None

        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        general.seen.clear()
        values = numbers(COUNT, 3)
        mine[:] = values[0]
        for peer, theirs in zip(made.peers, values[1:], strict=True):
            peer.sendall(frame(theirs))
        made.slow[1].to_send = to_send
        general.before = gets_room
        made.sum(request)
        assert general.seen == [1]
        assert mine.tobytes() == in_order(values).tobytes()
        for peer in made.peers:
            # As it was before the sum.
            assert received(peer, FRAME) == frame(values[0])
        made.links[1].offer()
        assert received(made.peers[1], 8) == SIGN_OF_LIFE

    @pytest.mark.usefixtures("patient")
    def test_a_socket_with_little_room(self, make: Make, general: General) -> None:
        made, mine = make(), np.zeros(LARGEST, np.float32)
        request = made.meet(mine)
        general.seen.clear()
        sock = made.slow[0]._sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        a, b = numbers(LARGEST, 2)
        mine[:] = a
        made.peers[0].sendall(frame(b))
        left: list[bytes] = []
        reader = threading.Thread(
            target=lambda: left.append(received(made.peers[0], 8 + a.nbytes))
        )
        general.before = reader.start
        made.sum(request)
        reader.join()
        assert general.seen == [1]
        assert left == [frame(a)] and mine.tobytes() == in_order([a, b]).tobytes()


class TestFailures:
    """A peer fails, and with it the communicator: all links end, and say why."""

    def fails(self, made: Group, request: bytes, words: str) -> None:
        for _ in range(2):
            with pytest.raises(RemoteFailure, match=words):
                made.sum(request)
        for link in made.links:
            assert link.failure is not None and link.duplex.fileno() == -1

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("count", [0, COUNT - 1, COUNT + 1])
    def test_another_size(self, make: Make, place: int, count: int) -> None:
        made = make(1, 3)
        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        made.peers[place].sendall(frame(np.zeros(count, np.float32)))
        made.peers[1 - place].sendall(frame(mine))
        words = f"it sent {4 * count} bytes where {4 * COUNT} were awaited"
        self.fails(made, request, f"^peer{place}:1: LX_ALLREDUCE: {words}")
        # Who did nothing wrong hears of it.
        assert received(made.peers[1 - place], FRAME + 1) == frame(mine)

    @pytest.mark.parametrize("place", [0, 1])
    @pytest.mark.parametrize("sent", [0, 5, FRAME - 1, FRAME])
    @pytest.mark.parametrize("unread", [False, True])
    def test_a_peer_that_is_gone(
        self, make: Make, place: int, sent: int, unread: bool
    ) -> None:
        made = make(1, 3)
        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        if unread:
            # Its end is a reset then.
            made.links[place].offer()
        made.peers[place].sendall(frame(mine)[:sent])
        made.peers[place].close()
        made.peers[1 - place].sendall(frame(mine))
        self.fails(made, request, f"^peer{place}:1: LX_ALLREDUCE: ")
        left = received(made.peers[1 - place], FRAME + 1)
        assert left in (b"", frame(mine))

    @pytest.mark.parametrize("sent", [0, 5, FRAME - 1])
    def test_a_peer_that_goes_later(self, make: Make, sent: int) -> None:
        made = make(0, 3)
        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        made.peers[0].sendall(frame(mine))
        made.peers[1].sendall(frame(mine)[:sent])
        # It takes everything in, so that ours leaves.
        made.peers[1].shutdown(socket.SHUT_WR)
        self.fails(made, request, "^peer1:1: LX_ALLREDUCE: it closed the connection")
        assert received(made.peers[0], FRAME + 1) == frame(mine)

    def test_one_is_gone_and_another_cannot_be_sent_to(self, make: Make) -> None:
        made = make(0, 3)
        mine = np.zeros(COUNT, np.float32)
        request = made.meet(mine)
        made.slow[0].to_send = 9
        made.peers[1].close()
        self.fails(made, request, "^peer1:1: LX_ALLREDUCE: ")
        assert received(made.peers[0], FRAME) == frame(mine)[:9]
