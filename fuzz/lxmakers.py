"""Makers of LX's messages, which build on each other more than others do."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.contents import CONTENTS, DIGESTS
from fuzz.makers import nothing, of_device, one_op, sound_graph
from fuzz.recording import NONCE, PROOF_STAND_IN
from fuzz.writer import FIELDS, SMALL, Maker, Message, Writer
from longwire.wire import messages as m
from longwire.wire.collectives import LxAllreduce, LxCommInit
from longwire.wire.constants import U32_MAX
from longwire.wire.constants import Command as C
from longwire.wire.links import LinkAccept, LinkConnect, LinkPart, Ticket
from longwire.wire.lx import Have, SetDigest, SupportsOps, Top
from longwire.wire.patches import GraphPatch
from longwire.wire.prepared import PrepareSet, SetPrepared
from longwire.wire.proof import NONCE_SIZE, PROOF_SIZE
from longwire.wire.spans import TraceRequest
from longwire.wire.tensors import TENSOR_SIZE
from support.tensors import tensor

__all__ = ["LX", "LX_TENSORS", "authenticate", "start"]

Words = npt.NDArray[Any]

_RECORD_WORDS = TENSOR_SIZE // 4
_NAME = 228
_PATIENCES = (0, 0, 1, 20, 60_001)
"""Milliseconds; longer ones would only keep the fuzzer waiting."""
_ENTRIES = (1, 2, 8, 4, 3, 4096)


def _supports(w: Writer) -> Message:
    ops = tuple(one_op(w) for _ in range(1 + w.source.below(3)))
    body = bytearray(SupportsOps(w.device(), ops).encode())
    if w.source.rarely(16):
        body[4:8] = m.U32.pack(w.size() & U32_MAX)
    return C.LX_SUPPORTS_OPS, bytes(body)


def _top(w: Writer) -> Message:
    source = w.source
    k = source.pick(SMALL if source.rarely(4) else _ENTRIES)
    record = w.record()
    return C.LX_TOP, Top(record, *w.part(record), k).encode()


def _trace(w: Writer) -> Message:
    return C.LX_TRACE, TraceRequest(w.source.pick((1, 0, 1, 0, 2, U32_MAX))).encode()


def _digest(w: Writer) -> Message:
    """Ask for data by digest, or use what was asked for."""
    ask = w.source.rarely(4) or not w.asked
    return _have(w) if ask != w.source.rarely(16) else _set_digest(w)


def _have(w: Writer) -> Message:
    source, digests = w.source, []
    for _ in range(source.pick((1, 2, 3, 0, 8))):
        if source.rarely(6):
            digests.append(source.take(32))
            continue
        known = source.below(len(DIGESTS))
        w.asked.append(known)
        digests.append(DIGESTS[known])
    body = bytearray(Have(tuple(digests)).encode())
    if source.rarely(16):
        body[:4] = m.U32.pack(w.size() & U32_MAX)
    return C.LX_HAVE, bytes(body)


def _set_digest(w: Writer) -> Message:
    """Fill a tensor, most often one that is as large as the data."""
    source = w.source
    kind = source.below(len(CONTENTS))
    if w.asked and not source.rarely(8):
        kind = source.pick(w.asked)
    size = len(CONTENTS[kind])
    record = w.record()
    if not source.rarely(4):
        at = source.pick((0, 0, 64, 4))
        record = tensor(1 + source.below(6), w.buffer(), at, (size // 4,)).encode()
        record = w.spoil(record)
    offset = w.offset() if source.rarely(4) else 0
    if source.rarely(6):
        size = w.size() if source.rarely(3) else w.part(record)[1]
    return C.LX_SET_DIGEST, SetDigest(record, offset, size, DIGESTS[kind]).encode()


def _patch(w: Writer) -> Message:
    """A graph sent before: the same, on the way to another, or a little changed."""
    source = w.source
    if not w.sent or source.rarely(4):
        # One more to start from, that no refusal has made both ends forget.
        return sound_graph(w)
    back = source.below(len(w.sent))
    words = w.sent[back]
    way = source.below(4)
    if way == 0:
        positions = np.zeros(0, np.uint32)
        values = positions
    elif way == 1:
        positions, values = _difference(words, w.sent[source.below(len(w.sent))])
    else:
        positions, values = _changes(w, words)
    if not len(positions) or positions.max() < len(words):
        after = words.copy()
        after[positions] = values
        w.sent.appendleft(after)
    if source.rarely(12):
        back = w.size() & U32_MAX
    patch = GraphPatch(w.device(), source.below(4), back, positions, values)
    body = bytearray(b"".join(map(bytes, patch.encode())))
    if source.rarely(24):
        body[16:20] = m.U32.pack(w.size() & U32_MAX)
    return C.LX_GRAPH_PATCH, bytes(body)


def _difference(words: Words, wanted: Words) -> tuple[Words, Words]:
    if len(words) != len(wanted):
        wanted = words
    changed = np.flatnonzero(words != wanted)
    return changed.astype(np.uint32), wanted[changed]


def _changes(w: Writer, words: Words) -> tuple[Words, Words]:
    """Up to three words of the records, or of what is before them."""
    positions, values = [], []
    for _ in range(1 + w.source.below(3)):
        at = _position(w, words)
        old = int(words[at]) if at < len(words) else 0
        positions.append(at)
        values.append(w.other(old, 4))
    return np.array(positions, "<u4"), np.array(values, "<u4")


def _position(w: Writer, words: Words) -> int:
    source = w.source
    if source.rarely(8):
        return source.pick((len(words), w.size() & U32_MAX))
    ahead = 2 + 2 * int(words[0]) if int(words[0]) < len(words) else 0
    records = max(0, len(words) - ahead) // _RECORD_WORDS
    if not records or source.rarely(8):
        return source.below(min(max(ahead, 1), 255))
    # What a name begins with means nothing: such a patch is legal.
    offset, size = (_NAME, 4) if source.rarely(4) else source.pick(FIELDS)
    half = size == 8 and source.rarely(8)
    row = source.below(min(records, 256))
    return ahead + row * _RECORD_WORDS + offset // 4 + half


def _ticket(w: Writer) -> Ticket:
    """One that nobody has: which ids a server gives is not for a recording to know."""
    return Ticket(w.source.take(16), w.source.take(4) * 8)


def _connect(w: Writer) -> Message:
    """To nowhere, or to a port of this machine where nobody knows the ticket."""
    source = w.source
    host = source.pick(("127.0.0.1", "", "127.0.0.1", "no.such.name.invalid", "\0"))
    certificate = source.take(4) if source.rarely(4) else b""
    request = LinkConnect(_ticket(w), source.pick(_PATIENCES), 1, host, certificate)
    body = bytearray(request.encode())
    if source.rarely(8):
        body[54:58] = source.take(4)
    return C.LX_CONNECT, bytes(body)


def _accept(w: Writer) -> Message:
    return C.LX_ACCEPT, LinkAccept(_ticket(w), w.source.pick(_PATIENCES)).encode()


def _link_part(w: Writer) -> Message:
    source = w.source
    record = w.record()
    part = LinkPart(source.below(3), record, *w.part(record))
    return source.pick((C.LX_SEND, C.LX_RECEIVE)), part.encode()


def _sum(w: Writer) -> Message:
    """Make a communicator, sum with it, free it."""
    if not w.sums or w.source.rarely(8):
        return _lx_comm_init(w)
    if w.source.rarely(4):
        w.sums = False
        return C.LX_COMM_FREE, m.U32.pack(_comm(w))
    return _lx_allreduce(w)


def _comm(w: Writer) -> int:
    return w.source.below(4) if w.source.rarely(6) else 1


def _lx_comm_init(w: Writer) -> Message:
    """Most often of this server alone, which needs no link."""
    source = w.source
    w.sums = True
    if not source.rarely(3):
        wire, device = source.pick((0, 1, 2)), w.device()
        return C.LX_COMM_INIT, LxCommInit(1, wire, 0, 0, (0,), (device,)).encode()
    links = tuple(source.below(3) for _ in range(source.pick((1, 1, 1, 2, 0))))
    devices = tuple(w.device() for _ in range(source.pick((1, 1, 2, 3, 0))))
    wire, least = source.pick((0, 0, 1, 2, 3)), source.pick((0, 64, U32_MAX))
    own = source.pick((0, 0, 0, 1))
    request = LxCommInit(_comm(w), wire, least, own, links, devices)
    body = bytearray(request.encode())
    if source.rarely(12):
        body[20:28] = source.take(8)
    return C.LX_COMM_INIT, bytes(body)


def _lx_allreduce(w: Writer) -> Message:
    source = w.source
    record = tensor(1, w.buffer(), 0, (1 + source.below(9), 2)).encode()
    count = source.pick((1, 1, 1, 1, 2, 3))
    records = [w.record() if source.rarely(6) else record for _ in range(count)]
    absent = source.pick((0, 0, 0, 1, 2, U32_MAX))
    return C.LX_ALLREDUCE, LxAllreduce(_comm(w), absent, tuple(records)).encode()


def _prepared(w: Writer) -> Message:
    """Give a number to a write, or do some that have one."""
    source = w.source
    if not w.prepared or source.rarely(3):
        number = source.below(4) if not source.rarely(16) else w.size() & U32_MAX
        record, offset, size = tensor(1, w.buffer(), 0, (4,)).encode(), 0, 16
        if source.rarely(4):
            record = w.record()
            offset, size = w.part(record)
        w.prepared[number] = size
        return C.LX_PREPARE_SET, PrepareSet(number, record, offset, size).encode()
    count = source.pick((1, 1, 1, 1, 2, 3, 0))
    numbers = [source.pick(list(w.prepared)) for _ in range(count)]
    size = min(sum(w.prepared[number] for number in numbers), 4096)
    if source.rarely(8):
        size = source.below(64)
    body = bytearray(SetPrepared.head(numbers) + bytes(size))
    if source.rarely(16):
        body[:4] = m.U32.pack(w.size() & U32_MAX)
    return C.LX_SET_PREPARED, bytes(body)


def _of_number(number: int) -> Maker:
    return lambda w: (number, m.U32.pack(w.source.below(4)))


def start(w: Writer) -> Message:
    return C.LX_START, m.U32.pack(w.source.number())


def authenticate(w: Writer) -> Message:
    """A step of the handshake, in any order."""
    source = w.source
    if source.rarely(2):
        nonce = source.take(NONCE_SIZE) if source.rarely(4) else NONCE
        return C.LX_AUTH, nonce
    proof = source.take(PROOF_SIZE) if source.rarely(4) else PROOF_STAND_IN
    return C.LX_PROVE, proof


LX: list[Maker] = [
    *(of_device(C.LX_DEVICE), nothing(C.LX_PING), _supports, _trace, _have),
    *(_patch, _patch),
    *(nothing(C.LX_LISTEN), _connect, _accept, _of_number(C.LX_UNLINK)),
    *(_lx_comm_init, _of_number(C.LX_COMM_FREE)),
]

LX_TENSORS: list[Maker] = [*LX, _top, _top, _digest, _digest, _digest, _patch]
LX_TENSORS += [_link_part, *[_sum] * 5, *[_prepared] * 4, *[_digest] * 3]
"""For a client that holds memory."""
