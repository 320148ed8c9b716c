from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longwire.errors import EndpointError
from longwire.transport.endpoint import Endpoint, parse_endpoint, parse_endpoints


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu", "gpu", 50052),
        ("gpu:1", "gpu", 1),
        ("GPU.Example.org:65535", "gpu.example.org", 65535),
        ("rack_3-node-7.lan.:5000", "rack_3-node-7.lan.", 5000),
        ("7zip:1", "7zip", 1),
        ("10.0.0.2", "10.0.0.2", 50052),
        ("10.0.0.2:00080", "10.0.0.2", 80),
        ("[::1]", "::1", 50052),
        ("[::1]:7", "::1", 7),
        ("[2001:DB8:0:0::1]:7", "2001:db8::1", 7),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
        ("a" * 63 + ":7", "a" * 63, 7),
    ],
)
def test_reads(text: str, host: str, port: int) -> None:
    assert parse_endpoint(text) == Endpoint(host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        (":", "the host is missing"),
        (":50052", "the host is missing"),
        ("gpu:", "the port is missing"),
        ("gpu:0", "'0' is not a port"),
        ("gpu:65536", "'65536' is not a port"),
        ("gpu:-1", "'-1' is not a port"),
        ("gpu:+1", "'+1' is not a port"),
        ("gpu:1_0", "'1_0' is not a port"),
        ("gpu:\u0661", "is not a port"),
        ("gpu:http", "'http' is not a port"),
        ("gpu:" + "9" * 5000, "is not a port"),
        ("::1", "needs brackets"),
        ("2001:db8::1", "needs brackets"),
        ("gpu:1:2", "needs brackets"),
        (" gpu", "a space in it"),
        ("gpu :1", "a space in it"),
        ("gpu:1\n", "a space in it"),
        ("[::1", "closing bracket is missing"),
        ("[]:1", "'' is not an IPv6 address"),
        ("[10.0.0.2]:1", "'10.0.0.2' is not an IPv6 address"),
        ("[::1%\0]:1", "is not an IPv6 address"),
        ("[gpu]:1", "'gpu' is not an IPv6 address"),
        ("[::1]50052", "'50052' follows the closing bracket"),
        ("[::1]:", "the port is missing"),
        ("[::1]:x", "'x' is not a port"),
        ("50052", "'50052' is not an IPv4 address"),
        ("10.0.0.256:1", "'10.0.0.256' is not an IPv4 address"),
        ("10.0.2", "'10.0.2' is not an IPv4 address"),
        ("gpu/1", "'gpu/1' is not a host name"),
        ("user@gpu:1", "'user@gpu' is not a host name"),
        ("-gpu:1", "'-gpu' is not a host name"),
        ("gpu..lan:1", "'gpu..lan' is not a host name"),
        ("a" * 64, "is not a host name"),
        (".".join(["abcdefg"] * 32), "is not a host name"),
        ("b\u00fccher", "is not a host name"),
        ("gpu\0:1", "is not a host name"),
        ("a:1,b:2", "needs brackets"),
    ],
)
def test_refuses(text: str, reason: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoint(text)
    assert reason in caught.value.reason
    assert caught.value.text == text
    assert isinstance(caught.value, ValueError)


def test_reads_a_list_in_order() -> None:
    endpoints = parse_endpoints("b,[::1]:7,a:2")
    assert list(map(str, endpoints)) == ["b:50052", "[::1]:7", "a:2"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        (",", "an item of the list is empty"),
        ("a,", "an item of the list is empty"),
        (",a", "an item of the list is empty"),
        ("a,,b", "an item of the list is empty"),
        ("a, b", "a space in it"),
        ("a,b:0", "'0' is not a port"),
        ("a:1,b,a:1", "a:1 is listed twice"),
        ("a,A:50052", "a:50052 is listed twice"),
        ("[::1],[0::1]", "[::1]:50052 is listed twice"),
    ],
)
def test_refuses_a_list(text: str, reason: str) -> None:
    with pytest.raises(EndpointError) as caught:
        parse_endpoints(text)
    assert reason in caught.value.reason


def test_a_port_tells_servers_of_one_host_apart() -> None:
    assert len(parse_endpoints("a:1,a:2")) == 2


@given(st.text(max_size=40) | st.text("a1.-:[]%,", max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        endpoint = parse_endpoint(text)
    except EndpointError:
        return
    assert parse_endpoint(str(endpoint)) == endpoint
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint
