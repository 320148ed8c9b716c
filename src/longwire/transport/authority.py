"""Certificates of a small team: a CA of its own, and what it issues.

Everything here is in memory; the files are `keyring`'s.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from longwire.errors import EndpointError, UsageError
from longwire.transport.endpoint import parse_endpoint

__all__ = ["DAYS", "Authority", "Pair", "Purpose", "certificate_hosts"]

DAYS = 825
"""Days that a certificate is good for: more, and Apple's systems refuse a server's."""

_CA_LIFE = timedelta(days=3650)

_CLOCK_SKEW = timedelta(minutes=5)
"""How far the clock of a machine that checks a new certificate may be behind."""

_Extension = TypeVar("_Extension", bound=x509.ExtensionType)

_LOCAL = ("localhost", "127.0.0.1", "::1")


class Purpose(Enum):
    """What a certificate is good for; the value is its only extended key usage."""

    SERVER = ExtendedKeyUsageOID.SERVER_AUTH
    CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH


def certificate_hosts(hosts: Iterable[str]) -> list[str]:
    """The names and addresses in a certificate for `hosts`: those of loopback as well.

    Each is written as an `Endpoint` has it, which is what a client compares.

    Raises:
        UsageError: one of them is neither a host name nor an address of a host.
    """
    return list(dict.fromkeys([*map(_parse_host, hosts), *_LOCAL]))


def _parse_host(text: str) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return _parse_name(text)
    if address.is_unspecified:
        raise UsageError(
            f"host {text!r} is every address of a machine; name those that clients "
            "write after --rpc"
        )
    if "%" in bare:
        raise UsageError(
            f"host {text!r}: no certificate can hold a zone; use an address without"
        )
    return str(address)


def _parse_name(text: str) -> str:
    try:
        if ":" in text:
            raise EndpointError(text, "a port has no place in a certificate")
        return parse_endpoint(text).host.rstrip(".")
    except EndpointError as error:
        raise UsageError(
            f"host {text!r}: {error.reason} (write a name or an address as clients "
            "do after --rpc, without the port)"
        ) from error


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and the private key that it is for."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def load(cls, certificate_pem: bytes, key_pem: bytes) -> Pair:
        """Read both from PEM text.

        Raises:
            ValueError: they are not a certificate and its key; the text says why.
        """
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
        except ValueError as error:
            raise ValueError("it is not a certificate in PEM text") from error
        try:
            key = serialization.load_pem_private_key(key_pem, None)
        except TypeError as error:
            raise ValueError("its key is encrypted") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise ValueError("its key is not a private key in PEM text") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("its key is not an EC key")
        if key.public_key() != certificate.public_key():
            raise ValueError("its key does not match")
        return cls(certificate, key)

    @property
    def until(self) -> datetime:
        """When the certificate ends."""
        return self.certificate.not_valid_after_utc

    def certificate_pem(self) -> bytes:
        """The certificate as a file's content."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        """The key as a file's content, not encrypted: the file's mode guards it."""
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def check_time(self, now: datetime) -> None:
        """Refuse a certificate that is not valid now.

        Raises:
            ValueError: it has ended, or its time has not come.
        """
        if now >= self.until:
            raise ValueError(f"it expired on {self.until:%Y-%m-%d}")
        if now < self.certificate.not_valid_before_utc:
            raise ValueError(
                f"it is valid from {self.certificate.not_valid_before_utc:%Y-%m-%d} "
                "on, which this machine's clock has not reached"
            )


class Authority:
    """A CA that can issue: its certificate, its key, and nothing else."""

    def __init__(self, pair: Pair, now: datetime) -> None:
        """Use a CA that there is.

        Raises:
            ValueError: it is expired, or its certificate is not that of a CA.
        """
        pair.check_time(now)
        basic = _extension(pair, x509.BasicConstraints)
        identifier = _extension(pair, x509.SubjectKeyIdentifier)
        if basic is None or not basic.ca or identifier is None:
            raise ValueError("it is not a CA's")
        self.pair = pair
        self._identifier = identifier

    @classmethod
    def create(cls, now: datetime) -> Authority:
        """Make a new CA. It signs certificates of servers and clients, never of CAs."""
        key = ec.generate_private_key(ec.SECP256R1())
        serial = x509.random_serial_number()
        # Whoever trusts several CAs can tell them apart.
        name = _name(f"Longwire CA {serial:040x}"[:20])
        builder = _builder(name, name, key, now, now + _CA_LIFE)
        builder = builder.serial_number(serial)
        for extension in (
            x509.BasicConstraints(ca=True, path_length=0),
            _key_usage(ca=True),
        ):
            builder = builder.add_extension(extension, critical=True)
        return cls(Pair(builder.sign(key, hashes.SHA256()), key), now)

    def issue(
        self,
        name: str,
        purpose: Purpose,
        now: datetime,
        *,
        days: int = DAYS,
        hosts: Sequence[str] = (),
    ) -> Pair:
        """Make a pair for `name`, never for longer than the CA itself is good for.

        `hosts` are a server's, from `certificate_hosts`.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        until = min(now + timedelta(days=days), self.pair.until)
        issuer = self.pair.certificate.subject
        builder = _builder(_name(name), issuer, key, now, until)
        builder = builder.serial_number(x509.random_serial_number())
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(ca=False), True),
            (x509.ExtendedKeyUsage([purpose.value]), False),
            (self._authority_identifier(), False),
        ):
            builder = builder.add_extension(extension, critical)
        if hosts:
            names = x509.SubjectAlternativeName(map(_general_name, hosts))
            builder = builder.add_extension(names, critical=False)
        return Pair(builder.sign(self.pair.key, hashes.SHA256()), key)

    def check(self, pair: Pair, purpose: Purpose, now: datetime) -> None:
        """Refuse a pair that is not of this CA, not for `purpose`, or not valid now.

        Raises:
            ValueError: the text says which of these.
        """
        pair.check_time(now)
        try:
            pair.certificate.verify_directly_issued_by(self.pair.certificate)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ValueError("it is of another CA") from error
        usage = _extension(pair, x509.ExtendedKeyUsage)
        if usage is None or list(usage) != [purpose.value]:
            raise ValueError(f"it is not a {purpose.name.lower()}'s")

    def _authority_identifier(self) -> x509.AuthorityKeyIdentifier:
        of_issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier
        return of_issuer(self._identifier)


def _extension(pair: Pair, kind: type[_Extension]) -> _Extension | None:
    try:
        found = pair.certificate.extensions.get_extension_for_class(kind)
    except x509.ExtensionNotFound:
        return None
    return found.value


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    """What a CA's certificate and all others have in common."""
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), False)
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
