"""Questions about what an op will be once its part of the cache has grown."""

from __future__ import annotations

from longwire.client.growth import Growth
from longwire.client.records import NativeTensor

MUL_MAT = 29
F16, F32 = 1, 0


def tensor(
    ne: tuple[int, int, int, int],
    nb: tuple[int, int, int, int] | None = None,
    op: int = 0,
    kind: int = F32,
) -> NativeTensor:
    size = 2 if kind == F16 else 4
    a, b, c, _ = ne
    whole = (size, size * a, size * a * b, size * a * b * c)
    return NativeTensor(
        *(1, kind, 0, ne, nb or whole, op, bytes(64), 0, (), 0, 0, 0, b"")
    )


def looking_at(n: int, cache: int = 2560) -> tuple[NativeTensor, list[NativeTensor]]:
    """The product of queries with `n` rows of a cache of keys."""
    keys = tensor((64, n, 4, 1), (2, 2 * 256, 2 * 64, 2 * 256 * cache), kind=F16)
    return tensor((n, 8, 4, 1), op=MUL_MAT), [keys, tensor((64, 8, 4, 1))]


def test_nothing_larger_is_known() -> None:
    assert not list(Growth().ahead(*looking_at(256)))


def test_a_part_of_the_cache_is_doubled() -> None:
    growth = Growth()
    assert not list(growth.ahead(*looking_at(2560)))
    larger = list(growth.ahead(*looking_at(256)))
    assert [op.ne for op, _ in larger] == [
        (n, 8, 4, 1) for n in (512, 1024, 2048, 2304)
    ]
    for op, (keys, queries) in larger:
        assert keys is not None and queries is not None
        n = op.ne[0]
        assert keys.ne == (64, n, 4, 1)
        assert keys.nb == looking_at(256)[1][0].nb, "a view keeps its strides"
        assert op.nb == (4, 4 * n, 32 * n, 128 * n), "what is contiguous stays so"
        assert queries == looking_at(256)[1][1], "what does not grow is as it was"


def test_missing_sources_keep_their_place() -> None:
    growth = Growth()
    for n in (1024, 256):
        op, (keys, queries) = looking_at(n)
        larger = list(growth.ahead(op, [keys, None, queries]))
    assert [[s is None for s in rest] for _, rest in larger] == 2 * [
        [False, True, False]
    ]


def test_other_types_are_another_sort() -> None:
    growth = Growth()
    list(growth.ahead(*looking_at(2560)))
    op, (keys, queries) = looking_at(256)
    assert not list(growth.ahead(op, [keys._replace(type=F32), queries]))


def test_the_end_is_bounded() -> None:
    growth = Growth()
    list(growth.ahead(tensor((1 << 40, 1, 1, 1), op=MUL_MAT), []))
    assert len(list(growth.ahead(tensor((1, 1, 1, 1), op=MUL_MAT), []))) == 16
