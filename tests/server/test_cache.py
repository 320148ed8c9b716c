from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from longwire.errors import UsageError
from longwire.server.cache import WeightCache, default_cache_dir
from longwire.wire.fnv import fnv1a_64

NO_LIMIT = 1 << 40


def stored(cache: WeightCache, data: bytes) -> Path:
    return cache.directory / cache.store(memoryview(data))


def fetched(cache: WeightCache, file: Path, size_limit: int = NO_LIMIT) -> bytes | None:
    view = cache.fetch(int(file.name, 16), size_limit)
    return None if view is None else bytes(view)


def sidecar(file: Path) -> Path:
    return file.with_name(f"{file.name}.blake3")


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def age(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "not" / "yet", None)


class TestKey:
    @pytest.mark.parametrize(
        ("data", "key"),
        [
            (b"", 0xCBF29CE484222325),
            (b"a", 0xAF63DC4C8601EC8C),
            (b"foobar", 0x85944171F73967E8),
            (b"\x00\x00\x40\x40" * 8, 0x5F5CA799E57435A5),
            (bytes(range(256)), 0x4242DC5249C33625),
        ],
    )
    def test_vectors(self, data: bytes, key: int) -> None:
        assert fnv1a_64(memoryview(data)) == key
        assert fnv1a_64(memoryview(bytearray(data))) == key

    def test_a_part_of_a_buffer(self) -> None:
        assert fnv1a_64(memoryview(b"-foobar-")[1:7]) == 0x85944171F73967E8


