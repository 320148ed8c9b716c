"""Weights as ggml sets them while a load is under way, and other commands beside."""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from longwire.client import uploader as module
from longwire.client.upload import Upload, uploading
from longwire.client.uploader import Uploader
from longwire.client.writes import Source
from longwire.native.abi import Usage
from longwire.wire import messages as m
from longwire.wire.constants import HASH_THRESHOLD, Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.lx import KEEPS_DATA, SetDigest
from longwire.wire.tensors import Tensor
from support.ggml import I8
from support.rig import Rig
from support.scripted import PATIENCE_S, having

Make = Callable[..., Rig]

SIZE = 4096


class Loading:
    """A rig with a weight of a model file, which is delivered behind a gate."""

    def __init__(
        self,
        make: Make,
        context: int,
        monkeypatch: pytest.MonkeyPatch,
        dialect: Dialect = V8,
    ) -> None:
        self.gate = threading.Event()
        self.data = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
        digest = blake3(self.data.tobytes()).digest()
        self.rig = make(having(digest), dialect, lx_flags=KEEPS_DATA)
        deliver = module.deliver

        def delivering(*arguments: Any) -> bool:
            assert self.gate.wait(PATIENCE_S)
            return deliver(*arguments)

        monkeypatch.setattr(module, "deliver", delivering)
        self.library = self.rig.ggml.library
        self.tensor = self.rig.ggml.tensor(context, SIZE, type=I8, name="w0")
        self.other = self.rig.ggml.tensor(context, SIZE, type=I8, name="w1")
        self.total: int = self.library.ggml_add(context, self.tensor, self.other)
        self.sources = {b"w0": Source(memoryview(self.data), digest)}

    @contextmanager
    def under_way(self) -> Iterator[int]:
        """The buffer, with a weight that waits for the gate; it opens soon."""
        upload = Upload(self.sources, [self.rig.connection])
        with self.rig.buffer(3 * SIZE, Usage.WEIGHTS) as buffer:
            self.rig.ggml.place(buffer, self.tensor, self.other, self.total)
            with uploading(upload):
                self.set(self.tensor)
                assert upload.under_way == SIZE
                timer = threading.Timer(0.05, self.gate.set)
                timer.start()
                yield buffer
                timer.join()
                upload.finish(lambda: None)

    def set(self, tensor: int) -> None:
        address = self.data.ctypes.data
        self.library.ggml_backend_tensor_set(tensor, address, 0, SIZE)

    @property
    def commands(self) -> list[str]:
        return self.rig.server.commands


