"""The tensor record, field by field, as one `Tensor` and as numpy's `TENSOR`."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from longwire.wire.tensors import NULL_TENSOR, TENSOR, TENSOR_SIZE, Tensor

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
