"""How the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from longwire.errors import UsageError

__all__ = ["Sampling"]

_RANDOM_SEED = 0xFFFF_FFFF
"""llama.cpp's `LLAMA_DEFAULT_SEED`: draw a fresh one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampler settings, llama.cpp's names and defaults.

    A temperature of 0 is greedy: the token with the largest logit, the first
    of equals.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    seed: int = _RANDOM_SEED

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature} is not 0 or above")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} is not between 0 and 1")
        if not 0 <= self.seed <= _RANDOM_SEED:
            raise UsageError(f"seed {self.seed} is not an unsigned 32-bit number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def entries(self) -> int | None:
        """How many of the largest logits decide on the token; None for all.

        A sampler has its own way with equals: one more tells whether its last has one.
        """
        if self.greedy:
            return 1
        return self.top_k + 1 if self.top_k > 0 else None
