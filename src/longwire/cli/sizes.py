"""Sizes as users write them."""

from __future__ import annotations

import re

from longwire.errors import UsageError

__all__ = ["parse_size"]

_SIZE = re.compile(r"([0-9]{1,15})(?:([KMGT])(iB?|B)?)?", re.ASCII | re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Read a number of bytes: 1000000, 20G or 20GiB (both 1024^3), 20GB (1000^3).

    Raises:
        UsageError: the text is not such a size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a size; write bytes, or 512MiB, 20G, 1TB")
    number, prefix, unit = match.groups()
    if prefix is None:
        return int(number)
    factor = 1000 if unit and unit.upper() == "B" else 1024
    return int(number) * int(factor ** _POWERS[prefix.upper()])
