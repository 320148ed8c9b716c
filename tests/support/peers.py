"""llama.cpp's own RPC client and server, where they are installed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("LONGWIRE_PEERS", ROOT.parent / "shared" / "peers"))
V8 = PEERS / "v8"


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def v7_libraries() -> Path:
    """The folder with llama.cpp's RPC backend for protocol 7.0.0, or skip."""
    package = _package("llama_cpp")
    if package is None or not (package / "lib" / "libggml-rpc.so.0").is_file():
        pytest.skip("peer missing: llama_cpp built with GGML_RPC=ON (protocol 7.0.0)")
    if not (PEERS / "serve_cpp.py").is_file():
        pytest.skip(f"peer missing: the scripts in {PEERS.name}")
    return package / "lib"


def v8_libraries() -> Path:
    """The folder with llama.cpp's RPC backend for protocol 8.0.0, or skip."""
    if not (V8 / "libggml-rpc.so.0").is_file():
        pytest.skip(f"peer missing: {V8.name} (protocol 8.0.0)")
    return V8


def v8_environment() -> dict[str, str]:
    """What the protocol 8 libraries need on an older glibc."""
    environment = dict(os.environ, LLAMA_CPP_LIB=str(V8 / "libllama.so.0"))
    if tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 38):
        environment["LD_PRELOAD"] = str(V8 / "libisoc23.so")
    return environment


@contextlib.contextmanager
def cpp_server(protocol: int, cache: Path | None = None) -> Iterator[str]:
    """A C++ server on a free loopback port; gives its endpoint."""
    libraries = v7_libraries() if protocol == 7 else v8_libraries()
    environment = v8_environment() if protocol == 8 else dict(os.environ)
    endpoint = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, PEERS / "serve_cpp.py", libraries, endpoint]
    command += ["--threads", "1"]
    if cache is not None:
        command += ["--cache", cache]
    server = subprocess.Popen(
        list(map(str, command)),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(endpoint, server)
        yield endpoint
        assert server.poll() is None, "the C++ server died"
    finally:
        server.kill()
        server.wait()


def cpp_generate(
    protocol: int, model: Path, prompt: str, n: int, endpoints: str, *options: str
) -> list[int]:
    """Greedy tokens through the C++ client; `options` are the script's."""
    if protocol == 7:
        v7_libraries()
        environment = dict(os.environ)
    else:
        v8_libraries()
        if _package("llama_cpp_py_sync") is None:
            pytest.skip("peer missing: llama-cpp-py-sync (protocol 8.0.0 client)")
        environment = v8_environment()
    script = PEERS / f"generate_cpp_v{protocol}.py"
    done = subprocess.run(
        [sys.executable, str(script), str(model), prompt, str(n), endpoints, *options],
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    tokens: list[int] = answer["tokens"]
    return tokens


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _wait_for(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    host, port = endpoint.split(":")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 5).close()
            return
        time.sleep(0.02)
    raise AssertionError(f"the C++ server on {endpoint} did not start")
