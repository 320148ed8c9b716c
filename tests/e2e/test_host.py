"""The host over workers: state, attach, command line, text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longwire.bench.models import LlamaShape, make_llama
from longwire.errors import UsageError
from longwire.host.engine import Engine
from longwire.host.sampling import Sampling
from support.models import GREEDY, N_TOKENS, PROMPT, exact_engine

Worker = Callable[..., str]
Reference = Callable[[str], list[int]]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longwire", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_state_survives_a_save_and_a_restore(
    model: Path, worker: Worker, workers: int
) -> None:
    rpc = ",".join(worker(number=n) for n in range(workers))
    with exact_engine(model, "xllamacpp", rpc) as engine:
        engine.eval(engine.tokenize(PROMPT))
        state = engine.save_state()
        ahead = [engine.eval([t]).tobytes() for t in (506, 5279)]
        engine.eval([7, 8, 9])
        engine.load_state(state)
        assert [engine.eval([t]).tobytes() for t in (506, 5279)] == ahead


def test_a_seed_repeats_the_text(model: Path, worker: Worker) -> None:
    with exact_engine(model, "xllamacpp", worker()) as engine:
        seeded = Sampling(temperature=1.0, seed=7)
        first = engine.generate(PROMPT, 12, seeded).finish().tokens
        assert engine.generate(PROMPT, 12, seeded).finish().tokens == first
        other = Sampling(temperature=1.0, seed=8)
        assert engine.generate(PROMPT, 12, other).finish().tokens != first


def test_streamed_text_has_no_broken_characters(model: Path) -> None:
    with exact_engine(model, "xllamacpp") as engine:
        text = "naïve 東京 🜁🜂 ok"
        pieces = [engine.model.piece(t) for t in engine.tokenize(text)]
        assert any(_broken(piece) for piece in pieces), "no character is split"
        generation = engine.generate("Emoji: 🜁🜂🜃🜄🜁🜂🜃🜄🜁🜂", 24, GREEDY)
        parts = [token.text for token in generation]
        assert "\ufffd" not in "".join(parts[:-1])
        assert "".join(parts) == generation.text


def _broken(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def test_bad_requests_are_named(model: Path) -> None:
    with exact_engine(model, "xllamacpp", n_ctx=256) as engine:
        with pytest.raises(UsageError, match="empty"):
            engine.eval([])
        with pytest.raises(UsageError, match="token 262144000"):
            engine.eval([262144000])
        with pytest.raises(UsageError, match="context of 256"):
            engine.eval([5] * 257)
        with pytest.raises(UsageError, match="template"):
            engine.chat_prompt("hello")
    with pytest.raises(UsageError, match="no model file"):
        Engine("absent.gguf")
    with pytest.raises(UsageError, match="no device named 'RPC99'"):
        Engine(model, devices=["RPC99"])


def test_run_prints_one_json_object(
    model: Path, worker: Worker, reference: Reference
) -> None:
    rpc = ",".join(worker(number=n) for n in range(2))
    done = _run(
        *("run", "-m", str(model), "--rpc", rpc, "-p", PROMPT, "-n", str(N_TOKENS)),
        *("--temp", "0", "-t", "1", "-ub", "128", "--exact", "--json"),
        "--ignore-eos",
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["tokens"] == reference("xllamacpp")
    assert answer["text"].startswith(" the capital")
    # That to the last worker, and the prefill's are not in it.
    assert answer["per_token"]["round_trips"] == 1
    # One of the logits: the boundary between the workers goes from one to the other.
    assert answer["per_token"]["bytes_received"] == 8 + 8
    assert [d["endpoint"] for d in answer["devices"][:2]] == rpc.split(",")
    assert sum(d["layers"] for d in answer["devices"]) == 19
    assert all(d["memory"] > 0 for d in answer["devices"])
    assert min(answer["prefill_tok_s"], answer["decode_tok_s"]) > 0


def test_run_takes_tokens_and_a_layout(model: Path, worker: Worker) -> None:
    rpc = ",".join(worker(number=n) for n in range(2))
    done = _run(
        *("run", "-m", str(model), "--rpc", rpc, "--prompt-tokens", "2,818,5279"),
        *("-n", "2", "--temp", "0", "--tensor-split", "3,1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    layers = [d["layers"] for d in json.loads(done.stdout)["devices"]]
    assert layers[0] > 2 * layers[1] > 0


def test_ctrl_c_ends_a_run_cleanly(model: Path, worker: Worker) -> None:
    command = [sys.executable, "-m", "longwire", "run", "-m", str(model)]
    command += ["--rpc", worker(), "-p", PROMPT, "-n", "4000", "--temp", "0"]
    process = subprocess.Popen(
        [*command, "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    watchdog.cancel()
    assert process.returncode == 130
    assert b"Traceback" not in errors and b"tok/s" in errors


@pytest.mark.parametrize(
    "endpoints", ["", "host:port", "127.0.0.1:0", "::1", "a,,b", "[::1", "a b"]
)
def test_malformed_endpoints_are_usage_errors(model: Path, endpoints: str) -> None:
    done = _run("devices", "--rpc", endpoints or ",")
    assert done.returncode == 2
    assert "is not an endpoint" in done.stderr and "Traceback" not in done.stderr


def test_devices_lists_the_living_and_names_the_dead(worker: Worker) -> None:
    alive = worker()
    done = _run("devices", "--rpc", f"{alive},127.0.0.1:9", "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert list(answer["errors"]) == ["127.0.0.1:9"]
    (far,) = [d for d in answer["devices"] if d["endpoint"] == alive]
    assert far["name"] == "RPC0" and far["protocol"] == "RPC 8.0.0"
    assert 0 < far["free"] <= far["total"] and far["round_trip_ms"] > 0
    plain = _run("devices", "--rpc", f"{alive},127.0.0.1:9")
    assert plain.stderr.strip() == "127.0.0.1:9: connect: Connection refused"
    assert alive in plain.stdout


ATTACHED = """
import json, sys
import llama_cpp
from llama_cpp import llama_cpp as lib
import longwire

