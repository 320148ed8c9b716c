from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from longwire.errors import UsageError
from longwire.models.gguf import gguf_head, gguf_tensors
from longwire.native.engine import NativeEngine, load_engine
from support.gguf import gguf_bytes, make_gguf

TENSORS = {"token_embd.weight": b"\x01" * 100, "empty": b"", "größe": bytes(range(64))}


@pytest.fixture(params=["xllamacpp", "llama-cpp-python"])
def engine(request: pytest.FixtureRequest) -> NativeEngine:
    if request.param == "llama-cpp-python":
        pytest.importorskip("llama_cpp", reason="engine missing: llama-cpp-python")
    return load_engine(request.param)


def test_tensors_are_where_the_file_has_them(
    engine: NativeEngine, tmp_path: Path
) -> None:
    path = make_gguf(tmp_path / "größe.gguf", TENSORS)
    content = path.read_bytes()
    found = gguf_tensors(engine, path)
    assert [t.name for t in found] == list(TENSORS)
    for t in found:
        assert content[t.offset : t.offset + t.size] == TENSORS[t.name]


def test_a_file_without_tensors(engine: NativeEngine, tmp_path: Path) -> None:
    assert gguf_tensors(engine, make_gguf(tmp_path / "vocabulary.gguf", {})) == []


@pytest.mark.parametrize("size", [0, 3, 4, 8, 24, 50, 100, 170])
def test_a_file_that_ends_too_early(
    engine: NativeEngine, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(gguf_bytes(TENSORS)[:size])
    with pytest.raises(UsageError, match="short.gguf"):
        gguf_tensors(engine, path)


def test_data_that_is_not_all_there(engine: NativeEngine, tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(gguf_bytes(TENSORS)[:-33])
    with pytest.raises(UsageError, match="not all there: größe ends at"):
        gguf_tensors(engine, path)


@pytest.mark.parametrize(
    "content",
    [
        b"GGML" + gguf_bytes(TENSORS)[4:],
        gguf_bytes(TENSORS, count=-1),
        gguf_bytes(TENSORS, count=1 << 62),
        b"\xff" * 4096,
        bytes(4096),
    ],
)
def test_what_is_no_gguf(engine: NativeEngine, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="cannot be read as GGUF: ."):
        gguf_tensors(engine, path)


def test_any_spoilt_byte_is_an_error_or_a_place_inside_the_file(
    engine: NativeEngine, tmp_path: Path
) -> None:
    whole = gguf_bytes(TENSORS)
    path = tmp_path / "spoilt.gguf"
    head = len(whole) - 128 - 64
    for at in range(head):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                found = gguf_tensors(engine, path)
            except UsageError:
                continue
            assert all(t.offset + t.size <= len(whole) for t in found)


def test_what_is_not_a_file(engine: NativeEngine, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(UsageError, match="is no file"):
            gguf_tensors(engine, path)
    with pytest.raises(UsageError, match="No such file"):
        gguf_tensors(engine, tmp_path / "nowhere.gguf")


def test_a_head_has_values_and_types(engine: NativeEngine, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is missing")
    path = tmp_path / "head.gguf"
    writer = gguf.GGUFWriter(path, "größe")
    writer.add_uint32("whole", 7)
    writer.add_int64("far", -(1 << 40))
    writer.add_float32("real", 0.5)
    writer.add_bool("true", True)
    writer.add_array("heads", [4, 8])
    writer.add_array("reals", [0.5])
    writer.add_array("texts", ["a", "b"])
    writer.add_tensor("f32", np.zeros(32, np.float32))
    writer.add_tensor("f16", np.zeros(32, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    head = gguf_head(engine, path)
    values = {"whole": 7, "far": -(1 << 40), "real": 0.5, "true": True, "heads": [4, 8]}
    assert head.values == {"general.architecture": "größe", **values}
    assert head.types == {"f32": 0, "f16": 1}


def test_a_head_that_is_none(engine: NativeEngine, tmp_path: Path) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(gguf_bytes(TENSORS)[:50])
    with pytest.raises(UsageError, match="short.gguf cannot be read as GGUF"):
        gguf_head(engine, path)
