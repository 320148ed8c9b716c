"""Token files: what counts as a token, and what is said when there is none."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from longwire.errors import UsageError
from longwire.transport.tokens import read_tokens, warn_if_exposed
from support.keys import Keys

GOOD, BETTER = b"sixteen letters!", b"some more than that it is"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "token"


def refusal(file: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_tokens(str(file))
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_what_keygen_makes(keys: Keys) -> None:
    (token,) = read_tokens(keys.ours.token_file)
    assert token == keys.ours.token
    assert len(token) >= 32


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (GOOD, [GOOD]),
        (GOOD + b"\n" + BETTER + b"\n", [GOOD, BETTER]),
        (b"# old\r\n\r\n  " + GOOD + b" \t\r\n#" + BETTER + b"\n", [GOOD]),
        (b"a # behind it is part of it\n", [b"a # behind it is part of it"]),
        (bytes(range(0x80, 0x90)) + b"\n", [bytes(range(0x80, 0x90))]),
    ],
)
def test_a_token_per_line(file: Path, text: bytes, tokens: list[bytes]) -> None:
    file.write_bytes(text)
    assert read_tokens(str(file)) == tokens


@pytest.mark.parametrize("text", [b"", b"\n\n", b"# nothing yet\n"])
def test_none_in_it(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    assert "no token in it (longwire keygen)" in refusal(file)


@pytest.mark.parametrize("text", [GOOD[:-1], GOOD + b"\nsecret\n"])
def test_a_short_one_is_named_and_not_shown(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    words = refusal(file)
    assert "under 16 characters" in words
    assert "secret" not in words and GOOD[:-1].decode() not in words


def test_a_file_that_is_something_else(file: Path) -> None:
    file.write_bytes((GOOD + b"\n") * 4000)
    assert "over 65536 bytes" in refusal(file)
    assert GOOD.decode() not in refusal(file)
    file.write_bytes((GOOD + b"\n") * 3800)
    assert len(read_tokens(str(file))) == 3800


def test_no_such_file(file: Path, tmp_path: Path) -> None:
    assert "No such file" in refusal(file)
    assert "directory" in refusal(tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)]
)
def test_others_that_may_read_it(
    file: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "longwire.tokens")
    file.write_bytes(GOOD)
    file.chmod(mode)
    warn_if_exposed("token file", str(file))
    assert [record.getMessage() for record in caplog.records] == (
        [f"token file {file}: others may read it (chmod 600)"] if warned else []
    )