model, rpc = sys.argv[1:]
if rpc:
    devices = longwire.attach(rpc)
# The exact reference: no weight repacking where the host computes.
defaults = lib.llama_model_default_params
def exact():
    params = defaults()
    params.use_extra_bufts = False
    return params
lib.llama_model_default_params = exact
llama = llama_cpp.Llama(model, n_gpu_layers=-1, n_ctx=512, n_threads=1, verbose=False)
tokens = llama.generate(llama.tokenize(b"The capital of France is"), top_k=1, temp=0.0)
picked = [next(tokens) for _ in range(24)]
layers = sorted(devices[0].layers) if rpc else []
print(json.dumps({"tokens": picked, "layers": layers}))
"""


def test_attached_devices_serve_llama_cpp_python(model: Path, worker: Worker) -> None:
    pytest.importorskip("llama_cpp", reason="engine missing: llama-cpp-python 0.3.36")
    rpc = worker("--engine", "llama-cpp-python")

    def answer(endpoints: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", ATTACHED, str(model), endpoints],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout.splitlines()[-1]))

    local, far = answer(""), answer(rpc)
    assert far["tokens"] == local["tokens"]
    assert far["layers"] == list(range(18))


def test_two_clients_at_once_and_a_silent_third(
    model: Path, worker: Worker, reference: Reference
) -> None:
    from longwire.client.greeting import open_connection
    from longwire.client.health import Deadlines
    from longwire.transport.endpoint import parse_endpoint

    endpoint = worker()
    silent = open_connection(parse_endpoint(endpoint), Deadlines())
    command = ["run", "-m", str(model), "--rpc", endpoint, "-p", PROMPT, "--json"]
    command += ["-n", str(N_TOKENS), "--temp", "0", "-t", "1", "-ub", "128", "--exact"]
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "longwire", *command, "--ignore-eos"],
            stdout=subprocess.PIPE,
        )
        for _ in range(2)
    ]
    for client in clients:
        out, _ = client.communicate(timeout=120)
        assert json.loads(out)["tokens"] == reference("xllamacpp")
    silent.check()
    silent.close()


def test_exact_logits_are_what_greedy_takes(model: Path) -> None:
    with exact_engine(model, "xllamacpp") as engine:
        logits = engine.eval(engine.tokenize(PROMPT))
        assert logits.dtype == np.float32 and len(logits) == engine.model.n_vocab
        assert engine.choose() == int(np.argmax(logits))


@pytest.mark.parametrize("protocol", ["7", "8"])
def test_tensor_split_sums_through_the_client(
    tmp_path: Path, worker: Worker, protocol: str
) -> None:
    """Without a communicator ggml exchanges the partial sums through the host."""
    pytest.importorskip("gguf", reason="package missing: gguf")
    path = tmp_path / "split.gguf"
    make_llama(path, LlamaShape(2, 256, 4, 4, 512, 256))
    rpc = ",".join(worker("--protocol", protocol, number=n) for n in range(2))
    with exact_engine(path, "xllamacpp", flash_attention="on") as local:
        expected = local.generate([1, 2, 3], 24, GREEDY).finish().tokens
    with exact_engine(path, "xllamacpp", rpc, split_mode="tensor") as far:
        assert far.generate([1, 2, 3], 24, GREEDY).finish().tokens == expected
        assert [report.layers for report in far.report()[:2]] == [2, 2]
