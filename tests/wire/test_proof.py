"""Proofs of a token: who can make one, and what it is good for."""

from __future__ import annotations

import hashlib

from longwire.wire.proof import (
    LEAST_TOKEN,
    NONCE_SIZE,
    PROOF_SIZE,
    client_proof,
    matching,
    server_proof,
)

TOKEN = b"correct horse battery staple"
CLIENT = bytes(range(32))
SERVER = bytes(range(32, 64))
CLIENT_VECTOR = "9be12dd6a2ba646b60618d5f3f6cff51f07185876309fc3f0389e0a79e72ff40"
SERVER_VECTOR = "b5d5b1350c349477c43707c094450e7c5b23a64cbb900c34c06a6c17fe48a882"


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """RFC 2104 by hand, for keys of up to a block."""
    block = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in block) + message).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in block) + inner).digest()


def test_a_known_vector() -> None:
    assert client_proof(TOKEN, CLIENT, SERVER) == bytes.fromhex(CLIENT_VECTOR)
    assert server_proof(TOKEN, CLIENT, SERVER) == bytes.fromhex(SERVER_VECTOR)
    assert len(bytes.fromhex(CLIENT_VECTOR)) == PROOF_SIZE == 32
    assert (NONCE_SIZE, LEAST_TOKEN) == (32, 16)


def test_it_is_what_the_protocol_says() -> None:
    for side, proof in ((b"client", client_proof), (b"server", server_proof)):
        message = b"longwire " + side + CLIENT + SERVER
        assert proof(TOKEN, CLIENT, SERVER) == hmac_sha256(TOKEN, message)


def test_nobody_can_send_back_what_he_was_sent() -> None:
    ours = client_proof(TOKEN, CLIENT, SERVER)
    assert server_proof(TOKEN, CLIENT, SERVER) != ours
    assert (
        matching([TOKEN], server_proof(TOKEN, CLIENT, SERVER), CLIENT, SERVER) is None
    )


def test_only_the_right_token_matches() -> None:
    proof = client_proof(TOKEN, CLIENT, SERVER)
    assert matching([TOKEN], proof, CLIENT, SERVER) == TOKEN
    assert matching([], proof, CLIENT, SERVER) is None
    for wrong in (TOKEN[:-1], TOKEN + b" ", TOKEN.upper(), b"another of that length"):
        assert matching([wrong], proof, CLIENT, SERVER) is None


def test_one_of_several() -> None:
    tokens = [b"the first of three", TOKEN, b"the last of three"]
    for token in tokens:
        proof = client_proof(token, CLIENT, SERVER)
        assert matching(tokens, proof, CLIENT, SERVER) == token
        assert matching(iter(tokens), proof, CLIENT, SERVER) == token


def test_each_pair_of_nonces_has_a_proof_of_its_own() -> None:
    proof = client_proof(TOKEN, CLIENT, SERVER)
    assert matching([TOKEN], proof, SERVER, CLIENT) is None
    for nonces in ((CLIENT, bytes(32)), (bytes(32), SERVER)):
        assert matching([TOKEN], proof, *nonces) is None


def test_a_spoilt_proof() -> None:
    proof = client_proof(TOKEN, CLIENT, SERVER)
    for i in range(0, 8 * PROOF_SIZE, 7):
        spoilt = bytearray(proof)
        spoilt[i // 8] ^= 1 << i % 8
        assert matching([TOKEN], bytes(spoilt), CLIENT, SERVER) is None
    for other in (b"", proof[:-1], proof + b"\0", bytes(PROOF_SIZE)):
        assert matching([TOKEN], other, CLIENT, SERVER) is None
