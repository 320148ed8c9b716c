"""Order, corking, the failure latch and the handshake, against a script."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.client import remote
from longwire.client.connection import Connection
from longwire.client.corking import BEHIND_READ, BULK, CORK_LIMIT
from longwire.client.greeting import open_connection
from longwire.client.health import Deadlines
from longwire.errors import (
    ConnectionLost,
    LongwireError,
    RemoteError,
    RemoteFailure,
    VersionMismatch,
)
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.tensors import NULL_TENSOR
from support.scripted import (
    ENDPOINT,
    PATIENCE_S,
    Instead,
    Listener,
    Partial,
    Raw,
    Request,
    Scripted,
    content,
    held,
    lx_server,
    refusal,
    start_scripted,
)

Start = Callable[..., Scripted]
Listen = Callable[..., Listener]

CLEAR = m.BufferClear(7, 1).encode()
RECOMPUTE = struct.pack("<IQ", 0, 5)
KIB = 1024


def write(n: int) -> tuple[bytes, bytes]:
    """The pieces of a SET_TENSOR with n bytes of data."""
    return m.SetTensor(NULL_TENSOR, 0, 0).encode(), content(n, n)


def read(size: int, offset: int = 0) -> bytes:
    """The body of a GET_TENSOR."""
    return m.GetTensor(NULL_TENSOR, offset, size).encode()


def names(requests: list[Request]) -> list[str]:
    return [request.command.name for request in requests]


def memory_of(answer: bytes) -> m.DeviceMemory:
    return m.DeviceMemory.decode(answer)


class TestCorking:
    def test_posts_leave_with_the_next_ask_in_one_write(self, scripted: Start) -> None:
        connection, stream, server = scripted(lx_flags=0)
        connection.post(Command.BUFFER_CLEAR, CLEAR)
        connection.post(Command.SET_TENSOR, *write(100))
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        assert stream.sends == []
        connection.ask(Command.GET_ALIGNMENT, m.U32.pack(0))
        expected = [
            (Command.BUFFER_CLEAR, CLEAR),
            (Command.SET_TENSOR, b"".join(write(100))),
            (Command.GRAPH_RECOMPUTE, RECOMPUTE),
            (Command.GET_ALIGNMENT, m.U32.pack(0)),
        ]
        assert stream.sends == [expected] == [server.requests]
        assert connection.traffic.round_trips == 1

    def test_small_data_may_change_after_the_post(self, scripted: Start) -> None:
        connection, _, server = scripted()
        data = bytearray(b"before")
        connection.post(Command.SET_TENSOR, write(0)[0], memoryview(data))
        data[:] = b"after!"
        connection.ask(Command.DEVICE_COUNT, b"")
        assert server.requests[0].body.endswith(b"before")

    def test_large_data_leaves_from_the_callers_memory(self, scripted: Start) -> None:
        connection, stream, server = scripted(lx_flags=0)
        head, data = write(64 * KIB)[0], bytearray(64 * KIB)
        connection.post(Command.BUFFER_CLEAR, CLEAR)
        connection.post(Command.SET_TENSOR, head, memoryview(data))
        assert [names(sent) for sent in stream.sends] == [
            ["BUFFER_CLEAR", "SET_TENSOR"]
        ]
        assert stream.pieces[-1] is data
        assert connection.traffic.round_trips == 0

    def test_data_below_that_size_waits(self, scripted: Start) -> None:
        connection, stream, _ = scripted(lx_flags=0)
        head, data = write(64 * KIB - 1 - 305)
        connection.post(Command.SET_TENSOR, head, data)
        assert stream.sends == []

    def test_much_small_data_leaves_without_an_ask(self, scripted: Start) -> None:
        connection, stream, _ = scripted(lx_flags=0)
        for _ in range(5):
            connection.post(Command.SET_TENSOR, *write(30 * KIB))
        assert [len(sent) for sent in stream.sends] == [4]

    def test_flush_sends_and_does_not_wait(self, scripted: Start) -> None:
        connection, stream, server = scripted()
        connection.flush()
        assert stream.sends == []
        target = memoryview(bytearray(8))
        connection.queue_read(Command.GET_TENSOR, read(8, offset=3), target)
        connection.flush()
        assert [names(sent) for sent in stream.sends] == [["GET_TENSOR"]]
        assert connection.traffic.round_trips == 0
        connection.synchronize()
        assert target == content(3, 8)
        assert len(stream.sends) == 1

    def test_synchronize_sends_a_graph_but_no_mere_data(self, scripted: Start) -> None:
        connection, stream, _ = scripted(lx_flags=0)
        connection.post(Command.SET_TENSOR, *write(1))
        connection.synchronize()
        assert stream.sends == []
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        connection.synchronize()
        connection.synchronize()
        assert [names(sent) for sent in stream.sends] == [
            ["SET_TENSOR", "GRAPH_RECOMPUTE"]
        ]
        assert connection.traffic.round_trips == 0


class TestServersOfLlamaCpp:
    """They sleep until a step begins, and are late to wake up."""

    def test_a_step_wakes_it_and_a_graph_does_not_wait(self, scripted: Start) -> None:
        connection, stream, _ = scripted()
        for _ in range(2):
            stream.sends.clear()
            for _ in range(3):
                connection.post(Command.SET_TENSOR, *write(100))
            connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
            assert [names(sent) for sent in stream.sends] == [
                ["SET_TENSOR"],
                ["SET_TENSOR", "SET_TENSOR", "GRAPH_RECOMPUTE"],
            ]
            connection.ask(Command.DEVICE_COUNT, b"")

    def test_it_may_wait_for_another_server(self, scripted: Start) -> None:
        connection, stream, _ = scripted()
        half = m.U32.pack(0) + NULL_TENSOR
        with connection.lock:
            connection.put(Command.COMM_ALLREDUCE, half)
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        assert stream.sends == []
        connection.flush()
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        assert len(stream.sends) == 1

    def test_nothing_overtakes_a_read(self, scripted: Start) -> None:
        connection, stream, _ = scripted()
        target = memoryview(bytearray(4))
        connection.queue_read(Command.GET_TENSOR, read(4), target)
        connection.post(Command.SET_TENSOR, *write(100))
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        assert stream.sends == []
        connection.synchronize()
        assert [names(sent) for sent in stream.sends] == [
            ["GET_TENSOR", "SET_TENSOR", "GRAPH_RECOMPUTE"]
        ]


class TestAnswers:
    def test_a_decode_step_is_one_write_and_one_read(self, scripted: Start) -> None:
        connection, stream, _ = scripted(lx_flags=0)
        target = memoryview(bytearray(300 * KIB))
        for i in range(13):
            connection.post(Command.SET_TENSOR, *write(8 * i + 8))
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        connection.queue_read(Command.GET_TENSOR, read(300 * KIB, offset=7), target)
        assert connection.traffic.round_trips == 0
        connection.synchronize()
        connection.synchronize()
        assert target == content(7, 300 * KIB)
        assert len(stream.sends) == connection.traffic.round_trips == 1

    def test_queued_reads_share_a_round_trip(self, scripted: Start) -> None:
        connection, stream, server = scripted()
        targets = [memoryview(bytearray(50 + i)) for i in range(20)]
        for i, target in enumerate(targets):
            body = read(len(target), offset=i)
            connection.queue_read(Command.GET_TENSOR, body, target)
        answer = connection.ask(Command.GET_DEVICE_MEMORY, m.U32.pack(0))
        assert memory_of(answer).total == 1 << 31
        assert targets == [content(i, 50 + i) for i in range(20)]
        assert len(stream.sends) == connection.traffic.round_trips == 1

    def test_a_read_that_was_sent_is_taken_before_the_next_write(
        self, scripted: Start
    ) -> None:
        connection, stream, _ = scripted()
        first, second = memoryview(bytearray(9)), memoryview(bytearray(9))
        connection.queue_read(Command.GET_TENSOR, read(9, offset=1), first)
        connection.flush()
        connection.queue_read(Command.GET_TENSOR, read(9, offset=2), second)
        connection.synchronize()
        assert [first, second] == [content(1, 9), content(2, 9)]
        assert len(stream.sends) == connection.traffic.round_trips == 2

    def test_traffic_counts_what_went_over_the_wire(self, scripted: Start) -> None:
        connection, _, _ = scripted()
        earlier = connection.traffic.snapshot()
        connection.post(Command.SET_TENSOR, *write(100))
        connection.ask(Command.GET_DEVICE_MEMORY, m.U32.pack(0))
        spent = connection.traffic.since(earlier)
        assert spent.bytes_sent == (9 + 305 + 100) + (9 + 4)
        assert spent.bytes_received == 8 + 16
        assert spent.plus(spent).round_trips == 2
        assert earlier.bytes_sent == 0
        assert min(spent.send_s, spent.wait_s, spent.receive_s) > 0

    @pytest.mark.parametrize("step", [30 * KIB, 64 * KIB, 3000 * KIB])
    def test_data_behind_a_large_read_does_not_block(
        self, scripted: Start, step: int
    ) -> None:
        """The server takes in nothing while its answer is stuck."""
        connection, _, server = scripted(socket_buffer=32 * KIB, deadline_s=3)
        target = memoryview(bytearray(3000 * KIB))
        connection.queue_read(Command.GET_TENSOR, read(len(target), 5), target)
        for _ in range(6):
            connection.post(Command.SET_TENSOR, *write(step))
        connection.ask(Command.DEVICE_COUNT, b"")
        assert target == content(5, len(target))
        expected = ["GET_TENSOR", *["SET_TENSOR"] * 6, "DEVICE_COUNT"]
        assert server.commands == expected

    def test_many_reads_go_out_in_portions(self, scripted: Start) -> None:
        connection, stream, _ = scripted(socket_buffer=32 * KIB, deadline_s=3)
        targets = [memoryview(bytearray(2 * KIB)) for _ in range(500)]
        for i, target in enumerate(targets):
            connection.queue_read(Command.GET_TENSOR, read(2 * KIB, i), target)
        connection.synchronize()
        assert targets == [content(i, 2 * KIB) for i in range(500)]
        assert max(len(sent) * (9 + 312) for sent in stream.sends) <= 33 * KIB

    def test_threads_get_their_own_answers(self, scripted: Start) -> None:
        connection, _, _ = scripted()
        wrong: list[int] = []

        def ask_often(offset: int) -> None:
            for _ in range(50):
                target = memoryview(bytearray(64))
                body = read(64, offset=offset)
                connection.ask_into(Command.GET_TENSOR, body, target)
                if target != content(offset, 64):
                    wrong.append(offset)

        threads = [threading.Thread(target=ask_often, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert connection.healthy
        assert not wrong


# Each step: what is called, and with how many bytes.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["post", "graph", "ask", "queue", "flush", "synchronize"]),
        st.sampled_from([0, 1, 300, 5 * KIB, 33 * KIB, 70 * KIB]),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_any_sequence_keeps_its_order(steps: list[tuple[str, int]]) -> None:
    """The stream itself fails a write while an answer is owed."""
    connection, stream, server = pair = start_scripted()
    expected: list[Request] = []
    reads: list[tuple[memoryview, bytes]] = []
    for i, (step, size) in enumerate(steps):
        target, body = memoryview(bytearray(size)), read(size, offset=i)
        if step == "post":
            connection.post(Command.SET_TENSOR, *write(size))
            expected.append(Request(Command.SET_TENSOR, b"".join(write(size))))
        elif step == "graph":
            connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
            expected.append(Request(Command.GRAPH_RECOMPUTE, RECOMPUTE))
        elif step == "flush":
            connection.flush()
        elif step == "synchronize":
            connection.synchronize()
        else:
            call = connection.ask_into if step == "ask" else connection.queue_read
            call(Command.GET_TENSOR, body, target)
            expected.append(Request(Command.GET_TENSOR, body))
            reads.append((target, content(i, size)))
            if step == "ask":
                assert all(target == answer for target, answer in reads)
    connection.synchronize()
    connection.flush()
    assert all(target == answer for target, answer in reads)
    assert [request for sent in stream.sends for request in sent] == expected
    pair.close()
    assert server.requests == expected
    for sent in stream.sends:
        behind = [len(r.body) + 9 for r in sent]
        first = next(
            (i for i, r in enumerate(sent) if r.command == Command.GET_TENSOR),
            len(sent),
        )
        assert sum(behind[first + 1 :]) <= 32 * KIB + 9


class TestOtherConnections:
    def test_waiting_sends_a_graph_that_another_holds_back(
        self, scripted: Start
    ) -> None:
        holder, waiter, idle = (
            scripted(lx_flags=0),
            scripted(lx_flags=0),
            scripted(lx_flags=0),
        )
        idle.connection.post(Command.BUFFER_CLEAR, CLEAR)
        holder.connection.post(Command.SET_TENSOR, *write(1))
        holder.connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        seen: list[int] = []

        def count_and_answer(_body: bytes) -> bytes:
            seen.append(len(holder.stream.sends))
            return m.U32.pack(1)

        waiter.server.answers[Command.DEVICE_COUNT] = count_and_answer
        waiter.connection.ask(Command.DEVICE_COUNT, b"")
        assert seen == [1]
        assert names(holder.stream.sends[0]) == ["SET_TENSOR", "GRAPH_RECOMPUTE"]
        assert idle.stream.sends == []

    def test_so_does_synchronize_but_only_when_it_waits(self, scripted: Start) -> None:
        holder, waiter = scripted(lx_flags=0), scripted(lx_flags=0)
        holder.connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        waiter.connection.synchronize()
        assert holder.stream.sends == []
        target = memoryview(bytearray(4))
        waiter.connection.queue_read(Command.GET_TENSOR, read(4), target)
        waiter.connection.synchronize()
        assert len(holder.stream.sends) == 1

    def test_a_post_that_has_to_wait_does_it_too(self, scripted: Start) -> None:
        holder, waiter = scripted(), scripted()
        target = memoryview(bytearray(4))
        waiter.connection.queue_read(Command.GET_TENSOR, read(4), target)
        holder.connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        waiter.connection.post(Command.SET_TENSOR, *write(64 * KIB))
        assert len(holder.stream.sends) == 1
        assert len(waiter.stream.sends) == 2

    def test_a_broken_holder_does_not_stop_the_waiter(self, scripted: Start) -> None:
        holder, waiter = scripted(lx_flags=0), scripted(lx_flags=0)
        holder.connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        holder.stream.close()
        assert waiter.connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)
        with pytest.raises(ConnectionLost, match="GRAPH_RECOMPUTE"):
            holder.connection.check()


def calls(connection: Connection) -> list[Callable[[], object]]:
    """Every call that a failed connection refuses."""
    target = memoryview(bytearray(4))
    return [
        lambda: connection.post(Command.BUFFER_CLEAR, CLEAR),
        lambda: connection.post(Command.SET_TENSOR, *write(64 * KIB)),
        lambda: connection.ask(Command.DEVICE_COUNT, b""),
        lambda: connection.ask_into(Command.GET_TENSOR, read(4), target),
        lambda: connection.queue_read(Command.GET_TENSOR, read(4), target),
        connection.synchronize,
        connection.flush,
        connection.check,
    ]


class TestFailure:
    @pytest.mark.parametrize(
        ("answer", "kind", "cause"),
        [
            (Instead.CLOSE, ConnectionLost, "the server closed the connection"),
            (Instead.SILENCE, ConnectionLost, "no answer before the deadline"),
            (bytes(5), RemoteFailure, "answered 5 bytes where 400 were due"),
            (bytes(401), RemoteFailure, "answered 401 bytes where 400 were due"),
        ],
    )
    def test_the_first_failure_is_the_last_word(
        self, scripted: Start, answer: object, kind: type[RemoteError], cause: str
    ) -> None:
        patience_s = 0.2 if answer is Instead.SILENCE else PATIENCE_S
        connection, stream, _ = scripted(
            {Command.GET_TENSOR: answer}, deadline_s=patience_s
        )
        early, late = memoryview(bytearray(b"x" * 400)), memoryview(bytearray(b"y" * 4))
        connection.queue_read(Command.GET_TENSOR, read(400), early)
        connection.queue_read(Command.GET_TENSOR, read(4), late)
        with pytest.raises(kind) as caught:
            connection.synchronize()
        failure = caught.value
        assert (failure.endpoint, failure.command) == (str(ENDPOINT), "GET_TENSOR")
        assert cause in failure.cause
        assert not connection.healthy
        assert [early, late] == [bytes(400), bytes(4)]

        used = stream.used
        for call in calls(connection):
            with pytest.raises(kind) as again:
                call()
            assert again.value is failure
        connection.close()
        assert connection.failure is failure
        assert stream.used == used

    def test_a_partial_answer_is_not_left_in_the_target(self, scripted: Start) -> None:
        connection, _, server = scripted()
        server.answers[Command.GET_TENSOR] = Partial(m.U64.pack(8) + b"abc")
        target = memoryview(bytearray(b"x" * 8))
        with pytest.raises(ConnectionLost):
            connection.ask_into(Command.GET_TENSOR, read(8), target)
        assert target == bytes(8)

    def test_answers_that_came_before_the_failure_stay(self, scripted: Start) -> None:
        connection, _, server = scripted()
        server.answers[Command.GET_ALIGNMENT] = Instead.CLOSE
        first, second = memoryview(bytearray(4)), memoryview(bytearray(b"x" * 8))
        connection.queue_read(Command.GET_TENSOR, read(4, offset=9), first)
        connection.queue_read(Command.GET_ALIGNMENT, m.U32.pack(0), second)
        with pytest.raises(ConnectionLost, match="GET_ALIGNMENT"):
            connection.synchronize()
        assert [first, second] == [content(9, 4), bytes(8)]

    def test_a_reset(self, listener: Listen) -> None:
        port = listener({Command.DEVICE_COUNT: Instead.RESET})
        connection = open_connection(port.endpoint, Deadlines(PATIENCE_S, PATIENCE_S))
        with pytest.raises(ConnectionLost, match="DEVICE_COUNT: the server closed"):
            connection.ask(Command.DEVICE_COUNT, b"")

    def test_a_write_that_fails_names_the_command(self, scripted: Start) -> None:
        connection, stream, _ = scripted(lx_flags=0)
        stream.close()
        connection.post(Command.BUFFER_CLEAR, CLEAR)
        with pytest.raises(ConnectionLost) as caught:
            connection.post(Command.SET_TENSOR, *write(64 * KIB))
        assert caught.value.command == "SET_TENSOR"
        assert isinstance(caught.value.__cause__, OSError)

    def test_a_server_that_takes_nothing_in(self, scripted: Start) -> None:
        connection, _, _ = scripted(
            {Command.DEVICE_COUNT: Instead.SILENCE}, deadline_s=0.2
        )
        connection._stream.send = time_out  # type: ignore[method-assign]
        with pytest.raises(ConnectionLost, match="no answer before the deadline"):
            connection.post(Command.SET_TENSOR, *write(64 * KIB))

    def test_no_failure_is_its_own_cause(self, scripted: Start) -> None:
        """Whoever follows causes would never come to an end."""
        connection, _, _ = scripted({Command.DEVICE_COUNT: b""})
        with pytest.raises(RemoteFailure) as caught:
            connection.ask(Command.DEVICE_COUNT, b"")
        assert caught.value.__cause__ is None

    def test_raising_it_often_adds_nothing(self, scripted: Start) -> None:
        connection, _, _ = scripted()
        connection.close()
        lengths = set()
        for _ in range(3):
            with pytest.raises(ConnectionLost) as caught:
                connection.check()
            lengths.add(len(caught.traceback))
        assert len(lengths) == 1

    def test_fail_keeps_the_first(self, scripted: Start) -> None:
        connection, _, _ = scripted()
        first = connection.fail(ValueError("odd"), "callback")
        assert str(first) == f"{ENDPOINT}: callback: odd"
        assert connection.fail(RuntimeError("later"), "other") is first
        assert isinstance(first.__cause__, ValueError)

    def test_close_says_that_it_is_closed(self, scripted: Start) -> None:
        connection, _, server = scripted(lx_flags=0)
        connection.post(Command.BUFFER_CLEAR, CLEAR)
        connection.close()
        connection.close()
        with pytest.raises(ConnectionLost, match="closed"):
            connection.ask(Command.DEVICE_COUNT, b"")
        assert server.stop() == []

    def test_ctrl_c_while_waiting_stays_ctrl_c(self, scripted: Start) -> None:
        connection, stream, _ = scripted({Command.GET_TENSOR: Instead.SILENCE})
        target = memoryview(bytearray(b"x" * 4))

        def interrupted(size: int) -> memoryview:
            raise KeyboardInterrupt

        stream.take = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            connection.ask_into(Command.GET_TENSOR, read(4), target)
        assert target == bytes(4)
        assert isinstance(connection.failure, ConnectionLost)
        for call in calls(connection):
            with pytest.raises(KeyboardInterrupt):
                call()


def time_out(pieces: object) -> None:
    raise TimeoutError("timed out")


class TestHandshake:
    DEADLINES = Deadlines(connect_s=PATIENCE_S, answer_s=PATIENCE_S)

    @pytest.mark.parametrize(
        ("answer", "dialect"),
        [
            (m.HelloAnswer(7, 0, 0), V7),
            (m.HelloAnswer(8, 0, 0), V8),
            (m.HelloAnswer(8, 0, 9), V8),
            (m.HelloAnswer(8, 0, 0, padding=255, caps=b"\xff" * 24), V8),
        ],
    )
    def test_the_dialect_is_the_servers(
        self, listener: Listen, answer: m.HelloAnswer, dialect: Dialect
    ) -> None:
        port = listener({Command.HELLO: answer.encode()})
        with closing(open_connection(port.endpoint, self.DEADLINES)) as connection:
            assert connection.dialect is dialect
            assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)
        assert port.servers[0].stop()[0] == (Command.HELLO, bytes(24))

    @pytest.mark.parametrize("version", [(9, 0, 0), (6, 0, 0), (8, 1, 0), (0, 0, 0)])
    def test_other_versions_are_refused_by_name(
        self, listener: Listen, version: tuple[int, int, int]
    ) -> None:
        port = listener({Command.HELLO: m.HelloAnswer(*version).encode()})
        with pytest.raises(VersionMismatch) as caught:
            open_connection(port.endpoint, self.DEADLINES)
        found = ".".join(map(str, version))
        assert caught.value.found == found
        assert caught.value.endpoint == str(port.endpoint)
        for part in (found, "7.0.0 and 8.0.0", str(port.endpoint)):
            assert part in str(caught.value)
        # The refused server is left, not kept waiting.
        assert len(port.servers[0].stop()) == 1

    def test_a_wrong_answer_length(self, listener: Listen) -> None:
        port = listener({Command.HELLO: bytes(4)})
        with pytest.raises(RemoteFailure, match="HELLO: answered 4 bytes where 28"):
            open_connection(port.endpoint, self.DEADLINES)

    def test_the_hello_deadline_ends_with_hello(self, listener: Listen) -> None:
        """A large ubatch on a slow worker takes its time."""
        port = listener()
        deadlines = Deadlines(connect_s=PATIENCE_S, answer_s=77)
        with closing(open_connection(port.endpoint, deadlines)) as connection:
            assert connection._stream._sock.gettimeout() == 77


LX = V8.with_lx()
SILENCE_S = 0.4


class TestKeepAlive:
    """A server of ours says once per second that it is still at work."""

    @pytest.mark.parametrize("n", [0, 1, 100])
    def test_it_is_no_answer(self, scripted: Start, n: int) -> None:
        answers = {Command.GET_TENSOR: lambda body: held(content(4, 5000), n)}
        connection, stream, _ = scripted(answers, LX)
        target = memoryview(bytearray(5000))
        connection.queue_read(Command.GET_TENSOR, read(5000), target)
        answer = connection.ask(Command.DEVICE_COUNT, b"")
        assert (target, answer) == (content(4, 5000), m.U32.pack(1))
        assert stream.taken == 8 * n + (8 + 5000) + (8 + 4)

    def test_it_may_be_cut_in_two(self, scripted: Start) -> None:
        raw = b"\xff" * 24 + struct.pack("<QI", 4, 7)
        pieces = [raw[at : at + 5] for at in range(0, len(raw), 5)]
        connection, _, _ = scripted({Command.DEVICE_COUNT: Raw(pieces, 0.01)}, LX)
        assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(7)

    def test_it_also_stands_before_an_error(self, scripted: Start) -> None:
        error = refusal("BadRequest", "no such handle")
        answer = Raw([*held(b"").pieces[:-1], *error.pieces])
        connection, _, _ = scripted({Command.BUFFER_GET_BASE: answer}, LX)
        with pytest.raises(RemoteFailure, match="no such handle"):
            connection.ask(Command.BUFFER_GET_BASE, m.U64.pack(1))
        assert connection.healthy

    def test_when_no_answer_is_owed(self, scripted: Start) -> None:
        """It stays where it is until there is one."""
        alive = Raw([b"\0" * 7 + b"\0", *held(b"").pieces[:-1]])
        connection, _, server = scripted({Command.LX_PING: alive}, LX)
        connection.ask(Command.LX_PING, b"")
        assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)
        assert server.commands == ["LX_PING", "DEVICE_COUNT"]

    def test_nobody_waits_longer_than_for_the_next(self, scripted: Start) -> None:
        answer = held(m.U32.pack(1), n=9, pause_s=SILENCE_S / 3)
        connection, _, _ = scripted(
            {Command.DEVICE_COUNT: answer}, LX, deadline_s=SILENCE_S
        )
        started = time.monotonic()
        assert connection.ask(Command.DEVICE_COUNT, b"") == m.U32.pack(1)
        assert time.monotonic() - started > 2 * SILENCE_S

    def test_silence_after_it(self, scripted: Start) -> None:
        def fall_silent(body: bytes) -> Raw:
            server.answers[Command.GET_ALIGNMENT] = Instead.SILENCE
            return Raw(held(b"").pieces[:-1])

        connection, _, server = scripted(
            {Command.DEVICE_COUNT: fall_silent}, LX, deadline_s=SILENCE_S
        )
        started = time.monotonic()
        with pytest.raises(ConnectionLost, match="no answer before the deadline"):
            connection.ask(Command.DEVICE_COUNT, b"")
        assert SILENCE_S <= time.monotonic() - started < SILENCE_S + 2

    def test_not_for_ever(self, scripted: Start) -> None:
        answer = held(m.U32.pack(1), n=1000, pause_s=0.02)
        connection, _, _ = scripted(
            {Command.DEVICE_COUNT: answer}, LX, deadlines=Deadlines(answer_s=0.3)
        )
        started = time.monotonic()
        with pytest.raises(ConnectionLost, match="no answer before the deadline"):
            connection.ask(Command.DEVICE_COUNT, b"")
        assert 0.3 <= time.monotonic() - started < 3

    def test_other_dialects_know_of_none(self, scripted: Start) -> None:
        connection, _, _ = scripted({Command.DEVICE_COUNT: held(m.U32.pack(1))}, V8)
        with pytest.raises(RemoteFailure, match="answered 18446744073709551615 bytes"):
            connection.ask(Command.DEVICE_COUNT, b"")

    @pytest.mark.parametrize("lx", [False, True])
    def test_whose_silence_is_an_end(self, listener: Listen, lx: bool) -> None:
        port = listener(lx_server() if lx else {})
        deadlines = Deadlines(connect_s=PATIENCE_S, answer_s=77, silence_s=33)
        with closing(open_connection(port.endpoint, deadlines)) as connection:
            assert connection._stream._sock.gettimeout() == (33 if lx else 77)


class TestHealth:
    @pytest.mark.parametrize(
        ("dialect", "command"), [(V8, "DEVICE_COUNT"), (LX, "LX_PING")]
    )
    def test_well(self, scripted: Start, dialect: Dialect, command: str) -> None:
        connection, _, server = scripted({}, dialect)
        for _ in range(3):
            health = connection.health()
            assert health.ok and health.failure is None
            assert health.endpoint is ENDPOINT
            assert health.round_trip_s is not None
            assert 0 < health.round_trip_s < PATIENCE_S
        assert server.commands == [command] * 3

    def test_while_another_thread_works(self, scripted: Start) -> None:
        may_answer = threading.Event()

        def late(body: bytes) -> bytes:
            may_answer.wait(PATIENCE_S)
            return m.U32.pack(1)

        connection, _, server = scripted({Command.DEVICE_COUNT: late}, LX)
        worker = threading.Thread(target=connection.ask, args=(0x0F, b""))
        worker.start()
        while not server.requests:
            time.sleep(0.001)
        started = time.monotonic()
        health = connection.health()
        assert time.monotonic() - started < 1
        assert (health.ok, health.round_trip_s) == (True, None)
        may_answer.set()
        worker.join(PATIENCE_S)
        assert server.commands == ["DEVICE_COUNT"]

    def test_frozen(self, scripted: Start) -> None:
        connection, stream, _ = scripted(
            {Command.LX_PING: Instead.SILENCE}, LX, deadline_s=SILENCE_S
        )
        started = time.monotonic()
        health = connection.health()
        assert SILENCE_S <= time.monotonic() - started < SILENCE_S + 2
        assert not health.ok and health.round_trip_s is None
        assert isinstance(health.failure, ConnectionLost)
        assert health.failure is connection.failure
        # From then on at once, and without a word to the server.
        used = stream.used
        started = time.monotonic()
        assert connection.health() == health
        assert time.monotonic() - started < SILENCE_S / 2
        assert stream.used == used

    def test_gone(self, scripted: Start) -> None:
        connection, _, _ = scripted({Command.LX_PING: Instead.CLOSE}, LX)
        failure = connection.health().failure
        assert isinstance(failure, ConnectionLost)
        assert "the server closed the connection" in failure.cause

    def test_a_refusal_is_no_failure(self, scripted: Start) -> None:
        """It is of an earlier command, and for whoever sent that."""
        connection, _, server = scripted(
            {Command.LX_PING: refusal("BadRequest", "no graph 5")}, LX
        )
        connection.post(Command.GRAPH_RECOMPUTE, RECOMPUTE)
        assert connection.health().ok
        with pytest.raises(RemoteFailure, match="no graph 5"):
            connection.check()
        del server.answers[Command.LX_PING]
        assert connection.health().round_trip_s is not None
        connection.check()

    def test_what_is_held_back_goes_first(self, scripted: Start) -> None:
        connection, _, server = scripted({}, LX)
        connection.post(Command.BUFFER_CLEAR, CLEAR)
        target = memoryview(bytearray(8))
        connection.queue_read(Command.GET_TENSOR, read(8, offset=3), target)
        assert connection.health().ok
        assert target == content(3, 8)
        assert server.commands == ["BUFFER_CLEAR", "GET_TENSOR", "LX_PING"]


class TestConnect:
    """`remote.connect`, whose devices stay for the life of the process."""

    def test_one_device_per_remote_device(self, listener: Listen) -> None:
        port = listener({Command.DEVICE_COUNT: m.U32.pack(3)})
        devices = remote.connect([port.endpoint, port.endpoint])
        assert [device.index for device in devices] == [0, 1, 2]
        assert {str(device.endpoint) for device in devices} == {str(port.endpoint)}
        assert len({device.name for device in devices}) == 3
        assert remote.connect(str(port.endpoint)) == devices
        assert len(port.servers) == 1
        remote.close(devices)
        # It was connected to twice.
        assert devices[0].connection.healthy
        remote.close(devices)
        assert port.servers[0].stop()[:2] == [
            (Command.HELLO, bytes(24)),
            (Command.DEVICE_COUNT, b""),
        ]

    def test_a_failed_connection_comes_back_to_life(self, listener: Listen) -> None:
        port = listener()
        (device,) = remote.connect([port.endpoint])
        name = device.name
        remote.close([device])
        with pytest.raises(ConnectionLost, match="closed"):
            device.connection.check()
        assert remote.connect([port.endpoint]) == [device]
        assert device.connection.healthy
        assert device.name == name
        remote.close([device])

    def test_a_refused_port(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
            with pytest.raises(ConnectionLost) as caught:
                remote.connect([endpoint])
        assert str(caught.value) == f"{endpoint}: connect: Connection refused"

    def test_dead_endpoints_cost_one_timeout_together(self, listener: Listen) -> None:
        silent = {Command.HELLO: Instead.SILENCE}
        ports = [listener(silent) for _ in range(5)]
        started = time.monotonic()
        with pytest.raises(ConnectionLost) as caught:
            remote.connect(
                [port.endpoint for port in ports], deadlines=Deadlines(connect_s=0.4)
            )
        assert 0.4 <= time.monotonic() - started < 1.6
        expected = f"{ports[0].endpoint}: HELLO: no answer before the deadline"
        assert str(caught.value) == expected

    def test_try_connect_keeps_what_works(self, listener: Listen) -> None:
        good = listener()
        none = listener({Command.DEVICE_COUNT: m.U32.pack(0)})
        many = listener({Command.DEVICE_COUNT: m.U32.pack(65)})
        old = listener({Command.HELLO: m.HelloAnswer(4, 2, 0).encode()})
        found = remote.try_connect([p.endpoint for p in (good, none, many, old)])
        devices = found[good.endpoint]
        assert isinstance(devices, list)
        assert "offers 0 devices" in str(found[none.endpoint])
        assert "offers 65 devices" in str(found[many.endpoint])
        assert isinstance(found[old.endpoint], VersionMismatch)
        remote.close(devices)


def test_the_limits_leave_room() -> None:
    """A read and what may follow it in one write fit small socket buffers."""
    assert BEHIND_READ <= BULK <= CORK_LIMIT


def test_errors_are_ours(scripted: Start) -> None:
    """A stream that fails in an unheard-of way is still a lost connection."""
    connection, stream, _ = scripted()

    def odd(pieces: object) -> None:
        raise MemoryError

    stream.send = odd  # type: ignore[method-assign]
    with pytest.raises(LongwireError, match="MemoryError"):
        connection.ask(Command.DEVICE_COUNT, b"")
    assert isinstance(stream, Stream)
