"""Fetching media over http(s), for deployments that allow it.

URLs come from clients, so a fetch must not reach what the client cannot reach itself (SSRF): every connection, also
after a redirect, goes to an allowed host and, by number, to an address that was checked, so that a second DNS answer
cannot differ from the first.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from urllib.parse import urljoin

from omnistage.core.cancellation import current_cancellation
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media.hosts import Target, check_target, is_public_address
from omnistage.media.limits import MediaLimits

_READ_BYTES = 64 * 1024
_MAX_REDIRECTS = 5
_MAX_URL_CHARS = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_MEDIA_TYPES = ("image/", "audio/", "video/")
# The types of unknown files, and of containers with audio or video.
_OTHER_TYPES = ("application/octet-stream", "binary/octet-stream", "application/ogg", "application/mp4")
_Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]


def fetch_url(url: str, limits: MediaLimits) -> bytes:
    """Return the body at an http(s) URL, at most `limits.max_bytes`, within `limits.url_timeout_seconds`.

    Proxies and credentials of the environment are not used: a proxy would hide the address that is connected to.
    """
    if not limits.allow_urls:
        raise InvalidRequestError("URLs are not fetched here; send the bytes as data:<type>;base64,<data>")
    if len(url) > _MAX_URL_CHARS:
        raise InvalidRequestError(f"the URL has over {_MAX_URL_CHARS} characters; send the bytes instead")
    dialer = _Dialer(limits)
    # A peer that sends one byte at a time passes every socket timeout; only aborting the connection ends it.
    timer = threading.Timer(limits.url_timeout_seconds, dialer.abort)
    timer.daemon = True
    timer.start()
    try:
        with current_cancellation().on_cancel(dialer.abort):
            body = _follow(url, dialer, limits)
    except (http.client.HTTPException, OSError, ValueError) as error:
        if dialer.aborted or isinstance(error, TimeoutError):
            raise _timed_out(limits) from error
        raise MediaError(f"the URL could not be fetched: {str(error)[:200]}") from error
    finally:
        timer.cancel()
        dialer.close()
    if dialer.aborted:
        raise _timed_out(limits)
    return body


def _follow(url: str, dialer: _Dialer, limits: MediaLimits) -> bytes:
    for _ in range(_MAX_REDIRECTS + 1):
        target = Target.parse(url)
        check_target(target, limits.url_hosts, allow_http=limits.allow_http_urls)
        response = _request(target, dialer)
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location is not None:
            # Its body is not read: it may have any length.
            url = urljoin(url, location)
            continue
        if response.status != http.HTTPStatus.OK:
            raise MediaError(f"the URL could not be fetched: it answered HTTP {response.status}")
        _check_type(response)
        return _read_body(response, limits)
    raise MediaError(f"the URL could not be fetched: it answered HTTP {response.status} over {_MAX_REDIRECTS} times")


def _request(target: Target, dialer: _Dialer) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = dialer.connect(target)
    headers = {"Host": target.origin, "User-Agent": "omnistage", "Accept": "*/*", "Connection": "close"}
    connection.request("GET", target.path, headers=headers)
    return connection.getresponse()


def _check_type(response: http.client.HTTPResponse) -> None:
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind and not kind.startswith(_MEDIA_TYPES) and kind not in _OTHER_TYPES:
        raise MediaError(f"the URL returned {kind[:60]!r}, which is not an image, audio or video; check it")


def _read_body(response: http.client.HTTPResponse, limits: MediaLimits) -> bytes:
    length = response.headers.get("Content-Length", "")
    claimed = int(length) if length.isascii() and length.isdigit() else 0
    body = bytearray()
    while claimed <= limits.max_bytes:
        block = response.read1(_READ_BYTES)
        if not block:
            if len(body) < claimed:
                raise MediaError(f"the URL returned {len(body)} of {claimed} bytes; try again")
            return bytes(body)
        body += block
        claimed = max(claimed, len(body))
    raise LimitExceededError(
        f"the URL's body of at least {claimed} bytes is over the limit of {limits.max_bytes}; use a smaller file"
    )


def _timed_out(limits: MediaLimits) -> MediaError:
    return MediaError(f"the URL was not fetched within {limits.url_timeout_seconds:g} seconds; send the bytes")


class _Dialer:
    """Opens the sockets of one fetch, and can abort them all."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._deadline = time.monotonic() + limits.url_timeout_seconds
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.aborted = False

    def connect(self, target: Target) -> socket.socket:
        """Return a socket to a checked address of the target, with TLS for its name where it is https."""
        addresses = _lookup(target.host, target.port, self._remaining())
        for *_, address in addresses:
            if not self._limits.allow_private_urls and not is_public_address(str(address[0])):
                raise InvalidRequestError("the URL leads to an address that is not public; send the bytes instead")
        plain = self._dial(addresses)
        if target.scheme == "http":
            return plain
        # The certificate is checked for the host's name, though the connection was made by number.
        return self._track(ssl.create_default_context().wrap_socket(plain, server_hostname=target.host))

    def _dial(self, addresses: list[_Address]) -> socket.socket:
        failure: OSError = OSError("the host has no address")
        for family, kind, proto, _, address in addresses:
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
        if remaining <= 0 or self.aborted:
            raise TimeoutError("timed out")
        return remaining

    def _track(self, sock: socket.socket) -> socket.socket:
        with self._lock:
            self._sockets.append(sock)
        return sock

    def abort(self) -> None:
        """End every connection; a read in progress returns."""
        with self._lock:
            self.aborted = True
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
    """The addresses of a host, looked up in a thread of its own: getaddrinfo has no timeout."""
    results: list[list[_Address] | OSError | UnicodeError] = []

    def look_up() -> None:
        try:
            results.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[arg-type]
        except (OSError, UnicodeError) as error:
            results.append(error)

    thread = threading.Thread(target=look_up, name="omnistage-dns", daemon=True)
    thread.start()
    thread.join(timeout)
    if not results:
        raise TimeoutError("timed out")
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]
