"""`longwire tap` between all pairs of clients and servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from longwire.transport.endpoint import parse_endpoint
from support.models import N_TOKENS, PROMPT, greedy_tokens
from support.peers import cpp_generate, cpp_server, v7_libraries
from support.timelines import read_timeline, spans

Reference = Callable[[str], list[int]]
Worker = Callable[..., str]
Line = dict[str, Any]

STOP_S = 20.0
READS = {"GET_TENSOR", "LX_TOP"}


class Tapped:
    """A tap on the way to a server; `lines` once it has ended."""

    def __init__(self, endpoint: str, trace: Path) -> None:
        self.endpoint = endpoint
        self.trace = trace
        self.lines: list[Line] = []

    def check(self, protocol: int, *, lx: bool) -> None:
        """Everything was understood, and the figures fit each other."""
        assert not [
            line
            for line in self.lines
            if "event" not in line and line.get("details", {}).get("problem")
        ]
        events = Counter(line["event"] for line in self.lines if "event" in line)
        assert events["undecoded"] == events["lost"] == 0
        assert events["open"] == events["close"] > 0
        assert all(
            line["owed"] == [] for line in self.lines if line.get("event") == "close"
        )
        (hello, *_) = self.messages("answer", "HELLO")
        assert hello["details"]["protocol"] == f"{protocol}.0.0"
        assert bool(self.messages("answer", "LX_START")) is lx
        asked = {line["command"] for line in self.messages("answer")}
        for command in asked:
            answers = len(self.messages("answer", command))
            assert answers == len(self.messages("request", command)), command
        self.check_steps()
        self.check_trace(events["open"])

    def check_steps(self) -> None:
        steps = [line for line in self.lines if line.get("event") == "step"]
        assert len(steps) >= N_TOKENS
        decode = steps[-N_TOKENS // 2 :]
        assert all(step["round_trips"] == 1 == step["graphs"] for step in decode)
        assert all(0 < step["wait_s"] <= step["seconds"] for step in decode)
        reads = [line for line in self.messages("answer") if line["command"] in READS]
        assert all(line["wait_s"] > 0 for line in reads)

    def check_trace(self, connections: int) -> None:
        events = read_timeline(self.trace)
        assert len({event["pid"] for event in events}) == connections
        assert len(spans(events, "steps")) >= N_TOKENS
        graphs = spans(events, "graphs")
        assert {span["name"] for span in graphs} <= {
            "GRAPH_COMPUTE",
            "GRAPH_RECOMPUTE",
            "LX_GRAPH_PATCH",
        }
        (first, *_) = (g for g in graphs if g["name"] == "GRAPH_COMPUTE")
        assert first["args"]["nodes"] > 100 and first["args"]["ops"]["MUL_MAT"] > 10

    def messages(self, direction: str, command: str | None = None) -> list[Line]:
        return [
            line
            for line in self.lines
            if line.get("direction") == direction and command in (None, line["command"])
        ]


@pytest.fixture
def tap(tmp_path: Path) -> Callable[[str], Any]:
    """`with tap(endpoint) as tapped` is a tap on the way to it."""

    @contextmanager
    def start(upstream: str) -> Iterator[Tapped]:
        parse_endpoint(upstream)
        output, trace = tmp_path / "lines", tmp_path / "trace.json"
        command = [sys.executable, "-m", "longwire", "tap", "127.0.0.1:0", upstream]
        command += ["--json", "--trace", str(trace)]
        with output.open("w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.PIPE, text=True
            )
        try:
            assert process.stderr is not None
            tapped = Tapped(process.stderr.readline().split()[-1], trace)
            yield tapped
            process.terminate()
            assert process.stderr.read() == ""
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()
            process.communicate()
        tapped.lines += map(json.loads, output.read_text().splitlines())

    return start


Tap = Callable[[str], Any]


@pytest.mark.parametrize("protocol", [7, 8])
def test_cpp_client_on_our_server(
    model: Path, worker: Worker, reference: Reference, tap: Tap, protocol: int
) -> None:
    server = worker("--engine", "xllamacpp", "--protocol", str(protocol))
    with tap(server) as tapped:
        tokens = cpp_generate(protocol, model, PROMPT, N_TOKENS, tapped.endpoint)
    assert tokens == reference("xllamacpp")
    tapped.check(protocol, lx=False)


@pytest.mark.parametrize("protocol", [7, 8])
def test_our_client_on_a_cpp_server(model: Path, tap: Tap, protocol: int) -> None:
    with cpp_server(protocol) as server:
        direct = greedy_tokens(model, "xllamacpp", server)
        with tap(server) as tapped:
            tokens = greedy_tokens(model, "xllamacpp", tapped.endpoint)
    assert tokens == direct
    tapped.check(protocol, lx=False)


def test_cpp_client_on_a_cpp_server(
    model: Path, reference: Reference, tap: Tap
) -> None:
    v7_libraries()
    with cpp_server(7) as server, tap(server) as tapped:
        tokens = cpp_generate(7, model, PROMPT, N_TOKENS, tapped.endpoint)
    assert tokens == reference("llama-cpp-python")
    tapped.check(7, lx=False)


@pytest.mark.parametrize("protocol", [7, 8])
def test_our_client_on_our_server(
    model: Path, worker: Worker, reference: Reference, tap: Tap, protocol: int
) -> None:
    with tap(worker("--protocol", str(protocol))) as tapped:
        tokens = greedy_tokens(model, "xllamacpp", tapped.endpoint)
    assert tokens == reference("xllamacpp")
    tapped.check(protocol, lx=True)
