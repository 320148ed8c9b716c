"""From any bytes to one client's life: mostly in order, and wrong in places."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.lxmakers import LX, LX_TENSORS, authenticate, start
from fuzz.makers import ANYWHERE, WITH_TENSORS, WITHOUT
from fuzz.opgraphs import OpGraph
from fuzz.recording import ENDINGS, Recording, stand_in
from fuzz.source import Source
from fuzz.writer import ROOM, Maker, Message, Writer
from longwire.wire.dialects import LX_OFFER, LX_SHAPES

__all__ = ["record_script"]

_MOST_MESSAGES = 16


def record_script(
    data: bytes,
    op_graphs: Sequence[OpGraph],
    protocol: int | None = None,
    allocating: bool | None = None,
) -> Recording:
    """The recording that `data` stands for.

    A given `protocol` or `allocating` overrules what the bytes say of it.
    """
    source = Source(data)
    wanted = source.pick((8, 7))
    writer = Writer(source, op_graphs, protocol or wanted)
    sizes = [source.pick(ROOM) for _ in range(source.pick((1, 2, 0, 3)))]
    if allocating is not None:
        sizes = (sizes or [ROOM[0]]) if allocating else []
    writer.buffers = [stand_in(i, size) for i, size in enumerate(sizes)]
    greet = bool(sizes) or not source.rarely(16)
    writer.lx = greet and source.rarely(2)
    # Most servers here know no token: the first of it ends the session.
    writer.proves = source.rarely(12)
    ending = source.pick((*ENDINGS[:1] * 12, *ENDINGS))
    body = b""
    for _ in range(_MOST_MESSAGES):
        if not source.left:
            break
        body += writer.framed(_maker(writer)(writer))
    return Recording(writer.protocol, body, sizes, greet, writer.lx, ending)


def _maker(w: Writer) -> Maker:
    source = w.source
    if w.proves and source.rarely(4):
        return authenticate
    if w.lx and source.rarely(2):
        return source.pick(LX_TENSORS if w.buffers else LX)
    # What names a tensor ends a session that has none.
    likely = WITH_TENSORS if w.buffers else WITHOUT
    return source.pick(_ALL if source.rarely(16) else likely)


def _shapeless(w: Writer) -> Message:
    """A command of the right length and of any content."""
    shapes = {**w.dialect.shapes, **LX_OFFER, **LX_SHAPES}
    number = w.source.pick(sorted(shapes))
    return number, w.source.take(min(shapes[number].least, 4096))


_ALL = [*WITHOUT, *WITH_TENSORS, *LX_TENSORS, start, authenticate, *ANYWHERE]
_ALL += [_shapeless] * 4
