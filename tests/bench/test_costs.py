"""The benches of Longwire by itself: sums between servers, and a server's own cost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from longwire.bench import serving
from longwire.bench.allreduce import measure_allreduce
from longwire.bench.floor import Floor
from longwire.bench.models import LlamaShape
from longwire.bench.serving import FIGURES, measure_server
from longwire.cli.main import main
from longwire.client.group import Group
from longwire.errors import CallFailed

SIZES = (8 << 10, 256 << 10)
SHALLOW = LlamaShape(2, 64, 4, 4, 128, 128)


def _children() -> set[str]:
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(task.read_text().split())


def test_sums_are_measured_beside_the_floor() -> None:
    before = _children()
    report = measure_allreduce("xllamacpp", runs=2, counts=(2, 3), sizes=SIZES)
    assert _children() == before
    assert list(report.sums) == [(n, size) for n in (2, 3) for size in SIZES]
    for samples in (*report.sums.values(), *report.swaps.values()):
        assert len(samples) == 2 and all(sample > 0 for sample in samples)
    found = report.as_json()
    assert json.loads(json.dumps(found)) == found
    first = found["results"][0]
    assert (first["servers"], first["bytes"]) == (2, SIZES[0])
    ratios = [a / b for a, b in zip(first["us"], first["floor_us"], strict=True)]
    assert first["ratio"] == pytest.approx(sum(ratios) / 2)


def test_a_wrong_sum_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "posts", lambda *_: [])
    with pytest.raises(CallFailed, match="a wrong sum at 127.0.0.1"):
        measure_allreduce("xllamacpp", runs=1, counts=(2,), sizes=SIZES)


def test_a_floor_that_is_gone_says_so() -> None:
    with Floor() as floor:
        assert floor.swap(100_000, 3) > 0
        floor.close()
        with pytest.raises(CallFailed, match="the processes of the floor"):
            floor.swap(1, 1)


def test_the_allreduce_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "allreduce", "--runs", "1", "--workers", "2"]
    assert main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line and line[0] == "2"]
    assert [row[1] for row in rows] == ["8", "64", "256", "1024"]
    assert all(row[-1] == "1.5" for row in rows)


def test_a_servers_own_cost_is_measured() -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    before = _children()
    report = measure_server("xllamacpp", runs=2, settle_s=0.0, shape=SHALLOW)
    assert _children() == before
    assert report.tensors > 80
    found = report.as_json()
    assert json.loads(json.dumps(found)) == found
    for figure in FIGURES:
        samples = found["results"][figure.name]["samples"]
        assert len(samples) == 2 and all(sample > 0 for sample in samples)
    assert found["results"]["build"]["at_most"] == 3.0


def test_the_server_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    monkeypatch.setattr(serving, "_DEEP", SHALLOW)
    arguments = ["bench", "server", "--runs", "1", "--settle", "0", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bench"] == "server" and found["tensors"] > 80
