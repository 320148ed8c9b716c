"""Sums and copies that go from server to server."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from longwire.bench.models import EXPERTS, SPLIT, SPLIT_THIRDS, make_llama
from longwire.client.buffer import buffer_of
from longwire.client.collectives import Communicator
from longwire.client.records import read_tensor
from longwire.client.traffic import Traffic
from longwire.errors import RemoteError
from longwire.host.engine import Engine
from longwire.host.workers import LocalWorker
from support.keys import Keys
from support.models import GREEDY, PROMPT, exact_engine
from support.peers import cpp_generate, cpp_server

Worker = Callable[..., str]
Rows = npt.NDArray[np.float32]

STEPS = 128
N_CTX = 512
# One rounding of a value to f16, as it goes into the KV cache.
CLOSE = 1e-3
WORD = "Sums"
"""A prompt for llama.cpp's client, whose room for tokens goes by characters."""
DIRECT, THROUGH_HERE = "sums go from server to server", "sums go through this machine"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """`made(3)` is a model that can be split over three devices."""
    pytest.importorskip("gguf", reason="package missing: gguf (longwire[bench])")
    folder = tmp_path_factory.mktemp("models")

    def make(ranks: int) -> Path:
        path = folder / ("thirds.gguf" if ranks % 3 == 0 else "split.gguf")
        if not path.exists():
            make_llama(path, SPLIT_THIRDS if ranks % 3 == 0 else SPLIT)
        return path

    return make


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """`lines(text)`: what was logged here with that text in it."""
    caplog.set_level(logging.INFO, "longwire.client")

    def found(text: str) -> list[str]:
        return [r.getMessage() for r in caplog.records if text in r.getMessage()]

    return found


def split(path: Path, rpc: str, **settings: Any) -> Engine:
    """Exact, and with its matrices cut over all devices of these endpoints."""
    options = {"n_ctx": N_CTX, "split_mode": "tensor", **settings}
    return exact_engine(path, "xllamacpp", rpc, **options)


def local(path: Path) -> Engine:
    return exact_engine(path, "xllamacpp", n_ctx=N_CTX, flash_attention="on")


def steps(engine: Engine, tokens: Sequence[int] = (), n: int = STEPS) -> Rows:
    """The logits of a prompt and of each token after it: those given, or greedy."""
    engine.reset()
    rows = [engine.eval(engine.tokenize(PROMPT)).copy()]
    for i in range(n):
        token = tokens[i] if len(tokens) else int(rows[-1].argmax())
        rows.append(engine.eval([token]).copy())
    return np.array(rows)


def tokens_of(engine: Engine, prompt: str = PROMPT, n: int = 24) -> list[int]:
    return engine.generate(prompt, n, GREEDY, stop_at_end=False).finish().tokens


def traffic(engine: Engine, work: Callable[[], object]) -> list[Traffic]:
    """What a piece of work sends and receives, by connection."""
    connections = list(dict.fromkeys(d.connection for d in engine.remote_devices))
    before = [c.traffic.snapshot() for c in connections]
    work()
    return [c.traffic.since(b) for c, b in zip(connections, before, strict=True)]


