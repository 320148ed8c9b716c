from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from longwire.errors import UsageError
from longwire.transport.authority import Authority, Pair, Purpose, certificate_hosts
from longwire.transport.keyring import issue

NOW = datetime(2026, 5, 4, 12, tzinfo=timezone.utc)
TIMEOUT_S = 10.0
GREETING = b"hello"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials") / "team"
    issue(folder, ["gpu1.lan", "10.0.0.7", "fd00::7"])
    return folder


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create(NOW)


def context(protocol: int, folder: Path, name: str) -> ssl.SSLContext:
    made = ssl.SSLContext(protocol)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    made.load_verify_locations(folder / "ca.pem")
    made.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return made


def shake(
    server: ssl.SSLContext, client: ssl.SSLContext, host: str
) -> tuple[bytes | OSError, bytes | OSError]:
    """What each end got: the other's greeting, or the error (server, client)."""
    near, far = socket.socketpair()
    near.settimeout(TIMEOUT_S)
    far.settimeout(TIMEOUT_S)
    outcome: list[bytes | OSError] = []

    def serve() -> None:
        with closing(far):
            outcome.append(_greet(far, server, None))

    thread = threading.Thread(target=serve)
    thread.start()
    with closing(near):
        answer = _greet(near, client, host)
    thread.join()
    return outcome[0], answer


def _greet(
    sock: socket.socket, tls: ssl.SSLContext, host: str | None
) -> bytes | OSError:
    try:
        with tls.wrap_socket(
            sock, server_side=host is None, server_hostname=host
        ) as wrapped:
            assert wrapped.version() == "TLSv1.3"
            wrapped.sendall(GREETING)
            return wrapped.recv(len(GREETING))
    except OSError as error:
        return error


@pytest.mark.parametrize(
    "host", ["gpu1.lan", "10.0.0.7", "fd00::7", "localhost", "127.0.0.1", "::1"]
)
def test_both_ends_accept_each_other(folder: Path, host: str) -> None:
    server = context(ssl.PROTOCOL_TLS_SERVER, folder, "server")
    client = context(ssl.PROTOCOL_TLS_CLIENT, folder, "client")
    assert shake(server, client, host) == (GREETING, GREETING)


@pytest.mark.parametrize("host", ["gpu2.lan", "lan", "10.0.0.8", "fd00::8"])
def test_another_host_is_refused(folder: Path, host: str) -> None:
    server = context(ssl.PROTOCOL_TLS_SERVER, folder, "server")
    client = context(ssl.PROTOCOL_TLS_CLIENT, folder, "client")
    _, error = shake(server, client, host)
    assert isinstance(error, ssl.SSLCertVerificationError)
    assert "mismatch" in error.verify_message


def test_a_client_cannot_play_server(folder: Path) -> None:
    server = context(ssl.PROTOCOL_TLS_SERVER, folder, "client")
    client = context(ssl.PROTOCOL_TLS_CLIENT, folder, "client")
    client.check_hostname = False  # so that its purpose alone can be the reason
    _, error = shake(server, client, "localhost")
    assert isinstance(error, ssl.SSLCertVerificationError)
    assert "purpose" in error.verify_message


def test_a_server_cannot_play_client(folder: Path) -> None:
    server = context(ssl.PROTOCOL_TLS_SERVER, folder, "server")
    client = context(ssl.PROTOCOL_TLS_CLIENT, folder, "server")
    error, _ = shake(server, client, "localhost")
    assert isinstance(error, ssl.SSLCertVerificationError)
    assert "purpose" in error.verify_message


def test_a_client_of_another_ca_is_refused(folder: Path, tmp_path: Path) -> None:
    issue(tmp_path / "other")
    server = context(ssl.PROTOCOL_TLS_SERVER, folder, "server")
    client = context(ssl.PROTOCOL_TLS_CLIENT, folder, "client")
    other = tmp_path / "other"
    client.load_cert_chain(other / "client.pem", other / "client.key")
    error, _ = shake(server, client, "localhost")
    assert isinstance(error, ssl.SSLCertVerificationError)


def test_a_certificate_says_what_it_is_for(authority: Authority) -> None:
    hosts = certificate_hosts(["gpu1", "10.0.0.7"])
    pair = authority.issue("one", Purpose.SERVER, NOW, days=30, hosts=hosts)
    certificate, ca = pair.certificate, authority.pair.certificate

    assert isinstance(pair.key.curve, ec.SECP256R1)
    assert isinstance(certificate.signature_hash_algorithm, hashes.SHA256)
    assert certificate.subject.rfc4514_string() == "CN=one"
    assert pair.until == NOW + timedelta(days=30)
    assert certificate.not_valid_before_utc == NOW - timedelta(minutes=5)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    dns = names.value.get_values_for_type(x509.DNSName)
    addresses = names.value.get_values_for_type(x509.IPAddress)
    assert dns == ["gpu1", "localhost"]
    assert list(map(str, addresses)) == ["10.0.0.7", "127.0.0.1", "::1"]

    critical = {x509.BasicConstraints, x509.KeyUsage}
    for one in (certificate, ca):
        found = {type(e.value) for e in one.extensions if e.critical}
        assert found == critical
    basic = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert basic == x509.BasicConstraints(ca=True, path_length=0)


