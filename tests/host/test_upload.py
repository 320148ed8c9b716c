"""What a load knows of its model file, and when an index is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from blake3 import blake3

from longwire.client.connection import Connection
from longwire.client.writes import Source
from longwire.host import upload as module
from longwire.host.upload import model_upload, split_files
from longwire.models.index import read_index
from longwire.native.engine import load_engine
from longwire.native.profiles import DEFAULT_ENGINE
from longwire.wire.constants import HASH_THRESHOLD
from longwire.wire.fnv import fnv1a_64
from longwire.wire.lx import KEEPS_DATA
from support.gguf import make_gguf
from support.scripted import start_scripted

Connect = Callable[[int | None], Connection]

SMALL = bytes(range(256))
LARGE = bytes(HASH_THRESHOLD + 32)


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(flags)` is a connection to a server of ours; None to a C++ one."""
    with ExitStack() as stack:

        def start(flags: int | None) -> Connection:
            pair = start_scripted(lx_flags=flags)
            stack.callback(pair.close)
            return pair.connection

        yield start


@pytest.fixture
def sources_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[bytes, Source]]:
    """The tensors that a load over these connections would send."""
    found: dict[bytes, Source] = {}

    def upload(sources: dict[bytes, Source], connections: object) -> None:
        found.update(sources)

    monkeypatch.setattr(module, "Upload", upload)

    def sources(path: Path, *connections: Connection) -> dict[bytes, Source]:
        found.clear()
        model_upload(load_engine(DEFAULT_ENGINE), path, connections)
        return found

    return sources


Sources = Callable[..., dict[bytes, Source]]


def test_where_nobody_asks_there_is_no_index(
    tmp_path: Path, connect: Connect, sources_of: Sources
) -> None:
    path = make_gguf(tmp_path / "model.gguf", {"a": SMALL, "b": LARGE})
    for flags in ([], [0], [0, 0]):
        found = sources_of(path, *map(connect, flags))
        assert [bytes(s.data) for s in found.values()] == [SMALL, LARGE][
            : 2 * len(flags)
        ]
        assert all(s.digest is None and s.fnv is None for s in found.values())
    small = make_gguf(tmp_path / "small.gguf", {"a": SMALL})
    assert sources_of(small, connect(None))[b"a"] == Source(memoryview(SMALL))
    assert read_index(path) is None and read_index(small) is None


@pytest.mark.parametrize("hashed", [False, True])
def test_servers_that_keep_data_are_asked_by_digest_and_cpp_ones_by_hash(
    tmp_path: Path, connect: Connect, sources_of: Sources, hashed: bool
) -> None:
    path = make_gguf(tmp_path / "model.gguf", {"a": SMALL, "b": LARGE})
    connections = [connect(KEEPS_DATA), connect(0)]
    connections += [connect(None)] if hashed else []
    found = sources_of(path, *connections)
    for name, data in ((b"a", SMALL), (b"b", LARGE)):
        known = fnv1a_64(memoryview(data)) if hashed and data is LARGE else None
        digest = blake3(data).digest()
        assert found[name] == Source(memoryview(data), digest, known)
    assert read_index(path) is not None


def test_a_cpp_server_alone_needs_the_index_for_what_is_large(
    tmp_path: Path, connect: Connect, sources_of: Sources
) -> None:
    path = make_gguf(tmp_path / "model.gguf", {"b": LARGE})
    assert sources_of(path, connect(None))[b"b"].fnv == fnv1a_64(memoryview(LARGE))


def test_a_model_in_several_files_is_all_of_them(
    tmp_path: Path, connect: Connect, sources_of: Sources
) -> None:
    first = tmp_path / "m-00001-of-00002.gguf"
    make_gguf(first, {"a": SMALL})
    make_gguf(tmp_path / "m-00002-of-00002.gguf", {"b": SMALL[::-1]})
    found = sources_of(first, connect(KEEPS_DATA))
    assert {n: bytes(s.data) for n, s in found.items()} == {
        b"a": SMALL,
        b"b": SMALL[::-1],
    }


@pytest.mark.parametrize("name", ["m.gguf", "m-1-of-2.gguf", "m-00001-of-00001.gguf"])
def test_one_file_is_itself(name: str) -> None:
    assert split_files(Path("folder", name)) == [Path("folder", name)]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"something else" * 99])
def test_what_is_no_model_is_left_to_llama_cpp(
    tmp_path: Path, connect: Connect, sources_of: Sources, content: bytes
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert sources_of(path, connect(KEEPS_DATA), connect(None)) == {}


def test_a_part_that_is_missing_too(
    tmp_path: Path, connect: Connect, sources_of: Sources
) -> None:
    first = make_gguf(tmp_path / "m-00001-of-00002.gguf", {"a": SMALL})
    sources_of(first, connect(KEEPS_DATA))
