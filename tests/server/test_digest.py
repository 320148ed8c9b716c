"""Weights by digest, with a real worker: mapped, shared, and never written back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from longwire.models.index import ModelIndex, load_index, read_index
from longwire.native.engine import load_engine
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, Command
from longwire.wire.dialects import V8
from longwire.wire.fnv import fnv1a_64
from longwire.wire.graphs import Graph
from longwire.wire.lx import Have, LxStartAnswer, SetDigest
from longwire.wire.patches import GraphPatch
from longwire.wire.tensors import WIDE_TENSOR, Tensor
from support.client import Buffer, RawClient
from support.gguf import make_gguf
from support.lx import WideClient
from support.tensors import ADD, tensor
from support.worker import PROC, Worker, running_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

I8, I32, Q8_0 = 24, 26, 8
MUL_MAT, MUL_MAT_ID = 29, 30
SIDE = 256
SIZE = 4 * SIDE * SIDE
"""Of a matrix: above what is copied instead of mapped."""

_random = np.random.default_rng(5)
MATRICES = {
    name: _random.standard_normal((SIDE, SIDE), np.float32).tobytes()
    for name in ("first", "second", "third")
}
SMALL = bytes(range(256)) * 4
HUGE = _random.bytes(HASH_THRESHOLD + 32)
ZEROS = bytes(SIZE)
TENSORS = {"small": SMALL, **MATRICES, "huge": HUGE, "zeros": ZEROS}
ODD = _random.bytes(SIZE)


def digest(data: bytes) -> bytes:
    return blake3(data).digest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_gguf(folder / "m.gguf", TENSORS)
    make_gguf(folder / "odd.gguf", {"few": b"12345678", "odd": ODD}, alignment=8)
    return folder


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Worker]:
    with running_worker("-d", "CPU", "--models", str(folder)) as worker:
        worker.logged(r"odd\.gguf: 2 tensors, .* indexed in", 20)
        yield worker


Connect = Callable[[], "Client"]


class Client(WideClient):
    """Asks for data by digest."""

    def have(self, *digests: bytes) -> list[int]:
        return list(self.ask(Command.LX_HAVE, Have(digests).encode()))

    def set_digest(self, t: Tensor, data: bytes, offset: int = 0) -> None:
        """Fill part of a tensor with data that is not sent."""
        body = SetDigest(t.encode(wide=True), offset, len(data), digest(data))
        self.post(Command.LX_SET_DIGEST, body.encode())

    def send_graph(self, node: Tensor, *sources: Tensor, uid: int) -> Graph:
        records = b"".join(t.encode(wide=True) for t in (*sources, node))
        ids = np.array([node.id], np.uint64)
        found = Graph(0, uid, ids, np.frombuffer(records, WIDE_TENSOR))
        self.compute(found)
        return found


@pytest.fixture
def connect(worker: Worker) -> Iterator[Connect]:
    with ExitStack() as stack:

        def started() -> Client:
            client = stack.enter_context(Client(worker.endpoint, V8))
            client.hello()
            client.start()
            return client

        yield started


@pytest.fixture
def client(connect: Connect) -> Client:
    client = connect()
    assert client.have(*map(digest, TENSORS.values())) == [1] * len(TENSORS)
    return client


def matrix(number: int, buffer: Buffer, at: int = 0) -> Tensor:
    """A matrix of f32 at a place that others may follow."""
    return tensor(number, buffer, at * SIZE, ne=(SIDE, SIDE))


def mapped(pid: int, name: str = "m.gguf") -> list[int]:
    """Sizes of a process's writable mappings of a file."""
    found = []
    for line in (PROC / str(pid) / "maps").read_text().splitlines():
        span, access, *_ = line.split()
        if line.endswith(f"/{name}") and "w" in access:
            start, _, end = span.partition("-")
            found.append(int(end, 16) - int(start, 16))
    return found


