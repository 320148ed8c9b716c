from __future__ import annotations

import pytest

from longwire.cli.sizes import parse_size
from longwire.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("3K", 3 << 10),
        ("512MiB", 512 << 20),
        ("20G", 20 << 30),
        ("20gib", 20 << 30),
        ("20Gi", 20 << 30),
        ("20GB", 20_000_000_000),
        ("2T", 2 << 40),
    ],
)
def test_reads(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "-1",
        "+1",
        "1.5G",
        "1 G",
        "1P",
        "1\u212a",
        "20B",
        "1_0",
        "\u0661",
        "9" * 5000,
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)