def test_two_of_a_kind_differ() -> None:
    first, second = Authority.create(NOW), Authority.create(NOW)
    assert first.pair.certificate.subject != second.pair.certificate.subject
    pairs = [first.issue("one", Purpose.CLIENT, NOW) for _ in range(2)]
    assert len({pair.certificate.serial_number for pair in pairs}) == 2
    assert pairs[0].key.public_key() != pairs[1].key.public_key()


def test_no_certificate_outlives_its_ca(authority: Authority) -> None:
    late = authority.pair.until - timedelta(days=10)
    pair = authority.issue("late", Purpose.CLIENT, late, days=825)
    assert pair.until == authority.pair.until


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("GPU1.lan", "gpu1.lan"),
        ("gpu1.", "gpu1"),
        ("[FD00::0007]", "fd00::7"),
        ("fd00::7", "fd00::7"),
        ("10.0.0.7", "10.0.0.7"),
        ("node_1", "node_1"),
    ],
)
def test_hosts_are_written_as_endpoints_are(text: str, host: str) -> None:
    assert certificate_hosts([text])[0] == host


def test_hosts_are_listed_once() -> None:
    hosts = certificate_hosts(["localhost", "gpu1", "GPU1", "::1"])
    assert hosts == ["localhost", "gpu1", "::1", "127.0.0.1"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("gpu1:50052", "port"),
        ("[::1]:50052", "port"),
        ("10.0.0", "not an IPv4 address"),
        ("10.0.0.256", "not an IPv4 address"),
        ("*.lan", "not a host name"),
        ("b\u00fccher.example", "not a host name"),
        ("a b", "space"),
        ("a" * 64, "not a host name"),
        ("0.0.0.0", "every address"),
        ("[::]", "every address"),
        ("fe80::1%eth0", "zone"),
    ],
)
def test_what_is_no_host_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        certificate_hosts([text])


def test_a_pair_survives_its_files(authority: Authority) -> None:
    pair = authority.issue("one", Purpose.CLIENT, NOW)
    again = Pair.load(pair.certificate_pem(), pair.key_pem())
    assert again.certificate == pair.certificate
    authority.check(again, Purpose.CLIENT, NOW)


def _encrypted(pair: Pair) -> bytes:
    return pair.key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"pass"),
    )


def _of_another_kind(pair: Pair) -> bytes:
    return ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (lambda pair: (pair.certificate_pem(), _encrypted(pair)), "encrypted"),
        (lambda pair: (pair.certificate_pem(), _of_another_kind(pair)), "EC key"),
        (lambda pair: (pair.certificate_pem(), b"junk"), "not a private key"),
        (lambda pair: (b"junk", pair.key_pem()), "not a certificate"),
        (lambda pair: (pair.key_pem(), pair.key_pem()), "not a certificate"),
        (
            lambda pair: (pair.certificate_pem(), Authority.create(NOW).pair.key_pem()),
            "does not match",
        ),
    ],
)
def test_what_is_no_pair_is_refused(
    spoiled: Callable[[Pair], tuple[bytes, bytes]], reason: str, authority: Authority
) -> None:
    with pytest.raises(ValueError, match=reason):
        Pair.load(*spoiled(authority.pair))


def test_a_ca_that_cannot_issue_is_refused(authority: Authority) -> None:
    with pytest.raises(ValueError, match="expired on 2036-05-01"):
        Authority(authority.pair, authority.pair.until)
    with pytest.raises(ValueError, match="valid from 2026-05-04"):
        Authority(authority.pair, NOW - timedelta(days=1))
    leaf = authority.issue("one", Purpose.CLIENT, NOW)
    with pytest.raises(ValueError, match="not a CA's"):
        Authority(leaf, NOW)


def test_check_refuses_what_is_not_its_own(authority: Authority) -> None:
    pair = authority.issue("one", Purpose.CLIENT, NOW)
    authority.check(pair, Purpose.CLIENT, NOW)
    with pytest.raises(ValueError, match="not a server's"):
        authority.check(pair, Purpose.SERVER, NOW)
    with pytest.raises(ValueError, match="expired"):
        authority.check(pair, Purpose.CLIENT, pair.until)
    with pytest.raises(ValueError, match="another CA"):
        Authority.create(NOW).check(pair, Purpose.CLIENT, NOW)
    with pytest.raises(ValueError, match="not a client's"):
        authority.check(authority.pair, Purpose.CLIENT, NOW)


def test_check_refuses_a_forged_signature(authority: Authority) -> None:
    forger = Authority.create(NOW)
    subject = authority.pair.certificate.subject
    key = ec.generate_private_key(ec.SECP256R1())
    forged = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=1))
        .sign(forger.pair.key, hashes.SHA256())
    )
    with pytest.raises(ValueError, match="another CA"):
        authority.check(Pair(forged, key), Purpose.CLIENT, NOW)
