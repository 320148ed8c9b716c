"""TLS 1.3 around a byte stream, by the standard library's `ssl`."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import struct
from dataclasses import dataclass

from longwire.errors import UsageError
from longwire.transport.stream import Stream

__all__ = [
    "TlsFiles",
    "TlsStream",
    "client_context",
    "explain",
    "pinning_context",
    "refuses_certificate",
    "server_context",
]

_RECORD = 16 * 1024
"""What TLS sends as one record. Smaller pieces are joined up to this."""

_CALL = 4 * _RECORD
"""OpenSSL returns once it has sent all it was given, and deadlines are for a call: a
tensor in one would have to be through before the first."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end."""

    cert: str | None = None
    """This end's certificate, with what leads to its CA."""
    key: str | None = None
    ca: str | None = None
    """Who must have signed the other end's certificate."""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """What a server needs; with a CA, clients must show a certificate of it.

    Raises:
        UsageError: a file is missing, unreadable, or not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Sessions live in processes that come and go: nothing could be resumed.
    context.num_tickets = 0
    _load(context, files)
    if files.ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """What a client needs; without a CA, those that the system trusts count.

    Raises:
        UsageError: a file is missing, unreadable, or not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _load(context, files)
    if files.ca is None:
        context.load_default_certs()
    return context


def pinning_context() -> ssl.SSLContext:
    """What a client needs that knows the server's certificate already, and compares
    it: no name and no CA are asked for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _load(context: ssl.SSLContext, files: TlsFiles) -> None:
    if (files.cert is None) is not (files.key is None):
        raise UsageError("a certificate needs its key: give --tls-cert and --tls-key")
    try:
        if files.cert is not None:
            # Never ask for a passphrase: nobody sits in front of a service.
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
    except (OSError, UsageError) as error:
        what = f"certificate {files.cert} with key {files.key}"
        raise UsageError(f"{what}: {explain(error)}") from error
    try:
        if files.ca is not None:
            context.load_verify_locations(cafile=files.ca)
    except OSError as error:
        raise UsageError(f"CA {files.ca}: {explain(error)}") from error


def _no_passphrase() -> str:
    raise UsageError("the key has a passphrase; give one without")


def refuses_certificate(error: BaseException | None) -> bool:
    """Whether this is the other end's word that it wants another certificate."""
    reason = _reason(error)
    return any(words in reason for words in ("_CERTIFICATE", "_UNKNOWN_CA"))


def _reason(error: BaseException | None) -> str:
    """OpenSSL's name for it, if it is one of OpenSSL's."""
    # Those that `ssl` itself raises have no such attribute.
    return getattr(error, "reason", None) or ""


def explain(error: BaseException) -> str:
    """An error of a file or a handshake, in the words of somebody who can act."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = _reason(error)
        return _WORDS.get(reason, reason or str(error))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


_WORDS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the server wants a client certificate "
    "(--tls-cert and --tls-key)",
    "TLSV1_ALERT_UNKNOWN_CA": "the other end does not know the CA of this end's "
    "certificate",
    "WRONG_VERSION_NUMBER": "the other end does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "the other end does not speak TLS 1.3",
    "TLSV1_ALERT_PROTOCOL_VERSION": "the other end does not speak TLS 1.3",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the other end does not accept this end's "
    "certificate (its name, perhaps)",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this end's certificate has expired",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "this end's certificate is not made for "
    "what it is used for here",
    "UNEXPECTED_EOF_WHILE_READING": "the connection closed during the TLS handshake",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no client certificate",
    "KEY_VALUES_MISMATCH": "the key is of another certificate",
    "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it",
    "PEM_LIB": "not a certificate and its key in PEM form",
    "NO_START_LINE": "not in PEM form",
}


class TlsStream(Stream):
    """A stream whose bytes travel encrypted. Its first call shakes hands, if
    nobody has before: with what can go wrong there as an `OSError`."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, server: str | None):
        """Take a connected socket over; `server` is the name that its certificate
        has to have, None at the server's end.

        Raises:
            OSError: the other end is gone, or the handshake failed.
        """
        # At the server's end, the first read shakes hands: under the deadlines
        # that hold for everything a client does.
        self._tls = tls.wrap_socket(
            sock,
            server_side=server is None,
            server_hostname=server,
            do_handshake_on_connect=server is not None,
        )
        self._send_s = _send_deadline(self._tls)
        super().__init__(self._tls)

    @property
    def certificate(self) -> bytes | None:
        return self._tls.getpeercert(binary_form=True)

    def _read(self, targets: tuple[memoryview, ...]) -> int:
        return self._tls.recv_into(targets[0])

    def _holds_more(self) -> bool:
        return self._tls.pending() > 0

    def _write(self, pieces: list[memoryview]) -> int:
        data = pieces[0][:_CALL]
        if len(data) < _RECORD and len(pieces) > 1:
            data = memoryview(_joined(pieces))
        try:
            return self._send(data)
        except (ssl.SSLEOFError, ConnectionError) as error:
            self._read_alert()
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error

    def _send(self, data: memoryview) -> int:
        if self._send_s is None:
            return self._tls.send(data)
        self._tls.settimeout(self._send_s)
        try:
            return self._tls.send(data)
        except TimeoutError as error:
            raise BlockingIOError("the peer takes nothing in") from error
        finally:
            self._tls.settimeout(None)

    def _read_alert(self) -> None:
        """Raise the reason that the other end gave before it closed, if it did."""
        self._tls.settimeout(0)
        # All but an alert only says again that the stream broke.
        with contextlib.suppress(
            ssl.SSLWantReadError, ssl.SSLEOFError, ConnectionError
        ):
            self._tls.recv(1)

    def hang_up(self) -> None:
        # An `SSLSocket` would go on in plain, and hand out what is still to decrypt.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)


def _send_deadline(sock: socket.socket) -> float | None:
    """What SO_SNDTIMEO bounds sends to. `ssl` tries again when it has passed."""
    size = struct.calcsize("@ll")
    whole, part = struct.unpack(
        "@ll", sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, size)
    )
    return float(whole + part / 1e6) or None


def _joined(pieces: list[memoryview]) -> bytearray:
    """The first bytes of all pieces, as many as make a record."""
    joined = bytearray()
    for piece in pieces:
        joined += piece[: _RECORD - len(joined)]
        if len(joined) == _RECORD:
            break
    return joined
