"""Sequences of messages of hypothesis's choosing, nearly in order."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longwire.native.compute import ComputeDevice
from longwire.server.session import serve_client
from longwire.server.state import SessionState
from longwire.transport.endpoint import Endpoint
from longwire.transport.stream import Stream
from longwire.wire.constants import U32_MAX, U64_MAX
from longwire.wire.dialects import Dialect
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.tensors import Tensor
from support import requests as r
from support.client import Buffer, RawClient
from support.device import PlainDevice
from support.requests import Request, Scene
from support.tensors import Sum, graph
from support.worker import Worker

BUDGET_S = 5.0
"""Per dialect, against the worker; examples that start later pass unseen."""

C = r.C
Make = Callable[[Scene], Request]

numbers = st.sampled_from(
    [0, 1, 2, 4, 8, 31, 32, 33, 63, 64, 65, 256, 1 << 16, 1 << 31, U32_MAX]
)
bigger = numbers | st.sampled_from([1 << 32, 1 << 61, 1 << 63, U64_MAX - 7, U64_MAX])
# Mostly in order, or no sequence would get far.
offsets = st.sampled_from([0, 0, 4, 8, 60]) | bigger
sizes = st.sampled_from([0, 1, 4, 4, 32]) | bigger
fours = st.tuples(numbers, numbers, numbers, numbers)
ids = st.sampled_from([0, 1, 2, 11, 12, 13, 99])
few = st.integers(0, 3)
short = st.binary(max_size=64)

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "id": ids,
    "type": st.integers(0, 44),
    "buffer": st.sampled_from(["own", "foreign", 0, 1]),
    "ne": fours,
    "nb": fours,
    "op": st.integers(0, 101),
    "op_params": st.binary(min_size=64, max_size=64),
    "flags": st.sampled_from([0, 16, -1]),
    "src": st.lists(ids, max_size=10).map(lambda x: (*x, *[0] * (10 - len(x)))),
    "view_src": ids,
    "view_offs": bigger,
    "data": bigger,
    "use_count": st.sampled_from([0, 1, -1, 1 << 30]),
}

# What is drawn may not depend on the handles of a run: it is a recipe for one.


@st.composite
def records(draw: st.DrawFn) -> Callable[[Scene], Tensor]:
    """One of the scene's tensors, with up to three fields out of order."""
    name = draw(st.sampled_from(["a", "b", "c", "t", "end"]))
    chosen = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))
    changes = {field: draw(FIELDS[field]) for field in chosen}
    relative = draw(st.booleans())

    def make(s: Scene) -> Tensor:
        handles = {"own": s.buffer.handle, "foreign": s.foreign.handle}
        fields = dict(changes)
        if "buffer" in fields:
            fields["buffer"] = handles.get(fields["buffer"], fields["buffer"])
        if "data" in fields and relative:
            fields["data"] = (fields["data"] + s.buffer.base) & U64_MAX
        tensor: Tensor = getattr(s, name)
        return tensor._replace(**fields)

    return make


t = records()

graphs = st.builds(
    lambda nodes, others, uid: (
        lambda s: r.compute(
            s, graph([t(s) for t in nodes], [s.a, s.b, *(t(s) for t in others)], uid)
        )
    ),
    *(st.lists(t, min_size=1, max_size=3), st.lists(t, max_size=3), few),
)

REQUESTS: list[st.SearchStrategy[Make]] = [
    st.builds(
        lambda t, data, at: lambda s: r.set_tensor(t(s), data, at), t, short, offsets
    ),
    st.builds(lambda t, at, n: lambda s: r.get_tensor(t(s), at, n), t, offsets, sizes),
    st.builds(lambda t, at, n: lambda s: r.memset(t(s), at, n), t, offsets, sizes),
    st.builds(lambda t, u: lambda s: r.copy(t(s), u(s)), t, t),
    st.builds(lambda t: lambda s: r.init(t(s)), t),
    st.builds(lambda t, u: lambda s: r.alloc_size(t(s), u(s)), t, t),
    st.builds(
        lambda t, data, at, n, stride: (
            lambda s: r.set_rows(t(s), data * n, at, len(data), n, stride)
        ),
        *(t, short, offsets, few, offsets),
    ),
    st.builds(
        lambda t, at, size, n, stride: lambda s: r.get_rows(t(s), at, size, n, stride),
        *(t, offsets, sizes, few | numbers, offsets),
    ),
    st.builds(lambda: r.addition),
    graphs,
    st.builds(
        lambda g, uid: lambda s: r.recompute(s, uid) if uid else g(s), graphs, few
    ),
    st.builds(lambda n: lambda s: r.clear(s.buffer.handle * n), st.integers(0, 1)),
    st.builds(
        lambda command, n: lambda s: r.for_handle(command, n * s.buffer.handle),
        st.sampled_from([C.BUFFER_GET_BASE, C.FREE_BUFFER]),
        st.integers(0, 1),
    ),
    st.builds(
        lambda command, device: lambda s: r.for_device(command, device),
        st.sampled_from([C.GET_ALIGNMENT, C.GET_MAX_SIZE, C.GET_DEVICE_MEMORY]),
        st.sampled_from([0, 0, 0, 1]),
    ),
    st.builds(
        lambda command, body: lambda s: Request(command, body * 37),
        *(st.integers(0, 255), st.binary(max_size=8)),
    ),
]


