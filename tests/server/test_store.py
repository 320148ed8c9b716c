from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from longwire.models.index import index_places, load_index
from longwire.native.engine import load_engine
from longwire.server import store as module
from longwire.server.cache import WeightCache
from longwire.server.store import DataStore
from longwire.wire.constants import HASH_THRESHOLD
from longwire.wire.fnv import fnv1a_64
from support.gguf import make_gguf

LARGE = b"\x05" * (HASH_THRESHOLD + 1)
TENSORS = {"a": b"\x01" * 100, "large": LARGE, "b": b"\x02" * 4096}
KEY = fnv1a_64(memoryview(LARGE))


def digest(data: bytes) -> bytes:
    return blake3(data).digest()


DIGESTS = [digest(data) for data in TENSORS.values()]


def indexed(path: Path, fnv: bool = True) -> None:
    load_index(load_engine("xllamacpp"), path, fnv=fnv)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def path(folder: Path) -> Path:
    path = make_gguf(folder / "m.gguf", TENSORS)
    # A file system's clock has coarse ticks; no test may fall into one with this.
    os.utime(path, ns=(1, path.stat().st_mtime_ns - 10**9))
    indexed(path)
    return path


@pytest.fixture
def store(folder: Path) -> Iterator[DataStore]:
    store = DataStore([str(folder)], None)
    yield store
    store.close()


def test_what_is_there_is_pinned(store: DataStore, path: Path) -> None:
    assert store.keeps
    asked = [*DIGESTS, digest(b"nobody has it"), DIGESTS[0]]
    assert store.pin(asked) == [True, True, True, False, True]
    for data in TENSORS.values():
        found = store.pinned(digest(data))
        assert found is not None and found.current and found.data.readonly
        assert found.data == data
    assert store.pinned(digest(b"nobody has it")) is None


def test_nothing_is_had_unasked(store: DataStore, path: Path) -> None:
    assert store.pinned(DIGESTS[0]) is None
    store.pin(DIGESTS[1:])
    assert store.pinned(DIGESTS[0]) is None


def test_writes_to_a_private_mapping_stay_there(store: DataStore, path: Path) -> None:
    before = path.read_bytes()
    store.pin(DIGESTS)
    found = store.pinned(DIGESTS[2])
    assert found is not None
    mine, other = found.private(), found.private()
    assert mine is not None and other is not None and len(mine) == 4096
    mine[:] = b"\xff" * 4096
    assert found.data == other == TENSORS["b"]
    assert path.read_bytes() == before
    neighbour = store.pinned(DIGESTS[1])
    assert neighbour is not None and neighbour.data == LARGE


def test_a_changed_file_is_not_served(store: DataStore, path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    assert not any(store.pin(DIGESTS))
    assert store.find(KEY, 1 << 40) is None


def test_a_file_that_changes_after_the_answer(store: DataStore, path: Path) -> None:
    assert all(store.pin(DIGESTS))
    found = store.pinned(DIGESTS[0])
    assert found is not None and found.current
    os.utime(path)
    assert not found.current
    assert store.find(KEY, 1 << 40) is None
    indexed(path)
    # One session keeps to one state of a file.
    store.pin(DIGESTS)
    assert not found.current


def test_a_file_that_is_replaced_after_the_answer(store: DataStore, path: Path) -> None:
    assert all(store.pin(DIGESTS))
    other = make_gguf(path.with_name("other"), {"a": b"\x07" * 100})
    os.replace(other, path)
    found = store.pinned(DIGESTS[1])
    assert found is not None and found.current and found.data == LARGE
    private = found.private()
    assert private is not None and private == LARGE
    indexed(path)
    assert store.pin([digest(b"\x07" * 100)]) == [False]


def test_an_index_counts_from_the_next_question_on(
    store: DataStore, folder: Path
) -> None:
    assert not any(store.pin(DIGESTS))
    path = make_gguf(folder / "m.gguf", TENSORS)
    assert not any(store.pin(DIGESTS))
    indexed(path, fnv=False)
    assert all(store.pin(DIGESTS))
    assert store.find(KEY, 1 << 40) is None
    indexed(path)
    store.pin([])
    assert store.find(KEY, 1 << 40) is not None


def test_a_damaged_index_is_none(store: DataStore, path: Path) -> None:
    kept = index_places(path)[0]
    kept.write_bytes(kept.read_bytes().replace(b"large", b"lurge"))
    assert not any(store.pin(DIGESTS))


def test_a_link_out_of_the_folder_is_not_followed(
    store: DataStore, folder: Path
) -> None:
    outside = make_gguf(folder.parent / "secret.gguf", TENSORS)
    link = folder / "link.gguf"
    link.symlink_to(outside)
    indexed(link)
    assert not any(store.pin(DIGESTS))


def test_by_hash(store: DataStore, path: Path) -> None:
    found = store.find(KEY, len(LARGE))
    assert found is not None and found.data == LARGE
    assert store.find(KEY, len(LARGE) - 1) is None
    assert store.find(KEY + 1, 1 << 40) is None


def test_model_files_come_before_the_cache(folder: Path, path: Path) -> None:
    cache = WeightCache(folder.parent / "cache")
    for data in (TENSORS["a"], b"only here"):
        cache.store(memoryview(data))
    (cache.directory / "blake3" / DIGESTS[0].hex()).write_bytes(b"damaged")
    store = DataStore([str(folder)], cache)
    assert store.pin([DIGESTS[0], digest(b"only here")]) == [True, True]
    found = store.pinned(digest(b"only here"))
    assert found is not None and found.data == b"only here"
    found = store.find(fnv1a_64(memoryview(b"only here")), 100)
    assert found is not None and found.data == b"only here"
    store.close()


def test_nothing_is_kept_without_folders_and_cache() -> None:
    store = DataStore([], None)
    assert not store.keeps
    assert store.pin([bytes(32)]) == [False]
    assert store.find(0, 1) is None
    store.close()


def test_pins_have_a_limit(
    store: DataStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PINS", 2)
    assert store.pin(DIGESTS) == [True, True, False]
    assert store.pin(DIGESTS[::-1]) == [False, True, True]


def test_everything_ends_with_close(folder: Path, path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = DataStore([str(folder)], None)
    store.pin(DIGESTS)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    found = store.pinned(DIGESTS[0])
    assert found is not None
    data = found.data
    store.close()
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before
    # A view is good for as long as it is kept, all the same.
    assert data == TENSORS["a"]
