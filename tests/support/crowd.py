"""Clients that nobody wants: silent, slow, rude, and never the last time."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType

from longwire.transport.endpoint import Endpoint
from longwire.wire import messages as m
from longwire.wire.constants import Command
from longwire.wire.dialects import V8
from longwire.wire.frames import REQUEST_HEADER
from support.client import Buffer, RawClient
from support.malformed import CASES, Case
from support.requests import Scene, set_tensor

__all__ = ["KINDS", "Crowd"]

_HELLO = REQUEST_HEADER.pack(Command.HELLO, 24) + m.Hello(bytes(24)).encode()
_MALFORMED = [case for case in CASES if V8 in case.dialects]
_LONGEST_S = 60.0
"""For anything that such a client waits for. Most of that is its time in line: where
memory was allocated, the next in line needs a new process."""
_PAUSE_S = 0.2
"""Between two visits of one client; all of them share a process with the test."""

Visit = Callable[["Crowd", RawClient], None]


class Crowd:
    """`each` clients of every kind, a thread each, from now to the end of a `with`.

    Whoever is sent away comes again. A visit that ends in another way than it has to
    is a failure, which the end of the `with` raises.
    """

    def __init__(self, endpoint: Endpoint, foreign: Buffer, each: int) -> None:
        """`foreign` is a live buffer of another client's session."""
        self._endpoint = endpoint
        self._foreign = foreign
        self.visits: Counter[str] = Counter()
        """Those that came to their end, by kind."""
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._cases = itertools.cycle(_MALFORMED)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), name=kind)
            for kind in KINDS
            for _ in range(each)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            assert not self.failures, self.failures[:3]

    def __len__(self) -> int:
        return len(self._threads)

    def next_case(self) -> Case:
        """The next of all malformed messages, over and over."""
        with self._lock:
            return next(self._cases)

    def scene(self, client: RawClient) -> Scene:
        """What a malformed message builds on."""
        return Scene(client, self._foreign)

    def pause(self, seconds: float) -> bool:
        """Wait, but for the end at most; False at the end."""
        return not self._stop.wait(seconds)

    def _run(self, kind: str) -> None:
        visit = KINDS[kind]
        while self.pause(_PAUSE_S):
            try:
                with RawClient(self._endpoint, V8, _LONGEST_S) as client:
                    visit(self, client)
            except Exception as error:
                self.failures.append(f"{kind}: {type(error).__name__}: {error}")
                return
            self.visits[kind] += 1


def _malformed(crowd: Crowd, client: RawClient) -> None:
    case = crowd.next_case()
    if case.greet:
        client.hello()
    request = case.bad(crowd.scene(client))
    length = len(request.body) if request.length is None else request.length
    _send(client, REQUEST_HEADER.pack(request.command, length) + request.body)
    _closed(client, case.name)


def _dribble(crowd: Crowd, client: RawClient) -> None:
    """A byte now and then: the handshake's deadline ends it."""
    for i in range(len(_HELLO) - 1):
        if not crowd.pause(0.2) or not _send(client, _HELLO[i : i + 1]):
            return
    _closed(client, "a dribbled HELLO")


def _half_hello(crowd: Crowd, client: RawClient) -> None:
    _send(client, _HELLO[:17])
    _closed(client, "half a HELLO")


def _silent(crowd: Crowd, client: RawClient) -> None:
    _closed(client, "nothing said")


def _reset(crowd: Crowd, client: RawClient) -> None:
    """Leave in the middle of a message, with a reset, and memory allocated."""
    client.hello()
    request = set_tensor(crowd.scene(client).t, bytes(64))
    client.send(REQUEST_HEADER.pack(request.command, len(request.body)))
    client.send(request.body[:99])
    _leave_hard(client)


def _huge(crowd: Crowd, client: RawClient) -> None:
    """Claim exabytes and send some of them."""
    client.hello()
    _send(client, REQUEST_HEADER.pack(Command.SET_TENSOR, 1 << 62))
    while _send(client, bytes(1 << 16)):
        continue
    _closed(client, "exabytes")


def _stalled(crowd: Crowd, client: RawClient) -> None:
    """Stop within a message."""
    client.hello()
    client.send(REQUEST_HEADER.pack(Command.GET_TENSOR, 312) + bytes(10))
    _closed(client, "a stalled message")


def _endless(crowd: Crowd, client: RawClient) -> None:
    """Come and go, with a HELLO or without one."""
    if crowd.visits["endless"] % 2:
        client.hello()
        _leave_hard(client)


KINDS: dict[str, Visit] = {
    "malformed": _malformed,
    "dribble": _dribble,
    "half a HELLO": _half_hello,
    "silent": _silent,
    "reset": _reset,
    "huge": _huge,
    "stalled": _stalled,
    "endless": _endless,
}


def _send(client: RawClient, data: bytes) -> bool:
    """Send; False if the server has had enough."""
    try:
        client.send(data)
    except ConnectionError:
        return False
    return True


def _closed(client: RawClient, what: str) -> None:
    """The server closes, and says nothing before."""
    try:
        client.expect_closed(_LONGEST_S)
    except TimeoutError:
        raise AssertionError(f"{what}: still open after {_LONGEST_S} s") from None


def _leave_hard(client: RawClient) -> None:
    client.socket.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )
    client.close()
