"""Fetching media over http(s), for deployments that allow it.

A URL comes from a client, so fetching it must not reach what the client could not reach itself: every
connection, also one that a redirect asks for, goes to an allowed host and to an address that was checked, by
number, so that a second DNS answer cannot differ from the first.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from urllib.parse import urljoin

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.context import current_fetches
from omnistage.media.hosts import Target, check_target, is_public_address
from omnistage.media.limits import MediaLimits

_READ_BYTES = 64 * 1024
_MAX_REDIRECTS = 5
_MAX_URL_CHARS = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_MEDIA_TYPES = ("image/", "audio/", "video/")
# What hosts say of files whose type they do not know, and containers that hold sound or video.
_OTHER_TYPES = ("application/octet-stream", "binary/octet-stream", "application/ogg", "application/mp4")
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]


def fetch_url(url: str, limits: MediaLimits) -> bytes:
    """Return the body at an http(s) URL, at most `limits.max_bytes`, within `limits.url_timeout_seconds`.

    Proxies of the environment are not used, since they would hide the address that is connected to. Nor are its
    credentials: no header says more than the host and who asks.
    """
    if not limits.allow_urls:
        raise InvalidRequestError("URLs are not fetched here; send the bytes as data:<type>;base64,<data>")
    if len(url) > _MAX_URL_CHARS:
        raise InvalidRequestError(f"the URL has over {_MAX_URL_CHARS} characters; send the bytes instead")
    dialer = _Dialer(limits)
    # A peer that drips one byte at a time passes every socket timeout; only cutting the connection ends it.
    timer = threading.Timer(limits.url_timeout_seconds, dialer.cut)
    timer.daemon = True
    timer.start()
    try:
        with current_fetches().holding(dialer.cut):
            body = _follow(url, dialer, limits)
    except (http.client.HTTPException, OSError, ValueError) as error:
        if dialer.was_cut or isinstance(error, TimeoutError):
            raise _timed_out(limits) from error
        raise MediaError(f"the URL could not be fetched: {str(error)[:200]}") from error
    finally:
        timer.cancel()
        dialer.close()
    if dialer.was_cut:
        raise _timed_out(limits)
    return body


def _follow(url: str, dialer: _Dialer, limits: MediaLimits) -> bytes:
    for _ in range(_MAX_REDIRECTS + 1):
        target = Target.parse(url)
        check_target(target, limits.url_hosts, allow_http=limits.allow_http_urls)
        response = _ask(target, dialer)
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location is not None:
            # Its body is left unread: it may be of any length.
            url = urljoin(url, location)
            continue
        if response.status != http.HTTPStatus.OK:
            raise MediaError(f"the URL could not be fetched: it answered HTTP {response.status}")
        _check_type(response)
        return _read_body(response, limits)
    raise MediaError(f"the URL could not be fetched: it answered HTTP {response.status} over {_MAX_REDIRECTS} times")


def _ask(target: Target, dialer: _Dialer) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = dialer.connect(target)
    headers = {"Host": target.origin, "User-Agent": "omnistage", "Accept": "*/*", "Connection": "close"}
    connection.request("GET", target.path, headers=headers)
    return connection.getresponse()


def _check_type(response: http.client.HTTPResponse) -> None:
    given = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if given and not given.startswith(_MEDIA_TYPES) and given not in _OTHER_TYPES:
        raise MediaError(f"the URL gives {given[:60]!r}, which is no picture, sound or video; check it")


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


class _Dialer:
    """Opens the sockets of one fetch, and can cut them all."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.url_timeout_seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.was_cut = False

    def connect(self, target: Target) -> socket.socket:
        """Return a socket to a checked address of the target, with TLS for its name where it is https."""
        found = _lookup(target.host, target.port, self._remaining())
        for *_, address in found:
            if not self._limits.allow_private_urls and not is_public_address(str(address[0])):
                raise InvalidRequestError("the URL leads to an address that is not public; send the bytes instead")
        plain = self._dial(found)
        if target.scheme == "http":
            return plain
        # By its name, whatever the number: the certificate is checked as if DNS had been asked here.
        return self._track(ssl.create_default_context().wrap_socket(plain, server_hostname=target.host))

    def _dial(self, found: list[_Address]) -> socket.socket:
        failure: OSError = OSError("the host has no address")
        for family, kind, proto, _, address in found:
            sock = self._track(socket.socket(family, kind, proto))
            sock.settimeout(self._remaining())
            try:
                sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
                continue
            return sock
        raise failure

    def _remaining(self) -> float:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0 or self.was_cut:
            raise TimeoutError("timed out")
        return remaining

    def _track(self, sock: socket.socket) -> socket.socket:
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

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def _lookup(host: str, port: int, timeout: float) -> list[_Address]:
    """The addresses of a host, in its own thread: nothing else can end a question to a DNS server that is silent."""
    answer: list[list[_Address] | OSError | UnicodeError] = []

    def ask() -> None:
        try:
            answer.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[arg-type]
        except (OSError, UnicodeError) as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="omnistage-dns", daemon=True)
    thread.start()
    thread.join(timeout)
    if not answer:
        raise TimeoutError("timed out")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return answer[0]
