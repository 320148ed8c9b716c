"""Loads over real workers: all at once, without what is there, and given up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from longwire.bench.models import LlamaShape, make_llama
from longwire.client.uploader import Delivery, Uploader
from longwire.errors import RemoteError
from longwire.host.engine import Engine
from longwire.host.workers import LocalWorker, local_workers
from longwire.native.model import NativeContext
from support.models import GREEDY, N_TOKENS, PROMPT, exact_engine
from support.peers import cpp_server

Worker = Callable[..., str]
Reference = Callable[[str], list[int]]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("upload")]


def _speaks(engine: Engine) -> list[int]:
    done = engine.generate(PROMPT, N_TOKENS, GREEDY, stop_at_end=False).finish()
    return done.tokens


def _sent(engine: Engine) -> int:
    return sum(d.connection.traffic.bytes_sent for d in engine.remote_devices)


def _held(engine: Engine) -> int:
    """Bytes of weights on the workers."""
    return sum(d.total for d in engine.loaded.deliveries)


def test_two_workers_are_sent_next_to_nothing_twice(
    model: Path, tmp_path: Path, reference: Reference
) -> None:
    with (
        LocalWorker("-t", "1", "-c", str(tmp_path / "a")) as a,
        LocalWorker("-t", "1", "-c", str(tmp_path / "b")) as b,
    ):
        rpc = f"{a.endpoint},{b.endpoint}"
        with exact_engine(model, "xllamacpp", rpc) as engine:
            first, weights = _sent(engine), _held(engine)
            assert first > weights > 200e6
            assert all(d.from_store == 0 for d in engine.loaded.deliveries)
            assert _speaks(engine) == reference("xllamacpp")
        with exact_engine(model, "xllamacpp", rpc) as engine:
            assert all(d.from_store > 0.99 * d.total for d in engine.loaded.deliveries)
            saved = [d.connection.traffic.bytes_saved for d in engine.remote_devices]
            assert sum(saved) == sum(d.from_store for d in engine.loaded.deliveries)
            assert _speaks(engine) == reference("xllamacpp")


def test_what_is_sent_twice_does_not_grow_with_the_model(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package missing: gguf")
    path = tmp_path / "model.gguf"
    make_llama(path, LlamaShape(4, 1024, 8, 8, 2816, 512))
    with LocalWorker("-t", "1", "-c", str(tmp_path / "cache")) as worker:
        loads = [_load(path, worker.endpoint) for _ in range(2)]
    (tokens, weights, sent), (again, _, sent_again) = loads
    assert again == tokens
    assert sent > weights > 200e6
    # Digests, and questions about ops: less than a thousandth of 2 GB.
    assert sent_again < 1 << 20


def _load(path: Path, endpoint: str) -> tuple[list[int], int, int]:
    """Tokens, bytes of weights, and bytes that the load sent."""
    with exact_engine(path, "xllamacpp", endpoint) as engine:
        sent = _sent(engine)
        tokens = engine.generate([1, 2, 3], 8, GREEDY).finish().tokens
        return tokens, _held(engine), sent


def test_progress_ends_with_all_that_each_worker_was_given(
    model: Path, worker: Worker
) -> None:
    shares: list[float] = []
    deliveries: list[Sequence[Delivery]] = []
    here = threading.get_ident()

    def on_progress(share: float) -> None:
        assert threading.get_ident() == here
        shares.append(share)

    rpc = ",".join(worker(number=n) for n in range(2))
    with exact_engine(
        model,
        "xllamacpp",
        rpc,
        on_progress=on_progress,
        on_delivery=deliveries.append,
    ) as engine:
        assert shares[-1] == 1.0 and all(0 <= share <= 1 for share in shares)
        assert list(deliveries[-1]) == engine.loaded.deliveries
        assert [str(d.endpoint) for d in deliveries[-1]] == rpc.split(",")
        assert all(d.done == d.total > 20e6 for d in deliveries[-1])


def test_a_cpp_server_gets_the_same_model(model: Path, reference: Reference) -> None:
    name = "llama-cpp-python"
    with cpp_server(7) as rpc, exact_engine(model, name, rpc) as engine:
        assert _held(engine) > 200e6
        assert _speaks(engine) == reference(name)


def _kill_during(
    monkeypatch: pytest.MonkeyPatch, worker: LocalWorker, after: int
) -> None:
    """Have a worker killed when the load has queued so many weights for it."""
    take, left = Uploader.take, [after]

    def taking(self: Uploader, *arguments: Any) -> None:
        if str(self.connection.endpoint) == worker.endpoint:
            left[0] -= 1
            if left[0] == 0:
                os.killpg(worker.process.pid, signal.SIGKILL)
        take(self, *arguments)

    monkeypatch.setattr(Uploader, "take", taking)


@pytest.mark.parametrize("after", [1, 60])
def test_a_worker_lost_in_a_load_ends_it_with_its_name(
    model: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        _kill_during(monkeypatch, b, after)
        with pytest.raises(RemoteError) as raised:
            exact_engine(model, "xllamacpp", f"{a.endpoint},{b.endpoint}")
        assert raised.value.endpoint == b.endpoint


def test_an_engine_that_resumes_loads_over_the_others(
    model: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    with LocalWorker("-t", "1") as a, LocalWorker("-t", "1") as b:
        _kill_during(monkeypatch, b, 20)
        with exact_engine(
            model,
            "xllamacpp",
            f"{a.endpoint},{b.endpoint}",
            on_failure="resume",
        ) as engine:
            assert [str(d.endpoint) for d in engine.remote_devices] == [a.endpoint]
            assert _speaks(engine) == reference("xllamacpp")


def test_ctrl_c_in_a_load_ends_it(
    model: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupting(share: float) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exact_engine(model, "xllamacpp", worker(), on_progress=interrupting)
    # The worker serves the next one.
    with exact_engine(model, "xllamacpp", worker()) as engine:
        assert _held(engine) > 200e6


def test_no_thread_is_left_before_the_context_is_made(
    model: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, seen = NativeContext.__init__, []

    def making(self: NativeContext, *arguments: Any, **settings: Any) -> None:
        names = [thread.name for thread in threading.enumerate()]
        seen.append([name for name in names if name.startswith("upload")])
        make(self, *arguments, **settings)

    monkeypatch.setattr(NativeContext, "__init__", making)
    exact_engine(model, "xllamacpp", worker()).close()
    assert seen == [[]]


def test_a_split_model_loads_from_all_its_files(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="package missing: gguf")
    whole = tmp_path / "whole.gguf"
    make_llama(whole, LlamaShape(2, 256, 4, 4, 512, 256))
    parts = _split(gguf, whole, tmp_path / "parts")
    cache = str(tmp_path / "cache")
    with local_workers(1, ["-t", "1", "-c", cache]) as (endpoint,):
        for share in (0.0, 1.0):
            with exact_engine(parts[0], "xllamacpp", endpoint) as engine:
                tokens = engine.generate([1, 2, 3], 8, GREEDY).finish().tokens
                (delivery,) = engine.loaded.deliveries
                assert delivery.from_store == pytest.approx(share * delivery.total)
    with exact_engine(whole, "xllamacpp") as engine:
        assert engine.generate([1, 2, 3], 8, GREEDY).finish().tokens == tokens


def _split(gguf: Any, whole: Path, folder: Path) -> list[Path]:
    """The same model in two files, as llama.cpp names them."""
    folder.mkdir()
    reader = gguf.GGUFReader(whole)
    tensors = list(reader.tensors)
    halves = [tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]]
    paths = []
    for number, half in enumerate(halves):
        path = folder / f"model-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if number == 0:
            for field in reader.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    kind = field.types[0]
                    writer.add_key_value(field.name, field.contents(), kind)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(halves))
        writer.add_int32("split.tensors.count", len(tensors))
        for tensor in half:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths
