"""What a token costs on the wire, counted and asserted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from longwire.host.engine import Engine
from longwire.host.sampling import Sampling
from longwire.host.workers import LocalWorker
from support.models import GREEDY, N_TOKENS, PROMPT, exact_engine
from support.peers import cpp_server

Worker = Callable[..., str]
Reference = Callable[[str], list[int]]

LARGE_WEIGHTS = 100 << 20
"""gemma's output matrix, its only weight over 10 MiB, is 178 MB."""


def _decode_cost(engine: Engine, workers: int) -> None:
    engine.generate(PROMPT, 3, GREEDY).finish()
    generation = engine.generate(PROMPT, 40, GREEDY, stop_at_end=False)
    tokens = iter(generation)
    # The prefill and the first step send their graphs whole.
    next(tokens), next(tokens), next(tokens)
    before = [d.connection.traffic.snapshot() for d in engine.remote_devices]
    steps = sum(1 for _ in tokens)
    assert steps == 37 and len(before) == workers
    for device, earlier in zip(engine.remote_devices, before, strict=True):
        spent = device.connection.traffic.since(earlier)
        # What one of ours has made goes to the next without a stop here.
        last = device is engine.remote_devices[-1]
        assert spent.round_trips == (steps if last else 0)
        assert spent.graphs == 0
        assert spent.recomputes == steps


@pytest.mark.parametrize("protocol", ["7", "8"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_decode_step_is_one_round_trip(
    model: Path, worker: Worker, protocol: str, workers: int
) -> None:
    rpc = [worker("--protocol", protocol, number=n) for n in range(workers)]
    with exact_engine(model, "xllamacpp", ",".join(rpc)) as engine:
        _decode_cost(engine, workers)


def test_so_it_is_on_a_cpp_server(model: Path) -> None:
    with (
        cpp_server(7) as rpc,
        exact_engine(model, "llama-cpp-python", rpc) as engine,
    ):
        _decode_cost(engine, 1)


def test_a_graph_like_one_before_is_sent_as_a_patch(
    model: Path, worker: Worker
) -> None:
    """The KV cache has grown: a few hundred numbers of 170 kB are others."""
    tokens = [5 + i % 1000 for i in range(1024)]
    with exact_engine(model, "xllamacpp") as alone:
        expected = alone.eval(tokens).tobytes()
    with exact_engine(model, "xllamacpp", worker()) as engine:
        traffic = engine.remote_devices[0].connection.traffic
        engine.eval(tokens[:256])
        before = traffic.snapshot()
        engine.eval(tokens[256:])
        spent = traffic.since(before)
        assert spent.graphs == 0 and spent.patches > 0
        engine.reset()
        assert engine.eval(tokens).tobytes() == expected


@pytest.mark.parametrize(
    ("sampling", "entries"),
    [
        (GREEDY, 1),
        (Sampling(temperature=0.8, seed=7), 41),
        (Sampling(temperature=1.5, top_k=1, seed=7), 2),
        (Sampling(temperature=1.5, top_k=2000, top_p=1.0, seed=7), 2001),
        (Sampling(temperature=1.0, top_k=0, seed=7), None),
        (Sampling(temperature=1.0, top_k=100_000, seed=7), None),
    ],
)
def test_of_a_row_of_logits_comes_what_the_sampler_looks_at(
    model: Path, worker: Worker, sampling: Sampling, entries: int | None
) -> None:
    def tokens(rpc: str) -> tuple[list[int], float]:
        with exact_engine(model, "xllamacpp", rpc) as engine:
            row = 8 + 4 * engine.model.n_vocab
            done = engine.generate(PROMPT, 12, sampling, stop_at_end=False).finish()
            received = done.decode.total().bytes_received / done.decode.tokens
            expected = row if entries is None else 8 + 8 * entries
            assert not rpc or received == expected
            return done.tokens, received

    assert tokens(worker())[0] == tokens("")[0]


def test_a_second_load_takes_all_weights_from_the_cache(
    model: Path, tmp_path: Path, reference: Reference
) -> None:
    with LocalWorker("-t", "1", "-c", str(tmp_path)) as worker:
        first = _load_bytes(model, worker.endpoint, reference)
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        (large,) = [file for file in files if file.stat().st_size > LARGE_WEIGHTS]
        second = _load_bytes(model, worker.endpoint, reference)
        assert second < first / 100

        whole = large.read_bytes()
        large.write_bytes(whole[: len(whole) // 2])
        third = _load_bytes(model, worker.endpoint, reference)
        assert third > second + len(whole) - (1 << 20)
        assert large.read_bytes() == whole


def _load_bytes(model: Path, rpc: str, reference: Reference) -> int:
    """Bytes sent for a load; the model then has to speak right."""
    with exact_engine(model, "xllamacpp", rpc) as engine:
        sent = engine.remote_devices[0].connection.traffic.bytes_sent
        generation = engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False)
        assert generation.finish().tokens == reference("xllamacpp")
    return sent


def test_two_contexts_that_come_and_go_keep_their_graphs_apart(
    model: Path, worker: Worker, reference: Reference
) -> None:
    """A freed buffer of one model must not let the other's graph run stale."""
    endpoint = worker()
    expected = reference("xllamacpp")
    with ExitStack() as stack:
        from longwire.client import remote

        devices = remote.connect(endpoint, engine="xllamacpp")
        stack.callback(remote.close, devices)
        engine = stack.enter_context(_engine_on(model, devices))
        tokens = iter(engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False))
        seen = [next(tokens).id for _ in range(8)]
        with _engine_on(model, devices) as passing:
            passing.eval([2, 5])
        seen += [token.id for token in tokens]
        assert seen == expected


def _engine_on(model: Path, devices: list) -> Engine:  # type: ignore[type-arg]
    return Engine(
        model, rpc=devices, engine="xllamacpp", n_ubatch=128, n_threads=1, exact=True
    )


def test_the_same_two_contexts_never_trip_a_cpp_server(
    model: Path, reference: Reference
) -> None:
    from longwire.client import remote

    expected = reference("llama-cpp-python")
    for protocol in (7, 8):
        with cpp_server(protocol) as endpoint:
            devices = remote.connect(endpoint, engine="xllamacpp")
            with _engine_on(model, devices) as engine:
                generation = engine.generate(PROMPT, N_TOKENS, GREEDY)
                tokens = iter(generation)
                seen = [next(tokens).id for _ in range(8)]
                with _engine_on(model, devices) as passing:
                    passing.eval([2, 5])
                seen += [token.id for token in tokens]
                assert seen == expected
            remote.close(devices)
