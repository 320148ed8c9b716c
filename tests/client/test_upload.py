"""Weights in a load: order, what is not sent, and how it ends, against a script."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from blake3 import blake3

from longwire.client import uploader as module
from longwire.client.connection import Connection
from longwire.client.upload import Upload, current, uploading
from longwire.client.uploader import Delivery, Uploader
from longwire.client.writes import Source, Weight, Write, known_digests
from longwire.errors import ConnectionLost, RemoteFailure
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, Command
from longwire.wire.dialects import MAX_DIGESTS, V8
from longwire.wire.fnv import fnv1a_64
from longwire.wire.lx import KEEPS_DATA, Have, SetDigest
from longwire.wire.tensors import NULL_TENSOR
from support.scripted import (
    PATIENCE_S,
    Instead,
    Scripted,
    content,
    having,
    refusal,
)

Start = Callable[..., Scripted]

HEAD = 305
BUFFER, OTHER = 7, 8


def record(n: int) -> bytes:
    """A tensor's record that can be told from others."""
    return bytes([n]) + NULL_TENSOR[1:]


def weight(n: int, data: bytes, offset: int = 0) -> Weight:
    return Weight(b"w%d" % n, record(n), memoryview(data), offset)


def source(data: bytes, fnv: int | None = None) -> Source:
    return Source(memoryview(data), blake3(data).digest(), fnv)


def file_of(*data: bytes) -> dict[bytes, Source]:
    """A model file whose tensors w0, w1, ... hold these."""
    return {b"w%d" % n: source(part) for n, part in enumerate(data)}


class Load:
    """An upload over scripted servers."""

    def __init__(self, *pairs: Scripted, sources: dict[bytes, Source]) -> None:
        self.pairs = pairs
        self.upload = Upload(sources, [pair.connection for pair in pairs])
        self.ticks: list[list[Delivery]] = []

    def of(self, pair: Scripted) -> Uploader:
        uploader = self.upload.uploader(pair.connection)
        assert uploader is not None
        return uploader

    def finish(self) -> None:
        self.upload.finish(lambda: self.ticks.append(self.upload.deliveries))


@pytest.fixture
def keeper(scripted: Start) -> Start:
    """`keeper(answers)` is a server of ours that keeps data."""

    def start(*arguments: object, **options: object) -> Scripted:
        return scripted(*arguments, lx_flags=KEEPS_DATA, **options)

    return start


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("upload")]


