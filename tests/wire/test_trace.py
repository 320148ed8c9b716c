"""What the decoder of passing bytes makes of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longwire.native.compute import op_names
from longwire.native.engine import load_engine
from longwire.wire import messages as m
from longwire.wire import trace as module
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.constants import Command
from longwire.wire.dialects import V7, V8, Dialect
from longwire.wire.frames import ANSWER_HEADER, REQUEST_HEADER
from longwire.wire.graphs import Graph, GraphRecompute
from longwire.wire.links import (
    LinkAccept,
    LinkConnect,
    LinkPart,
    Listening,
    Ticket,
)
from longwire.wire.lx import (
    ERROR_BIT,
    KEEP_ALIVE,
    ErrorAnswer,
    Have,
    LxDevice,
    LxStart,
    LxStartAnswer,
    SetDigest,
    SupportsOps,
    Top,
)
from longwire.wire.ops import OP_NAMES
from longwire.wire.patches import GraphPatch
from longwire.wire.prepared import PrepareSet, SetPrepared
from longwire.wire.spans import TraceAnswer, TraceRequest, WorkSpan
from longwire.wire.tensors import TENSOR, Tensor
from longwire.wire.trace import Answer, Event, Request, Trace, Undecoded

C = Command

W = Tensor(1, 0, 7, (4, 1, 1, 1), (4, 16, 16, 16), name=b"weight").encode()
X = Tensor(2, 0, 7, (4, 1, 1, 1), (4, 16, 16, 16), op=29, name=b"x\xff").encode()
TICKET = Ticket(b"id of a ticket..", b"s" * 32)
OPS = ("NONE", "ADD", "MUL_MAT")


class Case(NamedTuple):
    """A command with its answer, and what is said of both."""

    command: Command
    body: bytes
    details: dict[str, Any]
    answer: bytes | None = None
    answered: dict[str, Any] | None = None


def graph(dialect: Dialect) -> bytes:
    tensors = np.frombuffer(W + X + X, TENSOR).copy()
    tensors["id"] = [1, 2, 3]
    nodes = np.array([2, 3], "<u8")
    uid = 5 if dialect.graph_uid else 0
    return b"".join(Graph(0, uid, nodes, tensors).encode(dialect))


def part(offset: int, size: int) -> dict[str, Any]:
    return {"tensor": "weight", "offset": offset, "size": size}


DEVICE = m.U32.pack(3)
HANDLE = m.U64.pack(0xAB)
WORDS = np.array([4, 5], "<u4")

COMMON = [
    Case(
        C.ALLOC_BUFFER,
        m.AllocBuffer(1, 99).encode(),
        {"device": 1, "size": 99},
        m.AllocBufferAnswer(0xAB, 128).encode(),
        {"buffer": "0xab", "size": 128},
    ),
    Case(C.GET_ALIGNMENT, DEVICE, {"device": 3}, m.U64.pack(64), {"alignment": 64}),
    Case(C.GET_MAX_SIZE, DEVICE, {"device": 3}, m.U64.pack(9), {"max_size": 9}),
    Case(
        C.BUFFER_GET_BASE, HANDLE, {"buffer": "0xab"}, m.U64.pack(16), {"base": "0x10"}
    ),
    Case(C.FREE_BUFFER, HANDLE, {"buffer": "0xab"}),
    Case(
        C.BUFFER_CLEAR,
        m.BufferClear(0xAB, 1).encode(),
        {"buffer": "0xab", "value": 1},
    ),
    Case(C.SET_TENSOR, m.SetTensor(W, 0, 8).encode() + b"12345", part(8, 5)),
    Case(C.SET_TENSOR, m.SetTensor(W, 1, 0).encode(), {**part(0, 0), "cache": True}),
    Case(
        C.SET_TENSOR_HASH,
        m.SetTensorHash(W, 4, 255).encode(),
        {"tensor": "weight", "offset": 4, "hash": "00000000000000ff"},
        b"\1",
        {"done": 1},
    ),
    Case(C.GET_TENSOR, m.GetTensor(W, 4, 300).encode(), part(4, 300), bytes(300), {}),
    Case(C.GET_TENSOR, m.GetTensor(W, 0, 0).encode(), part(0, 0), b"", {}),
    Case(
        C.COPY_TENSOR,
        m.CopyTensor(W, X).encode(),
        {"tensor": "weight", "to": "x\N{REPLACEMENT CHARACTER}"},
        b"\0",
        {"done": 0},
    ),
    Case(
        C.GET_DEVICE_MEMORY,
        DEVICE,
        {"device": 3},
        m.DeviceMemory(1, 2).encode(),
        {"free": 1, "total": 2},
    ),
    Case(C.INIT_TENSOR, W, {"tensor": "weight"}),
    Case(
        C.GET_ALLOC_SIZE,
        m.GetAllocSize(3, X, bytes(2960)).encode(),
        {"device": 3, "tensor": "x\N{REPLACEMENT CHARACTER}", "op": "MUL_MAT"},
        m.U64.pack(7),
        {"size": 7},
    ),
    Case(C.DEVICE_COUNT, b"", {}, m.U32.pack(2), {"count": 2}),
    Case(
        C.MEMSET_TENSOR,
        m.MemsetTensor(W, 1, 2, 3).encode(),
        {**part(1, 2), "value": 3},
    ),
]
ONLY_7 = [
    Case(
        C.GRAPH_COMPUTE,
        graph(V7),
        {"device": 0, "uid": 0, "nodes": 2, "tensors": 3, "ops": {"MUL_MAT": 2}},
    ),
    Case(C.GRAPH_RECOMPUTE, GraphRecompute(3).encode(V7), {"device": 3, "uid": 0}),
]
ROWS = {"offset": 1, "size": 2, "n_copies": 3, "stride": 4}
ONLY_8 = [
    Case(
        C.GRAPH_COMPUTE,
        graph(V8),
        {"device": 0, "uid": 5, "nodes": 2, "tensors": 3, "ops": {"MUL_MAT": 2}},
    ),
    Case(C.GRAPH_RECOMPUTE, GraphRecompute(3, 9).encode(V8), {"device": 3, "uid": 9}),
    Case(
        C.SET_TENSOR_2D,
        m.SetTensor2D(W, 1, 2, 3, 4).encode() + b"123456",
        {"tensor": "weight", **ROWS},
    ),
    Case(
        C.GET_TENSOR_2D,
        m.GetTensor2D(W, 1, 2, 3, 4).encode(),
        {"tensor": "weight", **ROWS},
        bytes(6),
        {},
    ),
    Case(
        C.COMM_INIT,
        m.CommInit(3, 0, 2, 1, bytes(64)).encode(),
        {"device": 3, "rank": 0, "world": 2},
        b"\0",
        {"done": 0},
    ),
    Case(
        C.COMM_ALLREDUCE,
        m.CommAllreduce(3, W).encode(),
        {"tensor": "weight", "device": 3},
    ),
    Case(C.COMM_FREE, DEVICE, {"device": 3}),
]
OFFER = [
    Case(C.LX_AUTH, b"n" * 32, {}, b"N" * 32, {}),
    Case(C.LX_PROVE, b"p" * 32, {}, b"P" * 32, {}),
    Case(
        C.LX_START,
        LxStart(1).encode(),
        {"version": 1},
        LxStartAnswer(1, "an engine", OPS, 1).encode(),
        {"version": 1, "engine": "an engine", "flags": 1},
    ),
]
DEVICE_FACTS = LxDevice(1, 2, 3, "CPU", "a processor")
ONLY_LX = [
    Case(
        C.LX_DEVICE,
        DEVICE,
        {"device": 3},
        DEVICE_FACTS.encode(),
        DEVICE_FACTS._asdict(),
    ),
    Case(
        C.LX_SUPPORTS_OPS,
        SupportsOps(3, (bytes(3256), bytes(3256))).encode(),
        {"device": 3, "count": 2},
        b"\1\0",
        {"yes": 1, "count": 2},
    ),
    Case(C.LX_PING, b"", {}, b"", {}),
    Case(C.LX_TOP, Top(W, 0, 400, 2).encode(), {**part(0, 400), "k": 2}, bytes(16), {}),
    Case(
        C.LX_HAVE,
        Have((bytes(32), b"1" * 32, b"2" * 32)).encode(),
        {"count": 3},
        b"\0\1\1",
        {"yes": 2, "count": 3},
    ),
    Case(
        C.LX_SET_DIGEST,
        SetDigest(W, 0, 16, b"\xab" * 32).encode(),
        {**part(0, 16), "digest": "ab" * 32},
    ),
    Case(
        C.LX_GRAPH_PATCH,
        b"".join(GraphPatch(3, 9, 1, WORDS, WORDS).encode()),
        {"device": 3, "uid": 9, "base": 1, "words": 2},
    ),
    Case(
        C.LX_TRACE,
        TraceRequest(1).encode(),
        {"on": 1},
        TraceAnswer(5, 6, (WorkSpan(1, 2, 3, 4),)).encode(),
        {"spans": 1, "lost": 6},
    ),
    Case(C.LX_LISTEN, b"", {}, Listening(51052, TICKET).encode(), {"port": 51052}),
    Case(
        C.LX_CONNECT,
        LinkConnect(TICKET, 5, 51052, "gpu", b"DER").encode(),
        {"host": "gpu", "port": 51052, "tls": True},
        m.U32.pack(3),
        {"link": 3},
    ),
    Case(C.LX_ACCEPT, LinkAccept(TICKET, 5).encode(), {}, m.U32.pack(4), {"link": 4}),
    Case(C.LX_UNLINK, m.U32.pack(4), {"link": 4}),
    Case(C.LX_SEND, LinkPart(3, W, 0, 8).encode(), {**part(0, 8), "link": 3}),
    Case(C.LX_RECEIVE, LinkPart(3, W, 4, 8).encode(), {**part(4, 8), "link": 3}),
    Case(
        C.LX_COMM_INIT,
        LxCommInit(9, 0, 0, 1, (3, 0), (0,)).encode(),
        {"comm": 9, "rank": 1, "world": 2, "devices": 1},
        b"",
        {},
    ),
    Case(
        C.LX_ALLREDUCE,
        LxAllreduce(9, 1, (W, X)).encode(),
        {"comm": 9, "tensor": "weight", "absent": 1},
    ),
    Case(C.LX_COMM_FREE, m.U32.pack(9), {"comm": 9}),
    Case(
        C.LX_PREPARE_SET,
        PrepareSet(6, W, 4, 8).encode(),
        {**part(4, 8), "number": 6},
    ),
    Case(C.LX_SET_PREPARED, SetPrepared.head([6, 7]) + bytes(16), {"count": 2}),
    # In the server's numbers, the number 29 is one without a name.
    Case(
        C.GRAPH_COMPUTE,
        graph(V8),
        {"device": 0, "uid": 5, "nodes": 2, "tensors": 3, "ops": {"29": 2}},
    ),
]


def hello(dialect: Dialect, padding: int = 0) -> Case:
    answer = m.HelloAnswer(dialect.major, 0, 0, padding)
    said = {"protocol": dialect.version, "lx": bool(padding)}
    return Case(C.HELLO, m.Hello().encode(), {}, answer.encode(), said)


SESSIONS = {
    "7": [hello(V7), *COMMON, *ONLY_7],
    "8": [hello(V8), *COMMON, *ONLY_8],
    "lx": [hello(V8, 1), *OFFER, *COMMON, *ONLY_8[1:], *ONLY_LX],
}
sessions = pytest.mark.parametrize("session", SESSIONS.values(), ids=SESSIONS)

Passing = tuple[bool, bytes]
"""Whether it comes from the client, and the bytes."""


def request(case: Case) -> bytes:
    return REQUEST_HEADER.pack(case.command, len(case.body)) + case.body


def framed(body: bytes, flag: int = 0) -> bytes:
    return ANSWER_HEADER.pack(flag | len(body)) + body


def passing(cases: list[Case]) -> Iterator[Passing]:
    for case in cases:
        yield True, request(case)
        if case.answer is not None:
            yield False, framed(case.answer)


def traced(parts: list[Passing], trace: Trace | None = None) -> list[Event]:
    """Events of bytes that come one after the other, a second apart."""
    trace = trace or Trace()
    events = []
    for now, (upwards, data) in enumerate(parts):
        put = trace.from_client if upwards else trace.from_server
        events += put(float(now), data)
    return events


def check(events: list[Event], session: list[Case]) -> None:
    """All that was said, but for the times."""
    found = iter(events)
    for case in session:
        event = next(found)
        assert isinstance(event, Request), event
        assert (event.command, event.name) == (case.command, case.command.name)
        assert event.details == case.details
        assert event.size == 9 + len(case.body)
        if case.answer is not None:
            answer = next(found)
            assert isinstance(answer, Answer), answer
            assert answer.request is event
            assert answer.details == case.answered
            assert answer.size == 8 + len(case.answer)
            assert (answer.refused, answer.keep_alives) == (False, 0)
    assert not list(found)


@sessions
def test_a_whole_session(session: list[Case]) -> None:
    check(traced(list(passing(session))), session)


def test_the_sessions_have_every_command() -> None:
    for name, dialect in (("7", V7), ("8", V8), ("lx", V8.offering_lx().with_lx())):
        seen = {case.command for case in SESSIONS[name]}
        assert seen == set(dialect.shapes), name


@sessions
def test_byte_by_byte(session: list[Case]) -> None:
    parts = [
        (upwards, data[at : at + 1])
        for upwards, data in passing(session)
        for at in range(len(data))
    ]
    check(traced(parts), session)


@sessions
def test_cut_once_at_every_byte(session: list[Case]) -> None:
    whole = list(passing(session))
    for i, (upwards, data) in enumerate(whole):
        # Each message once, for the sessions are long; behind all that came before.
        trace = Trace()
        before = traced(whole[:i], trace)
        for at in range(1, len(data)):
            again = Trace()
            events = traced(whole[:i], again)
            events += traced([(upwards, data[:at]), (upwards, data[at:])], again)
            assert len(events) == len(before) + 1
            if at > 32 and len(data) > 700:
                break


@sessions
def test_all_requests_before_all_answers(session: list[Case]) -> None:
    """What comes behind HELLO and LX_START need not wait for their answers."""
    # Nobody can know of LX before HELLO is answered.
    first = 1 if session is SESSIONS["lx"] else 0
    greeting, rest = list(passing(session[:first])), session[first:]
    sent = b"".join(request(case) for case in rest)
    answers = b"".join(framed(c.answer) for c in rest if c.answer is not None)
    events = traced([*greeting, (True, sent), (False, answers)])[2 * first :]
    requests = [e for e in events if isinstance(e, Request)]
    found = [e for e in events if isinstance(e, Answer)]
    assert [r.command for r in requests] == [case.command for case in rest]
    assert [a.request for a in found] == [r for r in requests if r.answer is not None]


def test_times() -> None:
    cases = [hello(V8), COMMON[-2]]
    (up, asked), (down, answer) = list(passing(cases))[2:]
    trace = Trace()
    traced(list(passing(cases[:1])), trace)
    pieces = [(up, asked[:3]), (up, asked[3:]), (down, answer[:2]), (down, answer[2:])]
    count, said = traced(pieces, trace)
    assert isinstance(count, Request) and isinstance(said, Answer)
    assert (count.begun_s, count.ended_s) == (0, 1)
    assert (said.begun_s, said.ended_s, said.wait_s) == (2, 3, 1)


def started() -> Trace:
    """A connection that speaks LX."""
    trace = Trace()
    traced(list(passing([hello(V8, 1), OFFER[-1]])), trace)
    assert trace.dialect is not None and trace.dialect.lx
    return trace


ALIVE = (False, ANSWER_HEADER.pack(KEEP_ALIVE))
PING = Case(C.LX_PING, b"", {}, b"", {})


@pytest.mark.parametrize("cut", [1, 8])
def test_keep_alives_are_counted_and_no_answers(cut: int) -> None:
    trace = started()
    alive = [(False, ALIVE[1][:cut]), (False, ALIVE[1][cut:])]
    # One that nobody waits for stands before the next answer.
    parts = [*alive, (True, request(PING)), *alive, ALIVE, (False, framed(b""))]
    asked, answer = traced(parts, trace)
    assert isinstance(asked, Request) and isinstance(answer, Answer)
    assert answer.keep_alives == 3
    assert (asked.ended_s, answer.begun_s) == (2, 6)


def test_an_error_for_an_answer() -> None:
    body = ErrorAnswer(4, "BadRequest", "GET_TENSOR: no").encode()
    case = COMMON[9]
    trace = started()
    parts = [(True, request(case)), (False, framed(body, ERROR_BIT))]
    _, answer = traced([*parts, *passing([PING])], trace)[:2]
    assert isinstance(answer, Answer)
    assert answer.refused and answer.request.command == C.GET_TENSOR
    assert answer.details == {"error": "BadRequest", "sentence": "GET_TENSOR: no"}
    assert trace.undecoded is None and trace.owed == []


def test_a_refused_start_is_no_start() -> None:
    body = ErrorAnswer(6, "Unauthenticated", "a token is needed").encode()
    trace = Trace()
    traced(list(passing([hello(V8, 1)])), trace)
    parts = [(True, request(OFFER[-1])), (False, framed(body, ERROR_BIT))]
    assert isinstance(traced(parts, trace)[-1], Answer)
    assert trace.dialect is not None and not trace.dialect.lx


def test_what_is_owed() -> None:
    trace = started()
    assert traced([(True, request(PING) * 2 + request(COMMON[1]))], trace)
    assert trace.owed == ["LX_PING", "LX_PING", "GET_ALIGNMENT"]
    traced([(False, framed(b""))], trace)
    assert trace.owed == ["LX_PING", "GET_ALIGNMENT"]


def test_a_graph_that_is_no_graph_does_not_end_it() -> None:
    trace = started()
    broken = Case(C.GRAPH_COMPUTE, graph(V8)[:100], {})
    event, *rest = traced(list(passing([broken, PING])), trace)
    assert isinstance(event, Request)
    assert event.details == {
        "problem": "GRAPH_COMPUTE: length 100, expected at least 924"
    }
    assert len(rest) == 2 and trace.undecoded is None


def test_data_is_not_kept() -> None:
    trace = started()
    head = m.SetTensor(W, 0, 0).encode()
    size = 1 << 40
    traced([(True, REQUEST_HEADER.pack(C.SET_TENSOR, size) + head)], trace)
    piece = bytes(1 << 20)
    tracemalloc.start()
    try:
        for _ in range(16):
            assert traced([(True, piece)], trace) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([(True, b"GET / HTTP/1.1\r\n\r\n")], "0x47 is not part of protocol"),
        ([(True, request(COMMON[0]))], "ALLOC_BUFFER: no HELLO"),
        ([(True, REQUEST_HEADER.pack(C.HELLO, 25))], "length 25, expected 24"),
        ([(False, b"SSH-2.0-x")], "no command is waiting"),
        ([*passing([hello(V8)]), (True, request(hello(V8)))], "a second HELLO"),
        ([*passing([hello(V8)]), (True, request(PING))], "0x83 is not part"),
        ([*passing([hello(V8)]), (True, request(OFFER[-1]))], "0x80 is not part"),
        ([*passing([hello(V7)]), (True, request(ONLY_8[2]))], "0x12 is not part"),
        ([*passing([hello(V8)]), ALIVE], "no command is waiting"),
        (
            [*passing([hello(V8)]), (True, request(COMMON[1])), (False, framed(b"1"))],
            "GET_ALIGNMENT's answer: length 1, expected 8",
        ),
        (
            [
                (True, request(hello(V8))),
                (False, framed(m.HelloAnswer(9, 1, 2).encode())),
            ],
            "protocol 9.1.2",
        ),
        (
            [
                (True, request(hello(V8))),
                (False, framed(m.HelloAnswer(8, 1, 2).encode())),
            ],
            "protocol 8.1.2",
        ),
    ],
)
def test_what_it_cannot_decode_it_says_once(parts: list[Passing], reason: str) -> None:
    trace = Trace()
    *_, last = traced(parts, trace)
    assert isinstance(last, Undecoded)
    assert reason in last.reason and trace.undecoded == last.reason
    assert last.at_s == len(parts) - 1
    assert traced([*passing([hello(V8)]), (False, b"more"), (True, b"")], trace) == []


def test_answers_that_never_come_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_OWED", 10)
    *events, last = traced([(True, request(PING) * 11)], started())
    assert len(events) == 11
    assert isinstance(last, Undecoded) and "11 is over 10" in last.reason


chunks = st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), max_size=12)


@settings(deadline=None, max_examples=200)
@given(chunks, st.sampled_from(list(SESSIONS)), st.integers(0, 60), st.data())
def test_nothing_raises(
    garbage: list[Passing], name: str, begun: int, data: st.DataObject
) -> None:
    """Whatever comes, behind a session's first messages, one of them spoiled."""
    parts = list(passing(SESSIONS[name]))[:begun]
    if parts:
        at = data.draw(st.integers(0, len(parts) - 1))
        spoiled = bytearray(parts[at][1])
        spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= data.draw(
            st.integers(0, 255)
        )
        parts[at] = parts[at][0], bytes(spoiled)
    events = traced([*parts, *garbage])
    assert sum(isinstance(event, Undecoded) for event in events) <= 1


@pytest.mark.parametrize("engine", ["xllamacpp"])
def test_names_of_operations_are_the_engines(engine: str) -> None:
    assert op_names(load_engine(engine)) == OP_NAMES
