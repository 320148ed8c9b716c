from __future__ import annotations

import base64
import os
import re
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from longwire.errors import UsageError
from longwire.transport.keyring import issue
from longwire.transport.newfiles import NewFile, publish

NOW = datetime(2026, 5, 4, 12, tzinfo=timezone.utc)
ALL = {
    "ca.pem",
    "ca.key",
    "token",
    "server.pem",
    "server.key",
    "client.pem",
    "client.key",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "team"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hosts_in(certificate: Path) -> list[str]:
    extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def test_a_new_folder_gets_everything(folder: Path) -> None:
    issued = issue(folder, ["gpu1"], now=NOW)
    assert set(contents(folder)) == set(issued.made) == ALL
    assert (issued.kept, issued.server, issued.clients) == ([], "server", ["client"])
    assert set(issued.until) == {"ca.pem", "server.pem", "client.pem"}
    assert issued.until["client.pem"] == NOW + timedelta(days=825)
    assert hosts_in(folder / "server.pem") == issued.hosts
    assert issued.hosts == ["gpu1", "localhost", "127.0.0.1", "::1"]


def test_the_token_is_32_bytes_on_a_line(folder: Path) -> None:
    issue(folder)
    text = (folder / "token").read_text("ascii")
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}\n", text)
    assert len(base64.urlsafe_b64decode(text.strip() + "=")) == 32


def test_secrets_are_for_their_owner_alone(folder: Path) -> None:
    previous = os.umask(0)
    try:
        issue(folder)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    secret = {"ca.key", "server.key", "client.key", "token"}
    assert {name for name, mode in modes.items() if mode == 0o600} == secret
    assert {modes[name] for name in ALL - secret} == {0o644}


