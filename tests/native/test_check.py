"""The check at load time: it passes what fits, and names what does not."""

from __future__ import annotations

import ctypes as C
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longwire.errors import AbiMismatch, LibraryNotFound, NativeError
from longwire.native import check, profiles
from longwire.native import engine as engine_module
from longwire.native.abi import P
from longwire.native.check import check_profile
from longwire.native.engine import load_engine
from longwire.native.library import Library
from longwire.native.llama import (
    ContextParams,
    ContextParamsMoe,
    LlamaContextParams,
    ModelParams,
    declare_llama,
)
from longwire.native.profiles import LLAMA_CPP_PYTHON, PROFILES, folder_files
from support.ggml import Ggml, open_ggml


class Altered:
    """A library with some functions replaced."""

    def __init__(self, library: Library, **functions: Any) -> None:
        self._library = library
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        if name in self._functions:
            return self._functions[name]
        return getattr(self._library, name)


def refusal(ggml: Ggml, library: Any = None, **changes: Any) -> str:
    """What the check says is different; the rest of the sentence is checked here."""
    profile = replace(ggml.engine.profile, **changes)
    with pytest.raises(AbiMismatch) as caught:
        check_profile(profile, library or ggml.library)
    error = caught.value
    assert error.library == str(ggml.library.path)
    assert str(error).startswith(f"{error.library}: {error.what}. Versions that work:")
    for known in PROFILES:
        assert known.label in str(error)
    return error.what


def other_layout(ggml: Ggml) -> LlamaContextParams:
    """The context parameters that this engine does not have."""
    plain = ggml.engine.profile.context_params is ContextParams
    return ContextParamsMoe if plain else ContextParams


