"""One target under atheris: `python -m fuzz TARGET [libFuzzer options]`.

New inputs that reach something go to build/fuzz/TARGET and are used again; what
fails goes to corpus/TARGET, where the tests try it from then on.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import atheris

__all__ = ["TARGETS", "main"]

TARGETS = ("frames", "messages", "graphs", "sequences", "taps")

_HERE = Path(__file__).parent
_WORK = _HERE.parent / "build" / "fuzz"

_LONGEST = {"graphs": 8192}
"""Bytes of an input; a legal graph of one op takes up to 3 KiB."""

_MEMORY_MB = 8192
"""atheris 3.0 loses some KiB whenever watched code compares arrays, as graphs make it
do: enough for half an hour. Leaks of ours are for `fuzz.live` to see."""


def _prepare(target: str) -> list[str]:
    """Make the folders and the seeds; returns libFuzzer's arguments for them."""
    module = importlib.import_module(f"fuzz.{target}")
    work, corpus = _WORK / target, _HERE / "corpus" / target
    for folder in (work, corpus):
        folder.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(module.seeds()):
        (work / f"seed-{i}").write_bytes(seed)
    return [
        f"-artifact_prefix={corpus}/",
        f"-max_len={_LONGEST.get(target, 4096)}",
        "-timeout=30",
        f"-rss_limit_mb={_MEMORY_MB}",
        str(work),
        str(corpus),
    ]


def main() -> None:
    """Fuzz until an option of libFuzzer's ends it, or a finding does."""
    target, *options = sys.argv[1:] or [""]
    if target not in TARGETS:
        sys.exit(f"python -m fuzz TARGET [options]; targets: {', '.join(TARGETS)}")
    # Only what is imported inside is watched for coverage.
    with atheris.instrument_imports(
        include=["longwire.wire", "longwire.server", "longwire.transport"]
    ):
        module = importlib.import_module(f"fuzz.{target}")
    atheris.Setup([sys.argv[0], *_prepare(target), *options], module.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
