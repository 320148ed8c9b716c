from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from longwire.cli import main as cli
from longwire.transport.authority import DAYS


def words_of(output: str, command: str) -> list[str]:
    """The command line that begins with `command`."""
    (line,) = [line for line in output.splitlines() if line.startswith(command)]
    return shlex.split(line)


def test_says_what_was_made_and_how_to_use_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "the team"
    assert cli.main(["keygen", str(folder), "--host", "gpu1, 10.0.0.7"]) == 0
    output = capsys.readouterr().out
    assert "server.pem  made, until " in output
    assert "for gpu1, 10.0.0.7, localhost, 127.0.0.1, ::1\n" in output
    assert "to the server: server.pem, server.key, ca.pem, token\n" in output
    assert "to the client: ca.pem, client.pem, client.key, token\n" in output
    assert "ca.key stays here" in output
    assert words_of(output, "longwire serve") == [
        *("longwire", "serve", "-H", "gpu1"),
        *("--tls-cert", f"{folder}/server.pem", "--tls-key", f"{folder}/server.key"),
        *("--tls-client-ca", f"{folder}/ca.pem", "--token-file", f"{folder}/token"),
    ]
    assert words_of(output, "longwire run") == [
        *("longwire", "run", "-m", "MODEL", "--rpc", "gpu1"),
        *("--tls-ca", f"{folder}/ca.pem", "--tls-cert", f"{folder}/client.pem"),
        *("--tls-key", f"{folder}/client.key", "--token-file", f"{folder}/token"),
    ]


def test_prints_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--client", "amy"], ["--host", "gpu2"]):
        cli.main(["keygen", str(tmp_path), *arguments])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    secret_lines = [
        line
        for path in [*tmp_path.glob("*.key"), tmp_path / "token"]
        for line in path.read_text().splitlines()
    ]
    assert len(secret_lines) > 10
    assert not [line for line in secret_lines if line in text]


@pytest.mark.parametrize(
    ("options", "bind", "rpc"),
    [
        (["--host", "fd00::7"], "fd00::7", "[fd00::7]"),
        (["--host", "[fd00::7]"], "fd00::7", "[fd00::7]"),
        (["--host", "gpu2", "--host", "gpu3"], "gpu2", "gpu2"),
        ([], "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_host_is_one_that_the_certificate_has(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    bind: str,
    rpc: str,
) -> None:
    cli.main(["keygen", str(tmp_path), *options])
    output = capsys.readouterr().out
    assert words_of(output, "longwire serve")[3] == bind
    assert words_of(output, "longwire run")[5] == rpc


def test_a_later_call_is_about_what_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["keygen", str(tmp_path), "--host", "gpu1"])
    capsys.readouterr()
    assert cli.main(["keygen", str(tmp_path), "--client", "amy,client"]) == 0
    output = capsys.readouterr().out
    assert "client.pem  kept\n" in output
    assert "to the client amy: ca.pem, amy.pem, amy.key, token\n" in output
    assert "serve" not in output
    assert f"{tmp_path}/amy.pem" in words_of(output, "longwire run")
    assert "HOST" in words_of(output, "longwire run")


def test_a_call_that_makes_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["keygen", str(tmp_path)])
    capsys.readouterr()
    assert cli.main(["keygen", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: nothing to make\n")


def test_a_file_in_the_way_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["keygen", str(tmp_path), "--host", "gpu1"])
    capsys.readouterr()
    assert cli.main(["keygen", str(tmp_path), "--host", "gpu2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{tmp_path}/server.pem is there already" in printed.err


def test_the_help_has_the_days_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["keygen", "--help"])
    assert f"good for ({DAYS})" in " ".join(capsys.readouterr().out.split())
