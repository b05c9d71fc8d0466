"""Fetching media over http(s), for deployments that allow it.

A URL comes from a client, so fetching it must not reach what the client could not reach itself: every
connection, also one that a redirect asks for, goes to an address that was checked, by number, so that a second
DNS answer cannot differ from the first.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from typing import IO
from urllib.parse import urlsplit

from omnistage.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.limits import MediaLimits

_READ_BYTES = 64 * 1024
_IPV4_COMPATIBLE = ipaddress.IPv6Network("::/96")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


def fetch_url(url: str, limits: MediaLimits) -> bytes:
    """Return the body at an http(s) URL, at most `limits.max_bytes`, within `limits.url_timeout_seconds`.

    Proxies of the environment are not used, since they would hide the address that is connected to.
    """
    if not limits.allow_urls:
        raise InvalidRequestError("URLs are not fetched here; send the bytes as data:<type>;base64,<data>")
    dialer = _Dialer(limits)
    # A peer that drips one byte at a time passes every socket timeout; only cutting the connection ends it.
    timer = threading.Timer(limits.url_timeout_seconds, dialer.cut)
    timer.daemon = True
    timer.start()
    try:
        with _opener(dialer).open(url, timeout=limits.url_timeout_seconds) as response:
            body = _read_body(response, limits)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if dialer.was_cut or isinstance(cause, TimeoutError):
            raise _timed_out(limits) from error
        raise MediaError(f"the URL could not be fetched: {_reason(error)}") from error
    finally:
        timer.cancel()
    if dialer.was_cut:
        raise _timed_out(limits)
    return body


def _read_body(response: http.client.HTTPResponse, limits: MediaLimits) -> bytes:
    length = response.headers.get("Content-Length", "")
    claimed = int(length) if length.isascii() and length.isdigit() else 0
    body = bytearray()
    while claimed <= limits.max_bytes:
        block = response.read1(_READ_BYTES)
        if not block:
            if len(body) < claimed:
                raise MediaError(f"the URL gave {len(body)} of {claimed} bytes; try again")
            return bytes(body)
        body += block
        claimed = max(claimed, len(body))
    raise LimitExceededError(
        f"the URL's body of at least {claimed} bytes is over the limit of {limits.max_bytes}; use a smaller file"
    )


def _timed_out(limits: MediaLimits) -> MediaError:
    return MediaError(f"the URL did not answer in full within {limits.url_timeout_seconds:g} seconds; send the bytes")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered HTTP {error.code}"
    return str(error.reason if isinstance(error, urllib.error.URLError) else error)[:200]


class _Dialer:
    """Opens the sockets of one fetch, and can cut them all."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.url_timeout_seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.was_cut = False

    def connect(self, host: str, port: int) -> socket.socket:
        """Return a socket to a checked address of `host`."""
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, address in infos:
            if not self._limits.allow_private_urls and not is_public_address(str(address[0])):
                raise InvalidRequestError("the URL leads to an address that is not public; send the bytes instead")
        failure: OSError = OSError("the host has no address")
        for family, kind, proto, _, address in infos:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            sock = socket.socket(family, kind, proto)
            sock.settimeout(remaining)
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
                continue
            return self.track(sock)
        raise failure

    def track(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(sock)
        return sock

    def cut(self) -> None:
        """End every connection; a read in progress returns."""
        with self._lock:
            self.was_cut = True
            for sock in self._sockets:
                try:
                    # Not SSLSocket.shutdown: that one pulls the TLS state from under the reading thread.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
                except OSError:
                    continue  # closed already


def is_public_address(text: str) -> bool:
    """Whether a numeric address is on the public internet, also when one is wrapped inside another."""
    address: _IPAddress = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _IPV4_COMPATIBLE:  # `::127.0.0.1`: long obsolete, and some systems still unwrap it
            return False
        wrapped = address.ipv4_mapped or address.sixtofour
        if wrapped is None and address in _NAT64:
            wrapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if wrapped is not None:
            address = wrapped
    return address.is_global and not address.is_multicast


class _HTTPConnection(http.client.HTTPConnection):
    def __init__(self, host: str, *, dialer: _Dialer, timeout: float) -> None:
        super().__init__(host, timeout=timeout)
        self._dialer = dialer

    def connect(self) -> None:
        self.sock = self._dialer.connect(self.host, self.port)


class _HTTPSConnection(http.client.HTTPSConnection):
    def __init__(self, host: str, *, dialer: _Dialer, timeout: float) -> None:
        self._tls = ssl.create_default_context()
        super().__init__(host, timeout=timeout, context=self._tls)
        self._dialer = dialer

    def connect(self) -> None:
        plain = self._dialer.connect(self.host, self.port)
        self.sock = self._dialer.track(self._tls.wrap_socket(plain, server_hostname=self.host))


class _Handler(urllib.request.AbstractHTTPHandler):
    """Opens http and https requests over the dialer's connections."""

    http_request = urllib.request.AbstractHTTPHandler.do_request_
    https_request = urllib.request.AbstractHTTPHandler.do_request_

    def __init__(self, dialer: _Dialer) -> None:
        super().__init__()
        self._dialer = dialer

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPConnection, request, dialer=self._dialer)  # type: ignore[arg-type]

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPSConnection, request, dialer=self._dialer)  # type: ignore[arg-type]


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise InvalidRequestError("the URL redirects to something that is not http(s); send the bytes instead")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _opener(dialer: _Dialer) -> urllib.request.OpenerDirector:
    # Built by hand: build_opener would add the file:, ftp:, data: and proxy handlers.
    opener = urllib.request.OpenerDirector()
    for handler in (
        _Handler(dialer),
        _Redirects(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
