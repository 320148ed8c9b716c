"""`longwire run --trace`: host, wire and workers on one timeline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longwire.cli.main import main
from support.models import N_TOKENS, PROMPT
from support.peers import cpp_server
from support.timelines import named_tracks, read_timeline, spans

Worker = Callable[..., str]
Reference = Callable[[str], list[int]]

ROUNDING_US = 0.01


def traced_run(model: Path, rpc: str, trace: Path) -> list[int]:
    command = [sys.executable, "-m", "longwire", "run", "-m", str(model)]
    command += ["--rpc", rpc, "-p", PROMPT, "-n", str(N_TOKENS), "--ignore-eos"]
    command += ["--temp", "0", "--exact", "--json", "-t", "1", "-ub", "128"]
    done = subprocess.run(
        [*command, "--trace", str(trace)],
        capture_output=True,
        timeout=120,
        check=True,
    )
    tokens: list[int] = json.loads(done.stdout)["tokens"]
    return tokens


def test_two_workers(
    model: Path, worker: Worker, reference: Reference, tmp_path: Path
) -> None:
    rpc = f"{worker()},{worker(number=1)}"
    assert traced_run(model, rpc, tmp_path / "t") == reference("xllamacpp")
    events = read_timeline(tmp_path / "t")
    host = spans(events, "generation")
    assert [span["name"] for span in host] == [
        "prefill",
        *["sample", "decode"] * (N_TOKENS - 1),
        "sample",
    ]
    tracks = named_tracks(events)
    groups = {pid: group for (pid, _), (group, _) in tracks.items()}
    assert set(groups.values()) == {"host", *rpc.split(",")}
    for group in set(groups) - {1}:
        check_worker(events, tracks, group, [s for s in host if s["name"] != "sample"])


def check_worker(
    events: list[Any],
    tracks: dict[tuple[int, int], tuple[str, str]],
    group: int,
    steps: list[Any],
) -> None:
    """A worker computes once per step; the host waits for the last one of them."""
    row = tracks[group, 2][1]
    found = re.fullmatch(r"worker \(clock to within (\d+) us\)", row)
    assert found
    # Clocks are compared once per second; on one machine they are the same.
    error = int(found[1]) + 5000
    wire = [s for s in spans(events, "wire") if s["pid"] == group]
    work = [s for s in spans(events, row) if s["pid"] == group]
    computing = [s for s in work if s["name"] == "compute"]
    assert len(computing) == len(steps)
    reads = [s for s in wire if s["name"] in ("wait for GET_TENSOR", "wait for LX_TOP")]
    for compute, step in zip(computing, steps, strict=True):
        begun, ended = compute["ts"], compute["ts"] + compute["dur"]
        assert step["ts"] - error <= begun and ended <= end(step) + error
    last = tracks[group, 2][0] == list(dict.fromkeys(g for g, _ in tracks.values()))[-1]
    assert len(reads) == (len(steps) if last else 0)
    for compute, read in zip(computing, reads, strict=False):
        begun, ended = compute["ts"], compute["ts"] + compute["dur"]
        sent = [s for s in wire if s["name"] == "send" and s["ts"] <= read["ts"]][-1]
        assert sent["ts"] - error <= begun, (sent, compute)
        assert ended <= end(read) + error, (read, compute)


def end(span: Any) -> float:
    ended: float = span["ts"] + span["dur"] + ROUNDING_US
    return ended


def test_of_a_cpp_server_only_the_wire(model: Path, tmp_path: Path) -> None:
    with cpp_server(8) as rpc:
        traced_run(model, rpc, tmp_path / "t")
    events = read_timeline(tmp_path / "t")
    assert {row for _, row in named_tracks(events).values()} == {"generation", "wire"}
    assert spans(events, "wire")


def test_a_file_that_cannot_be_made(tmp_path: Path, capsys: Any) -> None:
    """Said before the model is loaded: there is none."""
    nowhere = str(tmp_path / "no" / "file")
    run = ["run", "-m", str(tmp_path / "model.gguf"), "-p", "x", "--trace", nowhere]
    assert main(run) == 2
    assert f"cannot write {nowhere}" in capsys.readouterr().err
