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
from longwire.server import cache as module
from longwire.server import stamps
from longwire.server.cache import WeightCache, default_cache_dir
from longwire.wire.fnv import fnv1a_64

NO_LIMIT = 1 << 40


def stored(cache: WeightCache, data: bytes, by_hash: bool = True) -> Path:
    """Store, and return the file that C++ clients ask for, or else LX clients."""
    cache.store(memoryview(data), by_hash)
    if by_hash:
        return cache.directory / f"{fnv1a_64(memoryview(data)):016x}"
    return cache.directory / "blake3" / blake3(data).hexdigest()


def fetched(cache: WeightCache, file: Path, size_limit: int = NO_LIMIT) -> bytes | None:
    if file.parent.name == "blake3":
        kept = cache.find_digest(bytes.fromhex(file.name))
    else:
        kept = cache.find(int(file.name, 16), size_limit)
    return None if kept is None else bytes(kept.data)


def sidecar(file: Path) -> Path:
    return file.with_name(f"{file.name}.blake3")


def names(folder: Path) -> set[str]:
    """What is in the folder but the one of digests."""
    return {entry.name for entry in folder.iterdir()} - {"blake3"}


def digests(cache: WeightCache) -> set[str]:
    """What is in the folder of digests."""
    return names(cache.directory / "blake3")