class TestWhatIsSent:
    def test_what_the_server_has_is_not(self, keeper: Start) -> None:
        had, new = content(1, 5000), content(2, 6000)
        pair = keeper(having(blake3(had).digest()))
        load = Load(pair, sources=file_of(had, new))
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, had))
            load.of(pair).take(BUFFER, weight(1, new))
            load.finish()
        assert pair.server.commands == [
            "LX_HAVE",
            "LX_SET_DIGEST",
            "SET_TENSOR",
            "LX_PING",
        ]
        asked = Have.decode(pair.server.requests[0].body)
        assert set(asked.digests) == {blake3(had).digest(), blake3(new).digest()}
        by_digest = SetDigest.decode(pair.server.requests[1].body)
        assert by_digest == (record(0), 0, 5000, blake3(had).digest())
        plain = pair.server.requests[2].body
        # The server is to keep it, however small it is.
        assert m.SetTensor.decode(plain[:HEAD]) == (record(1), 1, 0)
        assert plain[HEAD:] == new
        assert load.upload.deliveries == [
            Delivery(pair.connection.endpoint, 11_000, 11_000, 5000)
        ]
        assert pair.connection.traffic.bytes_saved == 5000

    def test_a_few_bytes_are_rather_sent(self, keeper: Start) -> None:
        short = content(3, 300)
        pair = keeper(having(blake3(short).digest()))
        load = Load(pair, sources=file_of(short))
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, short))
            load.finish()
        assert pair.server.commands == ["LX_HAVE", "SET_TENSOR", "LX_PING"]

    @pytest.mark.parametrize("at", [0, 5000, 9999])
    def test_other_data_than_the_files_is_sent_as_it_is(
        self, keeper: Start, at: int
    ) -> None:
        held = content(1, 10_000)
        given, gate = bytearray(held), threading.Event()
        given[at] ^= 1
        pair = keeper(having(blake3(held).digest(), gate=gate))
        load = Load(pair, sources=file_of(held))
        with uploading(load.upload):
            part = Weight(b"w0", record(0), memoryview(given), 0)
            load.of(pair).take(BUFFER, part)
            # llama.cpp's memory is its own again after the call.
            expected, given[:] = bytes(given), bytes(len(given))
            gate.set()
            load.finish()
        assert pair.server.commands == ["LX_HAVE", "SET_TENSOR", "LX_PING"]
        body = pair.server.requests[1].body
        assert m.SetTensor.decode(body[:HEAD]).cache_flag == 0
        assert body[HEAD:] == expected

    @pytest.mark.parametrize(
        ("name", "size", "offset"),
        [(b"w1", 1000, 0), (b"w0", 999, 0), (b"w0", 1000, 4)],
    )
    def test_so_is_what_is_no_whole_tensor_of_the_file(
        self, keeper: Start, name: bytes, size: int, offset: int
    ) -> None:
        data = content(1, 1000)
        pair = keeper(having(blake3(data).digest()))
        load = Load(pair, sources=file_of(data))
        part = Weight(name, record(0), memoryview(data[:size]), offset)
        with uploading(load.upload):
            load.of(pair).take(BUFFER, part)
            load.finish()
        body = pair.server.of(Command.SET_TENSOR)[0]
        assert m.SetTensor.decode(body[:HEAD]) == (record(0), 0, offset)
        assert len(body) == HEAD + size

    def test_a_server_that_keeps_nothing_is_not_asked(self, scripted: Start) -> None:
        data = content(1, HASH_THRESHOLD + 1)
        pair = scripted(lx_flags=0)
        load = Load(pair, sources=file_of(data))
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, data))
            load.finish()
        assert pair.server.commands == ["SET_TENSOR", "LX_PING"]
        head = pair.server.requests[0].body[:HEAD]
        assert m.SetTensor.decode(head).cache_flag == 0

    @pytest.mark.parametrize("hit", [0, 1])
    def test_a_cpp_server_is_asked_by_hash_for_what_is_large(
        self, scripted: Start, hit: int
    ) -> None:
        large, small = content(1, HASH_THRESHOLD + 1), content(2, 4096)
        pair = scripted({Command.SET_TENSOR_HASH: bytes([hit])})
        sources = file_of(large, small)
        sources[b"w0"] = source(large, fnv=12345)
        load = Load(pair, sources=sources)
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, large))
            load.of(pair).take(BUFFER, weight(1, small))
            load.finish()
        pair.connection.ask(Command.DEVICE_COUNT, b"")
        sets = ["SET_TENSOR"] * (1 - hit) + ["SET_TENSOR", "DEVICE_COUNT"]
        assert pair.server.commands == ["SET_TENSOR_HASH", *sets]
        # What the index knows is not computed again.
        assert m.SetTensorHash.decode(pair.server.requests[0].body).hash == 12345
        heads = [body[:HEAD] for body in pair.server.of(Command.SET_TENSOR)]
        flags = [m.SetTensor.decode(head).cache_flag for head in heads]
        assert flags == [1] * (1 - hit) + [0]
        assert pair.connection.traffic.bytes_saved == len(large) * hit

    def test_a_hash_that_nobody_knows_is_computed(self, scripted: Start) -> None:
        large = content(1, HASH_THRESHOLD + 1)
        pair = scripted({Command.SET_TENSOR_HASH: b"\x01"})
        load = Load(pair, sources={})
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, large))
            load.finish()
        probe = m.SetTensorHash.decode(pair.server.of(Command.SET_TENSOR_HASH)[0])
        assert probe.hash == fnv1a_64(memoryview(large))

    def test_data_leaves_from_where_it_lies(self, keeper: Start) -> None:
        data = content(1, 1 << 20)
        pair = keeper(having())
        load = Load(pair, sources=file_of(data))
        seen: list[object] = []
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, bytes(bytearray(data))))
            load.of(pair).wait_for(BUFFER)
            seen = pair.stream.pieces
            load.finish()
        assert any(piece is data for piece in seen)


def test_a_refused_digest_is_sent_after_all(keeper: Start) -> None:
    data = [content(n, 2000) for n in range(4)]
    pings = iter([refusal("BadRequest", "LX_SET_DIGEST: it is gone"), b""])
    answers = having(*(blake3(part).digest() for part in data[1:3]))
    pair = keeper({**answers, Command.LX_PING: lambda body: next(pings)})
    load = Load(pair, sources=file_of(*data))
    with uploading(load.upload):
        for n, part in enumerate(data):
            load.of(pair).take(BUFFER, weight(n, part))
        load.finish()
    # A server does nothing more after what it refused: all since then comes again.
    assert pair.server.commands[-4:] == ["SET_TENSOR"] * 3 + ["LX_PING"]
    written = pair.server.of(Command.SET_TENSOR)[-3:]
    assert [body[:HEAD][0] for body in written] == [1, 2, 3]
    assert [body[HEAD:] for body in written] == data[1:]
    assert pair.connection.traffic.bytes_saved == 0
    assert load.upload.deliveries[0].from_store == 0
    pair.connection.check()


