"""Media from elsewhere: which hosts, which addresses, which files."""

from __future__ import annotations

import asyncio
import base64
import http.server
import io
import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image
from pydantic import ValidationError

from omnistage.cli.serve_options import MediaOptions
from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media import fetch, source
from omnistage.media.hosts import HostRule, is_public_address
from omnistage.media.image import decode_image
from omnistage.media.limits import MediaLimits
from omnistage.media.source import load_bytes
from tests.hang_guard import HANG_SECONDS

PUBLIC = "93.184.216.34"
HOST = "media.example.org"


def test_a_service_takes_media_from_nowhere_unless_it_is_told_to(tmp_path: Path) -> None:
    def settings(*given: Any) -> dict[str, Any]:
        read = (entry.removeprefix("limits.media.").partition("=") for entry in MediaOptions(*given).overrides())
        return MediaLimits(**{key: json.loads(value) for key, _, value in read}).model_dump()

    closed = settings([], False, [])
    assert not any(closed[key] for key in ("allow_urls", "allow_http_urls", "allow_private_urls", "allow_paths"))
    opened = settings(["*.example.org"], True, [tmp_path])
    assert (opened["allow_urls"], opened["url_hosts"], opened["allow_http_urls"]) == (True, ("*.example.org",), True)
    assert (opened["allow_paths"], opened["allowed_path_roots"]) == (True, (tmp_path,))
    assert not opened["allow_private_urls"]
    wrong: list[tuple[list[str], bool, list[Path], str]] = [
        (["https://x"], False, [], "--media-host"),
        ([], True, [], "--media-http"),
        ([], False, [tmp_path / "missing"], "--media-path"),
    ]
    for *given, param in wrong:
        with pytest.raises(InvalidRequestError) as caught:
            MediaOptions(*given).overrides()  # type: ignore[arg-type]
        assert caught.value.param == param


# -------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rule", "scheme", "host", "port", "allowed"),
    [
        ("example.org", "https", "example.org", 443, True),
        ("Example.ORG.", "https", "example.org", 443, True),
        ("example.org", "http", "example.org", 80, True),
        ("example.org", "https", "example.org", 8443, False),
        ("example.org", "https", "example.org", 80, False),
        ("example.org:8443", "https", "example.org", 8443, True),
        ("example.org:8443", "https", "example.org", 443, False),
        ("example.org", "https", "www.example.org", 443, False),
        ("example.org", "https", "notexample.org", 443, False),
        ("example.org", "https", "example.org.evil.net", 443, False),
        ("*.example.org", "https", "a.b.example.org", 443, True),
        ("*.example.org", "https", "example.org", 443, False),
        ("*.example.org", "https", "evilexample.org", 443, False),
        ("bücher.example", "https", "xn--bcher-kva.example", 443, True),
    ],
)
def test_a_rule_allows_its_hosts_and_no_others(rule: str, scheme: str, host: str, port: int, allowed: bool) -> None:
    assert HostRule.parse(rule).allows(scheme, host, port) is allowed


@pytest.mark.parametrize(
    "entry", ["", "*", "*.org", "a.*.org", "https://example.org", "example.org/x", "u@example.org", "a b", "h:port"]
)
def test_what_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="not a host"):
        HostRule.parse(entry)
    with pytest.raises(ValidationError, match="not a host"):
        MediaLimits(url_hosts=(entry,))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "192.0.2.1",
        "198.18.0.1",
        "192.88.99.1",
        "192.0.0.8",
        "192.0.0.9",
        "192.31.196.1",
        "192.52.193.1",
        "192.175.48.1",
        "198.51.100.1",
        "203.0.113.1",
        "2001:2::1",
        "2001:20::1",
        "2001:30::1",
        "2620:4f:8000::1",
        "::ffff:192.0.0.9",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "0.0.0.0",
        "::",
        "::1",
        "::127.0.0.1",
        "fe80::1",
        "fec0::1",
        "fc00::1",
        "ff02::1",
        "2001:db8::1",
        "3fff::1",
        "5f00::1",
        "2001::1",  # Teredo
        "::ffff:10.0.0.1",
        "2002:0a00:0001::1",  # 6to4 of 10.0.0.1
        "64:ff9b::10.0.0.1",
        "64:ff9b:1::1",
    ],
)
def test_addresses_of_no_public_network(address: str) -> None:
    assert not is_public_address(address)


