"""Every exception Longwire raises.

LongwireError
├─ EndpointError        text that names no endpoint; also a ValueError
├─ ProtocolError        bytes or order against PROTOCOL.md
│   ├─ BadFrame           a length that its command does not have
│   ├─ UnknownCommand     a number the dialect does not know
│   ├─ LimitExceeded      well-formed, but over a named limit
│   ├─ BadRequest         a field that fails a check of PROTOCOL.md
│   │   └─ Unauthenticated  the server wants a token first, or another one
│   └─ VersionMismatch    the peer speaks a dialect we do not
├─ RemoteError          one endpoint let a command down
│   ├─ ConnectionLost     the byte stream broke, or a deadline passed
│   └─ RemoteFailure      the peer answered that it could not
│       └─ AuthenticationFailed  one end does not accept who the other is
├─ NativeError          the engine library
│   ├─ LibraryNotFound    every path tried
│   ├─ AbiMismatch        what was expected, what was found
│   └─ CallFailed         a native call gave up
└─ UsageError           the caller asked for something that cannot be
"""

from __future__ import annotations

__all__ = [
    "AbiMismatch",
    "AuthenticationFailed",
    "BadFrame",
    "BadRequest",
    "CallFailed",
    "ConnectionLost",
    "EndpointError",
    "LibraryNotFound",
    "LimitExceeded",
    "LongwireError",
    "NativeError",
    "ProtocolError",
    "RemoteError",
    "RemoteFailure",
    "Unauthenticated",
    "UnknownCommand",
    "UsageError",
    "VersionMismatch",
    "WIRE_CODES",
]


class LongwireError(Exception):
    """Base of all errors; the facts are attributes, `str()` is the sentence."""


WIRE_CODES = {
    "BadFrame": 1,
    "UnknownCommand": 2,
    "LimitExceeded": 3,
    "BadRequest": 4,
    "RemoteFailure": 5,
    "Unauthenticated": 6,
}
"""Numbers of LX error answers, by class name (PROTOCOL.md, "LX")."""


class UsageError(LongwireError):
    """The request makes no sense as asked; the sentence names the remedy."""


class EndpointError(LongwireError, ValueError):
    """Text that does not name an endpoint."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, reason)
        self.text = text
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.text!r} is not an endpoint: {self.reason} "
            "(write HOST, HOST:PORT or [IPv6]:PORT)"
        )


class ProtocolError(LongwireError):
    """A peer sent bytes that PROTOCOL.md does not allow."""


class BadFrame(ProtocolError):
    """A message whose length does not fit its command."""

    def __init__(self, command: str, length: int, expected: str) -> None:
        super().__init__(command, length, expected)
        self.command = command
        self.length = length
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.command}: length {self.length}, expected {self.expected}"


class UnknownCommand(ProtocolError):
    """A command number outside the dialect."""

    def __init__(self, number: int, dialect: str) -> None:
        super().__init__(number, dialect)
        self.number = number
        self.dialect = dialect

    def __str__(self) -> str:
        return f"command 0x{self.number:02x} is not part of protocol {self.dialect}"


class LimitExceeded(ProtocolError):
    """A count or size above a named limit, refused before memory is taken."""

    def __init__(self, command: str, what: str, value: int, limit: int) -> None:
        super().__init__(command, what, value, limit)
        self.command = command
        self.what = what
        self.value = value
        self.limit = limit

    def __str__(self) -> str:
        return f"{self.command}: {self.what} {self.value} is over {self.limit}"


class BadRequest(ProtocolError):
    """A field that fails one of the checks listed in PROTOCOL.md."""

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(command, reason)
        self.command = command
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.command}: {self.reason}"


class Unauthenticated(BadRequest):
    """A client that has not shown that it knows the server's token."""


class VersionMismatch(ProtocolError):
    """The server speaks a protocol version that this client does not."""

    def __init__(self, endpoint: str, found: str, supported: str) -> None:
        super().__init__(endpoint, found, supported)
        self.endpoint = endpoint
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return (
            f"{self.endpoint} speaks RPC protocol {self.found}; this client "
            f"speaks {self.supported}. Run a server of one of those versions "
            "there (with Longwire: serve --protocol 8 or --protocol 7)"
        )


class RemoteError(LongwireError):
    """One endpoint could not do one command."""

    def __init__(self, endpoint: str, command: str, cause: str) -> None:
        super().__init__(endpoint, command, cause)
        self.endpoint = endpoint
        self.command = command
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.endpoint}: {self.command}: {self.cause}"


class ConnectionLost(RemoteError):
    """The byte stream to an endpoint broke, could not be made, or timed out."""


class RemoteFailure(RemoteError):
    """The endpoint understood a command and could not do it."""


class AuthenticationFailed(RemoteFailure):
    """Server or client does not accept who the other says it is."""


class NativeError(LongwireError):
    """The engine library is missing, of a wrong version, or refused a call."""


class LibraryNotFound(NativeError):
    """No engine library; `attempts` has a (place, reason) pair per try."""

    def __init__(self, engine: str, attempts: list[tuple[str, str]]) -> None:
        super().__init__(engine, attempts)
        self.engine = engine
        self.attempts = attempts

    def __str__(self) -> str:
        tried = "; ".join(f"{place}: {reason}" for place, reason in self.attempts)
        return f"engine {self.engine!r} cannot be loaded ({tried})"


class AbiMismatch(NativeError):
    """The library is not the build its profile describes."""

    def __init__(self, library: str, what: str, supported: str) -> None:
        super().__init__(library, what, supported)
        self.library = library
        self.what = what
        self.supported = supported

    def __str__(self) -> str:
        return f"{self.library}: {self.what}. Versions that work: {self.supported}"


class CallFailed(NativeError):
    """A native function reported failure."""

    def __init__(self, function: str, status: str) -> None:
        super().__init__(function, status)
        self.function = function
        self.status = status

    def __str__(self) -> str:
        return f"{self.function}: {self.status}"
