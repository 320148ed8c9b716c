from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longwire.bench import settings as module
from longwire.bench.settings import PAIRS, Plan, Settings
from longwire.errors import UsageError

ALL = [str(pair) for pair in PAIRS]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bench": "encode"}, "no bench 'encode'"),
        ({"bench": "decode"}, "decode needs a model"),
        ({"model": "/nowhere/model.gguf"}, "no model file"),
        ({"cache": True}, "--cache changes loads; hop measures none"),
        ({"models": True}, "--models changes loads; hop measures none"),
        ({"split_mode": "row"}, "layer or tensor"),
        ({"runs": 0}, "start at 1"),
        ({"workers": 0}, "start at 1"),
        ({"n_prompt": 0}, "start at 1"),
        ({"n_tokens": 0}, "start at 1"),
        ({"relay_delay_ms": -1.0}, "above 0"),
        ({"relay_rate_mbit": 0.0}, "above 0"),
        ({"relay_delay_ms": 1.0, "split_mode": "tensor"}, "pass no relay"),
        ({"pairs": ("cpp-rust",)}, "no pairing 'cpp-rust'"),
    ],
)
def test_refuses(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Settings(**{"bench": "hop", **options})


def test_with_peers_all_pairings_share_their_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: Path("libggml-rpc.so.0"))
    plan = Plan.of(Settings("hop"))
    assert [str(pair) for pair in plan.pairs] == ALL
    assert (plan.engine, plan.protocol, plan.note) == ("llama-cpp-python", 7, None)


def test_without_peers_ours_run_alone_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: None)
    plan = Plan.of(Settings("hop"))
    assert [str(pair) for pair in plan.pairs] == ["longwire-longwire"]
    assert (plan.engine, plan.protocol) == ("xllamacpp", 8)
    assert plan.note is not None and "no C++ peers" in plan.note
    with pytest.raises(UsageError, match="nothing to measure.*no C\\+\\+ peers"):
        Plan.of(Settings("hop", pairs=("cpp-cpp",)))


def test_another_engine_has_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "find_cpp_rpc", lambda engine: engine != "xllamacpp" or None
    )
    plan = Plan.of(Settings("hop", engine="xllamacpp"))
    assert [str(pair) for pair in plan.pairs] == ["longwire-longwire"]
    assert (plan.engine, plan.protocol) == ("xllamacpp", 8)
    assert plan.note is not None and "not on xllamacpp" in plan.note


def test_pairs_are_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: Path("libggml-rpc.so.0"))
    plan = Plan.of(Settings("hop", pairs=("cpp-cpp", "longwire-cpp")))
    assert [str(pair) for pair in plan.pairs] == ["cpp-cpp", "longwire-cpp"]


def test_numbers_of_servers_are_compared_with_the_fewest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: Path("libggml-rpc.so.0"))
    names = ("cpp-cpp@4", "cpp-cpp@1", "longwire-longwire@2", "longwire-longwire@3")
    plan = Plan.of(Settings("hop", pairs=names))
    references = {str(pair): str(plan.reference(pair)) for pair in plan.pairs}
    assert references == {
        "cpp-cpp@4": "cpp-cpp@1",
        "cpp-cpp@1": "cpp-cpp@1",
        "longwire-longwire@2": "longwire-longwire@2",
        "longwire-longwire@3": "longwire-longwire@2",
    }
    for wrong in ("cpp-cpp@", "cpp-cpp@0", "cpp-cpp@x", "cpp-rust@2"):
        with pytest.raises(UsageError, match="no pairing"):
            Settings("hop", pairs=(wrong,))


def test_variants_of_ours_are_there_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: None)
    plan = Plan.of(Settings("hop", pairs=("longwire-tls", "longwire-longwire")))
    assert [str(pair) for pair in plan.pairs] == ["longwire-longwire", "longwire-tls"]
    assert {str(plan.reference(p)) for p in plan.pairs} == {"longwire-longwire"}


def test_a_folder_with_the_cpp_backend_has_peers(tmp_path: Path) -> None:
    for name in ("libggml.so.0", "libggml-rpc.so.0"):
        (tmp_path / name).touch()
    plan = Plan.of(Settings("hop", engine=str(tmp_path)))
    assert [str(pair) for pair in plan.pairs] == ALL
    assert (plan.engine, plan.protocol, plan.note) == (str(tmp_path), 8, None)
    (tmp_path / "libggml-rpc.so.0").unlink()
    assert len(Plan.of(Settings("hop", engine=str(tmp_path))).pairs) == 1


def test_sums_through_the_client_are_a_variant_of_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("longwire-fallback", "cpp-fallback@2")
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: Path("libggml-rpc.so.0"))
    plan = Plan.of(Settings("hop", pairs=names))
    assert [(str(pair), pair.servers) for pair in plan.pairs] == [
        ("longwire-fallback", "longwire"),
        ("cpp-fallback@2", "cpp"),
    ]
    # Where there is no C++ backend, its own variant cannot be measured either.
    monkeypatch.setattr(module, "find_cpp_rpc", lambda engine: None)
    plan = Plan.of(Settings("hop", pairs=names))
    assert [str(pair) for pair in plan.pairs] == ["longwire-fallback"]