class TestCheck:
    def test_an_installed_engine_passes(self, ggml: Ggml) -> None:
        check_profile(ggml.engine.profile, ggml.library)

    def test_another_api_version(self, ggml: Ggml) -> None:
        found = ggml.engine.profile.api_version
        expected = f"backend API version is {found}, expected 99"
        assert refusal(ggml, api_version=99) == expected

    def test_the_other_layout_of_context_parameters(self, ggml: Ggml) -> None:
        what = refusal(ggml, context_params=other_layout(ggml))
        assert what.startswith("llama_context_params defaults is {")

    def test_a_layout_that_is_far_too_short(self, ggml: Ggml) -> None:
        """The library writes its whole struct, wherever ours ends."""

        class Short(C.Structure):
            _fields_ = [("n_ctx", C.c_uint32)]

        for _ in range(100):
            function = "llama_context_default_params"
            assert check._defaults(ggml.library, function, Short).n_ctx == 512

    def test_another_layout_of_model_parameters(
        self, ggml: Ggml, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Shifted(C.Structure):
            _fields_ = [("new", P), *ModelParams._fields_]

        monkeypatch.setattr(check, "ModelParams", Shifted)
        assert refusal(ggml).startswith("llama_model_params defaults is {")

    @pytest.mark.parametrize(
        ("function", "result", "what"),
        [
            ("ggml_backend_dev_by_name", None, "no CPU device is registered"),
            ("ggml_op_name", b"OTHER", "name of op 100 is OTHER, expected GLU"),
            ("ggml_op_name", None, "name of op 100 is , expected GLU"),
            ("ggml_blck_size", 3, "block of type f32 is (3, 4), expected (1, 4)"),
            ("ggml_type_size", 5, "block of type f32 is (1, 5), expected (1, 4)"),
            ("ggml_init", None, "ggml_init failed"),
            ("ggml_graph_n_nodes", 7, "ggml_cgraph.n_nodes is 3, expected 7"),
            ("ggml_graph_node", 0, "ggml_cgraph.nodes is ["),
            ("ggml_set_name", None, "ggml_tensor.name is b'node_2'"),
            ("ggml_backend_graph_compute", -1, "status of a computed ADD is -1"),
            ("ggml_backend_tensor_get", None, "a computed ADD is [0.0, 0.0, 0.0"),
        ],
    )
    def test_a_function_with_another_result(
        self, ggml: Ggml, function: str, result: Any, what: str
    ) -> None:
        library = Altered(ggml.library, **{function: lambda *_: result})
        assert refusal(ggml, library).startswith(what)

    def test_ops_in_another_order(self, ggml: Ggml) -> None:
        names = {100: b"GLU", 2: b"ADD_ID"}
        library = Altered(ggml.library, ggml_op_name=names.get)
        assert refusal(ggml, library) == "name of op 2 is ADD_ID, expected ADD"

    def test_a_function_that_is_not_there(self, ggml: Ggml) -> None:
        def missing(*_: Any) -> Any:
            raise NativeError("it does not export ggml_view_1d")

        library = Altered(ggml.library, ggml_view_1d=missing)
        assert refusal(ggml, library) == "it does not export ggml_view_1d"

    def test_no_default_parameters(self, ggml: Ggml) -> None:
        library = Altered(ggml.library, address=lambda symbol: None)
        what = refusal(ggml, library)
        assert what == "llama_model_default_params is not exported"


class TestLibrary:
    def test_functions_are_found_once(self, ggml: Ggml) -> None:
        assert ggml.library.ggml_nbytes is ggml.library.ggml_nbytes

    def test_the_last_declaration_holds(self, ggml: Ggml) -> None:
        """A profile that was tried and refused must leave nothing behind."""
        library = Library("again", ggml.library._handles, ggml.library.path)
        for layout in (ContextParams, ContextParamsMoe):
            declare_llama(library, layout)
            function: Any = library.llama_context_default_params
            assert function.restype is layout

    def test_a_name_nobody_declared(self, ggml: Ggml) -> None:
        with pytest.raises(AttributeError, match="ggml_nonsense"):
            ggml.library.ggml_nonsense(1)

    def test_a_symbol_that_is_not_exported(self, ggml: Ggml) -> None:
        library = Library("again", ggml.library._handles, ggml.library.path)
        library.declare({"ggml_nonsense": (None,)})
        assert library.address("ggml_nonsense") is None
        expected = f"{library.path} does not export ggml_nonsense"
        with pytest.raises(NativeError, match=expected):
            library.ggml_nonsense()


class TestLoad:
    def test_once_per_name(self, ggml: Ggml) -> None:
        assert load_engine(ggml.library.name) is ggml.engine

    def test_the_first_profile_that_fits_is_taken(
        self, ggml: Ggml, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = ggml.engine.profile
        candidates = (
            replace(right, name="older", api_version=1),
            replace(right, name="other", context_params=other_layout(ggml)),
            right,
        )
        found = (candidates, ggml.library._handles, ggml.library.path)
        monkeypatch.setattr(engine_module, "locate", lambda engine: found)
        loaded = engine_module._load("a name")
        assert loaded.profile is right
        default = loaded.library.llama_context_default_params()
        assert isinstance(default, right.context_params)

    def test_none_fits(self, ggml: Ggml, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = replace(ggml.engine.profile, api_version=1)
        found = ((wrong, wrong), ggml.library._handles, ggml.library.path)
        monkeypatch.setattr(engine_module, "locate", lambda engine: found)
        with pytest.raises(AbiMismatch, match="expected 1"):
            engine_module._load("a name")

    def test_a_folder(self) -> None:
        installed = open_ggml("llama-cpp-python")
        loaded = load_engine(str(installed.library.path.parent))
        assert loaded.profile is LLAMA_CPP_PYTHON
        # The same library, not a second copy of it.
        address = installed.library.address("ggml_backend_register")
        assert loaded.library.address("ggml_backend_register") == address


class TestNotFound:
    def test_a_folder_without_libraries(self, tmp_path: Path) -> None:
        with pytest.raises(LibraryNotFound) as caught:
            load_engine(str(tmp_path))
        places = [place for place, _ in caught.value.attempts]
        assert places == [str(tmp_path), f"{tmp_path}/lib", f"{tmp_path}/bin"]
        for place in places:
            assert place in str(caught.value)

    def test_neither_a_name_nor_a_folder(self) -> None:
        with pytest.raises(LibraryNotFound) as caught:
            load_engine("lama.cpp")
        expected = "neither a folder nor xllamacpp or llama-cpp-python"
        assert caught.value.attempts == [("lama.cpp", expected)]

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        file = tmp_path / "libllama.so.0"
        file.write_text("not a library")
        with pytest.raises(LibraryNotFound) as caught:
            load_engine(str(tmp_path))
        ((place, reason),) = caught.value.attempts
        assert place == str(file)
        assert reason

    @pytest.mark.parametrize("engine", ["xllamacpp", "llama-cpp-python"])
    def test_an_engine_that_is_not_installed(
        self, engine: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(profiles, "_package_folder", lambda package: None)
        with pytest.raises(LibraryNotFound, match=f"pip install {engine}=="):
            engine_module._load(engine)

    def test_the_linked_name_is_preferred(self, tmp_path: Path) -> None:
        """A copy under another name would be a second registry."""
        (tmp_path / "lib").mkdir()
        for part in ("ggml-base", "ggml", "llama"):
            for ending in ("so", "so.0", "so.0.9"):
                (tmp_path / "lib" / f"lib{part}.{ending}").touch()
        names = [file.name for file in folder_files(tmp_path)]
        assert names == ["libggml-base.so.0", "libggml.so.0", "libllama.so.0"]
