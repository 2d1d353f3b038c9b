from __future__ import annotations

import socket

import pytest

from aoffpolicy.errors import ConfigError
from aoffpolicy.transport.address import Address, bind_listener, resolve


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("127.0.0.1:5555", "127.0.0.1", 5555, "tcp://127.0.0.1:5555"),
        ("[::1]:5555", "::1", 5555, "tcp://[::1]:5555"),
        ("tcp://[::1]:5555", "::1", 5555, "tcp://[::1]:5555"),
        ("tcp://node-7.cluster_a.example.:1", "node-7.cluster_a.example.", 1, "tcp://node-7.cluster_a.example.:1"),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80, "tcp://[fe80::1%eth0]:80"),
        ("localhost:0", "localhost", 0, "tcp://localhost:0"),
    ],
)
def test_an_address_is_read_with_a_bare_host_and_written_with_brackets(
    text: str, host: str, port: int, url: str
) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, address.url) == (host, port, url)
    assert Address.parse(address.url) == Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("::1", "::1", 7),
        ("[::1]", "::1", 7),
        ("127.0.0.1", "127.0.0.1", 7),
        ("name", "name", 7),
        ("[::1]:9", "::1", 9),
        ("name:9", "name", 9),
    ],
)
def test_a_missing_port_takes_the_default_where_there_is_one(text: str, host: str, port: int) -> None:
    assert Address.parse(text, default_port=7) == Address(host, port)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the host is missing"),
        (":5555", "the host is missing"),
        ("127.0.0.1", "the port is missing"),
        ("[::1]", "the port is missing"),
        ("127.0.0.1:", "'' is not a port"),
        ("127.0.0.1:65536", "'65536' is not a port"),
        ("127.0.0.1:-1", "'-1' is not a port"),
        ("127.0.0.1:٣", "'٣' is not a port"),
        ("::1:5555", "written in brackets"),
        ("[::1:5555", "never closed"),
        ("[::1]5555", "expected a colon"),
        ("[127.0.0.1]:5555", "'127.0.0.1' is not an IPv6 address"),
        ("300.1.1.1:5555", "'300.1.1.1' is not an IPv4 address"),
        ("a b:5555", "neither an IP address nor a host name"),
        ("udp://a:5555", "written in brackets"),
    ],
)
def test_a_fault_quotes_the_text_and_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_loopback_is_known_in_every_spelling(host: str) -> None:
    assert Address(host, 1).is_loopback


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:10.0.0.1"])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not Address(host, 1).is_loopback


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_listener_has_the_right_family_and_keeps_its_port(host: str, family: socket.AddressFamily) -> None:
    with bind_listener(host) as listener:
        assert listener.family == family
        port = listener.getsockname()[1]
        assert port > 0
        with socket.create_connection((host, port), timeout=5) as client:
            assert client.getpeername()[1] == port
        with socket.socket(family) as rival, pytest.raises(OSError, match="in use"):
            rival.bind((host, port))


def test_a_listener_on_a_foreign_address_says_so() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1: cannot listen there .* address of this machine"):
        bind_listener("192.0.2.1")


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid: no address is known"):
        resolve("no-such-host.invalid")


def test_a_scope_survives_the_lookup() -> None:
    assert resolve("fe80::1%lo") == ("fe80::1%lo",)
