"""The tensor record, field by field, as one `Tensor` and as numpy's `TENSOR`."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longwire.wire.tensors import (
    NULL_TENSOR,
    STRIDE_LIMIT,
    TENSOR,
    TENSOR_SIZE,
    WIDE_TENSOR,
    Tensor,
    put_strides,
    strides,
    too_wide,
)

OP_PARAMS = struct.pack("<16i", *range(-8, 8))

FIELDS: list[tuple[str, int, str, Any]] = [
    ("id", 0, "<Q", 0x1111111122222222),
    ("type", 8, "<I", 0x33333333),
    ("buffer", 12, "<Q", 0x4444444455555555),
    ("ne", 20, "<4I", (2, 3, 5, 0xFFFFFFFF)),
    ("nb", 36, "<4I", (7, 11, 13, 0xFFFFFFFE)),
    ("op", 52, "<I", 0x66666666),
    ("op_params", 56, "64s", OP_PARAMS),
    ("flags", 120, "<i", -17),
    ("src", 124, "<10Q", tuple(2**63 + i for i in range(10))),
    ("view_src", 204, "<Q", 0x7777777788888888),
    ("view_offs", 212, "<Q", 0x9999999900000000),
    ("data", 220, "<Q", 0xAAAAAAAABBBBBBBB),
    ("name", 228, "64s", b"blk.0.attn_q.weight"),
    ("use_count", 292, "<i", -3),
]
"""Field, offset, layout and a sample value: the table of PROTOCOL.md."""

FULL = Tensor(**{field: value for field, _, _, value in FIELDS})
ZERO = Tensor(id=0, type=0, buffer=0, ne=(0, 0, 0, 0), nb=(0, 0, 0, 0))

field_by_field = pytest.mark.parametrize(
    ("field", "offset", "layout", "value"), FIELDS, ids=[row[0] for row in FIELDS]
)


def put(record: bytearray, offset: int, layout: str, value: Any) -> None:
    """Write one sample value into a record."""
    values = value if isinstance(value, tuple) else (value,)
    struct.pack_into(layout, record, offset, *values)


def full_record() -> bytes:
    """A record that holds every sample value."""
    record = bytearray(296)
    for _, offset, layout, value in FIELDS:
        put(record, offset, layout, value)
    return bytes(record)


def test_the_table_covers_the_record_without_gaps() -> None:
    ends = [offset + struct.calcsize(layout) for _, offset, layout, _ in FIELDS]
    assert [offset for _, offset, _, _ in FIELDS] == [0, *ends[:-1]]
    assert ends[-1] == TENSOR_SIZE == TENSOR.itemsize == len(NULL_TENSOR) == 296


def test_numpy_has_the_fields_at_the_offsets_of_the_table() -> None:
    assert TENSOR.fields is not None
    offsets = {name: entry[1] for name, entry in TENSOR.fields.items()}
    assert offsets == {field: offset for field, offset, _, _ in FIELDS}


@field_by_field
def test_encode_puts_a_field_at_its_offset(
    field: str, offset: int, layout: str, value: Any
) -> None:
    record = bytearray(296)
    put(record, offset, layout, value)
    assert ZERO._replace(**{field: value}).encode() == record


@field_by_field
def test_decode_reads_a_field_from_its_offset(
    field: str, offset: int, layout: str, value: Any
) -> None:
    record = bytearray(296)
    put(record, offset, layout, value)
    assert Tensor.decode(record) == ZERO._replace(**{field: value})


@field_by_field
def test_numpy_reads_a_field_from_its_offset(
    field: str, offset: int, layout: str, value: Any
) -> None:
    record = bytearray(296)
    put(record, offset, layout, value)
    found = np.frombuffer(record, TENSOR)[0]
    if field == "op_params":
        assert found[field].tobytes() == value
    else:
        assert tuple(np.atleast_1d(found[field])) == tuple(np.atleast_1d(value))


def test_a_whole_record_reads_the_same_in_all_three_ways() -> None:
    record = full_record()
    assert FULL.encode() == record
    assert Tensor.decode(memoryview(record)) == FULL
    assert np.frombuffer(record, TENSOR).tobytes() == record


def test_numpy_writes_what_tensor_reads() -> None:
    records = np.zeros(3, TENSOR)
    for field, _, _, value in FIELDS:
        if field == "op_params":
            value = np.frombuffer(value, "<i4")
        records[1][field] = value
    body = records.tobytes()
    assert Tensor.decode(body[:296]) == ZERO
    assert Tensor.decode(body[296:592]) == FULL
    assert Tensor.decode(body[592:]) == ZERO


def test_the_null_tensor_is_all_zero() -> None:
    assert Tensor.decode(NULL_TENSOR) == ZERO
    assert ZERO.encode() == NULL_TENSOR


def test_decode_refuses_every_other_length() -> None:
    record = full_record()
    for length in range(296):
        with pytest.raises(struct.error):
            Tensor.decode(record[:length])
    with pytest.raises(struct.error):
        Tensor.decode(record + b"\0")


def test_a_name_ends_at_its_first_nul() -> None:
    record = bytearray(296)
    record[228:240] = b"first\0second"
    assert Tensor.decode(record).name == b"first"


def test_a_name_may_fill_its_field() -> None:
    tensor = ZERO._replace(name=b"n" * 64)
    assert Tensor.decode(tensor.encode()) == tensor


@pytest.mark.parametrize("field", ["ne", "nb"])
@pytest.mark.parametrize("dim", range(4))
def test_a_shape_beyond_32_bits_is_refused_not_cut(field: str, dim: int) -> None:
    shape: Any = [1, 1, 1, 1]
    shape[dim] = 2**32
    with pytest.raises(struct.error):
        ZERO._replace(**{field: shape}).encode()


class TestWide:
    """LX: the last 16 bytes of the name are the high halves of the strides."""

    NB = (4, 0x1_0000_0000, 0x23456789_ABCDEF01, 2**64 - 1)
    WIDE = FULL._replace(nb=NB)

    def test_the_halves_are_at_their_offsets(self) -> None:
        record = self.WIDE.encode(wide=True)
        assert struct.unpack_from("<4I", record, 36) == (4, 0, 0xABCDEF01, 2**32 - 1)
        assert struct.unpack_from("<4I", record, 276) == (0, 1, 0x23456789, 2**32 - 1)
        assert record[228:276] == b"blk.0.attn_q.weight".ljust(48, b"\0")
        # All else is where it always was.
        plain = FULL.encode()
        assert record[:36] + record[52:228] + record[292:] == (
            plain[:36] + plain[52:228] + plain[292:]
        )

    def test_numpy_reads_the_same(self) -> None:
        records = np.frombuffer(self.WIDE.encode(wide=True) + NULL_TENSOR, WIDE_TENSOR)
        assert strides(records).tolist() == [list(self.NB), [0, 0, 0, 0]]
        assert records["name"].tolist() == [b"blk.0.attn_q.weight", b""]
        assert WIDE_TENSOR.itemsize == TENSOR_SIZE
        assert WIDE_TENSOR.fields is not None and TENSOR.fields is not None
        for field in TENSOR.fields.keys() - {"name"}:
            assert WIDE_TENSOR.fields[field] == TENSOR.fields[field]

    def test_without_lx_a_name_is_no_stride(self) -> None:
        record = FULL._replace(name=b"n" * 64).encode()
        assert Tensor.decode(record).nb == FULL.nb
        assert Tensor.decode(record).name == b"n" * 64
        assert strides(np.frombuffer(record, TENSOR)).tolist() == [list(FULL.nb)]

    @pytest.mark.parametrize("n", [0, 46, 47, 48, 64])
    def test_a_long_name_is_cut(self, n: int) -> None:
        tensor = FULL._replace(name=b"n" * n)
        record = tensor.encode(wide=True)
        assert record[275] == 0
        assert Tensor.decode(record, wide=True) == tensor._replace(
            name=b"n" * min(n, 47)
        )

    @pytest.mark.parametrize("dim", range(4))
    def test_a_stride_beyond_64_bits_is_refused_not_cut(self, dim: int) -> None:
        nb: Any = [1, 1, 1, 1]
        nb[dim] = 2**64
        with pytest.raises(struct.error):
            ZERO._replace(nb=nb).encode(wide=True)

    @given(
        nb=st.tuples(*[st.integers(0, 2**64 - 1)] * 4),
        name=st.binary(max_size=47).filter(lambda name: b"\0" not in name),
    )
    def test_what_is_written_is_read(
        self, nb: tuple[int, int, int, int], name: bytes
    ) -> None:
        tensor = FULL._replace(nb=nb, name=name)
        record = tensor.encode(wide=True)
        assert Tensor.decode(record, wide=True) == tensor
        found = np.frombuffer(record, WIDE_TENSOR)
        assert strides(found).tolist() == [list(nb)]
        written = np.zeros(1, WIDE_TENSOR)
        put_strides(written, np.array([nb], np.uint64))
        assert written["nb"].tolist() == found["nb"].tolist()
        assert written["nb_high"].tolist() == found["nb_high"].tolist()

    @given(
        ne=st.tuples(*[st.integers(0, 2**32 - 1)] * 4),
        nb=st.tuples(*[st.integers(0, 2**64 - 1) | st.integers(0, 2**40)] * 4),
    )
    def test_sums_of_what_is_not_too_wide_fit(
        self, ne: tuple[int, ...], nb: tuple[int, ...]
    ) -> None:
        (found,) = too_wide(np.array([ne], np.uint64), np.array([nb], np.uint64))
        for n, b, wide in zip(ne, nb, found.tolist(), strict=True):
            reach = max(n, 1) * b
            assert not (wide and b < 2**32)
            # As floats, numbers next to the limit are the limit.
            assert wide or b < 2**32 or reach < STRIDE_LIMIT * (1 + 2**-50)
            assert not wide or reach > STRIDE_LIMIT * (1 - 2**-50)