def test_a_folder_that_is_there_keeps_its_mode(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    issue(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_second_call_adds_and_keeps(folder: Path) -> None:
    issue(folder, ["gpu1"])
    before = contents(folder)
    issued = issue(folder, clients=["amy", "client"])
    after = contents(folder)
    assert issued.made == ["amy.key", "amy.pem"]
    assert issued.kept == ["client.pem"]
    assert issued.server is None
    assert {name: after[name] for name in before} == before
    assert set(after) == ALL | {"amy.pem", "amy.key"}


def test_a_second_call_for_nothing_changes_nothing(folder: Path) -> None:
    issue(folder, ["gpu1"])
    before = contents(folder)
    issued = issue(folder)
    assert (issued.made, issued.kept) == ([], ["server.pem", "client.pem"])
    assert contents(folder) == before


def test_a_second_call_makes_what_was_removed(folder: Path) -> None:
    issue(folder)
    for name in ("token", "client.pem", "client.key"):
        (folder / name).unlink()
    assert issue(folder).made == ["client.key", "client.pem", "token"]


def test_a_later_server_has_files_of_its_own(folder: Path) -> None:
    issue(folder, ["gpu1"])
    issued = issue(folder, ["gpu2"], server="gpu2")
    assert issued.made == ["gpu2.key", "gpu2.pem"]
    assert hosts_in(folder / "gpu2.pem")[0] == "gpu2"
    assert hosts_in(folder / "server.pem")[0] == "gpu1"


def test_named_clients_take_the_place_of_the_default(folder: Path) -> None:
    issued = issue(folder, clients=["amy", "bob"])
    assert issued.clients == ["amy", "bob"]
    assert "client.pem" not in contents(folder)
    assert "server.pem" in contents(folder)


def _expire(folder: Path) -> None:
    _clear(folder)
    issue(folder, now=NOW - timedelta(days=3660))


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _mix(folder: Path) -> None:
    issue(folder / "other")
    (folder / "other" / "ca.key").replace(folder / "ca.key")


def _swap_ca(folder: Path) -> None:
    (folder / "ca.pem").unlink()
    (folder / "ca.key").unlink()


def _swap_roles(folder: Path) -> None:
    for end in ("pem", "key"):
        (folder / f"server.{end}").replace(folder / f"client.{end}")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_expire, r"ca\.pem.*expired on .*another folder"),
        (_mix, r"ca\.pem.*key does not match.*another folder"),
        (lambda f: (f / "ca.key").unlink(), r"ca\.key is missing.*bring it back"),
        (lambda f: (f / "ca.pem").write_text("junk"), r"ca\.pem.*not a certificate"),
        (lambda f: (f / "client.key").unlink(), r"client\.key is missing.*remove"),
        (lambda f: (f / "client.pem").unlink(), r"client\.pem is missing.*remove"),
        (_swap_ca, r"server\.pem.*another CA.*remove server\.pem"),
        (_swap_roles, r"client\.pem.*not a client's.*remove client\.pem"),
    ],
)
def test_a_folder_that_is_no_good_is_refused(
    folder: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    issue(folder, now=NOW)
    spoil(folder)
    before = sorted(folder.iterdir())
    with pytest.raises(UsageError, match=reason):
        issue(folder, clients=["client", "amy"] if reason[0] == "c" else [], now=NOW)
    assert sorted(folder.iterdir()) == before


def test_an_expired_client_is_refused(folder: Path) -> None:
    issue(folder, days=10, now=NOW)
    with pytest.raises(UsageError, match=r"client\.pem: it expired on 2026-05-14; rem"):
        issue(folder, clients=["client"], now=NOW + timedelta(days=10))


@pytest.mark.parametrize("left", ["server.pem", "server.key"])
def test_a_server_in_the_way_is_refused(folder: Path, left: str) -> None:
    issue(folder, ["gpu1"])
    for name in {"server.pem", "server.key"} - {left}:
        (folder / name).unlink()
    before = contents(folder)
    with pytest.raises(UsageError, match=rf"{re.escape(left)} is there .*--server"):
        issue(folder, ["gpu2"])
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"hosts": ["gpu1:1"]}, "port"),
        ({"clients": ["a/b"]}, "cannot name"),
        ({"clients": [".hidden"]}, "cannot name"),
        ({"clients": [""]}, "cannot name"),
        ({"clients": ["a" * 65]}, "cannot name"),
        ({"clients": ["CA"]}, "taken"),
        ({"clients": ["token"]}, "taken"),
        ({"clients": ["server"]}, "taken"),
        ({"clients": ["amy", "Amy"]}, "taken"),
        ({"hosts": ["gpu1"], "server": "ca"}, "taken"),
        ({"server": "gpu1"}, "needs a host"),
        ({"days": 0}, "0 days"),
        ({"days": 10**12}, "days"),
    ],
)
def test_a_bad_request_leaves_no_folder(
    folder: Path, asked: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        issue(folder, **asked)
    assert not folder.exists()


def test_the_longest_name_fits(folder: Path) -> None:
    assert issue(folder, clients=["a" * 64]).clients == ["a" * 64]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match=f"{file}: Not a directory"):
        issue(file)
    with pytest.raises(UsageError, match="/team: No such file"):
        issue(tmp_path / "absent" / "team")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no write of this process go beyond `size` bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_cut_short_leaves_nothing(folder: Path) -> None:
    with largest_file(300), pytest.raises(UsageError, match="File too large"):
        issue(folder)  # keys fit, certificates do not
    assert not folder.exists()


def test_a_write_cut_short_leaves_an_old_folder_as_it_was(folder: Path) -> None:
    issue(folder)
    before = contents(folder)
    with largest_file(300), pytest.raises(UsageError, match="File too large"):
        issue(folder, clients=["amy"])
    assert contents(folder) == before


@pytest.mark.parametrize("call", ["fsync", "link"])
@pytest.mark.parametrize("nth", range(7))
def test_an_interrupt_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, nth: int
) -> None:
    real, calls = getattr(os, call), iter(range(100))

    def interrupted(*arguments: object) -> None:
        real(*arguments)
        if next(calls) == nth:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        issue(folder)
    assert not folder.exists()
    issue(folder)
    assert set(contents(folder)) == ALL


def test_a_file_of_another_process_is_neither_replaced_nor_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def late(source: Path, target: Path) -> None:
        if target.name == "token":
            target.write_text("theirs")
        link(source, target)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(UsageError, match="token came into being meanwhile"):
        issue(folder)
    assert contents(folder) == {"token": b"theirs"}


def test_publishing_checks_every_name(folder: Path) -> None:
    folder.mkdir()
    (folder / "b").symlink_to("nowhere")
    files = [NewFile(name, b"new", is_secret=False) for name in ("a", "b")]
    with pytest.raises(FileExistsError):
        publish(folder, files)
    assert [path.name for path in folder.iterdir()] == ["b"]
