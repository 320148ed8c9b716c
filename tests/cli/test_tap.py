"""`longwire tap` as a process: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from longwire.cli.main import main
from longwire.cli.tap import _address
from longwire.errors import EndpointError
from longwire.transport.endpoint import Endpoint, parse_endpoint
from longwire.wire.dialects import V8
from support.client import RawClient
from support.scripted import Listener, lx_server
from support.timelines import read_timeline, spans

PATIENCE_S = 30.0


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("50060", "127.0.0.1", 50060),
        ("0", "127.0.0.1", 0),
        ("127.0.0.2:0", "127.0.0.2", 0),
        ("[::1]:0", "::1", 0),
        ("[::1]:7", "::1", 7),
        ("localhost", "localhost", 50052),
        ("10.0.0.1:80", "10.0.0.1", 80),
    ],
)
def test_where_to_listen(text: str, host: str, port: int) -> None:
    assert _address(text) == Endpoint(host, port)


@pytest.mark.parametrize("text", ["", "::1:0", "a b:0", "70000", "host:x", ":"])
def test_nowhere_to_listen(text: str) -> None:
    with pytest.raises(EndpointError):
        _address(text)


@pytest.fixture
def upstream() -> Iterator[Endpoint]:
    port = Listener(lx_server())
    yield port.endpoint
    port.close()


@contextmanager
def tapping(*options: str) -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """A tap on any port; whoever reads its output sees the rest of it."""
    command = [sys.executable, "-m", "longwire", "tap", "127.0.0.1:0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            told = process.stderr if "--json" in options else process.stdout
            assert told is not None
            found = re.fullmatch("listening on (.*)\n", told.readline())
            assert found
            yield process, parse_endpoint(found[1])
        finally:
            process.kill()


def ask(endpoint: Endpoint) -> None:
    with RawClient(endpoint, V8, PATIENCE_S) as client:
        client.hello()
        assert client.device_count() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_table_at_the_end(
    upstream: Endpoint, tmp_path: Path, number: signal.Signals
) -> None:
    trace = tmp_path / "trace.json"
    with tapping(str(upstream), "--trace", str(trace)) as (process, endpoint):
        ask(endpoint)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, "")
    assert re.search(r"DEVICE_COUNT +1 +9 B +12 B", out)
    assert "connections: 1, 0 of them open; protocol 8.0.0" in out
    answered = spans(read_timeline(trace), "commands with an answer")
    assert [span["name"] for span in answered] == ["HELLO", "DEVICE_COUNT"]


def test_lines_of_json_as_it_happens(upstream: Endpoint) -> None:
    with tapping(str(upstream), "--json") as (process, endpoint):
        assert process.stdout is not None
        ask(endpoint)
        # Before it ends: whoever looks on sees it live.
        lines = [json.loads(process.stdout.readline()) for _ in range(6)]
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    said = [(line.get("direction"), line.get("command")) for line in lines[1:5]]
    assert said == [
        ("request", "HELLO"),
        ("answer", "HELLO"),
        ("request", "DEVICE_COUNT"),
        ("answer", "DEVICE_COUNT"),
    ]
    assert [line.get("event") for line in (lines[0], lines[5])] == ["open", "close"]


def test_a_reader_that_leaves_breaks_no_connection(upstream: Endpoint) -> None:
    with tapping(str(upstream), "--json") as (process, endpoint):
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        for _ in range(2):
            ask(endpoint)
        process.terminate()
        assert process.wait(PATIENCE_S) == 1
        assert "nothing more is shown: [Errno 32] Broken pipe" in process.stderr.read()


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "no" / "file")
    assert main(["tap", "0", "127.0.0.1:9", "--trace", nowhere]) == 2
    assert f"cannot write {nowhere}: No such file" in capsys.readouterr().err
    assert main(["tap", "0.0.0.0:0", "127.0.0.1:9"]) == 2
    assert "0.0.0.0 is not a loopback address" in capsys.readouterr().err
