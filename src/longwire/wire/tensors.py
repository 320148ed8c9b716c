"""`rpc_tensor`, the 296-byte record that names a tensor on the wire.

One tensor is a `Tensor`; many at once are a numpy array of `TENSOR`, or of
`WIDE_TENSOR` where LX is spoken. All read the same bytes (PROTOCOL.md, "Tensor
record" and "Wide strides").
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longwire.wire.constants import U32_MAX

__all__ = [
    "NULL_TENSOR",
    "STRIDE_LIMIT",
    "TENSOR",
    "TENSOR_SIZE",
    "WIDE_NAME",
    "WIDE_TENSOR",
    "Tensor",
    "put_strides",
    "strides",
    "too_wide",
]


def _packed(*name: tuple[Any, ...]) -> np.dtype[Any]:
    """A record around its name; most fields are not naturally aligned."""
    return np.dtype(
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
            *name,
            ("use_count", "<i4"),
        ]
    )


TENSOR = _packed(("name", "S64"))

WIDE_TENSOR = _packed(("name", "S48"), ("nb_high", "<u4", 4))
"""LX: the end of the name's bytes holds the strides' high halves."""

WIDE_NAME = 47
"""Bytes of a name that LX leaves; a NUL follows."""

STRIDE_LIMIT = 1 << 62
"""A stride over 32 bits, times the elements along it, stays below this one: so
that sums and products of what a record says fit 64 bits."""

TENSOR_SIZE = 296
NULL_TENSOR = bytes(TENSOR_SIZE)

_LAYOUT = struct.Struct("<QIQ4I4II64si10QQQQ64si")
_HIGH = struct.Struct("<4I")


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

    def encode(self, wide: bool = False) -> bytes:
        """The 296 bytes of this record. `ne` and `nb` must fit 32 bits.

        `wide`, where LX is spoken: `nb` may have 64, and the name is cut.
        """
        nb: Iterable[int] = self.nb
        name = self.name
        if wide:
            name = name[:WIDE_NAME].ljust(WIDE_NAME + 1, b"\0")
            name += _HIGH.pack(*(b >> 32 for b in nb))
            nb = (b & U32_MAX for b in nb)
        return _LAYOUT.pack(
            self.id,
            self.type,
            self.buffer,
            *self.ne,
            *nb,
            self.op,
            self.op_params,
            self.flags,
            *self.src,
            self.view_src,
            self.view_offs,
            self.data,
            name,
            self.use_count,
        )

    @classmethod
    def decode(
        cls, record: bytes | bytearray | memoryview, wide: bool = False
    ) -> Tensor:
        """Read one record of exactly 296 bytes; nothing is checked here."""
        f = _LAYOUT.unpack(record)
        nb, name = f[7:11], f[27]
        if wide:
            high = _HIGH.unpack_from(name, WIDE_NAME + 1)
            nb = tuple(b | h << 32 for b, h in zip(nb, high, strict=True))
            name = name[: WIDE_NAME + 1]
        return cls(
            id=f[0],
            type=f[1],
            buffer=f[2],
            ne=f[3:7],
            nb=nb,
            op=f[11],
            op_params=f[12],
            flags=f[13],
            src=f[14:24],
            view_src=f[24],
            view_offs=f[25],
            data=f[26],
            name=name.split(b"\0", 1)[0],
            use_count=f[28],
        )


def strides(records: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The strides (n x 4) of an array of `TENSOR` or `WIDE_TENSOR`."""
    nb: npt.NDArray[np.uint64] = records["nb"].astype(np.uint64)
    if records.dtype == WIDE_TENSOR:
        nb |= records["nb_high"].astype(np.uint64) << np.uint64(32)
    return nb


def put_strides(records: npt.NDArray[Any], nb: npt.NDArray[np.uint64]) -> None:
    """Write strides (n x 4) that the records' layout has room for."""
    records["nb"] = nb & np.uint64(U32_MAX)
    if records.dtype == WIDE_TENSOR:
        records["nb_high"] = nb >> np.uint64(32)


def too_wide(ne: npt.NDArray[Any], nb: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Which strides (n x 4) over 32 bits, times their extent, reach the limit."""
    # Floats: the product itself may pass 2^64.
    reach = np.maximum(ne, 1).astype(np.float64) * nb.astype(np.float64)
    wide: npt.NDArray[np.bool_] = (nb > U32_MAX) & (reach >= STRIDE_LIMIT)
    return wide