@pytest.mark.parametrize("address", [PUBLIC, "2606:4700::1111", "64:ff9b::5db8:d822", "2002:5db8:d822::1"])
def test_public_addresses(address: str) -> None:
    assert is_public_address(address)


# --------------------------------------------------------------------------------------------- a web server


class _Site(http.server.BaseHTTPRequestHandler):
    """Answers what its paths say; remembers the `Host` of every request."""

    hosts: list[str]
    picture: bytes
    leave: threading.Event
    waiting: threading.Event
    left: threading.Event

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.hosts.append(self.headers["Host"])
        kind = "text/html; charset=utf-8" if self.path == "/page" else "image/png"
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path[4:])
            # The redirect's own body has no end; nobody reads it.
            self.send_header("Content-Length", "1000000000000")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        if self.path == "/endless":
            self._endless()
        elif self.path == "/hangs":
            self.waiting.set()
            self.connection.settimeout(30)
            self.left.set() if not self.rfile.read(1) else None
        else:
            self.wfile.write(self.picture)

    def _endless(self) -> None:
        try:
            while not self.leave.is_set():
                self.wfile.write(bytes(65536))
        except OSError:
            return


class Site:
    def __init__(self, httpd: http.server.HTTPServer, handler: type[_Site]) -> None:
        self.port = httpd.server_address[1]
        self.handler = handler


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (250, 0, 0)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def site() -> Iterator[Site]:
    yield from _serving(None)


def _serving(tls: ssl.SSLContext | None) -> Iterator[Site]:
    values: dict[str, Any] = {name: threading.Event() for name in ("leave", "waiting", "left")}
    handler = type("Handler", (_Site,), {**values, "hosts": [], "picture": _png()})
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls is not None:
        httpd.socket = tls.wrap_socket(httpd.socket, server_side=True)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield Site(httpd, handler)
    values["leave"].set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()


Lookup = Callable[..., None]


@pytest.fixture
def lookup(monkeypatch: pytest.MonkeyPatch) -> Lookup:
    """DNS as a test says it: each call takes the next answer for the host, the last one for ever.

    Names of `site` lead to this machine under an address that only the test takes for public.
    """
    asked: dict[str, list[list[str]]] = {}

    def set_up(**answers: list[list[str]]) -> None:
        asked.update({name.replace("_", "."): [*given] for name, given in answers.items()})

    def look(host: str, port: int, _timeout: float) -> list[Any]:
        given = asked[host]
        addresses = given.pop(0) if len(given) > 1 else given[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(fetch, "_lookup", look)
    monkeypatch.setattr(fetch, "is_public_address", lambda text: text == "127.0.0.1" or is_public_address(text))
    return set_up


HERE = ["127.0.0.1"]


def limits(site: Site, *more: str, **options: Any) -> MediaLimits:
    hosts = (f"{HOST}:{site.port}", *more)
    return MediaLimits(**{"allow_urls": True, "allow_http_urls": True, "url_hosts": hosts, **options})


def test_a_picture_of_an_allowed_host_is_fetched(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE])
    image = decode_image(f"http://{HOST}:{site.port}/picture", limits(site))
    assert image.size == (4, 3)
    assert site.handler.hosts == [f"{HOST}:{site.port}"]  # the name, though the number was dialled


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://other.example.org:{port}/picture", "not allowed"),
        ("http://media.example.org/picture", "not allowed"),
        ("http://127.0.0.1:{port}/picture", "not allowed"),
        ("http://media.example.org:{port}@127.0.0.1:{port}/picture", "password"),
        ("http://user:secret@media.example.org:{port}/picture", "password"),
        ("http://127.0.0.1:{port}\\@media.example.org:{port}/picture", "could not be fetched|password|not allowed"),
    ],
)
def test_other_hosts_ports_and_credentials_are_refused(site: Site, lookup: Lookup, url: str, why: str) -> None:
    lookup(media_example_org=[HERE], other_example_org=[HERE])
    with pytest.raises(InvalidRequestError, match=why):
        load_bytes(url.format(port=site.port), limits(site))
    assert site.handler.hosts == []