def kilobytes(pid: int, field: str) -> int:
    """One line of what a process occupies, as the kernel counts it."""
    text = (PROC / str(pid) / "smaps_rollup").read_text()
    return int(text.partition(f"\n{field}:")[2].split()[0])


# What is said, and what is refused.


@pytest.mark.parametrize("options", [(), ("--models",), ("-c",)])
def test_a_server_says_whether_it_keeps_data(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    given = [*options, str(tmp_path)] if options else []
    with running_worker("-d", "CPU", *given) as worker:
        with Client(worker.endpoint, V8) as client:
            client.hello()
            answer = LxStartAnswer.decode(client.ask(Command.LX_START, m.U32.pack(1)))
            assert answer.keeps_data is bool(options)
            assert answer.keeps_data == bool(options)
            assert client.have(bytes(32)) == [0]


def test_some_and_not_others(connect: Connect) -> None:
    client = connect()
    asked = [digest(SMALL), digest(b"unknown"), digest(SMALL)]
    assert client.have(*asked) == [1, 0, 1]
    assert client.have() == []


def test_data_without_data(client: Client) -> None:
    buffer = client.alloc(1 << 21)
    a, small = matrix(1, buffer), tensor(2, buffer, SIZE, (1024,), I8)
    client.set_digest(a, MATRICES["first"])
    client.set_digest(small, SMALL)
    assert client.read(a) == MATRICES["first"]
    assert client.read(a, 1000, 5000) == MATRICES["first"][1000:6000]
    assert client.read(small) == SMALL


def test_part_of_a_tensor(client: Client) -> None:
    t = tensor(1, client.alloc(SIZE + 64), ne=(SIZE + 64,), type_number=I8)
    client.write(t, b"\xee" * (SIZE + 64))
    client.set_digest(t, MATRICES["first"], offset=32)
    assert client.read(t) == b"\xee" * 32 + MATRICES["first"] + b"\xee" * 32
    client.set_digest(t, SMALL, offset=64)
    assert client.read(t, 0, 2048) == (
        b"\xee" * 32 + MATRICES["first"][:32] + SMALL + MATRICES["first"][1056:2016]
    )


@pytest.mark.parametrize(
    ("size", "offset", "data", "reason"),
    [
        (SIZE, 0, b"\1" * SIZE, "LX_HAVE has not said yes"),
        (SIZE - 1, 0, MATRICES["first"], "bytes at 0 in a tensor of"),
        (SIZE, 1, MATRICES["first"], "bytes at 1 in a tensor of"),
        (SIZE, 1 << 63, MATRICES["first"], "in a tensor of"),
    ],
)
def test_what_is_refused_costs_that_command(
    client: Client, size: int, offset: int, data: bytes, reason: str
) -> None:
    t = tensor(1, client.alloc(SIZE), ne=(size,), type_number=I8)
    client.set_digest(t, data, offset)
    client.post(Command.LX_PING)
    assert reason in client.error()
    assert client.read(t) == bytes(size)


def test_the_size_is_the_data_s(client: Client) -> None:
    t = tensor(1, client.alloc(SIZE), ne=(SIZE,), type_number=I8)
    body = SetDigest(t.encode(wide=True), 0, 100, digest(SMALL))
    client.post(Command.LX_SET_DIGEST, body.encode())
    client.post(Command.LX_PING)
    assert "100 bytes of data of 1024" in client.error()


# Mappings.


def test_large_tensors_are_mapped_and_small_ones_copied(
    client: Client, worker: Worker
) -> None:
    pid = worker.session_of(client.name)
    buffer = client.alloc(1 << 21)
    client.set_digest(tensor(1, buffer, SIZE, (1024,), I8), SMALL)
    client.device_count()
    assert mapped(pid) == []
    client.set_digest(matrix(2, buffer), MATRICES["first"])
    client.device_count()
    assert len(mapped(pid)) == 1
    client.free(buffer)
    client.device_count()
    assert mapped(pid) == []


def test_what_lies_askew_in_its_file_is_copied(
    connect: Connect, worker: Worker
) -> None:
    client = connect()
    assert client.have(digest(ODD)) == [1]
    t = matrix(1, client.alloc(SIZE))
    client.set_digest(t, ODD)
    assert client.read(t) == ODD
    assert mapped(worker.session_of(client.name), "odd.gguf") == []


def test_writes_reach_neither_the_file_nor_others(
    connect: Connect, client: Client, folder: Path
) -> None:
    before = (folder / "m.gguf").read_bytes()
    other = connect()
    other.have(digest(MATRICES["first"]))
    t, u = (matrix(1, c.alloc(SIZE)) for c in (client, other))
    for who, which in ((client, t), (other, u)):
        who.set_digest(which, MATRICES["first"])
    client.write(t, b"mine", offset=5000)
    expected = bytearray(MATRICES["first"])
    expected[5000:5004] = b"mine"
    assert client.read(t) == expected
    assert other.read(u) == MATRICES["first"]
    # Nor the next one of the same client: its data is the file's.
    again = matrix(2, client.alloc(SIZE))
    client.set_digest(again, MATRICES["first"])
    assert client.read(again) == MATRICES["first"]
    assert (folder / "m.gguf").read_bytes() == before


def test_a_tensor_can_be_filled_again(client: Client) -> None:
    t = matrix(1, client.alloc(SIZE))
    for name in ("first", "second", "second"):
        client.set_digest(t, MATRICES[name])
        assert client.read(t) == MATRICES[name]
    client.write(t, b"\1" * SIZE)
    assert client.read(t) == b"\1" * SIZE
    client.set_digest(t, MATRICES["third"])
    assert client.read(t) == MATRICES["third"]


def test_a_record_over_several_mappings_sees_and_changes_them_all(
    client: Client, worker: Worker
) -> None:
    pid = worker.session_of(client.name)
    buffer = client.alloc(4 * SIZE)
    parts = [matrix(i + 1, buffer, i) for i in range(4)]
    client.write(parts[3], b"\3" * SIZE)
    for part, data in zip(parts, MATRICES.values(), strict=False):
        client.set_digest(part, data)
    whole = b"".join(MATRICES.values()) + b"\3" * SIZE
    inner = tensor(10, buffer, 100, (64,), I8)
    assert client.read(inner) == whole[100:164]
    assert len(mapped(pid)) == 3

    across = tensor(11, buffer, SIZE - 50, (SIZE + 100,), I8)
    assert client.read(across) == whole[SIZE - 50 : 2 * SIZE + 50]
    client.write(across, b"\xaa" * (SIZE + 100))
    changed = bytearray(whole)
    changed[SIZE - 50 : 2 * SIZE + 50] = b"\xaa" * (SIZE + 100)
    for i, part in enumerate(parts):
        assert client.read(part) == changed[i * SIZE : (i + 1) * SIZE]
    assert client.read(inner) == whole[100:164]
    assert client.read(tensor(12, buffer, 0, (4 * SIZE,), I8)) == changed


def test_copies_between_mapped_tensors(client: Client) -> None:
    buffer = client.alloc(3 * SIZE)
    a, b, c = (matrix(i + 1, buffer, i) for i in range(3))
    client.set_digest(a, MATRICES["first"])
    client.set_digest(b, MATRICES["second"])

    def copy(src: Tensor, dst: Tensor) -> None:
        body = m.CopyTensor(src.encode(wide=True), dst.encode(wide=True)).encode()
        assert client.ask(Command.COPY_TENSOR, body) == b"\1"

    copy(a, c)
    assert client.read(c) == MATRICES["first"]
    # The target lies across both: what was mapped is moved under the copy's feet.
    across = tensor(9, buffer, SIZE // 2, (SIDE, SIDE))
    copy(a, across)
    half = SIZE // 2
    first, second = MATRICES["first"], MATRICES["second"]
    assert client.read(across) == first
    assert client.read(a) == first[:half] + first[:half]
    assert client.read(b) == first[half:] + second[half:]


def test_clearing_a_buffer(client: Client, worker: Worker) -> None:
    buffer = client.alloc(2 * SIZE)
    a, b = matrix(1, buffer, 0), matrix(2, buffer, 1)
    client.set_digest(a, MATRICES["first"])
    client.write(b, b"\2" * SIZE)
    client.post(Command.BUFFER_CLEAR, m.BufferClear(buffer.handle, 7).encode())
    assert client.read(a) == client.read(b) == b"\7" * SIZE
    assert mapped(worker.session_of(client.name)) == []
    client.set_digest(a, MATRICES["second"])
    assert client.read(a) == MATRICES["second"]


# Graphs.


class Sum:
    """c = a + b of two mapped matrices."""

    def __init__(self, client: Client, uid: int) -> None:
        self.client, self.uid = client, uid
        self.buffer = client.alloc(2 * SIZE)
        self.a, self.b = (matrix(i + 1, self.buffer, i) for i in range(2))
        client.set_digest(self.a, MATRICES["first"])
        client.set_digest(self.b, MATRICES["second"])
        self.results = client.alloc(SIZE)
        self.c = matrix(3, self.results)._replace(op=ADD, flags=16)
        self.c = self.c._replace(src=(self.a.id, self.b.id, *[0] * 8))

    def send(self) -> Graph:
        return self.client.send_graph(self.c, self.a, self.b, uid=self.uid)

    def check(self, a: bytes, b: bytes) -> None:
        """The result is that of these two, and not of an earlier run."""
        x, y = (np.frombuffer(data, np.float32) for data in (a, b))
        assert self.client.read(self.c) == (x + y).tobytes()
        wipe = m.MemsetTensor(self.c.encode(wide=True), 0, SIZE, 0xFF).encode()
        self.client.post(Command.MEMSET_TENSOR, wipe)


def test_a_graph_computes_on_mappings(client: Client, worker: Worker) -> None:
    total = Sum(client, 5)
    total.send()
    total.check(MATRICES["first"], MATRICES["second"])
    client.recompute(5)
    total.check(MATRICES["first"], MATRICES["second"])
    assert len(mapped(worker.session_of(client.name))) == 2


def test_a_kept_graph_follows_memory_that_moves(client: Client, worker: Worker) -> None:
    total = Sum(client, 5)
    total.send()
    total.check(MATRICES["first"], MATRICES["second"])
    across = tensor(9, total.buffer, SIZE - 4, (8,), I8)
    client.write(across, b"\0" * 8)
    client.device_count()
    assert mapped(worker.session_of(client.name)) == []
    a = MATRICES["first"][:-4] + b"\0" * 4
    b = b"\0" * 4 + MATRICES["second"][4:]
    client.recompute(5)
    total.check(a, b)
    client.post(Command.BUFFER_CLEAR, m.BufferClear(total.buffer.handle, 0).encode())
    client.recompute(5)
    total.check(bytes(SIZE), bytes(SIZE))


@pytest.mark.parametrize("uid", [8, 9])
def test_ids_that_move_take_their_graph_along(client: Client, uid: int) -> None:
    """What is checked before each run may not be looked for where it was."""
    buffer = client.alloc(2 * SIZE)
    experts = tensor(1, buffer, SIZE, (8, 4, 2))
    ids = tensor(2, buffer, 0, (1, 1), I32)
    client.set_digest(matrix(9, buffer), ZEROS)
    work = client.alloc(1024)
    x = tensor(3, work, 0, (8, 1, 1))
    y = tensor(4, work, 512, (4, 1, 1), op=MUL_MAT_ID, src=[experts, x, ids])
    client.write(x, np.ones(8, "<f4").tobytes())
    client.write(experts, np.arange(64, dtype="<f4").tobytes())
    client.send_graph(y, experts, x, ids, uid=8)
    expected = np.arange(32, dtype="<f4").reshape(4, 8).sum(1).tobytes()
    assert client.read(y) == expected
    same = GraphPatch(0, 9, 0, *np.zeros((2, 0), np.uint32))
    client.post(Command.LX_GRAPH_PATCH, same.encode())
    client.recompute(uid)
    assert client.read(y) == expected
    client.write(tensor(10, buffer, SIZE - 4, (8,), I8), bytes(8))
    client.recompute(uid)
    client.post(Command.LX_PING)
    assert f"no graph {uid}" in client.error()


def test_a_kept_graph_sees_what_its_tensors_are_filled_with_later(
    client: Client,
) -> None:
    total = Sum(client, 5)
    total.send()
    total.check(MATRICES["first"], MATRICES["second"])
    client.set_digest(total.a, MATRICES["third"])
    client.recompute(5)
    total.check(MATRICES["third"], MATRICES["second"])


def test_a_graph_that_was_sent_before_its_weights(client: Client) -> None:
    total = Sum(client, 5)
    buffer = client.alloc(SIZE)
    total.a = matrix(1, buffer)
    client.write(total.a, bytes(SIZE))
    total.send()
    total.check(bytes(SIZE), MATRICES["second"])
    client.set_digest(total.a, MATRICES["third"])
    client.recompute(5)
    total.check(MATRICES["third"], MATRICES["second"])


@pytest.mark.parametrize("move", ["fold", "lay"])
def test_a_patch_starts_from_memory_as_it_is_now(client: Client, move: str) -> None:
    total = Sum(client, 0)
    spare = client.alloc(SIZE)
    if move == "lay":
        total.a = matrix(1, spare)
        client.write(total.a, MATRICES["first"])
    total.send()
    total.check(MATRICES["first"], MATRICES["second"])
    if move == "lay":
        client.set_digest(total.a, MATRICES["third"])
        a = MATRICES["third"]
    else:
        client.write(tensor(9, total.buffer, SIZE - 4, (8,), I8), b"\0" * 8)
        a = MATRICES["first"][:-4] + b"\0" * 4
    nothing = np.zeros(0, np.uint32)
    patch = GraphPatch(0, 6, 0, nothing, nothing)
    client.post(Command.LX_GRAPH_PATCH, b"".join(map(bytes, patch.encode())))
    b = MATRICES["second"] if move == "lay" else b"\0" * 4 + MATRICES["second"][4:]
    total.check(a, b)


def test_a_graph_with_a_tensor_across_mappings(client: Client, worker: Worker) -> None:
    total = Sum(client, 0)
    half = SIZE // 2
    total.a = tensor(1, total.buffer, half, (SIDE, SIDE))
    total.send()
    a = MATRICES["first"][half:] + MATRICES["second"][:half]
    total.check(a, MATRICES["second"])
    assert mapped(worker.session_of(client.name)) == []


# What it saves.


def test_sessions_share_what_they_map(
    connect: Connect, client: Client, worker: Worker
) -> None:
    other = connect()
    other.have(digest(HUGE))
    clients = (client, other)
    pids = [worker.session_of(c.name) for c in clients]
    size = len(HUGE)
    tensors = [tensor(1, c.alloc(size), ne=(size,), type_number=I8) for c in clients]
    before = [(kilobytes(p, "Pss"), kilobytes(p, "Anonymous")) for p in pids]
    for c, t in zip(clients, tensors, strict=True):
        c.set_digest(t, HUGE)
        # Every page is looked at.
        for at in range(0, size, 1 << 20):
            assert c.read(t, at, min(1 << 20, size - at))
    grown = [
        (kilobytes(p, "Pss") - pss, kilobytes(p, "Anonymous") - anonymous)
        for p, (pss, anonymous) in zip(pids, before, strict=True)
    ]
    for pss, anonymous in grown:
        assert pss << 10 < 0.7 * size
        assert anonymous << 10 < 0.1 * size


# C++ clients.


def test_by_hash_from_model_files(worker: Worker) -> None:
    with RawClient(worker.endpoint, V8) as client:
        client.hello()
        t = tensor(1, client.alloc(len(HUGE)), ne=(len(HUGE),), type_number=I8)
        key = fnv1a_64(memoryview(HUGE))
        for wrong, offset in ((key + 1, 0), (key, 1)):
            ask = m.SetTensorHash(t.encode(), offset, wrong).encode()
            assert client.ask(Command.SET_TENSOR_HASH, ask) == b"\0"
        ask = m.SetTensorHash(t.encode(), 0, key).encode()
        assert client.ask(Command.SET_TENSOR_HASH, ask) == b"\1"
        assert client.read(t) == HUGE
        assert len(mapped(worker.session_of(client.name))) == 1
    figures = worker.end_of(client.name)
    assert "'cache_hits': 1, 'cache_misses': 2" in figures
    assert f"'bytes_from_files': {len(HUGE)}" in figures


def test_small_ones_are_not_known_by_hash(worker: Worker) -> None:
    with RawClient(worker.endpoint, V8) as client:
        client.hello()
        t = tensor(1, client.alloc(1024), ne=(1024,), type_number=I8)
        ask = m.SetTensorHash(t.encode(), 0, fnv1a_64(memoryview(SMALL))).encode()
        assert client.ask(Command.SET_TENSOR_HASH, ask) == b"\0"


# The cache.


class TestCache:
    @pytest.fixture
    def cache(self, tmp_path: Path) -> Path:
        return tmp_path / "cache"

    @pytest.fixture
    def worker(self, cache: Path) -> Iterator[Worker]:
        with running_worker("-d", "CPU", "-c", str(cache)) as worker:
            yield worker

    def keep(self, client: RawClient, t: Tensor, data: bytes, wide: bool) -> None:
        """Send data that the server may keep."""
        head = m.SetTensor(t.encode(wide), 1, 0).encode()
        client.post(Command.SET_TENSOR, [head, data])

    def test_what_one_client_sends_the_next_need_not(
        self, connect: Connect, cache: Path, worker: Worker
    ) -> None:
        first, second = connect(), connect()
        contents = [SMALL, *MATRICES.values()]
        assert first.have(*map(digest, contents)) == [0] * 4
        buffer = first.alloc(4 * SIZE)
        for i, data in enumerate(contents):
            place = tensor(i + 1, buffer, i * SIZE, (len(data),), I8)
            self.keep(first, place, data, wide=True)
        assert first.have(*map(digest, contents)) == [1] * 4
        # Nothing was asked for as C++ clients do, and nothing hashed for them.
        assert [entry.name for entry in cache.iterdir()] == ["blake3"]

        assert second.have(*map(digest, contents)) == [1] * 4
        buffer = second.alloc(4 * SIZE)
        for i, data in enumerate(contents):
            place = tensor(i + 1, buffer, i * SIZE, (len(data),), I8)
            second.set_digest(place, data)
            assert second.read(place) == data
        pid = worker.session_of(second.name)
        for data in MATRICES.values():
            assert mapped(pid, digest(data).hex()) == [SIZE]

    def test_what_is_evicted_after_the_answer_is_still_had(
        self, connect: Connect, cache: Path
    ) -> None:
        client = connect()
        t = matrix(1, client.alloc(SIZE))
        self.keep(client, t, MATRICES["first"], wide=True)
        assert client.have(digest(MATRICES["first"])) == [1]
        for file in (cache / "blake3").iterdir():
            file.unlink()
        client.write(t, bytes(SIZE))
        client.set_digest(t, MATRICES["first"])
        assert client.read(t) == MATRICES["first"]

    def test_what_a_cpp_client_sent_an_lx_client_has_and_back(
        self, connect: Connect, worker: Worker, cache: Path
    ) -> None:
        with RawClient(worker.endpoint, V8) as old:
            old.hello()
            t = matrix(1, old.alloc(SIZE))
            self.keep(old, t, MATRICES["first"], wide=False)
            old.device_count()
        client = connect()
        assert client.have(digest(MATRICES["first"])) == [1]
        key = fnv1a_64(memoryview(MATRICES["second"]))
        t = matrix(1, client.alloc(SIZE))
        ask = m.SetTensorHash(t.encode(wide=True), 0, key).encode()
        assert client.ask(Command.SET_TENSOR_HASH, ask) == b"\0"
        self.keep(client, t, MATRICES["second"], wide=True)
        assert client.ask(Command.SET_TENSOR_HASH, ask) == b"\1"
        files = [
            file for file in cache.rglob("*") if file.is_file() and not file.suffix
        ]
        assert len(files) == 4 and len({file.stat().st_ino for file in files}) == 2

    def test_a_damaged_file_is_not_served(
        self, connect: Connect, worker: Worker, cache: Path
    ) -> None:
        client = connect()
        t = matrix(1, client.alloc(SIZE))
        self.keep(client, t, MATRICES["first"], wide=True)
        client.device_count()
        (file,) = (cache / "blake3").iterdir()
        file.write_bytes(MATRICES["first"][:-1] + b"?")
        assert client.have(digest(MATRICES["first"])) == [0]
        worker.logged("is damaged, removed")


# A real model.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rich.console import Console

    from longwire.cli.demo import demo_model

    found = demo_model(Console(quiet=True))
    link = tmp_path_factory.mktemp("gemma") / found.name
    try:
        link.hardlink_to(found)
    except OSError:
        link.write_bytes(found.read_bytes())
    return link


@pytest.fixture(scope="module")
def gemma(model: Path) -> ModelIndex:
    return load_index(load_engine("xllamacpp"), model, fnv=True)


def test_a_whole_model(model: Path, gemma: ModelIndex) -> None:
    """Filled by digest it computes what it computes with data that was sent."""
    content = memoryview(model.read_bytes())
    size = sum(_padded(t.size) for t in gemma.tensors)
    results = []
    with running_worker("-d", "CPU", "--models", str(model.parent)) as worker:
        assert read_index(model) == gemma
        for by_digest in (True, False):
            with Client(worker.endpoint, V8, 60) as client:
                client.hello()
                client.start()
                known = client.have(*(t.digest for t in gemma.tensors))
                assert known == [1] * len(gemma.tensors)
                pid = worker.session_of(client.name)
                buffer, at = client.alloc(size), 0
                before = kilobytes(pid, "Anonymous")
                for i, t in enumerate(gemma.tensors):
                    place = tensor(i + 1, buffer, at, (t.size,), I8)
                    data = content[t.offset : t.offset + t.size]
                    if by_digest:
                        body = SetDigest(place.encode(True), 0, t.size, t.digest)
                        client.post(Command.LX_SET_DIGEST, body.encode())
                    else:
                        client.write(place, data)
                    if t.name == "token_embd.weight":
                        embeddings = at
                    at += _padded(t.size)
                results.append(_logits(client, buffer, embeddings))
                grown = (kilobytes(pid, "Anonymous") - before) << 10
                # Of a quarter of a gigabyte, the result and what is small.
                assert grown < 32 << 20 if by_digest else grown > size - (32 << 20)
    assert results[0] == results[1]


def _logits(client: Client, buffer: Buffer, at: int) -> bytes:
    """Gemma's embeddings times a vector."""
    width, words = 640, 262144
    a = tensor(1001, buffer, at, (width, words), Q8_0)
    work = client.alloc(4 * width + 4 * words)
    x = tensor(1002, work, 0, (width,))
    y = tensor(1003, work, 4 * width, (words,), op=MUL_MAT, src=[a, x])
    client.write(x, np.linspace(-1, 1, width, dtype="<f4").tobytes())
    client.send_graph(y, a, x, uid=0)
    return client.read(y)


def _padded(size: int) -> int:
    return size + -size % 32
