"""The type table, and the byte sizes that follow from it."""

from __future__ import annotations

import numpy as np
import pytest

from longwire.wire.types import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    QUANTIZED,
    TYPE_COUNT,
    TYPES,
    TypeTraits,
    nbytes,
)

F32, F16, Q4_0, Q8_0, Q4_K, Q6_K, I8, I64 = 0, 1, 2, 8, 12, 14, 24, 27
WITHDRAWN = {4, 5, 31, 32, 33, 36, 37, 38}
TOP = 2**32 - 1

Shape = tuple[int, int, int, int]


def test_live_and_withdrawn_types_make_up_the_whole_range() -> None:
    assert TYPE_COUNT == 43
    assert set(TYPES) == set(range(43)) - WITHDRAWN


@pytest.mark.parametrize(
    ("number", "traits"),
    [
        (0, TypeTraits("f32", 1, 4, False)),
        (1, TypeTraits("f16", 1, 2, False)),
        (2, TypeTraits("q4_0", 32, 18, True)),
        (8, TypeTraits("q8_0", 32, 34, True)),
        (14, TypeTraits("q6_K", 256, 210, True)),
        (26, TypeTraits("i32", 1, 4, False)),
        (30, TypeTraits("bf16", 1, 2, False)),
        (40, TypeTraits("nvfp4", 64, 36, True)),
        (42, TypeTraits("q2_0", 64, 18, True)),
    ],
)
def test_types_have_ggml_s_traits(number: int, traits: TypeTraits) -> None:
    assert TYPES[number] == traits


def test_columns_agree_with_the_table() -> None:
    for number, traits in TYPES.items():
        assert BLOCK_SIZE[number] == traits.block
        assert BLOCK_BYTES[number] == traits.size
        assert QUANTIZED[number] == traits.quantized
    assert len(BLOCK_SIZE) == len(BLOCK_BYTES) == len(QUANTIZED) == TYPE_COUNT


def test_columns_are_zero_for_withdrawn_types() -> None:
    gone = sorted(WITHDRAWN)
    assert not BLOCK_SIZE[gone].any()
    assert not BLOCK_BYTES[gone].any()
    assert not QUANTIZED[gone].any()


def test_quantised_types_are_those_with_blocks() -> None:
    assert np.array_equal(QUANTIZED, BLOCK_SIZE > 1)


@pytest.mark.parametrize(
    ("type_number", "ne", "nb", "size"),
    [
        (F32, (10, 1, 1, 1), (4, 40, 40, 40), 40),
        (F32, (4, 3, 2, 5), (4, 16, 48, 96), 480),
        (F16, (1, 1, 1, 1), (2, 2, 2, 2), 2),
        (I8, (7, 1, 1, 1), (1, 7, 7, 7), 7),
        (I64, (3, 2, 1, 1), (8, 24, 48, 48), 48),
        (F32, (4, 3, 1, 1), (4, 100, 300, 300), 216),
        (F32, (3, 4, 1, 1), (16, 4, 48, 48), 48),
        (F32, (4, 3, 1, 1), (4, 0, 0, 0), 16),
        (F32, (2, 2, 1, 1), (0, 0, 0, 0), 4),
    ],
    ids=[
        "vector",
        "contiguous",
        "one element",
        "bytes",
        "matrix of i64",
        "rows apart",
        "transposed",
        "broadcast rows",
        "all strides zero",
    ],
)
def test_nbytes_of_plain_types(
    type_number: int, ne: Shape, nb: Shape, size: int
) -> None:
    assert nbytes(type_number, ne, nb) == size


@pytest.mark.parametrize(
    ("type_number", "ne", "nb", "size"),
    [
        (Q4_0, (32, 1, 1, 1), (18, 18, 18, 18), 18),
        (Q4_0, (64, 3, 1, 1), (18, 36, 108, 108), 108),
        (Q8_0, (512, 512, 1, 1), (34, 544, 278528, 278528), 278528),
        (Q8_0, (256, 512, 1, 1), (34, 544, 278528, 278528), 278256),
        (Q4_K, (256, 2, 3, 1), (144, 144, 288, 864), 864),
        (Q6_K, (768, 4, 1, 2), (210, 630, 2520, 2520), 5040),
        (Q4_0, (48, 1, 1, 1), (18, 27, 27, 27), 27),
        (Q4_0, (1, 1, 1, 1), (18, 18, 18, 18), 0),
    ],
    ids=[
        "one block",
        "rows",
        "matrix",
        "half of each row",
        "three dimensions",
        "four dimensions",
        "half a block more",
        "less than a block",
    ],
)
def test_nbytes_of_block_types(
    type_number: int, ne: Shape, nb: Shape, size: int
) -> None:
    assert nbytes(type_number, ne, nb) == size


@pytest.mark.parametrize("type_number", [F32, Q4_0])
@pytest.mark.parametrize("dim", range(4))
def test_a_tensor_without_elements_has_no_bytes(type_number: int, dim: int) -> None:
    ne = [32, 32, 32, 32]
    ne[dim] = 0
    assert nbytes(type_number, ne, (TOP, TOP, TOP, TOP)) == 0


@pytest.mark.parametrize("type_number", [F32, Q4_0])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_the_stride_of_a_dimension_of_one_does_not_count(
    type_number: int, dim: int
) -> None:
    nb = [18, 18, 18, 18]
    plain = nbytes(type_number, (32, 1, 1, 1), nb)
    nb[dim] = TOP
    assert nbytes(type_number, (32, 1, 1, 1), nb) == plain


def test_the_largest_record_does_not_wrap_around() -> None:
    ne = nb = (TOP, TOP, TOP, TOP)
    assert nbytes(F32, ne, nb) == 4 + 4 * (TOP - 1) * TOP
    assert nbytes(F32, ne, nb) > 2**64
    assert nbytes(Q4_0, ne, nb) == TOP * TOP // 32 + 3 * (TOP - 1) * TOP
    assert nbytes(Q4_0, ne, nb) > 2**64
