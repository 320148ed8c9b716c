"""A recording played to a session in this process, without sockets or ggml.

`serve_client` and its stream are the real ones; the socket is a script, and the
device is plain memory with guards around it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fuzz.contents import own_cache
from fuzz.inline import LedgerQuota
from fuzz.recording import NONCE, PROOF_STAND_IN, Recording
from longwire.native.compute import NativeBuffer
from longwire.server.buffers import BufferTable
from longwire.server.graphs import GraphStore, StoredGraph
from longwire.server.session import serve_client
from longwire.server.state import SessionState
from longwire.transport.stream import Stream
from longwire.wire import messages as m
from longwire.wire.frames import ANSWER_HEADER
from longwire.wire.lx import ERROR_BIT
from longwire.wire.proof import NONCE_SIZE, client_proof
from longwire.wire.trace import Event, Trace
from support.device import PlainDevice

__all__ = ["Answers", "Tap", "rehearse"]

_MEMORY = 1 << 24
"""What a client may allocate: the plain device really fills it."""

_ORDERLY = re.compile("refused: |the client left|the connection broke: scripted")


class Answers:
    """Bytes from a server, taken apart into answers as they come."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.errors = 0
        """How many of them are LX errors."""
        self.rest = b""

    def feed(self, data: bytes) -> None:
        self.rest += data
        while len(self.rest) >= ANSWER_HEADER.size:
            (size,) = ANSWER_HEADER.unpack_from(self.rest)
            if size == (1 << 64) - 1:
                # LX: the answer is still to come.
                self.rest = self.rest[ANSWER_HEADER.size :]
                continue
            end = ANSWER_HEADER.size + (size & ~ERROR_BIT)
            if len(self.rest) < end:
                return
            self.errors += size >= ERROR_BIT
            self.bodies.append(self.rest[ANSWER_HEADER.size : end])
            self.rest = self.rest[end:]


class Tap:
    """Looks on as bytes pass, and counts them for its clock."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.events: list[Event] = []
        self._now_s = 0.0

    def up(self, data: m.Bytes) -> None:
        self._now_s += 1
        self.events += self.trace.from_client(self._now_s, data)

    def down(self, data: m.Bytes) -> None:
        self._now_s += 1
        self.events += self.trace.from_server(self._now_s, data)


class _ScriptedSocket:
    """Gives the opening, then the rest once the opening is answered, then the end."""

    family = -1

    def __init__(
        self, recording: Recording, token: bytes | None, tap: Tap | None
    ) -> None:
        self.answers = Answers()
        self._token, self._tap = token, tap
        self._recording = recording
        self._pending = memoryview(recording.opening)
        self._opened = False
        # Small pieces split headers and bodies at every place.
        self._most = 7 if recording.ending == "pieces" else 1 << 20

    def recv_into(self, target: memoryview) -> int:
        if not self._pending and not self._opened:
            self._opened = True
            if len(self.answers.bodies) >= self._recording.answers:
                self._pending = memoryview(self._recording.rest(self.answers.bodies))
        if not self._pending and self._recording.ending == "reset":
            raise ConnectionResetError("scripted")
        n = min(len(target), len(self._pending), self._most, self._unproven())
        target[:n] = self._pending[:n]
        self._pending = self._pending[n:]
        if self._tap is not None:
            self._tap.up(bytes(target[:n]))
        return n

    def _unproven(self) -> int:
        """How many bytes are ahead of the next proof; one that is due is made."""
        if self._token is None:
            return len(self._pending)
        pending = bytes(self._pending)
        at = pending.find(PROOF_STAND_IN)
        if at == 0:
            nonces = [b for b in self.answers.bodies if len(b) == NONCE_SIZE]
            proof = client_proof(self._token, NONCE, nonces[-1] if nonces else b"")
            pending = proof + pending[len(proof) :]
            self._pending = memoryview(pending)
            at = pending.find(PROOF_STAND_IN)
        return len(pending) if at < 0 else at

    def sendmsg(self, pieces: list[memoryview]) -> int:
        if self._recording.ending == "leave" and self._opened:
            raise BrokenPipeError("scripted")
        sent = b"".join(pieces)
        if self._tap is not None:
            self._tap.down(sent)
        self.answers.feed(sent)
        return len(sent)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None: ...


class _Graphs(GraphStore):
    """Sees that no graph goes which a device may still read."""

    def __init__(self, state: SessionState) -> None:
        super().__init__(state.dialect)
        self._state = state

    def keep(self, device: int, uid: int, graph: StoredGraph) -> None:
        assert not self._state.running, "a graph is replaced that may be running"
        super().keep(device, uid, graph)

    def clear(self) -> None:
        assert not self._state.running, "a graph is cleared that may be running"
        super().clear()

    def drop(self, handle: int) -> None:
        assert not self._state.running, "a graph is dropped that may be running"
        super().drop(handle)


class _Profile:
    label = "plain"


class _Library:
    @staticmethod
    def ggml_op_name(number: int) -> bytes:
        return b"OP%d" % number


class _Engine:
    profile = _Profile
    library = _Library


class _Device(PlainDevice):
    """A plain device with what LX asks of one."""

    type = 0
    description = "memory with guards"
    accelerates = True
    """So that no file is mapped in place of its memory: that is ggml's to do."""
    engine = _Engine

    def free(self, buffer: NativeBuffer) -> None:
        super().free(buffer)
        # As the guards are: whoever still writes there is seen in the end.
        self._memory[buffer.address][:] = 0xEE

    def intact(self) -> bool:
        """Whether nobody wrote around the buffers, or to freed ones."""
        freed = (m for a, m in self._memory.items() if a not in self._live)
        return super().intact() and all((memory == 0xEE).all() for memory in freed)

    def supports_op(self, op: npt.NDArray[Any]) -> bool:
        return bool(np.count_nonzero(op["src"]))


def rehearse(
    recording: Recording,
    tokens: Sequence[bytes] = (),
    token: bytes | None = None,
    tap: Tap | None = None,
) -> Answers:
    """Play a recording, and see that nothing is left of it.

    With `tokens`, of the server's: that nothing has been done for it, unless it
    knows a `token` and has proven it.

    Raises:
        AssertionError: the session did not end in order, left something, or wrote
            around its buffers.
    """
    device = _Device()
    quota = LedgerQuota(_MEMORY)
    scripted = _ScriptedSocket(recording, token, tap)
    state = SessionState(
        dialect=recording.dialect,
        devices=cast(Any, [device]),
        n_threads=1,
        cache=own_cache(),
        stream=Stream(cast(Any, scripted)),
        buffers=BufferTable(quota),
        tokens=tokens,
    )
    state.graphs = _Graphs(state)
    reason = serve_client(state)
    assert _ORDERLY.match(reason), reason
    if tap is not None and reason == "the client left":
        # Who looks on from piece to piece understands what the server does.
        assert tap.trace.undecoded is None, tap.trace.undecoded
    if token is not None:
        assert state.proven or not recording.prove, "a client with a token is out"
    elif tokens:
        assert not state.proven, "a client without a token is in"
        assert not state.buffers.opened and not device.computed, "and was served"
    state.stream.close()
    state.close()
    assert not len(state.buffers) and state.buffers.allocated == 0
    assert quota.ledger.total == 0, f"{quota.ledger.total} bytes are still charged"
    assert device.intact(), "written around a buffer"
    assert device.astray == [], device.astray
    assert scripted.answers.rest == b"", "half an answer"
    return scripted.answers
