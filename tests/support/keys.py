"""Certificates and tokens of two teams, who know nothing of each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from longwire.client.credentials import Credentials
from longwire.transport.keyring import issue
from longwire.transport.tls import TlsFiles

__all__ = ["Keys", "Team", "make_keys"]


@dataclass(frozen=True)
class Team:
    """A folder as `longwire keygen` makes it."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def token_file(self) -> str:
        return self.path("token")

    @property
    def token(self) -> bytes:
        return Path(self.token_file).read_bytes().strip()

    @property
    def server(self) -> TlsFiles:
        """What a server has that asks clients for certificates."""
        return self.pair("server")

    @property
    def client(self) -> TlsFiles:
        return self.pair("client")

    def pair(self, name: str) -> TlsFiles:
        """A certificate of this team, and trust in its CA."""
        cert, key = self.path(f"{name}.pem"), self.path(f"{name}.key")
        return TlsFiles(cert, key, self.path("ca.pem"))

    def serving(self, *, token: bool = True) -> list[str]:
        """`serve`'s options for mutual TLS, and a token."""
        files = self.server
        assert files.cert and files.key and files.ca
        options = ["--tls-cert", files.cert, "--tls-key", files.key]
        options += ["--tls-client-ca", files.ca]
        return [*options, "--token-file", self.token_file] if token else options

    def connecting(self, *, token: bool = True) -> list[str]:
        """A client's options for the same."""
        files = self.client
        assert files.cert and files.key and files.ca
        options = ["--tls-cert", files.cert, "--tls-key", files.key]
        options += ["--tls-ca", files.ca]
        return [*options, "--token-file", self.token_file] if token else options

    def credentials(self, *, token: bool = True, name: str = "client") -> Credentials:
        """What those options are to the library."""
        files = self.pair(name)
        return Credentials.load(
            token_file=self.token_file if token else None,
            tls_ca=files.ca,
            tls_cert=files.cert,
            tls_key=files.key,
        )

    def secrets(self) -> list[str]:
        """What must not be in any log: the token, and each line of every key."""
        lines = [self.token.decode()]
        for key in self.folder.glob("*.key"):
            lines += [line for line in key.read_text().split("\n") if "-" not in line]
        return [line for line in lines if len(line) > 8]


@dataclass(frozen=True)
class Keys:
    """All teams of one run of the tests."""

    ours: Team
    others: Team
    bygone: Team
    """Its certificates have expired."""

    def check_unspoken(self, text: str) -> None:
        """No secret is in a text."""
        for team in (self.ours, self.others, self.bygone):
            for secret in team.secrets():
                assert secret not in text


def make_keys(folder: Path) -> Keys:
    """Make all of them in a folder."""
    keys = Keys(*(Team(folder / name) for name in ("ours", "others", "bygone")))
    issue(keys.ours.folder)
    issue(keys.others.folder)
    long_ago = datetime.now(timezone.utc) - timedelta(days=30)
    issue(keys.bygone.folder, days=7, now=long_ago)
    return keys
