"""What passes on one connection, as messages: for those who look on.

`Trace` takes the bytes of both directions and the time, and gives an event for each
message that is through, with answers matched to their requests. It keeps the heads
of messages, and none of the data that follows them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from longwire.errors import BadFrame, BadRequest, LimitExceeded, ProtocolError
from longwire.wire import messages as m
from longwire.wire.constants import LX_OFFERS, Command
from longwire.wire.describe import Details, describe_answer, describe_request, kept
from longwire.wire.dialects import (
    ANY,
    DIALECTS,
    LX_OFFER,
    V7,
    V8,
    Dialect,
    Shape,
)
from longwire.wire.frames import (
    ANSWER_HEADER,
    REQUEST_HEADER,
    ServerOrder,
    command_name,
)
from longwire.wire.lx import (
    ERROR_BIT,
    KEEP_ALIVE,
    MAX_ANSWER,
    TOP_ENTRY,
    ErrorAnswer,
    LxStartAnswer,
)
from longwire.wire.ops import OP_NAMES

__all__ = ["Answer", "Event", "Request", "Trace", "Undecoded"]

_MOST_OWED = 1 << 16
"""Answers that may be owed at a time; a client waits long before that."""

T = TypeVar("T")
_Reading = Generator[None, None, T]
"""Yields when there are no bytes left, and goes on once more have come."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is through. Times are those the bytes came with."""

    command: int
    begun_s: float
    """Its first byte."""
    ended_s: float
    """Its last byte."""
    size: int
    """With its header."""
    details: Details
    answer: int | None
    """Bytes of the answer that is due, as in `Shape`; None for none."""

    @property
    def name(self) -> str:
        return command_name(self.command)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that is through, and the request that it is for."""

    request: Request
    begun_s: float
    ended_s: float
    size: int
    details: Details
    refused: bool = False
    """LX: it says why a command was not done."""
    keep_alives: int = 0
    """How often the server said before that it is still at work."""

    @property
    def wait_s(self) -> float:
        """From the request's last byte to the answer's first one."""
        return self.begun_s - self.request.ended_s


@dataclass(frozen=True, slots=True)
class Undecoded:
    """What passes from here on, both ways, is not understood; said once."""

    at_s: float
    reason: str


Event = Request | Answer | Undecoded

# Until HELLO is answered nobody knows which: what either dialect allows.
_EITHER = replace(
    V8,
    shapes={
        number: Shape(
            min(shape.least, V7.shapes.get(number, shape).least),
            shape.most,
            shape.answer,
        )
        for number, shape in V8.shapes.items()
    },
)


class _Inlet:
    """The bytes of one direction, for a reader that waits by yielding."""

    def __init__(self) -> None:
        self._data = memoryview(b"")
        self.now_s = 0.0
        """When the newest bytes came."""

    def put(self, now_s: float, data: memoryview) -> None:
        """More bytes; the reader has taken all there were before."""
        self.now_s, self._data = now_s, data

    def begin(self) -> _Reading[float]:
        """Wait for a byte; returns when it came."""
        while not self._data:
            yield
        return self.now_s

    def take(self, size: int) -> _Reading[bytes]:
        taken = bytearray()
        while True:
            part = self._data[: size - len(taken)]
            self._data = self._data[len(part) :]
            taken += part
            if len(taken) == size:
                return bytes(taken)
            yield

    def skip(self, size: int) -> _Reading[None]:
        while True:
            part = min(size, len(self._data))
            self._data = self._data[part:]
            size -= part
            if not size:
                return
            yield


class Trace:
    """Decodes one connection; knows no dialect before the server has named it.

    Never raises for what passes. Bytes have to come in the order in which they
    passed: a request's before those of its answer.
    """

    def __init__(self) -> None:
        self.dialect: Dialect | None = None
        """As HELLO's answer said; with LX once that has started."""
        self.undecoded: str | None = None
        """Why this connection is not understood any more."""
        self._order = ServerOrder(_EITHER)
        self._ops: Sequence[str] = OP_NAMES
        self._owed: deque[Request] = deque()
        self._events: list[Event] = []
        self._up, self._down = _Inlet(), _Inlet()
        self._requests = self._read_requests()
        self._answers = self._read_answers()

    @property
    def owed(self) -> list[str]:
        """The commands whose answers have not come."""
        return [request.name for request in self._owed]

    def from_client(self, now_s: float, data: m.Bytes) -> list[Event]:
        """Bytes went to the server; what they completed."""
        return self._put(self._up, self._requests, now_s, data)

    def from_server(self, now_s: float, data: m.Bytes) -> list[Event]:
        """Bytes went to the client; what they completed."""
        return self._put(self._down, self._answers, now_s, data)

    def _put(
        self, inlet: _Inlet, reader: _Reading[None], now_s: float, data: m.Bytes
    ) -> list[Event]:
        if self.undecoded is not None:
            return []
        inlet.put(now_s, memoryview(data))
        try:
            next(reader)
        except ProtocolError as error:
            self.undecoded = str(error)
            self._events.append(Undecoded(now_s, self.undecoded))
        events, self._events = self._events, []
        return events

    def _read_requests(self) -> _Reading[None]:
        up = self._up
        while True:
            begun_s = yield from up.begin()
            header = yield from up.take(REQUEST_HEADER.size)
            number, length = REQUEST_HEADER.unpack(header)
            shape = self._order.admit(number, length)
            # A request that overtakes HELLO's answer is in a dialect still unknown.
            dialect = self.dialect
            size = kept(number, length)
            head = yield from up.take(size)
            yield from up.skip(length - size)
            details = describe_request(number, head, length, dialect, self._ops)
            size = REQUEST_HEADER.size + length
            request = Request(number, begun_s, up.now_s, size, details, shape.answer)
            self._events.append(request)
            if shape.answer is not None:
                self._owe(request)

    def _owe(self, request: Request) -> None:
        if len(self._owed) >= _MOST_OWED:
            what = "count of answers that are owed"
            raise LimitExceeded(request.name, what, len(self._owed) + 1, _MOST_OWED)
        self._owed.append(request)
        if request.command == Command.LX_START and self.dialect is not None:
            # A client need not wait for the answer to go on in LX.
            self._order.dialect = self.dialect.with_lx()

    def _read_answers(self) -> _Reading[None]:
        down = self._down
        while True:
            begun_s = yield from down.begin()
            size = yield from self._answer_size()
            alive = 0
            while size == KEEP_ALIVE and self._lx:
                alive += 1
                begun_s = yield from down.begin()
                size = yield from self._answer_size()
            if not self._owed:
                raise BadRequest("an answer", "no command is waiting for one")
            request = self._owed[0]
            refused = bool(size & ERROR_BIT) and (
                self._lx or request.command in LX_OFFER
            )
            if refused:
                size &= ~ERROR_BIT
            _check_size(request, size, refused)
            head_size = size if refused else kept(request.command, size, answer=True)
            head = yield from down.take(head_size)
            yield from down.skip(size - head_size)
            self._owed.popleft()
            details = self._learn(request, head, refused)
            size += ANSWER_HEADER.size
            answer = Answer(request, begun_s, down.now_s, size, details, refused, alive)
            self._events.append(answer)

    def _answer_size(self) -> _Reading[int]:
        header = yield from self._down.take(ANSWER_HEADER.size)
        size: int = ANSWER_HEADER.unpack(header)[0]
        return size

    @property
    def _lx(self) -> bool:
        return self.dialect is not None and self.dialect.lx

    def _learn(self, request: Request, head: bytes, refused: bool) -> Details:
        """What an answer says; some of it changes what comes after."""
        if refused:
            error = ErrorAnswer.decode(head)
            return {"error": error.name, "sentence": error.sentence}
        if request.command == Command.HELLO:
            self.dialect = _dialect(m.HelloAnswer.decode(head))
            self._order.dialect = self.dialect
        elif request.command == Command.LX_START and self.dialect is not None:
            self.dialect = self.dialect.with_lx()
            self._ops = LxStartAnswer.decode(head).ops
        return describe_answer(request.command, head)


