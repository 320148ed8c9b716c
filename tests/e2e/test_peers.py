"""Both ways with llama.cpp's own client and server, in both protocols."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from longwire.host.workers import ListeningProcess
from support.keys import Keys
from support.models import N_TOKENS, PROMPT, greedy_tokens
from support.peers import (
    cpp_generate,
    cpp_server,
    v7_libraries,
    v8_environment,
    v8_libraries,
)

ENGINES = ("xllamacpp", "llama-cpp-python")

Reference = Callable[[str], list[int]]
Worker = Callable[..., str]


@pytest.fixture(scope="session")
def v8_reference(model: Path) -> list[int]:
    """The exact local run of the protocol 8 peer's own engine."""
    command = [sys.executable, "-m", "longwire", "run", "-m", str(model)]
    command += ["--engine", str(v8_libraries()), "--exact", "--json", "--temp", "0"]
    command += ["-p", PROMPT, "-n", str(N_TOKENS), "--ignore-eos", "-t", "1"]
    done = subprocess.run(
        [*command, "-ub", "128"],
        env=v8_environment(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    tokens: list[int] = json.loads(done.stdout)["tokens"]
    return tokens


@pytest.fixture(scope="module")
def tunnelled(keys: Keys, worker: Worker) -> Iterator[Worker]:
    """Like `worker`: one with TLS and a token, as seen through a tunnel to it."""
    tunnels: dict[str, str] = {}
    with ExitStack() as stack:

        def start(*options: str, number: int = 0) -> str:
            remote = worker(*options, *keys.ours.serving(), number=number)
            if remote not in tunnels:
                arguments = ("tunnel", remote, "-p", "0", *keys.ours.connecting())
                process = ListeningProcess("longwire", *arguments, stderr=None)
                tunnels[remote] = stack.enter_context(process).endpoint
            return tunnels[remote]

        yield start


@pytest.fixture(params=["worker", pytest.param("tunnelled", marks=pytest.mark.slow)])
def ours(request: pytest.FixtureRequest) -> Worker:
    """A worker of ours, bare or behind a tunnel."""
    found: Worker = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("protocol", [7, 8])
def test_cpp_client_on_our_servers(
    model: Path, ours: Worker, reference: Reference, engine: str, protocol: int
) -> None:
    expected = reference(engine)
    options = ("--engine", engine, "--protocol", str(protocol))
    one = ours(*options)
    assert cpp_generate(protocol, model, PROMPT, N_TOKENS, one) == expected
    two = f"{one},{ours(*options, number=1)}"
    assert cpp_generate(protocol, model, PROMPT, N_TOKENS, two) == expected


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("servers", [1, 2])
def test_our_client_on_cpp_servers_of_protocol_7(
    model: Path, reference: Reference, engine: str, servers: int
) -> None:
    v7_libraries()
    with ExitStack() as stack:
        rpc = ",".join(stack.enter_context(cpp_server(7)) for _ in range(servers))
        assert greedy_tokens(model, engine, rpc) == reference("llama-cpp-python")


@pytest.mark.parametrize("servers", [1, 2])
def test_our_client_on_cpp_servers_of_protocol_8(
    model: Path, v8_reference: list[int], servers: int
) -> None:
    with ExitStack() as stack:
        rpc = ",".join(stack.enter_context(cpp_server(8)) for _ in range(servers))
        assert greedy_tokens(model, "xllamacpp", rpc) == v8_reference


@pytest.mark.parametrize("protocol", [7, 8])
def test_one_server_of_ours_and_one_of_theirs(
    model: Path, ours: Worker, reference: Reference, protocol: int
) -> None:
    expected = reference("llama-cpp-python")
    one = ours("--engine", "llama-cpp-python", "--protocol", str(protocol))
    with cpp_server(7) as theirs:
        for rpc in (f"{one},{theirs}", f"{theirs},{one}"):
            assert greedy_tokens(model, "xllamacpp", rpc) == expected
        if protocol == 7:
            both = f"{one},{theirs}"
            assert cpp_generate(7, model, PROMPT, N_TOKENS, both) == expected


@pytest.mark.parametrize("client", ENGINES)
@pytest.mark.parametrize("server", ENGINES)
def test_engines_pair_up(
    model: Path, worker: Worker, reference: Reference, client: str, server: str
) -> None:
    reference(client)
    rpc = worker("--engine", server, "--protocol", "8")
    assert greedy_tokens(model, client, rpc) == reference(server)