def age(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def occupied(folder: Path) -> int:
    """Bytes of weights, each file counted once however many names it has."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.suffix]
    return sum({file.stat().st_ino: file.stat().st_size for file in files}.values())


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
        assert cache.find(1, NO_LIMIT) is None
        assert cache.find_digest(bytes(32)) is None
        cache.store(memoryview(b"weights"))
        assert cache.find(1, NO_LIMIT) is None
        assert cache.find_digest(bytes(32)) is None
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
        kept = cache.find(int(file.name, 16), NO_LIMIT)
        assert kept is not None and kept.data.readonly
        cache.store(memoryview(b"weights" * 10_000))
        file.unlink()
        assert kept.data == b"weights" * 10_000

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
        cache.store(memoryview(b""))
        assert not cache.directory.exists()

    def test_storing_again_mends(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights")
        file.write_bytes(b"weighty")
        stored(cache, b"weights")
        assert fetched(cache, file) == b"weights"


class TestDigests:
    """What LX clients ask for."""

    def test_a_hit(self, cache: WeightCache) -> None:
        file = stored(cache, b"foobar", by_hash=False)
        assert fetched(cache, file) == b"foobar"
        assert names(cache.directory) == set() and digests(cache) == {file.name}
        assert cache.find(0x85944171F73967E8, NO_LIMIT) is None

    def test_one_file_has_both_names(self, cache: WeightCache) -> None:
        file = stored(cache, b"foobar")
        other = cache.directory / "blake3" / blake3(b"foobar").hexdigest()
        assert fetched(cache, other) == fetched(cache, file) == b"foobar"
        assert other.samefile(file)

    def test_without_links_there_are_two(
        self, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
        file = stored(cache, b"foobar")
        other = cache.directory / "blake3" / blake3(b"foobar").hexdigest()
        assert fetched(cache, other) == fetched(cache, file) == b"foobar"
        assert not other.samefile(file)

    @pytest.mark.parametrize("size", [0, 3500, 7001])
    def test_damage(
        self, cache: WeightCache, caplog: pytest.LogCaptureFixture, size: int
    ) -> None:
        file = stored(cache, b"weights" * 1000, by_hash=False)
        os.truncate(file, size)
        assert fetched(cache, file) is None
        assert not file.exists()
        assert f"{file.name} is damaged" in caplog.text

    def test_one_flipped_bit(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights" * 1000, by_hash=False)
        with file.open("r+b") as content:
            content.write(b"W")
        assert fetched(cache, file) is None
        assert not file.exists()

    def test_both_names_count_once_and_go_together(self, tmp_path: Path) -> None:
        cache = WeightCache(tmp_path, 300)
        first, second = stored(cache, b"\1" * 100), stored(cache, b"\2" * 100)
        third = stored(cache, b"\3" * 100, by_hash=False)
        for file, seconds in ((first, 30), (second, 20), (third, 10)):
            age(file, seconds)
        assert len(digests(cache)) == 3
        fourth = stored(cache, b"\4" * 200, by_hash=False)
        assert names(tmp_path) == set()
        assert digests(cache) == {third.name, fourth.name}

    def test_a_use_under_one_name_is_one_of_the_other(self, tmp_path: Path) -> None:
        cache = WeightCache(tmp_path, 200)
        first, second = stored(cache, b"\1" * 100), stored(cache, b"\2" * 100)
        age(first, 30)
        age(second, 20)
        assert cache.find_digest(blake3(b"\1" * 100).digest()) is not None
        stored(cache, b"\3" * 100)
        assert fetched(cache, first) is not None and not second.exists()

    def test_a_file_is_what_its_name_says_if_memory_changes_meanwhile(
        self, cache: WeightCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = bytearray(b"weights" * 1000)
        real = Path.write_bytes

        def write(path: Path, content: memoryview) -> int:
            written = real(path, content)
            data[:7] = b"WEIGHTS"
            return written

        monkeypatch.setattr(Path, "write_bytes", write)
        cache.store(memoryview(data))
        before = b"weights" * 1000
        assert cache.find_digest(blake3(data).digest()) is None
        kept = cache.find_digest(blake3(before).digest())
        assert kept is not None and kept.data == before
        kept = cache.find(fnv1a_64(memoryview(before)), NO_LIMIT)
        assert kept is not None and kept.data == before

    def test_a_private_mapping_is_the_caller_s_alone(self, cache: WeightCache) -> None:
        file = stored(cache, b"weights", by_hash=False)
        kept = cache.find_digest(bytes.fromhex(file.name))
        assert kept is not None
        one, two = kept.private(), kept.private()
        assert one is not None and two is not None
        one[:1] = b"W"
        assert bytes(one) == b"Weights"
        assert kept.data == two == file.read_bytes() == b"weights"

    @pytest.mark.parametrize("successor", [None, b"weights", b"w"])
    def test_data_outlives_its_file(
        self, cache: WeightCache, successor: bytes | None
    ) -> None:
        file = stored(cache, b"weights", by_hash=False)
        kept = cache.find_digest(bytes.fromhex(file.name))
        assert kept is not None
        file.rename(file.with_name("kept"))
        if successor is not None:
            file.write_bytes(successor)
        assert kept.private() is None
        assert kept.data == b"weights"


class TestStamps:
    """A file that was checked since the last boot is not read again."""

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Sizes of what was hashed."""
        sizes: list[int] = []
        real = module._digest

        def counted(data: memoryview) -> str:
            sizes.append(data.nbytes)
            return real(data)

        monkeypatch.setattr(module, "_digest", counted)
        return sizes

    @pytest.fixture(params=[True, False], ids=["hash", "digest"])
    def file(self, request: pytest.FixtureRequest, cache: WeightCache) -> Path:
        file = stored(cache, b"weights" * 1000, by_hash=request.param)
        with file.open("rb") as opened:
            if stamps.stamp(opened.fileno()) is None:
                pytest.skip("no extended attributes in the temporary folder")
        return file

    def test_what_was_stored_since_the_boot(
        self, cache: WeightCache, file: Path, read: list[int]
    ) -> None:
        for _ in range(3):
            assert fetched(cache, file) is not None
        assert read == []

    def test_what_was_stored_before_the_boot(
        self,
        cache: WeightCache,
        file: Path,
        read: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(stamps, "_boot", lambda: "another")
        for _ in range(3):
            assert fetched(cache, file) is not None
        assert read == [7000]

    def test_what_was_changed_since(
        self, cache: WeightCache, file: Path, read: list[int]
    ) -> None:
        with file.open("r+b") as content:
            content.write(b"W")
        assert fetched(cache, file) is None
        assert read == [7000]

    def test_what_was_changed_just_now_is_not_stamped(
        self, cache: WeightCache, file: Path, read: list[int]
    ) -> None:
        os.utime(file)
        for _ in range(2):
            assert fetched(cache, file) is not None
        assert read == [7000, 7000]

    def test_without_attributes_everything_is_read(
        self,
        cache: WeightCache,
        file: Path,
        read: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        for name in ("getxattr", "setxattr"):
            monkeypatch.setattr(os, name, refuse)
        for _ in range(2):
            assert fetched(cache, file) is not None
        assert read == [7000, 7000]


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
from longwire.wire.fnv import fnv1a_64

folder, limit, count = Path(sys.argv[1]), int(sys.argv[2]) or None, int(sys.argv[3])
logging.basicConfig(level=logging.WARNING)
cache = WeightCache(folder, limit)
tensors = [bytes([n]) * 100_000 for n in range(count)]
print("ready", flush=True)
sys.stdin.readline()
for turn in range(40):
    for data in tensors:
        cache.store(memoryview(data))
        kept = cache.find(fnv1a_64(memoryview(data)), 1 << 40)
        assert kept is None or kept.data == data
        if limit is None:
            assert kept is not None
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
        assert 0 < occupied(tmp_path) <= (limit or 100_000)


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
