"""Where a server is: a host and a port, and the text that users write for it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

from longwire.errors import EndpointError
from longwire.wire.constants import DEFAULT_PORT

__all__ = ["Endpoint", "parse_endpoint", "parse_endpoints"]

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?")
_IPV6_TEXT = re.compile(r"[A-Za-z0-9:.%_-]*")
_NUMERIC = re.compile(r"[0-9.]+")
_PORT = re.compile(r"[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server's address; equal when host and port are."""

    host: str
    """A host name in lower case, or an IPv4 or IPv6 address without brackets."""

    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_endpoint(text: str) -> Endpoint:
    """Read HOST, HOST:PORT, [IPv6] or [IPv6]:PORT.

    Raises:
        EndpointError: the text is none of these; the reason says which part.
    """
    if not text:
        raise EndpointError(text, "it is empty")
    if any(character.isspace() for character in text):
        raise EndpointError(text, "it has a space in it")
    if text.startswith("["):
        return _parse_bracketed(text)
    if text.count(":") > 1:
        raise EndpointError(text, "an IPv6 address needs brackets around it")
    host, colon, port = text.partition(":")
    return Endpoint(_host(text, host), _port(text, colon, port))


def parse_endpoints(text: str) -> list[Endpoint]:
    """Read a comma-separated list of different endpoints, in its order.

    Raises:
        EndpointError: an item is malformed, empty or there twice.
    """
    endpoints: list[Endpoint] = []
    for item in text.split(","):
        if text and not item:
            raise EndpointError(text, "an item of the list is empty")
        endpoint = parse_endpoint(item)
        if endpoint in endpoints:
            raise EndpointError(text, f"{endpoint} is listed twice")
        endpoints.append(endpoint)
    return endpoints


def _parse_bracketed(text: str) -> Endpoint:
    address, bracket, rest = text[1:].partition("]")
    if not bracket:
        raise EndpointError(text, "the closing bracket is missing")
    try:
        # The class takes any text after a "%", NUL included; resolvers do not.
        host = str(IPv6Address(address if _IPV6_TEXT.fullmatch(address) else ""))
    except AddressValueError:
        raise EndpointError(text, f"{address!r} is not an IPv6 address") from None
    junk, colon, port = rest.partition(":")
    if junk:
        raise EndpointError(text, f"{junk!r} follows the closing bracket")
    return Endpoint(host, _port(text, colon, port))


def _host(text: str, host: str) -> str:
    if not host:
        raise EndpointError(text, "the host is missing")
    if _NUMERIC.fullmatch(host):
        try:
            return str(IPv4Address(host))
        except AddressValueError:
            raise EndpointError(text, f"{host!r} is not an IPv4 address") from None
    if not _HOST_NAME.fullmatch(host):
        raise EndpointError(text, f"{host!r} is not a host name")
    return host.lower()


def _port(text: str, colon: str, port: str) -> int:
    if not colon:
        return DEFAULT_PORT
    if not port:
        raise EndpointError(text, "the port is missing after the colon")
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise EndpointError(text, f"{port!r} is not a port from 1 to 65535")
    return int(port)
