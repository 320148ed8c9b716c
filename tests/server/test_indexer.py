"""The process that indexes a server's model files."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longwire.models.index import load_index, read_index
from longwire.native.engine import load_engine
from longwire.server.indexer import index_models
from longwire.wire.constants import HASH_THRESHOLD
from support.gguf import make_gguf, make_sparse_gguf
from support.worker import PROC, alive, running_worker, serve_command, until

LARGE = bytes(HASH_THRESHOLD + 1)
ENDLESS = 1 << 36
"""Bytes that nobody hashes in the time of a test."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def indexer_of(parent: int) -> int:
    """The process of a server's indexer."""

    def find() -> int | None:
        for place in PROC.glob("[0-9]*"):
            try:
                command = (place / "cmdline").read_bytes()
                stat = (place / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if b"longwire.server.indexer" in command and int(stat[1]) == parent:
                return int(place.name)
        return None

    return until(find, 20)


def niceness(pid: int) -> int:
    return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[16])


# One pass.


def test_all_that_is_new_is_indexed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine("xllamacpp")
    old = make_gguf(folder / "a.gguf", {"a": b"x"})
    half = make_gguf(folder / "b.gguf", {"large": LARGE})
    new = make_gguf(folder / "d.gguf", {"a": b"y"})
    load_index(engine, old, fnv=True)
    load_index(engine, half, fnv=False)
    (folder / "c.gguf").write_bytes(b"no model at all")
    with caplog.at_level(logging.INFO, "longwire.serve"):
        index_models(engine, [str(folder)])
    for path in (old, half, new):
        index = read_index(path)
        assert index is not None and index.has_fnv
    lines = [r.getMessage() for r in caplog.records if r.name == "longwire.serve"]
    assert len(lines) == 4
    assert lines[0] == f"{old}: 1 tensors, indexed before"
    assert lines[1].startswith(f"{half}: 1 tensors, 10 MB, indexed in ")
    assert lines[2].startswith(f"not indexed: {folder / 'c.gguf'} cannot be read")
    assert lines[3].startswith(f"{new}: 1 tensors, 0 MB, indexed in ")


# Beside a server.


def test_it_delays_nobody_and_ends_with_the_server(folder: Path) -> None:
    make_sparse_gguf(folder / "endless.gguf", ENDLESS)
    with running_worker("-d", "CPU", "--models", str(folder)) as worker:
        pid = indexer_of(worker.process.pid)
        until(lambda: niceness(pid) == 19)
        worker.process.send_signal(signal.SIGTERM)
        worker.ended()
        assert not alive(pid)
        assert "indexer died" not in worker.log


def test_it_does_not_outlive_a_killed_server(folder: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("needs Linux")
    make_sparse_gguf(folder / "endless.gguf", ENDLESS)
    process = subprocess.Popen(
        serve_command("-d", "CPU", "--models", str(folder)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        pid = indexer_of(process.pid)
        until(lambda: niceness(pid) == 19)
    finally:
        process.kill()
        process.wait()
    until(lambda: not alive(pid))


def test_sighup_looks_for_new_files(folder: Path) -> None:
    make_gguf(folder / "old.gguf", {"a": b"x"})
    with running_worker("-d", "CPU", "--models", str(folder)) as worker:
        worker.logged(r"old\.gguf: 1 tensors, 0 MB, indexed in", 20)
        make_gguf(folder / "new.gguf", {"a": b"y"})
        worker.process.send_signal(signal.SIGHUP)
        worker.logged(r"new\.gguf: 1 tensors, 0 MB, indexed in", 20)
        worker.logged(r"old\.gguf: 1 tensors, indexed before")


def test_sighup_starts_it_anew(folder: Path) -> None:
    make_sparse_gguf(folder / "endless.gguf", ENDLESS)
    with running_worker("-d", "CPU", "--models", str(folder)) as worker:
        first = indexer_of(worker.process.pid)
        worker.process.send_signal(signal.SIGHUP)
        until(lambda: not alive(first))
        assert indexer_of(worker.process.pid) != first


def test_a_death_is_said_and_costs_nothing_else(folder: Path) -> None:
    make_sparse_gguf(folder / "endless.gguf", ENDLESS)
    with running_worker("-d", "CPU", "--models", str(folder)) as worker:
        os.kill(indexer_of(worker.process.pid), signal.SIGKILL)
        worker.logged("the indexer died: SIGKILL")


def test_a_folder_that_is_not_there(folder: Path) -> None:
    command = serve_command("--models", f"{folder},{folder / 'gone'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert f"--models: {folder / 'gone'} is no folder" in done.stderr
