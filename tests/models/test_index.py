from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from longwire.errors import UsageError
from longwire.models import index as module
from longwire.models.index import index_places, load_index, read_index
from longwire.native.engine import NativeEngine, load_engine
from longwire.wire.constants import HASH_THRESHOLD
from longwire.wire.fnv import fnv1a_64
from support.gguf import make_gguf

LARGE = b"\x05" * (HASH_THRESHOLD + 1)
TENSORS = {"a": b"\x01" * 100, "large": LARGE, "b": b"\x02" * 4096, "empty": b""}


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return load_engine("xllamacpp")


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_complaints", set())
    return tmp_path / "cache"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return make_gguf(tmp_path / "models" / "m.gguf", TENSORS)


@pytest.fixture
def kept(path: Path) -> Path:
    """Where the index is."""
    return index_places(path)[0]


@pytest.fixture
def makings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that have been hashed."""
    made: list[Path] = []
    real = module.gguf_tensors

    def counted(engine: NativeEngine, path: Path) -> object:
        made.append(path)
        return real(engine, path)

    monkeypatch.setattr(module, "gguf_tensors", counted)
    return made


def test_an_index_is_true(engine: NativeEngine, path: Path) -> None:
    index = load_index(engine, path, fnv=True)
    content = path.read_bytes()
    assert [t.name for t in index.tensors] == list(TENSORS)
    for t in index.tensors:
        data = content[t.offset : t.offset + t.size]
        assert data == TENSORS[t.name]
        assert t.digest == blake3(data).digest()
        expected = fnv1a_64(memoryview(data)) if t.name == "large" else None
        assert t.fnv == expected
    assert index.is_of(path.stat()) and index.path == path


def test_it_is_made_once(
    engine: NativeEngine, path: Path, kept: Path, makings: list[Path]
) -> None:
    assert read_index(path) is None
    index = load_index(engine, path, fnv=True)
    assert kept == path.with_name("m.gguf.longwire.json") and kept.is_file()
    assert json.loads(kept.read_text())["index"]["name"] == "m.gguf"
    assert read_index(path) == index
    assert load_index(engine, path, fnv=True) == index
    assert load_index(engine, path, fnv=False) == index
    assert makings == [path]
    assert {p.name for p in path.parent.iterdir()} == {path.name, kept.name}


def test_hashes_are_added_when_they_are_asked_for(
    engine: NativeEngine,
    path: Path,
    makings: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = load_index(engine, path, fnv=False)
    assert not first.has_fnv and all(t.fnv is None for t in first.tensors)
    with monkeypatch.context() as patched:
        patched.setattr(module, "blake3", _only_short(module.blake3))
        second = load_index(engine, path, fnv=True)
    assert second.has_fnv
    assert [t.digest for t in second.tensors] == [t.digest for t in first.tensors]
    assert read_index(path) == second
    assert len(makings) == 2


def _only_short(real: Callable[..., object]) -> Callable[..., object]:
    """BLAKE3 for an index itself, but for no tensor."""

    def short(data: bytes, *rest: object) -> object:
        assert len(data) < 4096 and not isinstance(data, memoryview)
        return real(data, *rest)

    return short


@pytest.mark.parametrize(
    "change",
    [
        lambda path: make_gguf(path, {**TENSORS, "b": b"\x03" * 4096}),
        lambda path: make_gguf(path, {"a": b"\x01"}),
        lambda path: os.utime(path, ns=(1, path.stat().st_mtime_ns + 1)),
    ],
    ids=["content", "size", "time"],
)
def test_a_changed_file_gets_another(
    engine: NativeEngine, path: Path, change: Callable[[Path], object]
) -> None:
    old = load_index(engine, path, fnv=False)
    # As if time had gone by: a file system's clock has coarse ticks.
    os.utime(path, ns=(1, path.stat().st_mtime_ns - 10**9))
    old = load_index(engine, path, fnv=False)
    change(path)
    assert read_index(path) is None
    new = load_index(engine, path, fnv=False)
    assert new.is_of(path.stat()) and not old.is_of(path.stat())
    assert read_index(path) == new


def test_a_file_that_took_another_s_place_is_not_it(
    engine: NativeEngine, path: Path, kept: Path
) -> None:
    load_index(engine, path, fnv=False)
    other = path.with_name("other.gguf")
    os.rename(path, other)
    os.rename(kept, index_places(other)[0])
    assert read_index(other) is None


def test_any_damage_is_seen(engine: NativeEngine, path: Path, kept: Path) -> None:
    index = load_index(engine, path, fnv=False)
    whole = kept.read_bytes()
    for at in range(0, len(whole), 7):
        spoilt = bytearray(whole)
        spoilt[at] ^= 0x11
        kept.write_bytes(spoilt)
        found = read_index(path)
        # A changed byte between the parts says nothing else.
        assert found is None or found == index
    for size in (0, 1, 10, 100, len(whole) // 2, len(whole) - 5):
        kept.write_bytes(whole[:size])
        assert read_index(path) is None
    assert load_index(engine, path, fnv=False) == index
    assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("field", "value"),
    [("offset", -32), ("size", 1 << 40), ("size", -1), ("offset", "x")],
)
def test_a_forged_place_outside_of_the_file(
    engine: NativeEngine, path: Path, kept: Path, field: str, value: object
) -> None:
    index = load_index(engine, path, fnv=False)
    forged = index.tensors[0]._replace(**{field: value})
    kept.write_bytes(
        module._encode(module.ModelIndex(path, index.size, index.mtime_ns, (forged,)))
    )
    assert read_index(path) is None


def test_a_folder_that_cannot_be_written(
    engine: NativeEngine,
    path: Path,
    user_cache: Path,
    makings: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = module._write

    def refuse(target: Path, data: bytes) -> None:
        if target.parent == path.parent:
            raise PermissionError(13, "Permission denied")
        real(target, data)

    monkeypatch.setattr(module, "_write", refuse)
    index = load_index(engine, path, fnv=False)
    assert read_index(path) == load_index(engine, path, fnv=False) == index
    other = make_gguf(path.with_name("other.gguf"), {"a": b"x"})
    load_index(engine, other, fnv=False)
    load_index(engine, other, fnv=False)
    assert makings == [path, other]
    assert len(list((user_cache / "longwire" / "indexes").iterdir())) == 2
    assert caplog.text.count("no place for indexes") == 1


def test_nothing_half_written_stays(
    engine: NativeEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert load_index(engine, path, fnv=False).tensors
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


def test_a_file_that_changes_while_it_is_read(
    engine: NativeEngine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.fnv1a_64

    def touched(data: memoryview) -> int:
        os.utime(path, ns=(1, 1))
        return real(data)

    monkeypatch.setattr(module, "fnv1a_64", touched)
    with pytest.raises(UsageError, match="changed while it was read"):
        load_index(engine, path, fnv=True)
    assert [p.name for p in path.parent.iterdir()] == ["m.gguf"]


def test_what_cannot_be_read(engine: NativeEngine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere.gguf"):
        load_index(engine, tmp_path / "nowhere.gguf", fnv=False)
    assert read_index(tmp_path / "nowhere.gguf") is None


def test_others_may_read_it(engine: NativeEngine, path: Path, kept: Path) -> None:
    load_index(engine, path, fnv=False)
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o666 & ~mask