def _dialect(hello: m.HelloAnswer) -> Dialect:
    dialect = DIALECTS.get(hello.major)
    if dialect is None or hello.minor > dialect.minor:
        version = f"{hello.major}.{hello.minor}.{hello.patch}"
        raise BadRequest("HELLO", f"the server speaks protocol {version}")
    return dialect.offering_lx() if hello.padding in LX_OFFERS else dialect


def _check_size(request: Request, size: int, refused: bool) -> None:
    """Raise for a length that an answer to this request cannot have."""
    least, most = (0, MAX_ANSWER) if refused else _sizes(request)
    if not least <= size <= most:
        expected = f"{least}" if least == most else f"{least} to {most}"
        raise BadFrame(f"{request.name}'s answer", size, expected)


def _sizes(request: Request) -> tuple[int, int]:
    """The least and the most bytes of the answer to a request."""
    command, details = request.command, request.details
    size = request.answer
    if command == Command.GET_TENSOR:
        size = details["size"]
    elif command == Command.GET_TENSOR_2D:
        size = details["size"] * details["n_copies"]
    elif command in (Command.LX_HAVE, Command.LX_SUPPORTS_OPS):
        size = details["count"]
    elif command == Command.LX_TOP:
        return 0, TOP_ENTRY.itemsize * details["k"]
    if size is None or size == ANY:
        return 0, MAX_ANSWER
    return size, size
