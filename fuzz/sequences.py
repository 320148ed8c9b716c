"""Whole command sequences to a session in this process."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from fuzz.opgraphs import OpGraph, op_graphs
from fuzz.recording import Recording
from fuzz.rehearsal import rehearse
from fuzz.script import record_script

__all__ = ["check", "recording", "seeds"]

# What it refuses is what is looked for here.
logging.getLogger("longwire.session").setLevel(logging.CRITICAL)

_TOKEN = b"a token that is long enough"


@cache
def _op_graphs() -> list[OpGraph]:
    return op_graphs()


def recording(data: bytes) -> Recording:
    """What an input stands for."""
    return record_script(data, _op_graphs())


def check(data: bytes) -> None:
    """Any sequence ends in order, and nothing is left of it."""
    played = recording(data)
    rehearse(played)
    rehearse(replace(played, buffers=[]), tokens=[_TOKEN])
    if played.greet:
        rehearse(
            replace(played, prove=True), tokens=[b"another token", _TOKEN], token=_TOKEN
        )


def seeds() -> Iterator[bytes]:
    """Inputs of all lengths to begin with."""
    for i in range(300):
        yield random.Random(i).randbytes(16 + 3 * i)