class TestStoreAndFetch:
    def test_a_miss(self, cache: WeightCache, caplog: pytest.LogCaptureFixture) -> None:
        assert cache.fetch(1, NO_LIMIT) is None
        cache.store(memoryview(b"weights"))
        assert cache.fetch(1, NO_LIMIT) is None
        assert not caplog.records

    def test_a_hit(self, cache: WeightCache) -> None:
        file = stored(cache, b"foobar")
        assert file.name == "85944171f73967e8"
        assert fetched(cache, file) == b"foobar"
        assert names(cache.directory) == {file.name, sidecar(file).name}
        record = f"6 {blake3(b'foobar').hexdigest()}\n"
        assert sidecar(file).read_text() == record

    def test_another_process_hits(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights")
        assert fetched(WeightCache(cache.directory), file) == b"weights"

    def test_the_view_is_read_only_and_outlives_its_file(
        self, cache: WeightCache
    ) -> None:
        file = stored(cache, b"weights" * 10_000)
        view = cache.fetch(int(file.name, 16), NO_LIMIT)
        assert view is not None and view.readonly
        cache.store(memoryview(b"weights" * 10_000))
        file.unlink()
        assert view == b"weights" * 10_000

    def test_no_descriptor_stays_open(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            assert fetched(cache, file) == b"weights"
        assert len(os.listdir("/proc/self/fd")) == before

    def test_the_size_limit_is_inclusive(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights")
        assert fetched(cache, file, 7) == b"weights"
        assert fetched(cache, file, 6) is None
        assert fetched(cache, file, 7) == b"weights"

    def test_nothing_is_not_stored(self, cache: WeightCache) -> None:
        assert cache.store(memoryview(b"")) == "cbf29ce484222325"
        assert not cache.directory.exists()

    def test_storing_again_mends(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights")
        file.write_bytes(b"weighty")
        stored(cache, b"weights")
        assert fetched(cache, file) == b"weights"


class TestDamage:
    """A damaged file is a miss, is said so, and is gone afterwards."""

    @pytest.fixture
    def file(self, cache: WeightCache) -> Path:
        return stored(cache, b"weights" * 1000)

    @pytest.fixture(autouse=True)
    def removed(
        self, cache: WeightCache, file: Path, caplog: pytest.LogCaptureFixture
    ) -> Iterator[None]:
        yield
        assert fetched(cache, file) is None
        assert names(cache.directory) == set()
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert f"{file.name} is damaged" in caplog.text

    def test_cut_in_half(self, file: Path) -> None:
        os.truncate(file, 3500)

    def test_cut_in_half_without_sidecar(self, file: Path) -> None:
        os.truncate(file, 3500)
        sidecar(file).unlink()

    def test_empty(self, file: Path) -> None:
        os.truncate(file, 0)

    def test_empty_without_sidecar(self, file: Path) -> None:
        os.truncate(file, 0)
        sidecar(file).unlink()

    def test_too_long(self, file: Path) -> None:
        with file.open("ab") as more:
            more.write(b"\0")

    def test_one_flipped_bit(self, file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[6999] ^= 1
        file.write_bytes(data)

    def test_one_flipped_bit_without_sidecar(self, file: Path) -> None:
        self.test_one_flipped_bit(file)
        sidecar(file).unlink()

    def test_an_empty_sidecar(self, file: Path) -> None:
        sidecar(file).write_bytes(b"")

    def test_a_sidecar_of_other_bytes(self, file: Path) -> None:
        sidecar(file).write_bytes(b"7000 \xff\n")


def test_an_empty_file_under_the_key_of_nothing_is_a_miss(cache: WeightCache) -> None:
    cache.directory.mkdir(parents=True)
    file = cache.directory / "cbf29ce484222325"
    file.touch()
    assert fetched(cache, file) is None
    assert not file.exists()


def test_files_of_a_cpp_server_are_adopted(cache: WeightCache) -> None:
    ours = stored(cache, b"foobar")
    record = sidecar(ours).read_bytes()
    sidecar(ours).unlink()
    assert fetched(cache, ours) == b"foobar"
    assert sidecar(ours).read_bytes() == record
    assert fetched(cache, ours) == b"foobar"


class TestLimit:
    def test_the_least_recently_used_goes_first(self, tmp_path: Path) -> None:
        cache = WeightCache(tmp_path, 300)
        first, second, third = (stored(cache, bytes([n]) * 100) for n in range(3))
        for file, seconds in ((first, 30), (second, 20), (third, 10)):
            age(file, seconds)
        assert fetched(cache, first) is not None

        fourth = stored(cache, b"\3" * 100)
        kept = {first, third, fourth}
        assert names(tmp_path) == {
            each.name for file in kept for each in (file, sidecar(file))
        }

    def test_as_many_go_as_must(self, tmp_path: Path) -> None:
        cache = WeightCache(tmp_path, 300)
        files = [stored(cache, bytes([n]) * 100) for n in range(3)]
        for seconds, file in enumerate(reversed(files), start=10):
            age(file, seconds)
        last = stored(cache, b"\3" * 200)
        assert names(tmp_path) == {
            each.name for file in (files[2], last) for each in (file, sidecar(file))
        }

    def test_the_newest_stays_even_if_the_clock_went_back(self, tmp_path: Path) -> None:
        cache = WeightCache(tmp_path, 150)
        old = stored(cache, b"\1" * 100)
        age(old, -3600)
        new = stored(cache, b"\2" * 100)
        assert fetched(cache, new) is not None
        assert fetched(cache, old) is None

    def test_one_over_the_limit_is_not_stored(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = WeightCache(tmp_path, 100)
        small = stored(cache, b"\1" * 100)
        for n in range(101, 104):
            assert fetched(cache, stored(cache, b"\2" * n)) is None
        assert fetched(cache, small) is not None
        assert caplog.text.count("over the limit of 100 bytes") == 1

    def test_other_files_are_let_alone(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        others = {"notes.txt", "0123456789ABCDEF", "0123456789abcdef0", "x.tmp"}
        for name in others:
            (tmp_path / name).write_bytes(bytes(1000))
            age(tmp_path / name, 7200)
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "nowhere")
        file = stored(WeightCache(tmp_path, 10), b"weights")
        assert not caplog.records
        assert names(tmp_path) == {
            *others,
            "folder",
            "link",
            file.name,
            sidecar(file).name,
        }

    @pytest.mark.parametrize("limit", [None, 1000])
    def test_abandoned_temporaries_go(self, tmp_path: Path, limit: int | None) -> None:
        temporaries = [
            f"0123456789abcdef{kind}.{n:016x}.tmp"
            for kind in ("", ".blake3")
            for n in range(2)
        ]
        for name, seconds in zip(temporaries, (4000, 3000, 4000, 3000), strict=True):
            (tmp_path / name).write_bytes(b"half a ten")
            age(tmp_path / name, seconds)
        stored(WeightCache(tmp_path, limit), b"weights")
        left = {name for name in names(tmp_path) if name.endswith(".tmp")}
        assert left == {temporaries[1], temporaries[3]}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let writes past `size` fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestErrors:
    """The server must serve on: errors are logged once, never raised."""

    @pytest.mark.parametrize("limit", [None, 1000])
    def test_a_folder_that_cannot_be(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int | None
    ) -> None:
        (tmp_path / "file").touch()
        cache = WeightCache(tmp_path / "file" / "rpc", limit)
        for _ in range(3):
            file = stored(cache, b"weights")
            assert fetched(cache, file) is None
        assert caplog.text.count("cannot store: Not a directory") == 1
        assert caplog.text.count("cannot read: Not a directory") == 1
        assert len(caplog.records) == 2

    def test_a_full_disk(
        self, cache: WeightCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        with largest_file(50_000):
            for n in range(3):
                file = stored(cache, bytes([n]) * 100_000)
                assert fetched(cache, file) is None
        assert not [name for name in names(cache.directory) if "tmp" in name]
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "cannot store: File too large" in caplog.text

        file = stored(cache, b"\0" * 100_000)
        assert fetched(cache, file) == b"\0" * 100_000

    def test_a_folder_in_the_place_of_a_file(
        self, cache: WeightCache, caplog: pytest.LogCaptureFixture
    ) -> None:
        (cache.directory / "85944171f73967e8").mkdir(parents=True)
        file = stored(cache, b"foobar")
        assert fetched(cache, file) is None
        assert "cannot store: Is a directory" in caplog.text
        assert "cannot read: Is a directory" in caplog.text

    def test_a_hit_does_not_need_write_access(
        self,
        cache: WeightCache,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        file = stored(cache, b"weights")
        sidecar(file).unlink()

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "utime", refuse)
        monkeypatch.setattr(os, "replace", refuse)
        assert fetched(cache, file) == b"weights"
        assert fetched(cache, file) == b"weights"
        assert caplog.text.count("cannot mark a use: Permission denied") == 1
        assert caplog.text.count("cannot store: Permission denied") == 1

    def test_what_cannot_be_evicted_does_not_keep_the_rest(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = WeightCache(tmp_path, 250)
        stuck = tmp_path / "0123456789abcdef"
        stuck.mkdir()
        age(stuck, 60)
        old, *_ = [stored(cache, bytes([n]) * 100) for n in range(3)]
        assert stuck.exists() and not old.exists()
        assert caplog.text.count("cannot evict") == 1


WORKER = """
import logging, sys
from pathlib import Path
from longwire.server.cache import WeightCache

folder, limit, count = Path(sys.argv[1]), int(sys.argv[2]) or None, int(sys.argv[3])
logging.basicConfig(level=logging.WARNING)
cache = WeightCache(folder, limit)
tensors = [bytes([n]) * 100_000 for n in range(count)]
print("ready", flush=True)
sys.stdin.readline()
for turn in range(40):
    for data in tensors:
        view = cache.fetch(int(cache.store(memoryview(data)), 16), 1 << 40)
        assert view is None or view == data
        if limit is None:
            assert view is not None
"""


class TestTogether:
    @pytest.mark.parametrize(("limit", "tensors"), [(0, 1), (250_000, 4)])
    def test_processes_share_a_folder(
        self, tmp_path: Path, limit: int, tensors: int
    ) -> None:
        command = [
            sys.executable,
            "-c",
            WORKER,
            str(tmp_path),
            str(limit),
            str(tensors),
        ]
        workers = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(3)
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        outputs = [worker.communicate("go\n", timeout=60)[0] for worker in workers]

        assert outputs == ["", "", ""]
        assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
        sizes = [each.stat().st_size for each in tmp_path.iterdir() if not each.suffix]
        assert 0 < sum(sizes) <= (limit or 100_000)


class TestDefaultFolder:
    @pytest.fixture(autouse=True)
    def bare(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("LLAMA_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", "/home/me")

    @pytest.mark.parametrize(
        ("system", "environment", "folder"),
        [
            ("linux", {}, "/home/me/.cache/llama.cpp/rpc"),
            ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/llama.cpp/rpc"),
            ("linux", {"XDG_CACHE_HOME": ""}, "/home/me/.cache/llama.cpp/rpc"),
            ("linux", {"LLAMA_CACHE": "/l", "XDG_CACHE_HOME": "/x"}, "/l/rpc"),
            ("linux", {"LLAMA_CACHE": ""}, "/home/me/.cache/llama.cpp/rpc"),
            ("linux", {"LOCALAPPDATA": "/a"}, "/home/me/.cache/llama.cpp/rpc"),
            ("darwin", {}, "/home/me/Library/Caches/llama.cpp/rpc"),
            (
                "darwin",
                {"XDG_CACHE_HOME": "/x"},
                "/home/me/Library/Caches/llama.cpp/rpc",
            ),
            ("darwin", {"LLAMA_CACHE": "/l"}, "/l/rpc"),
            (
                "win32",
                {"LOCALAPPDATA": "/a", "XDG_CACHE_HOME": "/x"},
                "/a/llama.cpp/rpc",
            ),
        ],
    )
    def test_rule(
        self,
        monkeypatch: pytest.MonkeyPatch,
        system: str,
        environment: dict[str, str],
        folder: str,
    ) -> None:
        monkeypatch.setattr(sys, "platform", system)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert default_cache_dir() == Path(folder)

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
        with pytest.raises(UsageError, match="set LLAMA_CACHE"):
            default_cache_dir()
