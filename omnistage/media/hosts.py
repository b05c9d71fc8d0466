"""Which hosts media may be fetched from, and which addresses are on the public internet."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from omnistage.core.errors import InvalidRequestError

_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# IANA's registries of special-purpose addresses, in full: what `ipaddress` knows of them depends on Python's version.
_NOT_PUBLIC_4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared, of carriers
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.31.196.0/24",  # AS112
        "192.52.193.0/24",  # AMT
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "192.175.48.0/24",  # AS112
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
# Beside everything outside of 2000::/3.
_NOT_PUBLIC_6 = tuple(
    ipaddress.IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, with Teredo, benchmarks and ORCHID
        "2001:db8::/32",  # documentation
        "2620:4f:8000::/48",  # AS112
        "3fff::/20",  # documentation
    )
)


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of `url_hosts`: `media.example.org`, `*.example.org` (every host below it), either with `:port`."""

    host: str
    below: bool = False
    port: int | None = None

    @classmethod
    def parse(cls, entry: str) -> HostRule:
        """Raises `ValueError`."""
        try:
            parts = urlsplit(f"//{entry.strip()}")
            host, port = plain_host(parts.hostname or ""), parts.port
        except ValueError as error:
            raise ValueError(f"{entry!r} is not a host like media.example.org or *.example.org") from error
        below = host.startswith("*.")
        if parts.path or parts.query or parts.fragment or "@" in parts.netloc or not _is_host(host):
            raise ValueError(f"{entry!r} is not a host like media.example.org, *.example.org or example.org:8443")
        return cls(host.removeprefix("*."), below, port)

    def allows(self, scheme: str, host: str, port: int) -> bool:
        if port != (_PORTS[scheme] if self.port is None else self.port):
            return False
        return host.endswith(f".{self.host}") if self.below else host == self.host


def _is_host(host: str) -> bool:
    if _is_numeric(host):
        return True
    # A whole top-level domain is not allowed.
    return _NAME.fullmatch(host) is not None and not (host.startswith("*.") and "." not in host[2:])


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def plain_host(host: str) -> str:
    """A host as DNS compares it: lower case, ASCII, without the last dot. Raises `ValueError`."""
    host = host.rstrip(".").lower()
    if host.isascii():
        return host
    return host.encode("idna").decode("ascii")


@dataclass(frozen=True, slots=True)
class Target:
    """Where one request of a fetch goes."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Target:
        """Raises `ValueError` for an invalid URL, `InvalidRequestError` for one that is never fetched."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS:
            raise InvalidRequestError("the URL or its redirect is not http(s); send the bytes instead")
        if "@" in parts.netloc:
            raise InvalidRequestError("the URL contains a user name or password; leave them out, or send the bytes")
        host = plain_host(parts.hostname or "")
        if not host or re.search(r"[\s\x00-\x20\x7f%\\]", host):
            raise ValueError("the URL has no host")
        return cls(parts.scheme, host, parts.port or _PORTS[parts.scheme], _path(parts))

    @property
    def origin(self) -> str:
        """The `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def _path(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def check_target(target: Target, hosts: Sequence[str], *, allow_http: bool) -> None:
    """Refuse a target that is not listed. Without a list every host and port is allowed."""
    if target.scheme == "http" and not allow_http:
        raise InvalidRequestError("only https URLs are fetched here; use one, or send the bytes")
    rules = [HostRule.parse(entry) for entry in hosts]
    if rules and not any(rule.allows(target.scheme, target.host, target.port) for rule in rules):
        raise InvalidRequestError("the URL leads to a host or port that is not allowed here; send the bytes instead")


def is_public_address(text: str) -> bool:
    """Whether a numeric address is on the public internet, also when one is wrapped inside another."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour
        if wrapped is None and address in _NAT64:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if wrapped is None:
            known = address in _UNICAST and not any(address in network for network in _NOT_PUBLIC_6)
            return known and address.is_global
        address = wrapped
    return not any(address in network for network in _NOT_PUBLIC_4) and address.is_global
