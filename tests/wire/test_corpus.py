"""What once was a finding of the wire's fuzzers, and what they begin with."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from fuzz import frames, messages

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"
TARGETS = {"frames": frames, "messages": messages}
FILES = [
    pytest.param(module, file, id=f"{name}/{file.name[:20]}")
    for name, module in TARGETS.items()
    for file in sorted((CORPUS / name).iterdir())
]


@pytest.mark.parametrize(("target", "file"), FILES)
def test_no_input_breaks_a_decoder(target: ModuleType, file: Path) -> None:
    target.check(file.read_bytes())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_fuzzers_begin_in_order(target: ModuleType) -> None:
    for seed in target.seeds():
        target.check(seed)