@pytest.fixture
def loading(rig: Make, context: int, monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(rig, context, monkeypatch)


def test_a_weight_goes_by_digest(loading: Loading) -> None:
    with loading.under_way():
        pass
    assert loading.commands[:3] == ["LX_HAVE", "LX_SET_DIGEST", "LX_PING"]
    sent = SetDigest.decode(loading.rig.server.requests[1].body)
    assert Tensor.decode(sent.tensor).name == b"w0"
    assert (sent.offset, sent.size) == (0, SIZE)


def _clear(load: Loading, buffer: int) -> None:
    load.library.ggml_backend_buffer_clear(buffer, 0)


def _memset(load: Loading, buffer: int) -> None:
    load.library.ggml_backend_tensor_memset(load.tensor, 0, 0, 4)


def _read(load: Loading, buffer: int) -> None:
    out = (C.c_char * 4)()
    load.library.ggml_backend_tensor_get(load.tensor, C.addressof(out), 0, 4)


def _copy(load: Loading, buffer: int) -> None:
    load.library.ggml_backend_tensor_copy(load.tensor, load.other)


def _graph(load: Loading, buffer: int) -> None:
    with load.rig.ggml.context() as context, load.rig.backend() as backend:
        graph = load.rig.ggml.graph(context, load.total)
        load.library.ggml_backend_graph_compute(backend, graph)


@pytest.mark.parametrize(
    ("act", "command"),
    [
        (_clear, "BUFFER_CLEAR"),
        (_memset, "MEMSET_TENSOR"),
        (_read, "GET_TENSOR"),
        (_copy, "COPY_TENSOR"),
        (_graph, "GRAPH_COMPUTE"),
    ],
)
def test_nothing_overtakes_a_weight_in_its_buffer(
    loading: Loading, act: Callable[[Loading, int], None], command: str
) -> None:
    with loading.under_way() as buffer:
        act(loading, buffer)
        loading.rig.connection.flush()
    assert loading.commands[:3] == ["LX_HAVE", "LX_SET_DIGEST", command]
    assert loading.rig.connection.healthy


def test_a_buffer_that_is_freed_takes_its_weights_along(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Upload(loading.sources, [loading.rig.connection])
    asked, forget = threading.Event(), Uploader.forget

    def have(body: bytes) -> bytes:
        # Until this is answered no weight has begun.
        asked.set()
        assert loading.gate.wait(PATIENCE_S)
        return b"\1"

    def forgetting(uploader: Uploader, buffer: int) -> None:
        forget(uploader, buffer)
        loading.gate.set()

    loading.rig.server.answers[Command.LX_HAVE] = have
    monkeypatch.setattr(Uploader, "forget", forgetting)
    with ExitStack() as stack:
        buffer = stack.enter_context(loading.rig.buffer(2 * SIZE, Usage.WEIGHTS))
        loading.rig.ggml.place(buffer, loading.tensor)
        with uploading(upload):
            assert asked.wait(PATIENCE_S)
            loading.set(loading.tensor)
            stack.close()
            upload.finish(lambda: None)
    assert loading.commands == ["LX_HAVE", "FREE_BUFFER", "LX_PING"]


@pytest.mark.parametrize("dialect", [V7, V8], ids=["v7", "v8"])
def test_strided_writes_are_queued_as_copies(
    rig: Make, context: int, monkeypatch: pytest.MonkeyPatch, dialect: Dialect
) -> None:
    load = Loading(rig, context, monkeypatch, dialect)
    with load.under_way():
        rows = np.arange(64, dtype=np.uint8)
        address = rows.ctypes.data
        load.library.ggml_backend_tensor_set_2d(load.other, address, 0, 8, 2, 16, 32)
        expected = rows[:8].tobytes() + rows[32:40].tobytes()
        rows[:] = 0
    name = Command.SET_TENSOR_2D if dialect is V8 else Command.SET_TENSOR
    written = load.rig.server.of(name)
    head = 328 if dialect is V8 else 305
    assert b"".join(body[head:] for body in written) == expected


def test_outside_of_a_load_large_weights_are_asked_for_alone(
    rig: Make, context: int
) -> None:
    size = HASH_THRESHOLD + 1
    data = np.zeros(size, np.uint8)
    digest = blake3(data.tobytes()).digest()
    r = rig(having(digest), V8, lx_flags=KEEPS_DATA)
    tensor = r.ggml.tensor(context, 2 * size, type=I8)
    with r.buffer(2 * size, Usage.WEIGHTS) as buffer:
        r.ggml.place(buffer, tensor)
        for offset, count in ((0, size), (64, HASH_THRESHOLD)):
            address = data.ctypes.data
            r.ggml.library.ggml_backend_tensor_set(tensor, address, offset, count)
        assert r.settle() == ["LX_HAVE", "LX_SET_DIGEST", "SET_TENSOR"]
        requests = list(r.server.requests)
    sent = SetDigest.decode(requests[1].body)
    assert (sent.offset, sent.size, sent.digest) == (0, size, digest)
    head = m.SetTensor.decode(requests[2].body[:305])
    assert (head.cache_flag, head.offset) == (0, 64)


def test_no_question_goes_to_a_server_that_keeps_nothing(
    rig: Make, context: int
) -> None:
    size = HASH_THRESHOLD + 1
    data = np.zeros(size, np.uint8)
    r = rig({}, V8, lx_flags=0)
    tensor = r.ggml.tensor(context, size, type=I8)
    with r.buffer(size, Usage.WEIGHTS) as buffer:
        r.ggml.place(buffer, tensor)
        r.ggml.library.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, size)
        assert r.settle() == ["SET_TENSOR"]