def test_unless_the_data_is_not_there_any_more(keeper: Start) -> None:
    had = content(1, 2000)
    no = refusal("BadRequest", "LX_SET_DIGEST: it is gone")
    pair = keeper({**having(blake3(had).digest()), Command.LX_PING: no})
    load = Load(pair, sources=file_of(had))
    with pytest.raises(RemoteFailure, match="it is gone"), uploading(load.upload):
        load.of(pair).take(BUFFER, weight(0, had))
        load.of(pair).take(BUFFER, weight(1, content(2, 3000)))
        load.finish()
    assert pair.server.commands.count("SET_TENSOR") == 1


def test_another_refusal_ends_the_load(keeper: Start) -> None:
    data = content(1, 2000)
    no = refusal("BadRequest", "SET_TENSOR: no such")
    pair = keeper({**having(), Command.LX_PING: no})
    load = Load(pair, sources=file_of(data))
    with pytest.raises(RemoteFailure, match="no such"), uploading(load.upload):
        load.of(pair).take(BUFFER, weight(0, data))
        load.finish()
    # It was told once; whoever uses the connection next has no part in it.
    pair.connection.check()


def test_digests_are_asked_in_questions_of_a_size(keeper: Start) -> None:
    digests = [n.to_bytes(32, "little") for n in range(MAX_DIGESTS + 2)]
    pair = keeper(having(digests[0], digests[-1]))
    assert known_digests(pair.connection, digests) == {digests[0], digests[-1]}
    assert pair.server.commands == ["LX_HAVE", "LX_HAVE"]


def test_an_answer_that_fits_no_question_ends_the_connection(keeper: Start) -> None:
    pair = keeper({Command.LX_HAVE: b"\x01"})
    with pytest.raises(RemoteFailure, match="1 bytes for 2 digests"):
        known_digests(pair.connection, [bytes(32), bytes(32)])
    assert not pair.connection.healthy


