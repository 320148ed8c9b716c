"""Weights that need not travel: asked for by digest, and filled in from files.

Where a device computes on the host's memory nothing is copied either: the tensor
gets a mapping of the file, which all sessions on the same model share until one
of them writes to it (`overlays`).
"""

from __future__ import annotations

from longwire.errors import BadRequest
from longwire.native.memory import address_of
from longwire.server.state import Pieces, SessionState
from longwire.server.store import Data
from longwire.server.tensors import CheckedTensor
from longwire.wire import messages as m
from longwire.wire.lx import Have, SetDigest

__all__ = ["have", "keep", "set_digest", "set_tensor_hash"]

_LEAST_MAPPED = 64 << 10
"""Less than this is copied faster than mapped."""


def have(s: SessionState, body: memoryview, length: int) -> Pieces:
    """LX_HAVE."""
    found = s.store.pin(Have.decode(body).digests)
    s.served.cache_misses += found.count(False)
    return [bytes(found)]


def set_digest(s: SessionState, body: memoryview, length: int) -> Pieces:
    """LX_SET_DIGEST."""
    name = "LX_SET_DIGEST"
    record, offset, size, digest = SetDigest.decode(body)
    tensor = s.tensors.check_range(record, offset, size, name)
    data = s.store.pinned(digest)
    if data is None:
        raise BadRequest(name, "a digest that LX_HAVE has not said yes to")
    if len(data.data) != size:
        raise BadRequest(name, f"{size} bytes of data of {len(data.data)}")
    if not data.current:
        raise BadRequest(name, "the file has changed")
    _fill(s, tensor, offset, data)
    return None


def set_tensor_hash(s: SessionState, body: memoryview, length: int) -> Pieces:
    """SET_TENSOR_HASH."""
    request = m.SetTensorHash.decode(body)
    if not s.store.keeps:
        return [m.U8.pack(0)]
    tensor = s.tensors.check_range(request.tensor, request.offset, 0, "SET_TENSOR_HASH")
    data = s.store.find(request.hash, tensor.nbytes - request.offset)
    if data is None:
        s.asks_by_hash = True
        s.served.cache_misses += 1
        return [m.U8.pack(0)]
    _fill(s, tensor, request.offset, data)
    return [m.U8.pack(1)]


def keep(s: SessionState, data: memoryview) -> None:
    """Put what a client has sent into the cache, under what it asks by."""
    if s.keeper is not None:
        s.keeper.put(data, by_hash=s.asks_by_hash or not s.dialect.lx)


def _fill(s: SessionState, tensor: CheckedTensor, offset: int, data: Data) -> None:
    size = len(data.data)
    s.served.cache_hits += 1
    s.served.bytes_from_files += size
    if offset == 0 and size == tensor.nbytes and _lay(s, tensor, data):
        return
    target = tensor.bytes(offset, size)
    if target is not None:
        target[:] = data.data
    elif size:
        tensor.buffer.device.set_tensor(
            tensor.native, address_of(data.data), offset, size
        )


def _lay(s: SessionState, tensor: CheckedTensor, data: Data) -> bool:
    """Map the data in place of a whole tensor, if that can be."""
    buffer = tensor.buffer
    if (
        len(data.data) < _LEAST_MAPPED
        or not buffer.takes_overlays
        or tensor.memory is not buffer.native
        # Kept graphs have the address of the tensor as it is.
        or s.graphs.uses(buffer.handle)
    ):
        return False
    mapping = data.private()
    if mapping is None or address_of(mapping) % buffer.device.alignment():
        return False
    s.buffers.lay(buffer, tensor.start, mapping)
    s.tensors.forget()
    return True
