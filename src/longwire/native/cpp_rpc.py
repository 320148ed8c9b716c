"""llama.cpp's own RPC client and server, where an engine's libraries have them.

For measurements and tests: nothing of the product calls the C++ backend.
"""

from __future__ import annotations

import ctypes as C
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from longwire.errors import CallFailed, LibraryNotFound
from longwire.native.abi import P, S
from longwire.native.compute import select_devices
from longwire.native.engine import NativeEngine
from longwire.native.library import Library, Signature
from longwire.native.profiles import folder_files

__all__ = ["CPP_ENGINE", "cpp_devices", "find_cpp_rpc", "serve_cpp"]

CPP_ENGINE = "llama-cpp-python"
"""The engine whose package may hold the C++ backend."""

_FILE = "libggml-rpc.so.0"

_FUNCTIONS: Mapping[str, Signature] = {
    # ggml-rpc.h
    "ggml_backend_rpc_add_server": (P, C.c_char_p),
    "ggml_backend_rpc_start_server": (None, C.c_char_p, C.c_char_p, S, S, P),
    # ggml-backend.h
    "ggml_backend_reg_dev_count": (S, P),
    "ggml_backend_reg_dev_get": (P, P, S),
}


def find_cpp_rpc(engine: str = CPP_ENGINE) -> Path | None:
    """The C++ backend that comes with an engine, or with none; loads nothing.

    An engine that is a folder of llama.cpp's libraries may have it, too.
    """
    if engine != CPP_ENGINE:
        libraries = folder_files(Path(engine))
        folder = libraries[-1].parent if libraries else Path(engine)
    else:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent / "lib"
    file = folder / _FILE
    return file if file.is_file() else None


def cpp_devices(engine: NativeEngine, endpoints: Sequence[str]) -> list[int]:
    """Addresses of the devices that the C++ client makes of servers.

    They go to `Engine(native_devices=...)`. A server that fails later makes
    the C++ client abort the process.

    Raises:
        LibraryNotFound: the engine comes without the C++ backend.
        CallFailed: a server cannot be reached, or speaks another protocol.
    """
    library = _open(engine)
    devices: list[int] = []
    for endpoint in endpoints:
        registry = library.ggml_backend_rpc_add_server(endpoint.encode())
        if not registry:
            raise CallFailed("ggml_backend_rpc_add_server", f"no device at {endpoint}")
        for i in range(library.ggml_backend_reg_dev_count(registry)):
            devices.append(library.ggml_backend_reg_dev_get(registry, i))
    return devices


def serve_cpp(
    engine: NativeEngine, endpoint: str, n_threads: int, cache_dir: str | None
) -> None:
    """Run the C++ server on what `longwire serve` would serve by default.

    Does not return unless the endpoint cannot be bound. One client at a time.

    Raises:
        LibraryNotFound: the engine comes without the C++ backend.
    """
    addresses = [device.address for device in select_devices(engine, [])]
    _open(engine).ggml_backend_rpc_start_server(
        endpoint.encode(),
        cache_dir.encode() if cache_dir else None,
        n_threads,
        len(addresses),
        (P * len(addresses))(*addresses),
    )


def _open(engine: NativeEngine) -> Library:
    """The C++ backend that belongs to the engine's own libraries.

    It finds ggml by soname, so it shares the registry that is loaded already.
    """
    path = engine.library.path.parent / _FILE
    try:
        handle = C.CDLL(str(path), mode=C.RTLD_LOCAL)
    except OSError as error:
        raise LibraryNotFound(engine.library.name, [(str(path), str(error))]) from error
    library = Library("ggml-rpc", [handle], path)
    library.declare(_FUNCTIONS)
    return library