class TestOrder:
    def test_a_command_waits_for_the_writes_to_its_buffer(self, keeper: Start) -> None:
        gate = threading.Event()
        data = content(1, 2000)
        pair = keeper(having(gate=gate))
        load = Load(pair, sources=file_of(data))
        uploader = load.of(pair)
        with uploading(load.upload):
            uploader.take(BUFFER, weight(0, data))
            uploader.wait_for(OTHER)
            threading.Timer(0.05, gate.set).start()
            uploader.wait_for(BUFFER)
            assert gate.is_set()
            pair.connection.post(Command.BUFFER_CLEAR, m.BufferClear(7, 1).encode())
            load.finish()
        assert pair.server.commands[1:] == ["SET_TENSOR", "BUFFER_CLEAR", "LX_PING"]

    def test_writes_to_a_buffer_that_is_freed_are_dropped(self, keeper: Start) -> None:
        gate = threading.Event()
        data = [content(n, 2000) for n in range(3)]
        pair = keeper(having(gate=gate))
        load = Load(pair, sources=file_of(*data))
        uploader = load.of(pair)
        with uploading(load.upload):
            for n, buffer in enumerate([BUFFER, OTHER, BUFFER]):
                uploader.take(buffer, weight(n, data[n]))
            uploader.forget(BUFFER)
            gate.set()
            load.finish()
        (written,) = pair.server.of(Command.SET_TENSOR)
        assert written[HEAD:] == data[1]

    def test_copies_wait_for_room(
        self, keeper: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_MOST_COPIED", 5000)
        gate = threading.Event()
        pair = keeper(having(gate=gate))
        load = Load(pair, sources=file_of(b"something else"))
        uploader = load.of(pair)
        with uploading(load.upload):
            uploader.take(BUFFER, weight(1, content(1, 3000)))
            uploader.take(BUFFER, weight(2, content(2, 2000)))
            threading.Timer(0.05, gate.set).start()
            uploader.take(BUFFER, weight(3, content(3, 2000)))
            assert gate.is_set()
            # One that is larger than all the room there is goes alone.
            uploader.take(BUFFER, weight(4, content(4, 9000)))
            load.finish()
        sizes = [len(body) - HEAD for body in pair.server.of(Command.SET_TENSOR)]
        assert sizes == [3000, 2000, 2000, 9000]

    def test_strided_rows_keep_their_place(self, keeper: Start) -> None:
        data = content(1, 2000)
        pair = keeper(having())
        load = Load(pair, sources=file_of(data))
        uploader = load.of(pair)
        head = m.SetTensor2D(record(5), 0, 10, 2, 20).encode()
        rows = memoryview(content(9, 20))
        with uploading(load.upload):
            uploader.take(BUFFER, weight(0, data))
            write = Write(record(5), Command.SET_TENSOR_2D, head, rows, copied=True)
            uploader.put(BUFFER, write)
            load.finish()
        assert pair.server.commands[1:3] == ["SET_TENSOR", "SET_TENSOR_2D"]
        assert pair.server.requests[2].body == head + bytes(rows)


class TestSeveral:
    def test_all_are_fed_at_once(self, keeper: Start) -> None:
        """The second gets its data while the first takes nothing in."""
        gate = threading.Event()
        data = content(1, 2000)
        slow, quick = keeper(having(gate=gate)), keeper(having())
        load = Load(slow, quick, sources=file_of(data))
        with uploading(load.upload):
            load.of(slow).take(BUFFER, weight(0, data))
            load.of(quick).take(BUFFER, weight(0, data))
            load.of(quick).wait_for(BUFFER)
            assert [d.done for d in load.upload.deliveries] == [0, 2000]
            assert load.upload.under_way == 2000
            gate.set()
            load.finish()
        assert load.upload.under_way == 0

    def test_progress_is_told_until_the_end(self, keeper: Start) -> None:
        gate = threading.Event()
        data = content(1, 2000)
        pair = keeper(having(gate=gate))
        load = Load(pair, sources=file_of(data))
        with uploading(load.upload):
            load.of(pair).take(BUFFER, weight(0, data))

            def tick() -> None:
                load.ticks.append(load.upload.deliveries)
                gate.set()

            load.upload.finish(tick)
        endpoint = pair.connection.endpoint
        assert load.ticks[0] == [Delivery(endpoint, 0, 2000, 0)]
        assert load.ticks[-1] == [Delivery(endpoint, 2000, 2000, 0)]

    def test_one_that_is_lost_ends_all(self, keeper: Start) -> None:
        gate = threading.Event()
        data = content(1, 2000)
        lost = keeper(
            {Command.LX_HAVE: Instead.CLOSE}, endpoint=Endpoint("gone", 50052)
        )
        other = keeper(having(gate=gate))
        load = Load(lost, other, sources=file_of(data))
        with pytest.raises(ConnectionLost, match="gone:50052.*LX_HAVE"):
            with uploading(load.upload):
                for pair in (lost, other):
                    load.of(pair).take(BUFFER, weight(0, data))
                try:
                    load.finish()
                finally:
                    assert load.upload.failed
                    threading.Timer(0.05, gate.set).start()
        assert other.connection.healthy
        other.connection.ask(Command.DEVICE_COUNT, b"")
        # What had not begun when the load ended was not sent.
        assert other.server.commands == ["LX_HAVE", "DEVICE_COUNT"]

    def test_nothing_waits_for_one_that_is_lost(self, keeper: Start) -> None:
        pair = keeper({Command.LX_HAVE: Instead.CLOSE})
        load = Load(pair, sources=file_of(content(1, 2000)))
        uploader = load.of(pair)
        with uploading(load.upload):
            while not load.upload.failed:
                uploader.join(PATIENCE_S)
            uploader.take(BUFFER, weight(1, content(1, 100 << 20)))
            uploader.take(BUFFER, weight(2, content(1, 100 << 20)))
            uploader.wait_for(BUFFER)
            uploader.forget(BUFFER)
        assert uploader.delivery.total == 0

    def test_a_server_that_takes_nothing_in_is_left(
        self, keeper: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A load that is given up ends at once, at the cost of that connection."""
        monkeypatch.setattr(module, "_GRACE_S", 0.05)
        pair = keeper({Command.LX_HAVE: Instead.SILENCE})
        load = Load(pair, sources=file_of(content(1, 2000)))
        with pytest.raises(KeyboardInterrupt), uploading(load.upload):
            raise KeyboardInterrupt
        assert not pair.connection.healthy


def test_a_failure_does_not_wait_for_a_send_that_is_stuck() -> None:
    """Ctrl-C in one thread while another sends to a server that takes nothing in."""
    ours, theirs = socket.socketpair()
    entered = threading.Event()

    class Watched(Stream):
        def _write(self, pieces: list[memoryview]) -> int:
            entered.set()
            return super()._write(pieces)

    connection = Connection(Endpoint("worker", 50052), Watched(ours), V8)
    ended: list[BaseException] = []

    def send() -> None:
        try:
            connection.post(Command.BUFFER_CLEAR, bytes(64 << 20))
        except KeyboardInterrupt as error:
            ended.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    assert entered.wait(PATIENCE_S)
    failure = connection.fail(KeyboardInterrupt(), "load")
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and len(ended) == 1
    assert isinstance(failure.__cause__, KeyboardInterrupt)
    theirs.close()


def test_a_load_is_this_threads_and_for_its_time() -> None:
    upload = Upload({}, [])
    seen: list[object] = []
    with uploading(upload):
        assert current() is upload
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert current() is None and seen == [None]


def test_a_closed_uploader_was_never_started(scripted: Start) -> None:
    with closing(Uploader(scripted().connection, {})) as uploader:
        assert not uploader.alive
