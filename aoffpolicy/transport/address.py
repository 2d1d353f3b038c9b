"""Addresses: IPv4 literals, IPv6 literals with or without a scope, and names, all alike.

Brackets belong into text and URLs only. `Address.host` and everything that goes to a socket or a TCPStore is bare.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Self

from aoffpolicy.errors import ConfigError

_NAME = re.compile(r"(?=.{1,253}\.?$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
_LOOKS_LIKE_IPV4 = re.compile(r"[0-9.]+")


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port."""

    host: str
    """Bare: a name, an IPv4 literal, or an IPv6 literal without brackets, with its scope if it has one."""
    port: int
    """0 stands for a port that the kernel chooses."""

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> Self:
        """Read `host:port`, `[v6]:port` or either behind `tcp://`.

        Args:
            text: What the user or a file says.
            default_port: Port of a text without one (then also a bare `::1` is understood); None demands a port.

        Raises:
            ConfigError: The text is no address; the message quotes it and says what was expected.
        """
        rest = text.strip().removeprefix("tcp://")
        if default_port is not None and _is_ipv6(rest):
            return cls(rest, default_port)
        if rest.startswith("["):
            host, bracket, tail = rest[1:].partition("]")
            if not bracket:
                raise _fault(text, "the bracket is never closed")
            if not _is_ipv6(host):
                raise _fault(text, f"{host!r} is not an IPv6 address")
            if tail and not tail.startswith(":"):
                raise _fault(text, f"expected a colon and a port after the bracket, not {tail!r}")
            port_text = tail[1:] if tail else None
        else:
            host, colon, after = rest.rpartition(":")
            if not colon:
                host, after = rest, ""
            if ":" in host:
                raise _fault(text, "an IPv6 address is written in brackets, as in [::1]:5555")
            _check_host(text, host)
            port_text = after if colon else None
        if port_text is None:
            if default_port is None:
                raise _fault(text, "the port is missing, as in host:5555")
            return cls(host, default_port)
        return cls(host, _port(text, port_text))

    @property
    def url(self) -> str:
        """The address as ZeroMQ and torch take it, as in `tcp://[::1]:5555`."""
        return f"tcp://{self}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; a name is looked up."""
        return all(_is_loopback_literal(host) for host in resolve(self.host))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def resolve(host: str) -> tuple[str, ...]:
    """Bare numeric addresses of a host, the preferred one first; literals come back as they are.

    Blocks while a name is looked up.

    Raises:
        ConfigError: The host has no address.
    """
    return tuple(dict.fromkeys(_text_of(sockaddr) for _, sockaddr in _lookup(host)))


def bind_listener(host: str) -> socket.socket:
    """A listening socket of the right family on a port that the kernel chose, kept by the caller from now on.

    Raises:
        ConfigError: The host has no address, or none on this machine.
    """
    family, sockaddr = _lookup(host)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(sockaddr)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            [f"{host}: cannot listen there ({error.strerror}); is it an address of this machine?"]
        ) from error
    return listener


def _lookup(host: str) -> list[tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError([f"{host}: no address is known for this host ({error})"]) from error
    return [(entry[0], entry[4]) for entry in found]  # type: ignore[misc]  # (int, bytes) is for builds without IPv6


def _text_of(sockaddr: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """The numeric host; Python's lookup moves a scope out of the text into the fourth field, as an index."""
    host = sockaddr[0]
    if len(sockaddr) == 4 and sockaddr[3] and "%" not in host:
        return f"{host}%{socket.if_indextoname(sockaddr[3])}"
    return host


def _is_loopback_literal(host: str) -> bool:
    ip = ipaddress.ip_address(host)
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _check_host(text: str, host: str) -> None:
    if not host:
        raise _fault(text, "the host is missing")
    if _LOOKS_LIKE_IPV4.fullmatch(host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise _fault(text, f"{host!r} is not an IPv4 address") from None
    elif not _NAME.fullmatch(host):
        raise _fault(text, f"{host!r} is neither an IP address nor a host name")


def _port(text: str, port: str) -> int:
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise _fault(text, f"{port!r} is not a port between 0 and 65535")
    return int(port)


def _fault(text: str, reason: str) -> ConfigError:
    return ConfigError([f"{text!r} is not an address: {reason}"])
