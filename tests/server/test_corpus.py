"""What once was a finding of the server's fuzzers, and what they begin with."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fuzz import graphs, sequences, taps
from fuzz.clients import Plan, address_of, play, seed_of
from fuzz.health import LogWatch
from fuzz.recording import ENDINGS, Recording, stand_in
from fuzz.rehearsal import rehearse
from longwire.server import session
from longwire.server.rewrites import Rewrites
from longwire.server.state import Handler, Pieces, SessionState
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import Dialect
from support.tensors import Sum
from support.worker import Worker

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
TARGETS = {"graphs": graphs, "sequences": sequences, "taps": taps}
FILES = [
    pytest.param(module, file, id=f"{name}/{file.name[:20]}")
    for name, module in TARGETS.items()
    for file in sorted((CORPUS / name).iterdir())
]
RECORDINGS = [
    pytest.param(file, id=file.stem) for file in sorted((CORPUS / "live").iterdir())
]

visits = itertools.count(1)


@pytest.mark.parametrize(("target", "file"), FILES)
def test_no_input_breaks_a_session_in_process(target: ModuleType, file: Path) -> None:
    target.check(file.read_bytes())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_fuzzers_begin_in_order(target: ModuleType) -> None:
    for seed in target.seeds():
        target.check(seed)


def test_the_sequences_reach_every_kind_of_end() -> None:
    played = [sequences.recording(seed) for seed in sequences.seeds()]
    answers = [rehearse(recording) for recording in played]
    assert {recording.ending for recording in played} == set(ENDINGS)
    assert {recording.protocol for recording in played} == {7, 8}
    assert any(found.errors for found in answers)
    assert max(len(found.bodies) for found in answers) > 8


_FOR_TWO = {
    Command.COMM_ALLREDUCE,
    *(Command.LX_LISTEN, Command.LX_CONNECT, Command.LX_ACCEPT),
    *(Command.LX_UNLINK, Command.LX_SEND, Command.LX_RECEIVE),
}
"""Where there is no other server, these are refused."""


def test_the_sequences_reach_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    done: set[int] = set()
    rewritten = 0

    def noting(number: int, handler: Handler) -> Handler:
        def handle(s: SessionState, body: memoryview, length: int) -> Pieces:
            answer = handler(s, body, length)
            done.add(number)
            return answer

        return handle

    class Noting(Rewrites):
        def find(self, stream: Stream) -> memoryview | None:
            nonlocal rewritten
            target = super().find(stream)
            rewritten += target is not None
            return target

    handlers = {number: noting(number, h) for number, h in session.HANDLERS.items()}
    monkeypatch.setattr(session, "HANDLERS", handlers)
    monkeypatch.setattr("longwire.server.tensors.Rewrites", Noting)
    for seed in sequences.seeds():
        sequences.check(seed)
    assert set(Command) - done == _FOR_TWO
    assert rewritten


@pytest.mark.parametrize("file", RECORDINGS)
def test_no_recording_breaks_a_session_in_process(file: Path) -> None:
    rehearse(Recording.load(file))


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127/8")
@pytest.mark.parametrize("file", RECORDINGS)
def test_no_recording_harms_a_worker(
    file: Path,
    workers: Callable[[Dialect], Worker],
    neighbours: Callable[[Dialect], Sum],
) -> None:
    recording = Recording.load(file)
    worker = workers(recording.dialect)
    neighbour = neighbours(recording.dialect)
    address = address_of(next(visits))
    play(recording, worker.endpoint, address)
    end = worker.logged(rf"session \d+ of {re.escape(address)}:\d+.*\n", 10)[0]
    assert "'reason': " in end, end
    neighbour.check(again=True)


PEER = "session 3 of 127.64.0.9:4711"


@pytest.mark.parametrize(
    ("lines", "findings"),
    [
        ([f"E longwire.serve: {PEER} died: SIGSEGV"], 1),
        ([f"E longwire.serve: {PEER} died: SIGABRT"], 1),
        ([f"{PEER}: ggml aborted: GGML_ASSERT(x)", f"{PEER} died: SIGABRT"], 0),
        ([f"{PEER}: ggml aborted: GGML_ASSERT(x)", f"{PEER} died: SIGSEGV"], 1),
        (["Traceback (most recent call last):"], 1),
        (["session 3 reports nonsense, killed"], 1),
        ([f"{PEER}: {{'reason': 'refused: x', 'refused': 'protocol', 'a': 1}}"], 0),
        (['{"event": "died", "peer": "127.64.0.9", "how": "SIGALRM"}'], 0),
        (['{"event": "died", "peer": "127.64.0.9", "how": "exit code 1"}'], 1),
        (
            [
                '{"event": "aborted", "peer": "127.64.0.9",'
                ' "command": "LX_GRAPH_PATCH", "words": "x"}',
                '{"event": "died", "peer": "127.64.0.9", "how": "SIGABRT"}',
            ],
            0,
        ),
        (
            [
                '{"event": "aborted", "peer": "127.64.0.9",'
                ' "command": "LX_SUPPORTS_OPS", "words": "x"}'
            ],
            1,
        ),
    ],
)
def test_a_log_tells_findings_from_the_rest(
    lines: list[str], findings: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(lines) + "\n")
    with log.open("rb") as file:
        watch = LogWatch(file, tmp_path / "kept")
        watch.join()
    assert len(watch.findings) == findings, watch.findings
    assert all(f.address in (None, "127.64.0.9") for f in watch.findings)


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording = Recording(7, b"\0\1\xff", [256, 0], lx=True, ending="reset")
    path = recording.save(tmp_path, "name", "a note")
    assert Recording.load(path) == recording
    assert path.name == "name.json"


def test_a_recording_gets_the_handles_of_its_session() -> None:
    first, second = (stand_in(i, 64).handle for i in range(2))
    recording = Recording(8, m.U64.pack(second) + m.U64.pack(first), [64, 64])
    answers = [m.HelloAnswer(8, 0, 0).encode()]
    answers += [m.AllocBufferAnswer(handle, 64).encode() for handle in (5, 6)]
    assert recording.rest(answers) == m.U64.pack(6) + m.U64.pack(5)


@pytest.mark.parametrize("seed", [0, 1, 1234567, (1 << 22) + 5, 1 << 40])
def test_a_log_line_leads_back_to_its_seed(seed: int) -> None:
    plan = Plan(
        Endpoint("127.0.0.1", 1),
        8,
        first=seed - min(seed, 1000),
        count=2000,
        allocating=1,
    )
    assert seed_of(address_of(seed), plan) == seed
    assert seed_of("127.0.0.1", plan) is None
