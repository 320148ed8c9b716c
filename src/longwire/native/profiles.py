"""Engine profiles: which library, which build, which layouts, where to look."""

from __future__ import annotations

import ctypes as C
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longwire.errors import AbiMismatch, LibraryNotFound
from longwire.native.abi import BufferType2, BufferType3
from longwire.native.llama import (
    ContextParams,
    ContextParamsMoe,
    LlamaContextParams,
)

__all__ = ["DEFAULT_ENGINE", "PROFILES", "Profile", "locate"]

DEFAULT_ENGINE = "xllamacpp"


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known about one engine build, before it is loaded."""

    name: str
    version: str
    api_version: int
    buffer_type: type[BufferType2] | type[BufferType3]
    context_params: LlamaContextParams

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"


XLLAMACPP = Profile(
    name="xllamacpp",
    version="2026.10.11549",
    api_version=3,
    buffer_type=BufferType3,
    context_params=ContextParamsMoe,
)

LLAMA_CPP_PYTHON = Profile(
    name="llama-cpp-python",
    version="0.3.36",
    api_version=2,
    buffer_type=BufferType2,
    context_params=ContextParams,
)

B11434 = Profile(
    name="llama.cpp",
    version="b11434",
    api_version=3,
    buffer_type=BufferType3,
    context_params=ContextParams,
)

PROFILES = (XLLAMACPP, LLAMA_CPP_PYTHON, B11434)

# Load order matters: each library finds the ones before it by soname.
_PARTS = ("ggml-base", "ggml-cpu", "ggml", "llama")


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _xllamacpp_files() -> list[Path]:
    folder = _package_folder("xllamacpp")
    return sorted(folder.glob("xllamacpp*.so")) if folder else []


def _llama_cpp_python_files() -> list[Path]:
    folder = _package_folder("llama_cpp")
    return folder_files(folder / "lib") if folder else []


def _places(folder: Path) -> list[Path]:
    """Where a build folder may have its libraries."""
    return [folder, folder / "lib", folder / "bin"]


def folder_files(folder: Path) -> list[Path]:
    """The engine's libraries in a llama.cpp build folder, in load order.

    The name with `.0` comes first: it is what libllama itself links to, and a
    copy under another name would be a second registry.
    """
    found = []
    for part in _PARTS:
        names = [f"lib{part}.so.0", f"lib{part}.so", f"lib{part}.dylib", f"{part}.dll"]
        for place in _places(folder):
            hits = [place / name for name in names if (place / name).is_file()]
            if hits:
                found.append(hits[0])
                break
    return found


_FINDERS: dict[str, tuple[Profile, str, Callable[[], list[Path]]]] = {
    "xllamacpp": (XLLAMACPP, "pip install xllamacpp==2026.10.11549", _xllamacpp_files),
    "llama-cpp-python": (
        LLAMA_CPP_PYTHON,
        "pip install llama-cpp-python==0.3.36",
        _llama_cpp_python_files,
    ),
}


def locate(engine: str) -> tuple[tuple[Profile, ...], list[C.CDLL], Path]:
    """Open the libraries of an engine given by name or by folder.

    Returns the profiles it may be, the open handles, and the main library.

    Raises:
        LibraryNotFound: every place that was tried, with the reason.
    """
    if engine in _FINDERS:
        profile, remedy, finder = _FINDERS[engine]
        candidates: tuple[Profile, ...] = (profile,)
        files = finder()
        attempts = [(engine, f"not installed; {remedy}")]
    else:
        candidates = PROFILES
        files = folder_files(Path(engine))
        attempts = [(str(p), "no libllama, no libggml") for p in _places(Path(engine))]
        if not Path(engine).is_dir():
            names = " or ".join(_FINDERS)
            attempts = [(engine, f"neither a folder nor {names}")]
    if not files:
        raise LibraryNotFound(engine, attempts)
    handles = []
    for file in files:
        try:
            # Local: two engines in one process must not see each other's symbols.
            handles.append(C.CDLL(str(file), mode=C.RTLD_LOCAL))
        except OSError as error:
            raise LibraryNotFound(engine, [(str(file), str(error))]) from error
    return candidates, handles, files[-1]


def supported() -> str:
    """The builds that work, for error messages."""
    return ", ".join(profile.label for profile in PROFILES)


def mismatch(path: Path, what: str) -> AbiMismatch:
    """The one error for a library that is not what its profile says."""
    return AbiMismatch(str(path), what, supported())
