"""One client's life as data: what it sends, and how it leaves.

A recording says what goes over the wire, byte for byte, so that a finding stays
the same finding whatever becomes of the generator. Filled in when it is played are
the handles that the server gives out, which are random, and proofs, which are of
the server's nonce.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longwire.wire import messages as m
from longwire.wire.constants import LX_VERSION, Command
from longwire.wire.dialects import DIALECTS, Dialect
from longwire.wire.frames import REQUEST_HEADER
from longwire.wire.lx import LxStart
from support.client import Buffer

__all__ = ["ENDINGS", "NONCE", "PROOF_STAND_IN", "Recording", "frame", "stand_in"]

_HANDLE = 0xA5C3_0000_F19E_0000
"""Plus a buffer's number: its handle until the server has named it."""

_BASE, _BASE_STEP = 1 << 44, 2 << 32
"""Where our server puts the first buffer of a session, and how far the next."""

NONCE = bytes(range(32))
"""What a recording sends in LX_AUTH, if it means well."""

PROOF_STAND_IN = b"proof of a token, not yet known."
"""In LX_PROVE, for who plays it with a token to replace."""

ENDINGS = ("half-close", "reset", "leave", "pieces")
"""Half-close and read all; reset at once; close unread; dribble, then half-close."""


def frame(number: int, body: bytes = b"", length: int | None = None) -> bytes:
    """One request; `length` where the header shall lie about it."""
    claimed = len(body) if length is None else length
    return REQUEST_HEADER.pack(number, claimed) + body


def stand_in(number: int, size: int) -> Buffer:
    """The session's buffer of that number, before there is a session."""
    return Buffer(_HANDLE + number, size, _BASE + number * _BASE_STEP)


@dataclass(frozen=True, slots=True)
class Recording:
    """What one client sends, in two parts: an opening, and all the rest."""

    protocol: int
    body: bytes
    buffers: list[int] = field(default_factory=list)
    """Sizes to allocate in the opening, which only then has answers to wait for."""
    greet: bool = True
    lx: bool = False
    ending: str = ENDINGS[0]
    prove: bool = False
    """Whether the opening shows that it knows a token."""

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.protocol]

    @property
    def opening(self) -> bytes:
        """HELLO, a proof, LX_START and the allocations, as far as they are wanted."""
        sent = frame(Command.HELLO, m.Hello().encode()) if self.greet else b""
        if self.prove:
            sent += frame(Command.LX_AUTH, NONCE)
            sent += frame(Command.LX_PROVE, PROOF_STAND_IN)
        if self.lx:
            sent += frame(Command.LX_START, LxStart(LX_VERSION).encode())
        for size in self.buffers:
            sent += frame(Command.ALLOC_BUFFER, m.AllocBuffer(0, size).encode())
        return sent

    @property
    def answers(self) -> int:
        """How many answers the opening gets."""
        return self.greet + 2 * self.prove + self.lx + len(self.buffers)

    def rest(self, answers: list[bytes]) -> bytes:
        """The bytes after the opening, with the handles of its answers."""
        body = self.body
        for i, answer in enumerate(answers[len(answers) - len(self.buffers) :]):
            handle = m.AllocBufferAnswer.decode(answer).handle
            body = body.replace(m.U64.pack(_HANDLE + i), m.U64.pack(handle))
        return body

    def save(self, folder: Path, name: str, note: str = "") -> Path:
        """Write it to a file of that name; `note` says what it did."""
        facts: dict[str, Any] = {"note": note, **asdict(self), "body": self.body.hex()}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        path.write_text(json.dumps(facts, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read what `save` has written."""
        facts = json.loads(path.read_text())
        del facts["note"]
        return cls(**{**facts, "body": bytes.fromhex(facts["body"])})
