from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from longwire.bench.children import Worker
from longwire.bench.measure import balanced_order, measure
from longwire.bench.settings import BENCHES, PAIRS, Pair, Plan, Settings
from longwire.cli.main import main
from longwire.errors import UsageError

ALL = [str(pair) for pair in PAIRS]
OURS = "longwire-longwire"
QUICK: dict[str, Any] = {"runs": 1, "settle_s": 0.0}


def children_of(parent: int) -> dict[int, str]:
    """Command lines of a process's living children."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                words = (stat.parent / "cmdline").read_text().split("\0")
                found[int(stat.parent.name)] = " ".join(words)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def check_schema(report: dict[str, Any], bench: str, pairs: list[str]) -> None:
    assert report["bench"] == bench
    assert report["unit"] == BENCHES[bench].unit
    assert report["errors"] == {}
    assert report["tokens_equal"] is True
    assert list(report["pairs"]) == pairs
    for samples in report["pairs"].values():
        assert len(samples) == report["settings"]["runs"]
        assert all(isinstance(sample, float) for sample in samples)
    ours = [name for name in pairs if name.startswith("longwire-")]
    assert list(report["wire"]) == ours
    assert json.loads(json.dumps(report)) == report


@pytest.mark.parametrize("count", range(1, 7))
def test_each_pairing_follows_each_other_as_often(count: int) -> None:
    pairs = tuple(Pair(str(i), str(i)) for i in range(count))
    runs = [balanced_order(pairs, run) for run in range(2 * count)]
    assert all(set(run) == set(pairs) for run in runs)
    followed = Counter(two for run in runs for two in itertools.pairwise(run))
    expected = itertools.permutations(pairs, 2)
    assert followed == Counter({two: 2 for two in expected})


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("bench", ["decode", "prefill", "load"])
def test_all_pairings(bench: str, tiny: Path) -> None:
    length = {"prefill": 256}.get(bench)
    settings = Settings(bench, model=str(tiny), n_prompt=length, **QUICK)
    report = measure(settings).as_json()
    check_schema(report, bench, ALL)
    assert all(samples[0] > 0 for samples in report["pairs"].values())
    assert list(report["ratio"]) == [name for name in ALL if name != "cpp-cpp"]
    reference = report["pairs"]["cpp-cpp"][0]
    assert report["ratio"][OURS] == report["pairs"][OURS][0] / reference
    assert report["settings"]["protocol"] == "7.0.0"
    assert report["settings"]["engine"] == "llama-cpp-python 0.3.36"
    if bench == "decode":
        assert report["wire"][OURS]["round_trips"] == 1


@pytest.mark.usefixtures("peers")
def test_hop_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "hop", "--runs", "1", "--settle", "0", "--json"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    check_schema(report, "hop", ALL)
    (local,) = report["local"]
    assert local > 0
    for name in ALL:
        assert report["pairs"][name][0] == report["total"][name][0] - local
    assert not list(tmp_path.iterdir())


def test_ours_alone_over_a_relay(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "decode", "--model", str(tiny), "--engine", "xllamacpp"]
    arguments += ["--runs", "1", "--settle", "0", "--tokens", "8", "--workers", "2"]
    assert main([*arguments, "--relay-delay-ms", "5", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    check_schema(report, "decode", [OURS])
    assert report["ratio"] == {}
    assert "Longwire alone" in report["note"]
    assert report["settings"]["protocol"] == "8.0.0"
    # One round trip of 10 ms to each of the workers.
    assert report["pairs"][OURS][0] <= 1 / 0.020


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("wanted", [False, True])
def test_huge_pages_for_a_cpp_server(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    settings = Settings("decode", model=str(tiny), huge_pages=wanted, **QUICK)
    worker = Worker("cpp", settings, Plan.of(settings), tmp_path / "server")
    try:
        (server,) = (p for p, words in children_of(os.getpid()).items() if words)
        advice = Path(f"/proc/{server}/smaps").read_text()
        variables = Path(f"/proc/{server}/environ").read_bytes()
    finally:
        worker.close()
    assert (" hg" in advice) is wanted
    assert b"glibc.malloc.check=0" in variables


def test_huge_pages_are_for_cpp_servers(tiny: Path) -> None:
    settings = Settings("decode", model=str(tiny), huge_pages=True, pairs=(OURS,))
    with pytest.raises(UsageError, match="--huge-pages is for C"):
        Plan.of(settings)


def test_the_table_names_what_to_type_again(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "load", "--model", str(tiny), "--engine", "xllamacpp"]
    arguments += ["--runs", "1", "--settle", "0", "--cache"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert OURS in output
    assert "Longwire alone" in output
    (again,) = (line for line in output.splitlines() if line.startswith("again: "))
    assert again.startswith("again: longwire bench load --model ")
    assert again.endswith(" --cache")


def test_servers_with_the_models_folder_need_not_be_sent_it(tiny: Path) -> None:
    settings = Settings(
        "load", model=str(tiny), engine="xllamacpp", models=True, workers=2, **QUICK
    )
    report = measure(settings)
    check_schema(report.as_json(), "load", [OURS])
    # The prompt, its graphs, and what is asked about ops.
    assert 0 < report.received()[OURS] < tiny.stat().st_size / 10
    plain = measure(Settings("load", model=str(tiny), engine="xllamacpp", **QUICK))
    assert plain.received() == {}
    assert plain.wire()[OURS]["bytes_sent"] > tiny.stat().st_size / 2


@pytest.mark.usefixtures("peers")
def test_a_tensor_split_of_all_pairings(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "decode", "--model", str(tiny), "--workers", "2"]
    arguments += ["--split-mode", "tensor", "--tokens", "8"]
    assert main([*arguments, "--runs", "1", "--settle", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    check_schema(report, "decode", ALL)
    assert report["settings"]["split_mode"] == "tensor"


def test_sums_between_servers_beside_those_of_the_client(tiny: Path) -> None:
    names = (OURS, "longwire-fallback")
    settings = Settings(
        "decode",
        model=str(tiny),
        engine="xllamacpp",
        split_mode="tensor",
        workers=2,
        n_tokens=8,
        pairs=names,
        **QUICK,
    )
    report = measure(settings)
    check_schema(report.as_json(), "decode", list(names))
    # ggml's own way sends copies and a graph of one node for each sum.
    sent = {name: wire["bytes_sent"] for name, wire in report.wire().items()}
    assert sent[OURS] < 0.9 * sent["longwire-fallback"]


def test_several_ubatches_are_several_benches(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "prefill", "--model", str(tiny), "--engine", "xllamacpp"]
    arguments += ["--runs", "1", "--settle", "0", "--prompt", "64", "--json"]
    assert main([*arguments, "--ubatch", "16,64"]) == 0
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["settings"]["ubatch"] for report in reports] == [16, 64]


@pytest.mark.usefixtures("peers")
def test_a_dead_server_costs_its_pairing_alone(tiny: Path) -> None:
    def kill_when_a_client_is_there(server: int) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if any("bench.client" in c for c in children_of(os.getpid()).values()):
                break
            time.sleep(0.005)
        os.kill(server, signal.SIGKILL)

    def on_progress(text: str) -> None:
        if not text.endswith("longwire-cpp"):
            return
        children = children_of(os.getpid())
        (server,) = (pid for pid, c in children.items() if "bench.cpp_server" in c)
        # Stopped it passes for alive, and no client gets through before its end.
        os.kill(server, signal.SIGSTOP)
        killer = threading.Thread(target=kill_when_a_client_is_there, args=(server,))
        killer.start()

    settings = Settings("decode", model=str(tiny), n_tokens=8, **QUICK)
    report = measure(settings, on_progress)
    assert list(report.errors()) == ["longwire-cpp"]
    (reason,) = report.errors()["longwire-cpp"]
    assert reason.startswith("run 1: the longwire client: ended with exit code 1: ")
    assert "the cpp server died of SIGKILL" in reason
    assert report.measured("longwire-cpp") == [None]
    assert report.measured("cpp-longwire") != [None]
    assert not any("bench" in c for c in children_of(os.getpid()).values())


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("client", ["longwire", "cpp"])
def test_a_failing_client_says_why(
    client: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing listens on the discard port.
    monkeypatch.setattr("longwire.bench.children.Worker.endpoint", "127.0.0.1:9")
    settings = Settings(
        "decode", model=str(tiny), pairs=(f"{client}-longwire",), **QUICK
    )
    errors = measure(settings).errors()
    (reason,) = errors[f"{client}-longwire"]
    assert f"the {client} client" in reason
    assert "127.0.0.1:9" in reason
    assert "the longwire server lives" in reason


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_all_processes(
    number: signal.Signals, status: int, tiny: Path
) -> None:
    command = [
        sys.executable,
        "-m",
        "longwire",
        "bench",
        "decode",
        "--model",
        str(tiny),
    ]
    bench = subprocess.Popen(
        [*command, "--runs", "1000", "--engine", "xllamacpp", "--settle", "60"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        children: dict[int, str] = {}
        while len(children) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
            children = children_of(bench.pid)
        sessions = [pid for child in children for pid in children_of(child)]
        bench.send_signal(number)
        assert bench.wait(20) == status
    finally:
        bench.kill()
        bench.wait()
    assert len(children) == 2
    left = [pid for pid in (*children, *sessions) if Path(f"/proc/{pid}").exists()]
    assert not left