def test_http_needs_its_own_permission(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE])
    with pytest.raises(InvalidRequestError, match="only https"):
        load_bytes(f"http://{HOST}:{site.port}/picture", limits(site, allow_http_urls=False))
    assert site.handler.hosts == []


def test_a_redirect_within_the_list_is_followed(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE], cdn_example_org=[HERE])
    there = f"http://cdn.example.org:{site.port}/picture"
    data = load_bytes(f"http://{HOST}:{site.port}/to/{there}", limits(site, f"cdn.example.org:{site.port}"))
    assert data == site.handler.picture
    assert site.handler.hosts == [f"{HOST}:{site.port}", f"cdn.example.org:{site.port}"]


@pytest.mark.parametrize(
    "target",
    [
        "http://elsewhere.example.net:{port}/picture",
        "http://127.0.0.1:{port}/picture",
        "http://media.example.org:22/",
        "file:///etc/hostname",
        "http://u:p@media.example.org:{port}/picture",
    ],
)
def test_a_redirect_out_of_the_list_is_refused(site: Site, lookup: Lookup, target: str) -> None:
    lookup(media_example_org=[HERE], elsewhere_example_net=[HERE])
    with pytest.raises(InvalidRequestError, match=r"not allowed|not http|password"):
        load_bytes(f"http://{HOST}:{site.port}/to/{target.format(port=site.port)}", limits(site))
    assert len(site.handler.hosts) == 1


def test_a_redirect_to_a_host_that_is_private_is_refused(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE], inside_example_org=[["10.0.0.7"]])
    target = f"http://inside.example.org:{site.port}/picture"
    with pytest.raises(InvalidRequestError, match="not public"):
        load_bytes(f"http://{HOST}:{site.port}/to/{target}", limits(site, f"inside.example.org:{site.port}"))


@pytest.mark.parametrize("addresses", [["127.0.0.1", "10.0.0.1"], ["192.168.0.1", "127.0.0.1"], ["169.254.169.254"]])
def test_one_private_address_refuses_the_name(site: Site, lookup: Lookup, addresses: list[str]) -> None:
    lookup(media_example_org=[addresses])
    with pytest.raises(InvalidRequestError, match="not public"):
        load_bytes(f"http://{HOST}:{site.port}/picture", limits(site))
    assert site.handler.hosts == []


def test_the_address_that_was_checked_is_the_one_that_is_dialled(site: Site, lookup: Lookup) -> None:
    """A name that would answer with another address a moment later is asked once for each connection."""
    lookup(media_example_org=[HERE, ["10.0.0.1"]])
    url = f"http://{HOST}:{site.port}/picture"
    assert load_bytes(url, limits(site)) == site.handler.picture
    with pytest.raises(InvalidRequestError, match="not public"):  # asked anew, and checked anew
        load_bytes(url, limits(site))


def test_a_redirect_asks_again_and_is_checked_again(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE, ["10.0.0.1"]])
    with pytest.raises(InvalidRequestError, match="not public"):
        load_bytes(f"http://{HOST}:{site.port}/to//picture", limits(site))


def test_a_body_without_end_is_cut_at_the_limit(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE])
    with pytest.raises(LimitExceededError, match="limit of 100000"):
        load_bytes(f"http://{HOST}:{site.port}/endless", limits(site, max_bytes=100_000))


