"""Each op as ggml builds it passes the check, and computes what it computes here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

from longwire.server.verify.rules import NO_DATA, RULES
from longwire.wire.constants import OP_COUNT, POINTER_OPS
from longwire.wire.dialects import V8
from support.client import Buffer, RawClient
from support.ggml import ENGINES, Ggml, fields, open_ggml
from support.op_cases import CASES
from support.ops import Case, built
from support.tensors import tensor
from support.worker import running_worker

SIZE = 1 << 20

WITHOUT_CASE = {"FLASH_ATTN_BACK"}
"""ggml has no constructor for it any more."""


class Pair(NamedTuple):
    """An engine here, and the same one in a worker with a buffer."""

    ggml: Ggml
    backend: int
    client: RawClient
    buffer: Buffer


@pytest.fixture(scope="module", params=ENGINES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ggml = open_ggml(request.param)
    library = ggml.library
    cpu = library.ggml_backend_dev_by_name(b"CPU")
    backend = library.ggml_backend_dev_init(cpu, None)
    try:
        with (
            running_worker("--engine", request.param) as worker,
            RawClient(worker.endpoint, V8) as client,
        ):
            client.hello()
            yield Pair(ggml, backend, client, client.alloc(SIZE))
    finally:
        library.ggml_backend_free(backend)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_worker_computes_what_the_cpu_computes(case: Case, pair: Pair) -> None:
    ggml, backend, client, buffer = pair
    with built(ggml, case, SIZE) as graph:
        assert any(not NO_DATA[int(fields(node)["op"])] for node in graph.nodes), (
            "nothing to compute"
        )
        expected = graph.compute(backend)
        assert expected != graph.before, "the data shows nothing"
        whole = tensor(1, buffer, ne=(graph.size // 4,))
        client.write(whole, graph.before)
        client.compute(graph.message(buffer.handle, buffer.base))
        assert client.read(whole) == expected


def test_every_op_has_a_rule_and_every_rule_a_case() -> None:
    assert {*RULES, *np.flatnonzero(NO_DATA), *POINTER_OPS} == set(range(OP_COUNT))
    names = {rule.name for rule in RULES.values()}
    cases = {case.op for case in CASES}
    assert names - cases == WITHOUT_CASE


def test_rules_have_the_engine_s_names() -> None:
    library = open_ggml(ENGINES[0]).library
    for op, rule in RULES.items():
        assert library.ggml_op_name(op).decode() == rule.name