class Sums:
    """All-reduces of a block, with what each rank has right after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[bytes]] = []
        allreduce = Communicator.allreduce

        def looking(communicator: Communicator, tensors: Sequence[int]) -> bool:
            done = allreduce(communicator, tensors)
            self.found.append([self._read(tensor) for tensor in tensors])
            return done

        monkeypatch.setattr(Communicator, "allreduce", looking)

    @staticmethod
    def _read(tensor: int) -> bytes:
        buffer = buffer_of(tensor)
        assert buffer is not None
        numbers = np.empty(math.prod(read_tensor(tensor).ne), np.float32)
        buffer.get_tensor(tensor, numbers.ctypes.data, 0, numbers.nbytes)
        return numbers.tobytes()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_sum_among_themselves(
    made: Callable[[int], Path],
    worker: Worker,
    lines: Callable[[str], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    with local(made(ranks)) as engine:
        expected = steps(engine)
    tokens = [int(token) for token in expected.argmax(axis=1)]
    rpc = ",".join(worker(number=n) for n in range(ranks))
    with split(made(ranks), rpc) as engine:
        found = steps(engine, tokens)
        assert lines(DIRECT) and not lines(THROUGH_HERE)
        assert found.argmax(axis=1).tolist() == tokens
        worst = np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)
        assert worst.max() < CLOSE
        again = steps(engine, tokens, 16)
        assert again.tobytes() == found[:17].tobytes()
        carried = traffic(engine, lambda: engine.eval([5]))
        sums = Sums(monkeypatch)
        assert steps(engine, tokens, 2).tobytes() == found[:3].tobytes()
    # Of each layer: after the attention, and at its end.
    assert len(sums.found) == 3 * 2 * SPLIT.n_layer
    for results in sums.found:
        assert len(results) == ranks and len(set(results)) == 1
    for one in carried:
        # Its part of the logits is all that is read of a server.
        assert one.round_trips == 1
        assert one.bytes_received <= 8 + 4 * 512


def test_runs_are_alike_to_the_bit(made: Callable[[int], Path], worker: Worker) -> None:
    rpc = ",".join(worker(number=n) for n in range(3))
    runs = []
    for _ in range(2):
        with split(made(3), rpc) as engine:
            runs.append(steps(engine, n=16).tobytes())
    assert runs[0] == runs[1]


@pytest.mark.parametrize("servers", [["CPU,CPU"], ["CPU,CPU", "CPU"]])
def test_a_server_may_take_part_with_several_devices(
    made: Callable[[int], Path],
    worker: Worker,
    lines: Callable[[str], list[str]],
    servers: list[str],
) -> None:
    ranks = ",".join(servers).count("CPU")
    with local(made(ranks)) as engine:
        expected = tokens_of(engine)
    rpc = ",".join(worker("-d", names, number=5) for names in servers)
    with split(made(ranks), rpc) as engine:
        assert len(engine.remote_devices) == ranks
        assert tokens_of(engine) == expected
    assert lines(DIRECT) and not lines(THROUGH_HERE)


def test_one_of_two_needs_a_peer_port(
    made: Callable[[int], Path], worker: Worker, lines: Callable[[str], list[str]]
) -> None:
    with local(made(2)) as engine:
        expected = tokens_of(engine)
    with_port, without = worker(), worker("--peer-port", "off")
    for rpc in (f"{with_port},{without}", f"{without},{with_port}"):
        with split(made(2), rpc) as engine:
            assert tokens_of(engine) == expected
    assert len(lines(DIRECT)) == 2 and not lines(THROUGH_HERE)


def test_without_peer_ports_sums_go_through_the_host(
    made: Callable[[int], Path], worker: Worker, lines: Callable[[str], list[str]]
) -> None:
    with local(made(2)) as engine:
        expected = tokens_of(engine)
    rpc = ",".join(worker("--peer-port", "off", number=n) for n in range(2))
    with split(made(2), rpc) as engine:
        assert tokens_of(engine) == expected
    (said,) = lines("go through this machine")
    assert "sums" in said and "has a peer port" in said


def test_sums_between_servers_with_tls_and_a_token(
    made: Callable[[int], Path],
    worker: Worker,
    keys: Keys,
    lines: Callable[[str], list[str]],
) -> None:
    with local(made(2)) as engine:
        expected = tokens_of(engine)
    rpc = ",".join(worker(*keys.ours.serving(), number=n) for n in range(2))
    with split(made(2), rpc, credentials=keys.ours.credentials()) as engine:
        assert tokens_of(engine) == expected
    assert lines(DIRECT) and not lines(THROUGH_HERE)


def test_a_lost_rank_is_an_error_for_all(made: Callable[[int], Path]) -> None:
    with ExitStack() as stack:
        workers = [stack.enter_context(LocalWorker("-t", "1")) for _ in range(3)]
        rpc = ",".join(w.endpoint for w in workers)
        with split(made(3), rpc) as engine:
            steps(engine, n=2)
            os.killpg(workers[1].process.pid, signal.SIGKILL)
            with pytest.raises(RemoteError):
                steps(engine, n=64)


@contextlib.contextmanager
def pair(kinds: str) -> Iterator[str]:
    """Two servers that speak protocol 8: "ours cpp"."""
    with ExitStack() as stack:
        yield ",".join(
            stack.enter_context(cpp_server(8))
            if kind == "cpp"
            # llama.cpp's server is looked for 1000 above its port.
            else stack.enter_context(LocalWorker("-t", "1", "-p", free_port())).endpoint
            for kind in kinds.split()
        )


def free_port() -> str:
    """A port that is free, and so is the one 1000 above."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
        with contextlib.suppress(OSError, OverflowError):
            socket.create_server(("127.0.0.1", port + 1000)).close()
            return str(port)


