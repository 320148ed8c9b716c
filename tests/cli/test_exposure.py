"""Addresses that others can reach: bound only if something keeps them out."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from longwire.cli.exposure import binding, check_exposure
from longwire.cli.main import main
from longwire.errors import UsageError
from longwire.transport.endpoint import Endpoint
from longwire.wire.dialects import V8
from support.client import RawClient
from support.keys import Keys
from support.worker import Worker, running_worker

REMEDY = "Give it a guard"
LOOPBACK = ("127.0.0.1", "127.3.2.1", "localhost", "::1")
EXPOSED = ("0.0.0.0", "::", "192.168.1.2", "fe80::1", "gpu1", "")


def check(host: str, *, guarded: bool = False, insecure: bool = False) -> None:
    check_exposure(host, guarded=guarded, insecure=insecure, remedy=REMEDY)


class TestCheck:
    @pytest.mark.parametrize("host", LOOPBACK)
    def test_loopback_needs_nothing(
        self, host: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        check(host)
        check(host, insecure=True)
        assert not caplog.records

    @pytest.mark.parametrize("host", EXPOSED)
    def test_anything_else_is_refused(self, host: str) -> None:
        with pytest.raises(UsageError) as caught:
            check(host)
        text = str(caught.value)
        assert text.startswith(f"{host} is not a loopback address")
        assert text.endswith(REMEDY)

    @pytest.mark.parametrize("host", EXPOSED)
    def test_unless_it_is_wanted(
        self, host: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        check(host, guarded=True)
        assert not caplog.records
        check(host, insecure=True)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert "everybody who can reach it" in record.getMessage()


class TestBinding:
    @pytest.mark.parametrize("port", [-1, 65536])
    def test_a_port_that_is_none(self, port: int) -> None:
        with pytest.raises(UsageError, match=f"port {port} is not"), binding("h", port):
            raise AssertionError("not reached")

    def test_what_the_system_says(self) -> None:
        with pytest.raises(UsageError, match="cannot bind h:1: Address in use"):
            with binding("h", 1):
                raise OSError(98, "Address in use")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(arguments) == code
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = [x for x in output.err.splitlines() if x.startswith("longwire: ")]
    return line


class TestRefusals:
    """None of these gets as far as an open port."""

    def test_serve(self, capsys: pytest.CaptureFixture[str], keys: Keys) -> None:
        server = keys.ours.server
        assert server.cert and server.key
        tls = ("--tls-cert", server.cert, "--tls-key", server.key)
        for options in ((), tls):
            text = refusal(capsys, "serve", "-H", "0.0.0.0", "-p", "0", *options)
            assert "0.0.0.0 is not a loopback address" in text
            for remedy in ("--token-file", "--tls-client-ca", "--allow", "--insecure"):
                assert remedy in text

    def test_tunnel(self, capsys: pytest.CaptureFixture[str], keys: Keys) -> None:
        """Its own end has no guard to offer, whatever the other has."""
        options = ("-H", "0.0.0.0", "-p", "0", *keys.ours.connecting())
        text = refusal(capsys, "tunnel", "127.0.0.1:9", *options)
        assert "0.0.0.0 is not a loopback address" in text
        assert "--insecure" in text

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--token-file", "{none}"], "token file {none}: No such file"),
            (["--tls-cert", "{cert}"], "give --tls-cert and --tls-key"),
            (["--tls-key", "{key}"], "need --tls-cert"),
            (["--tls-client-ca", "{ca}"], "need --tls-cert"),
            (["--tls-cert", "{cert}", "--tls-key", "{none}"], "No such file"),
            (["--allow", "10.0.0.1/8"], "--allow: 10.0.0.1/8 has host bits set"),
        ],
    )
    def test_files_of_serve(
        self,
        capsys: pytest.CaptureFixture[str],
        keys: Keys,
        tmp_path: Path,
        options: list[str],
        words: str,
    ) -> None:
        files = keys.ours.server
        names = {"cert": files.cert, "key": files.key, "ca": files.ca}
        names["none"] = str(tmp_path / "none")
        filled = [option.format(**names) for option in options]
        assert words.format(**names) in refusal(capsys, "serve", "-p", "0", *filled)

    def test_files_of_a_client(
        self, capsys: pytest.CaptureFixture[str], keys: Keys, tmp_path: Path
    ) -> None:
        none, files = str(tmp_path / "none"), keys.ours.client
        assert files.cert
        for command in (["devices", "--rpc", "127.0.0.1:9"], ["tunnel", "127.0.0.1:9"]):
            for options in (["--token-file", none], ["--tls-ca", none]):
                assert none in refusal(capsys, *command, *options)
            text = refusal(capsys, *command, "--tls-cert", files.cert)
            assert "give --tls-cert and --tls-key" in text


def serves(worker: Worker) -> None:
    """Somebody on this machine gets an answer from all addresses."""
    port = worker.endpoint.port
    assert worker.endpoint.host == "0.0.0.0"
    with RawClient(Endpoint("127.0.0.1", port), V8) as client:
        client.hello()
        client.device_count()


def test_insecure_is_said_loudly() -> None:
    with running_worker("-H", "0.0.0.0", "--insecure") as worker:
        worker.logged("WARNING .*0.0.0.0 is not a loopback address")
        serves(worker)


def test_each_guard_is_enough(keys: Keys) -> None:
    """They start; what they let through is tested elsewhere."""
    token = ["--token-file", keys.ours.token_file]
    guards = [token, keys.ours.serving(token=False), ["--allow", "10.0.0.0/8"]]
    command = [sys.executable, "-m", "longwire", "serve", "-p", "0", "-H", "0.0.0.0"]
    started = [
        subprocess.Popen(
            [*command, *guard], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for guard in guards
    ]
    try:
        for process in started:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, b"")
            assert any(re.match(rb"listening on 0.0.0.0:\d+\n", x) for x in lines)
            process.send_signal(signal.SIGTERM)
        for process in started:
            _, log = process.communicate(timeout=20)
            assert process.returncode == 0
            assert b"WARNING" not in log
    finally:
        for process in started:
            process.kill()
            process.communicate()
