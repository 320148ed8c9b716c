"""`rpc_tensor`, the 296-byte record that names a tensor on the wire.

One tensor is a `Tensor`; many at once are a numpy array of `TENSOR`. Both
read the same bytes (PROTOCOL.md, "Tensor record").
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

__all__ = ["NULL_TENSOR", "TENSOR", "TENSOR_SIZE", "Tensor"]

TENSOR = np.dtype(
    [
        ("id", "<u8"),
        ("type", "<u4"),
        ("buffer", "<u8"),
        ("ne", "<u4", 4),
        ("nb", "<u4", 4),
        ("op", "<u4"),
        ("op_params", "<i4", 16),
        ("flags", "<i4"),
        ("src", "<u8", 10),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("data", "<u8"),
        ("name", "S64"),
        ("use_count", "<i4"),
    ]
)
"""Packed: most fields are not naturally aligned."""

TENSOR_SIZE = 296
NULL_TENSOR = bytes(TENSOR_SIZE)

_LAYOUT = struct.Struct("<QIQ4I4II64si10QQQQ64si")


class Tensor(NamedTuple):
    """One tensor record.

    `id` is the client's own number for the tensor, 0 for "no tensor"; `buffer`
    a handle of the server's or 0; `data` an address in the server's number
    space or 0; `op_params` 64 raw bytes; `name` ends at its first NUL.
    """

    id: int
    type: int
    buffer: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    op: int = 0
    op_params: bytes = bytes(64)
    flags: int = 0
    src: tuple[int, ...] = (0,) * 10
    view_src: int = 0
    view_offs: int = 0
    data: int = 0
    name: bytes = b""
    use_count: int = 0

    def encode(self) -> bytes:
        """The 296 bytes of this record. `ne` and `nb` must fit 32 bits."""
        return _LAYOUT.pack(
            self.id,
            self.type,
            self.buffer,
            *self.ne,
            *self.nb,
            self.op,
            self.op_params,
            self.flags,
            *self.src,
            self.view_src,
            self.view_offs,
            self.data,
            self.name,
            self.use_count,
        )

    @classmethod
    def decode(cls, record: bytes | bytearray | memoryview) -> Tensor:
        """Read one record of exactly 296 bytes; nothing is checked here."""
        f = _LAYOUT.unpack(record)
        return cls(
            id=f[0],
            type=f[1],
            buffer=f[2],
            ne=f[3:7],
            nb=f[7:11],
            op=f[11],
            op_params=f[12],
            flags=f[13],
            src=f[14:24],
            view_src=f[24],
            view_offs=f[25],
            data=f[26],
            name=f[27].split(b"\0", 1)[0],
            use_count=f[28],
        )