@pytest.fixture(scope="module")
def cpp_pair_tokens(made: Callable[[int], Path]) -> list[int]:
    """What llama.cpp says, with its client and two of its servers."""
    with pair("cpp cpp") as rpc:
        return cpp_generate(8, made(2), WORD, 24, rpc, "--split-mode", "3")


@pytest.mark.parametrize("kinds", ["cpp cpp", "ours cpp", "cpp ours"])
def test_our_client_with_servers_of_both_kinds(
    made: Callable[[int], Path],
    cpp_pair_tokens: list[int],
    lines: Callable[[str], list[str]],
    kinds: str,
) -> None:
    with pair(kinds) as rpc, split(made(2), rpc) as engine:
        assert tokens_of(engine, WORD) == cpp_pair_tokens
    assert lines(DIRECT) and not lines(THROUGH_HERE)


@pytest.mark.parametrize("kinds", ["ours ours", "ours cpp", "cpp ours"])
def test_their_client_with_servers_of_both_kinds(
    made: Callable[[int], Path], cpp_pair_tokens: list[int], kinds: str
) -> None:
    with pair(kinds) as rpc:
        tokens = cpp_generate(8, made(2), WORD, 24, rpc, "--split-mode", "3")
    assert tokens == cpp_pair_tokens


def layers(path: Path, rpc: str, **settings: Any) -> Engine:
    return exact_engine(path, "xllamacpp", rpc, n_ctx=N_CTX, **settings)


def test_layers_hand_on_what_they_made(
    made: Callable[[int], Path], worker: Worker, lines: Callable[[str], list[str]]
) -> None:
    with layers(made(2), "") as engine:
        expected = steps(engine, n=16)
    rpc = ",".join(worker(number=n) for n in range(3))
    with layers(made(2), rpc) as engine:
        assert steps(engine, n=16).tobytes() == expected.tobytes()
        carried = traffic(engine, lambda: engine.eval([5]))
    assert len(lines("copies go directly")) == 2
    # Nothing is read of a server but the last one's logits.
    assert [one.bytes_received for one in carried] == [0, 0, 8 + 4 * 512]
    assert [one.round_trips for one in carried] == [0, 0, 1]


def test_layers_without_peer_ports_hand_on_through_the_host(
    made: Callable[[int], Path], worker: Worker, lines: Callable[[str], list[str]]
) -> None:
    with layers(made(2), "") as engine:
        expected = steps(engine, n=16)
    rpc = ",".join(worker("--peer-port", "off", number=n) for n in range(2))
    with layers(made(2), rpc) as engine:
        assert steps(engine, n=16).tobytes() == expected.tobytes()
    (said,) = lines("copies go through this machine")
    assert "has a peer port" in said


def test_long_prompts_overlap_and_stay_exact(
    made: Callable[[int], Path], worker: Worker
) -> None:
    """Many parts of a prompt are under way at once, each with its copies."""
    prompt = [3 + i % 500 for i in range(400)]
    with layers(made(2), "", n_ubatch=32) as engine:
        expected = engine.eval(prompt).tobytes()
    rpc = ",".join(worker(number=n) for n in range(2))
    with layers(made(2), rpc, n_ubatch=32) as engine:
        for _ in range(2):
            engine.reset()
            assert engine.eval(prompt).tobytes() == expected


@pytest.mark.parametrize("experts", [False, True])
def test_a_split_takes_a_prompt_in_parts(
    made: Callable[[int], Path], worker: Worker, tmp_path: Path, experts: bool
) -> None:
    """No logits are wanted of any but the last: products of nothing, oddly cut."""
    path = made(2)
    if experts:
        path = tmp_path / "experts.gguf"
        make_llama(path, EXPERTS)
    prompt = [3 + i % 500 for i in range(200)]
    with local(path) as engine:
        expected = engine.eval(prompt).copy()
    rpc = ",".join(worker(number=n) for n in range(2))
    with split(path, rpc, n_ubatch=64) as engine:
        found = engine.eval(prompt).copy()
        engine.reset()
        assert engine.eval(prompt).tobytes() == found.tobytes()
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
