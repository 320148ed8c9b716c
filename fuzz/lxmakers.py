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
from longwire.wire.constants import U32_MAX
from longwire.wire.constants import Command as C
from longwire.wire.lx import Have, SetDigest, SupportsOps, Top
from longwire.wire.patches import GraphPatch
from longwire.wire.proof import NONCE_SIZE, PROOF_SIZE
from longwire.wire.spans import TraceRequest
from longwire.wire.tensors import TENSOR_SIZE
from support.tensors import tensor

__all__ = ["LX", "LX_TENSORS", "authenticate", "start"]

Words = npt.NDArray[Any]

_RECORD_WORDS = TENSOR_SIZE // 4
_NAME = 228
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
]

LX_TENSORS: list[Maker] = [*LX, _top, _top, _digest, _digest, _digest, _patch]
"""For a client that holds memory."""
