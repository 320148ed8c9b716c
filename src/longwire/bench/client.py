"""One measurement in a process of its own: `python -m longwire.bench.client JOB`.

A fresh process each time, because the C++ client aborts when a server fails,
and because ggml never forgets a device. Host and engine are the same for both
clients, so that only the way to the server differs.
"""

from __future__ import annotations

import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from longwire.client import remote
from longwire.client.credentials import Credentials
from longwire.client.device import RemoteDevice
from longwire.client.traffic import Traffic
from longwire.errors import LongwireError
from longwire.host.engine import Engine
from longwire.models.gguf import gguf_tensors
from longwire.native.cpp_rpc import cpp_devices
from longwire.native.engine import load_engine

__all__ = ["Job", "Measurement", "main", "perform"]

_WARM_UP = 8
"""Decode steps before those that count: the first one builds the graph."""

_HOP_ROUNDS = 10
"""How often hop starts anew: more steps in a row would make llama.cpp rebuild."""

_CTX_STEP = 256
"""llama.cpp rounds contexts up to this."""

_SEED = 1

_NO_COMMUNICATOR = "GGML_RPC_NO_COMM"


@dataclass(frozen=True, slots=True)
class Job:
    """One measurement as one process does it."""

    bench: str
    client: str
    """"longwire", "cpp", or "local" for no server at all."""
    endpoints: list[str]
    model: str
    engine: str
    threads: int
    n_prompt: int
    n_tokens: int
    ubatch: int
    settle_s: float
    tls_ca: list[str] = field(default_factory=list)
    """Per endpoint the CA of its certificate; empty for servers without TLS."""
    split_mode: str = "layer"
    fallback: bool = False
    """Have ggml sum through this process."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Job:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one job found out."""

    value: float
    """In the bench's unit."""
    tokens: list[int]
    """Greedy ones: the same for all pairings, or the speed is of something else."""
    engine: str
    wire: dict[str, float] | None
    """Traffic per token or per load; only Longwire's client knows."""
    index_s: float = 0.0
    """What of a load went into the model's index, which is made once."""
    received: int | None = None
    """Bytes that reached the servers, by their own count, where they keep one."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Measurement:
        return cls(**json.loads(text))


class _Wire:
    """Counts the traffic of Longwire's connections since `start`."""

    def __init__(self, devices: Sequence[RemoteDevice]) -> None:
        self._connections = {device.connection for device in devices}
        self._before = Traffic()

    def start(self) -> None:
        self._before = self._total()

    def per(self, count: int) -> dict[str, float] | None:
        """The traffic since `start`, divided by a count."""
        if not self._connections:
            return None
        spent = asdict(self._total().since(self._before))
        return {name: value / count for name, value in spent.items()}

    def _total(self) -> Traffic:
        total = Traffic()
        for connection in self._connections:
            total = total.plus(connection.traffic)
        return total


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A job with its model in place."""

    job: Job
    engine: Engine
    wire: _Wire
    load_s: float

    def prompt(self) -> list[int]:
        """Random tokens, the same for the same model and length."""
        draw = random.Random(_SEED)
        n_vocab = self.engine.model.n_vocab
        return [draw.randrange(n_vocab) for _ in range(self.job.n_prompt)]

    def settle(self) -> None:
        """Let the servers come to rest after the load."""
        time.sleep(self.job.settle_s)

    def found(self, value: float, tokens: list[int], count: int) -> Measurement:
        label = self.engine.model.engine.profile.label
        wire, index_s = self.wire.per(count), self.engine.loaded.index_s
        return Measurement(value, tokens, label, wire, index_s)


def perform(job: Job) -> Measurement:
    """Load the model over the job's servers and measure.

    Raises:
        LongwireError: a server or the engine failed. The C++ client has no
            such thing: it aborts the process.
    """
    if job.fallback:
        # Both clients look for it; llama.cpp's when a context is made.
        os.environ[_NO_COMMUNICATOR] = "1"
    native = load_engine(job.engine)
    remote_devices: list[RemoteDevice] = []
    addresses: list[int] = []
    if job.client == "longwire":
        # Each server made a CA of its own.
        authorities: list[str | None] = [*job.tls_ca]
        authorities = authorities or [None] * len(job.endpoints)
        for endpoint, ca in zip(job.endpoints, authorities, strict=True):
            credentials = Credentials.load(tls_ca=ca)
            remote_devices += remote.connect(
                endpoint, engine=job.engine, credentials=credentials
            )
    elif job.client == "cpp":
        addresses = cpp_devices(native, job.endpoints)
    wire = _Wire(remote_devices)
    wire.start()
    started = time.perf_counter()
    with _load(job, remote_devices, addresses) as engine:
        load_s = time.perf_counter() - started
        return _MEASURES[job.bench](_Loaded(job, engine, wire, load_s))


def _load(job: Job, remote_devices: list[RemoteDevice], addresses: list[int]) -> Engine:
    room = job.n_prompt + _WARM_UP + job.n_tokens + 1
    remote_names = [device.name for device in remote_devices]
    tensors = job.split_mode == "tensor"
    return Engine(
        job.model,
        rpc=remote_devices,
        engine=job.engine,
        # Next to servers, a GPU of this machine would do part of their work.
        devices=None if job.client == "local" else remote_names,
        native_devices=addresses,
        split_mode=job.split_mode if len(job.endpoints) > 1 else "layer",
        tensor_split=[] if tensors else _shares(job),
        # A split by tensors is on it, and what is compared with one must be.
        flash_attention="on" if tensors else "auto",
        n_ctx=-(-room // _CTX_STEP) * _CTX_STEP,
        n_ubatch=job.ubatch,
        n_threads=job.threads,
        exact=True,
    )


def _shares(job: Job) -> list[float]:
    """As many layers for each server, whatever free memory they report.

    llama.cpp counts the output as one more layer; it is the last server's.
    """
    count = len(job.endpoints)
    if count < 2:
        return []
    tensors = gguf_tensors(load_engine(job.engine), Path(job.model))
    blocks = {t.name.split(".")[1] for t in tensors if t.name.startswith("blk.")}
    shares = [len(blocks) / count] * count
    shares[-1] += 1
    return shares


def _decode(loaded: _Loaded) -> Measurement:
    loaded.settle()
    times, tokens = _steps(loaded)
    return loaded.found(1 / statistics.median(times), tokens, len(tokens))


def _hop(loaded: _Loaded) -> Measurement:
    loaded.settle()
    times: list[float] = []
    # Its steps are so short that some hundred could all fall into one bad moment.
    for _ in range(_HOP_ROUNDS):
        loaded.engine.reset()
        more, tokens = _steps(loaded)
        times += more
    return loaded.found(statistics.median(times) * 1e6, tokens, len(tokens))


def _steps(loaded: _Loaded) -> tuple[list[float], list[int]]:
    """The times of decode steps after a prompt, and the tokens."""
    engine = loaded.engine
    engine.advance(loaded.prompt(), 1)
    for _ in range(_WARM_UP):
        engine.advance([engine.choose()], 1)
    loaded.wire.start()
    times, tokens = [], []
    for _ in range(loaded.job.n_tokens):
        token = engine.choose()
        started = time.perf_counter()
        engine.advance([token], 1)
        times.append(time.perf_counter() - started)
        tokens.append(token)
    return times, tokens


def _prefill(loaded: _Loaded) -> Measurement:
    engine, prompt = loaded.engine, loaded.prompt()
    loaded.settle()
    # The first one builds the graphs and touches every weight.
    engine.eval(prompt)
    engine.reset()
    loaded.wire.start()
    started = time.perf_counter()
    engine.eval(prompt)
    seconds = time.perf_counter() - started
    return loaded.found(len(prompt) / seconds, [engine.choose()], len(prompt))


def _loading(loaded: _Loaded) -> Measurement:
    # The context asks every worker for buffers, so the time of both together
    # ends when the last weight has arrived.
    value = loaded.engine.model.size / 1e6 / loaded.load_s
    measured = loaded.found(value, [], 1)
    loaded.engine.eval(loaded.prompt())
    measured.tokens.append(loaded.engine.choose())
    return measured


_MEASURES: dict[str, Callable[[_Loaded], Measurement]] = {
    "decode": _decode,
    "prefill": _prefill,
    "load": _loading,
    "hop": _hop,
}


def main() -> int:
    """Print the measurement as one line of JSON, or the reason on stderr."""
    # An abort prints a page of addresses otherwise, and its reason is lost.
    os.environ["GGML_NO_BACKTRACE"] = "1"
    logging.getLogger("longwire.engine").setLevel(logging.ERROR)
    try:
        print(perform(Job.decode(sys.argv[1])).encode())
    except LongwireError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