def test_a_host_that_hangs_is_left(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE])
    with pytest.raises(MediaError, match=r"within 0\.3 seconds"):
        load_bytes(f"http://{HOST}:{site.port}/hangs", limits(site, url_timeout_seconds=0.3))
    assert site.handler.left.wait(HANG_SECONDS)


def test_a_name_server_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: forever.wait(HANG_SECONDS))
    with pytest.raises(MediaError, match=r"within 0\.2 seconds"):
        load_bytes("https://media.example.org/x", MediaLimits(allow_urls=True, url_timeout_seconds=0.2))
    forever.set()


def test_a_page_is_not_a_picture(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE])
    with pytest.raises(MediaError, match="text/html"):
        load_bytes(f"http://{HOST}:{site.port}/page", limits(site))


def test_a_cancelled_request_ends_its_fetch(site: Site, lookup: Lookup) -> None:
    lookup(media_example_org=[HERE])

    async def request() -> None:
        with cancellation_scope(Cancellation()):
            await asyncio.to_thread(
                load_bytes, f"http://{HOST}:{site.port}/hangs", limits(site, url_timeout_seconds=2 * HANG_SECONDS)
            )

    async def main() -> None:
        task = asyncio.ensure_future(request())
        assert await asyncio.to_thread(site.handler.waiting.wait, HANG_SECONDS)
        task.cancel()
        assert await asyncio.to_thread(site.handler.left.wait, HANG_SECONDS)
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


# -------------------------------------------------------------------------------------------------- https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for `media.example.org`, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture
def secure_site(certificate: Path) -> Iterator[Site]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    yield from _serving(context)


def test_tls_is_for_the_name_not_for_the_number(
    secure_site: Site, lookup: Lookup, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup(media_example_org=[HERE], cdn_example_org=[HERE])
    own = limits(secure_site, f"cdn.example.org:{secure_site.port}", allow_http_urls=False)
    url = f"https://{HOST}:{secure_site.port}/picture"
    with pytest.raises(MediaError, match="certificate"):  # nobody has signed it
        load_bytes(url, own)
    trusting = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting(cafile=str(certificate)))
    assert load_bytes(url, own) == secure_site.handler.picture
    with pytest.raises(MediaError, match="certificate"):  # it is another's
        load_bytes(url.replace(HOST, "cdn.example.org"), own)


# -------------------------------------------------------------------------------------------------- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "a.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "secret")
    return tmp_path


def below(folder: Path) -> MediaLimits:
    return MediaLimits(allowed_path_roots=(folder / "open",))


def test_files_below_the_folders_are_read_and_no_others(folder: Path) -> None:
    own = below(folder)
    assert load_bytes(f"{folder}/open/a.png", own) == b"inside"
    for path in ("secret", "open/../secret", "open/link", "open/../open/link", "missing"):
        with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
            load_bytes(f"{folder}/{path}", own)
        with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
            load_bytes(f"file://{folder}/{path}", own)


def test_a_folder_that_becomes_a_link_while_it_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check of the path and the opening, somebody puts a link in its place."""
    inner = folder / "open" / "inner"
    inner.mkdir()
    (inner / "secret").write_bytes(b"inside")
    opening = os.open

    def swapped(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).endswith("inner/secret") and not inner.is_symlink():
            (inner / "secret").unlink()
            inner.rmdir()
            inner.symlink_to(folder)
        return opening(path, flags, *rest, **more)

    monkeypatch.setattr(source.os, "open", swapped)
    with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
        load_bytes(f"{inner}/secret", below(folder))
    assert inner.is_symlink()


def test_data_urls_need_no_permission() -> None:
    url = "data:image/png;base64," + base64.b64encode(b"abc").decode()
    assert load_bytes(url, MediaLimits(allow_paths=False)) == b"abc"