class Spoil(NamedTuple):
    """How a message's bytes change: one replaced, cut short, or drawn out."""

    kind: int
    at: int
    data: bytes

    def apply(self, whole: bytes) -> bytes:
        # What is simplest to draw should not always hit the command number.
        at = (self.at + 9) % (len(whole) + 1)
        if self.kind == 0:
            return whole[:at] + self.data + whole[at + 1 :]
        return whole[:at] if self.kind == 1 else whole + self.data


# Mostly None, or no sequence would get far.
spoils = st.builds(
    lambda n, spoil: spoil if n == 0 else None,
    st.integers(0, 7),
    st.builds(
        Spoil,
        st.integers(0, 2),
        st.integers(0, 4000),
        st.binary(min_size=1, max_size=9),
    ),
)
Plan = list[tuple[Make, Spoil | None]]
plans = st.lists(st.tuples(st.one_of(REQUESTS), spoils), min_size=1, max_size=12)
computing = st.lists(st.tuples(graphs, st.none()), min_size=1, max_size=4)
quick = settings(deadline=None, suppress_health_check=list(HealthCheck))


def play(client: RawClient, plan: Plan, foreign: Buffer) -> bool:
    """Send it all and leave; False if the server is not done after a second."""
    client.hello()
    scene = Scene(client, foreign)
    assert scene.buffer.handle
    client.socket.settimeout(1)
    # The server may close at any step.
    with suppress(ConnectionError):
        for make, spoil in plan:
            command, body, _ = make(scene)
            message = REQUEST_HEADER.pack(command, len(body)) + body
            client.send(spoil.apply(message) if spoil else message)
            # Whoever never reads would have the server wait.
            while select.select([client.socket], [], [], 0)[0]:
                if not client.socket.recv(1 << 20):
                    return True
        with suppress(OSError):
            client.socket.shutdown(socket.SHUT_WR)
        try:
            while client.socket.recv(1 << 20):
                pass
        except TimeoutError:
            return False
    return True


def test_any_messages_are_answered_or_refused(dialect: Dialect) -> None:
    computed = 0

    def serve(state: SessionState) -> str:
        reason = serve_client(state)
        state.stream.close()
        return reason

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as ex:
        endpoint = Endpoint(*listener.getsockname())

        @settings(quick, max_examples=400)
        @given(plans)
        def check(plan: Plan) -> None:
            nonlocal computed
            device = PlainDevice()
            devices = [cast(ComputeDevice, device)]
            with RawClient(endpoint, dialect) as client:
                stream = Stream(listener.accept()[0])
                state = SessionState(dialect, devices, 1, None, stream)
                reason = ex.submit(serve, state)
                assert play(client, plan, Buffer(1 << 40, 256, 1 << 50))
                assert re.match(
                    "refused: |the client left|the connection broke", reason.result(5)
                )
            state.close()
            assert device.intact()
            assert device.astray == []
            computed += device.computed

        check()
    assert computed


def test_no_messages_harm_the_worker(
    dialect: Dialect,
    worker: Worker,
    neighbours: Callable[[Dialect], Sum],
    connect: Callable[[], RawClient],
) -> None:
    neighbour = neighbours(dialect)
    end = time.monotonic() + BUDGET_S
    ends: list[str] = []

    @settings(quick, max_examples=60)
    @given(plans | computing)
    def check(plan: Plan) -> None:
        if time.monotonic() > end:
            return
        with RawClient(worker.endpoint, dialect) as client:
            if not play(client, plan, neighbour.buffer):
                # A kernel may be sent on a long way.
                os.kill(worker.session_of(client.name), signal.SIGKILL)
            ends.append(worker.end_of(client.name))
        neighbour.check(again=True)

    check()
    assert worker.process.poll() is None
    assert "Traceback" not in worker.log
    Sum(connect()).check()
