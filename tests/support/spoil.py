"""Graphs that are legal but for a field or two."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from longwire.wire.graphs import Graph

__all__ = ["Change", "spoilt"]


class Change(NamedTuple):
    """One field of the last node (`who` "dst") or of one of its sources (a slot)."""

    who: str | int
    field: str
    index: int | None
    value: Any


def spoilt(message: Graph, *changes: Change) -> Graph:
    """A copy of the graph with these changes."""
    records = message.tensors.copy()
    by_id = {int(number): i for i, number in enumerate(records["id"])}
    last = records[by_id[int(message.nodes[-1])]]
    sources = last["src"].tolist()
    for who, field, index, value in changes:
        record = last if who == "dst" else records[by_id[sources[int(who)]]]
        if index is None:
            record[field] = value
        else:
            record[field][index] = np.array(value).astype(record[field].dtype)
    return message._replace(tensors=records)
