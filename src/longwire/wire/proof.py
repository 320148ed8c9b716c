"""How two ends show each other that they know the same token, and never say it.

PROTOCOL.md, "Authentication". Each end adds a random number of its own, so that
nothing heard on the wire is of use a second time.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

__all__ = [
    "LEAST_TOKEN",
    "NONCE_SIZE",
    "PROOF_SIZE",
    "client_proof",
    "matching",
    "server_proof",
]

NONCE_SIZE = 32
PROOF_SIZE = 32
"""HMAC-SHA256."""

LEAST_TOKEN = 16
"""Characters. Who listens can try tokens against a proof for as long as he likes."""


def client_proof(token: bytes, client: bytes, server: bytes) -> bytes:
    """What a client answers to the server's nonce."""
    return _proof(b"longwire client", token, client, server)


def server_proof(token: bytes, client: bytes, server: bytes) -> bytes:
    """What a server answers to a client's right proof."""
    return _proof(b"longwire server", token, client, server)


def matching(
    tokens: Iterable[bytes], proof: bytes, client: bytes, server: bytes
) -> bytes | None:
    """The token that a client's proof was made with, if it is one of these.

    Takes the same time whichever it is.
    """
    found = None
    for token in tokens:
        if hmac.compare_digest(client_proof(token, client, server), proof):
            found = token
    return found


def _proof(side: bytes, token: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.digest(token, side + client + server, "sha256")
