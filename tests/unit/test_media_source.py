"""Where media may come from, and what is refused before it is read."""

from __future__ import annotations

import base64
import http.server
import os
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from omnistage.core.errors import InvalidRequestError, LimitExceededError, MediaError
from omnistage.media import fetch
from omnistage.media.limits import MediaLimits
from omnistage.media.source import load_bytes

LIMITS = MediaLimits()
SMALL = MediaLimits(max_bytes=10)


def test_limits_are_frozen_and_refuse_unknown_fields() -> None:
    with pytest.raises(ValidationError):
        LIMITS.max_bytes = 1
    with pytest.raises(ValidationError, match="max_byte"):
        MediaLimits(max_byte=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        MediaLimits(max_items=0)


def test_every_limit_says_what_it_means() -> None:
    assert all(field.description for field in MediaLimits.model_fields.values())


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_are_taken(kind: type) -> None:
    assert load_bytes(kind(b"abc"), LIMITS) == b"abc"


def test_bytes_over_the_limit_are_refused_with_both_numbers() -> None:
    with pytest.raises(LimitExceededError, match=r"11 bytes .* limit of 10"):
        load_bytes(bytes(11), SMALL)
    with pytest.raises(LimitExceededError):
        load_bytes(memoryview(bytes(16)).cast("I"), SMALL)


@pytest.mark.parametrize("source", [b"", "data:image/png;base64,"])
def test_an_empty_item_is_an_error(source: bytes | str) -> None:
    with pytest.raises(MediaError, match="empty"):
        load_bytes(source, LIMITS)


def test_a_source_of_another_type_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="got int"):
        load_bytes(7, LIMITS)  # type: ignore[arg-type]


class TestBase64:
    def test_a_data_url_is_decoded(self) -> None:
        assert load_bytes("data:image/png;base64," + base64.b64encode(b"hello").decode(), LIMITS) == b"hello"

    def test_case_parameters_whitespace_and_percent_encoding_are_tolerated(self) -> None:
        assert load_bytes("DATA:audio/wav;rate=1;BASE64,+/+/\n +/+/", LIMITS) == base64.b64decode("+/+/+/+/")
        assert load_bytes("data:;base64,%2B%2F%2B%2F", LIMITS) == base64.b64decode("+/+/")

    @pytest.mark.parametrize(
        ("url", "why"),
        [
            ("data:image/png;base64", "no comma"),
            ("data:image/png,abcd", "not base64"),
            ("data:image/png;base64,abc", "malformed"),
            ("data:image/png;base64,ab!d", "malformed"),
            ("data:image/png;base64,ab\u00e9d", "not ASCII"),
        ],
    )
    def test_a_malformed_data_url_says_what_is_wrong(self, url: str, why: str) -> None:
        with pytest.raises(MediaError, match=why):
            load_bytes(url, LIMITS)

    def test_the_length_is_checked_before_decoding(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
        with pytest.raises(LimitExceededError, match="11 bytes"):
            load_bytes("data:;base64," + base64.b64encode(bytes(11)).decode(), SMALL)

    def test_exactly_the_limit_is_taken(self) -> None:
        assert load_bytes("data:;base64," + base64.b64encode(bytes(10)).decode(), SMALL) == bytes(10)

    @pytest.mark.parametrize("data", [b"\xff" * 10, bytes(10), b"\xfb\xef\xbe" * 3])
    @pytest.mark.parametrize("folded", [False, True])
    def test_the_limit_is_of_bytes_however_they_are_escaped(self, data: bytes, folded: bool) -> None:
        text = base64.b64encode(data).decode()
        text = "\r\n".join(text[i : i + 4] for i in range(0, len(text), 4)) if folded else text
        assert load_bytes(f"data:;base64,{text}\n\n", SMALL) == data
        assert load_bytes(f"data:;base64,{quote(text, safe='')}%0A", SMALL) == data

    @pytest.mark.parametrize("character", ["A", "%2F", "%"])
    @pytest.mark.parametrize("prefix", ["data:image/png;base64,", ""])
    def test_long_base64_is_refused_before_it_is_copied(self, character: str, prefix: str) -> None:
        text = prefix + character * 4_000_000
        tracemalloc.start()
        with pytest.raises(LimitExceededError, match="over the limit of 10;"):
            load_bytes(text, SMALL, bare_base64=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000

    def test_a_data_url_without_a_comma_is_not_searched_to_its_end(self) -> None:
        with pytest.raises(MediaError, match="no comma"):
            load_bytes("data:" + "a" * 10_000 + ",", LIMITS)

    def test_bare_base64_is_read_only_where_the_caller_says_so(self) -> None:
        assert load_bytes("aGVsbG8=", LIMITS, bare_base64=True) == b"hello"
        assert load_bytes("data:;base64,aGVsbG8=", LIMITS, bare_base64=True) == b"hello"
        with pytest.raises(InvalidRequestError, match="no such file"):
            load_bytes("aGVsbG8=", LIMITS)

    def test_bare_base64_is_never_a_path_or_a_url(self, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_bytes(b"x")
        for source in (str(secret) + ".", "http://127.0.0.1/x"):
            with pytest.raises(MediaError, match="malformed"):
                load_bytes(source, MediaLimits(allow_urls=True), bare_base64=True)


class TestPaths:
    def test_a_path_a_string_and_a_file_url_are_read(self, tmp_path: Path) -> None:
        file = tmp_path / "a b.bin"
        file.write_bytes(b"abc")
        for source in (file, str(file), file.as_uri(), f"file://localhost{file.as_uri()[7:]}"):
            assert load_bytes(source, LIMITS) == b"abc"

    def test_paths_are_refused_where_they_are_not_allowed(self, tmp_path: Path) -> None:
        file = tmp_path / "a.bin"
        file.write_bytes(b"abc")
        for source in (file, str(file), file.as_uri()):
            with pytest.raises(InvalidRequestError, match="not allowed"):
                load_bytes(source, MediaLimits(allow_paths=False))

    def test_a_file_over_the_limit_is_refused_before_it_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "sparse.bin"
        with file.open("wb") as handle:
            handle.truncate(1 << 40)
        with pytest.raises(LimitExceededError, match=str(1 << 40)):
            load_bytes(file, LIMITS)

    def test_a_file_outside_the_roots_is_refused_whether_or_not_it_exists(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        root.mkdir()
        (root / "in.bin").write_bytes(b"in")
        (tmp_path / "out.bin").write_bytes(b"out")
        limits = MediaLimits(allowed_path_roots=(root,))
        assert load_bytes(root / "in.bin", limits) == b"in"
        for name in ("../out.bin", "../missing.bin"):
            with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
                load_bytes(root / name, limits)

    def test_a_symbolic_link_does_not_lead_out_of_the_roots(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        root.mkdir()
        (tmp_path / "out.bin").write_bytes(b"out")
        (root / "link.bin").symlink_to(tmp_path / "out.bin")
        with pytest.raises(InvalidRequestError, match="outside the allowed folders"):
            load_bytes(root / "link.bin", MediaLimits(allowed_path_roots=(root,)))

    def test_a_root_that_is_itself_a_link_works(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "real" / "a.bin").write_bytes(b"abc")
        (tmp_path / "alias").symlink_to(tmp_path / "real")
        limits = MediaLimits(allowed_path_roots=(tmp_path / "alias",))
        assert load_bytes(tmp_path / "alias" / "a.bin", limits) == b"abc"

    def test_missing_files_folders_and_pipes_are_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for source in (tmp_path / "missing", tmp_path, tmp_path / "pipe"):
            with pytest.raises(InvalidRequestError, match="no such file"):
                load_bytes(source, LIMITS)

    def test_impossible_paths_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for source in ("a\0b", "x" * 100_000, str(tmp_path / "loop")):
            with pytest.raises(InvalidRequestError) as caught:
                load_bytes(source, LIMITS)
            assert len(caught.value.message) < 300

    @pytest.mark.parametrize("source", ["ftp://host/a.png", "file://host/a.png"])
    def test_other_schemes_and_hosts_are_refused(self, source: str) -> None:
        with pytest.raises(InvalidRequestError, match=r"not supported|local file"):
            load_bytes(source, LIMITS)


class _Handler(http.server.BaseHTTPRequestHandler):
    stop = threading.Event()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/ok":
            self._answer(200, b"media", [("Content-Length", "5")])
        elif self.path == "/nolength":
            self._answer(200, bytes(200_000), [])
        elif self.path == "/claims":
            self._answer(200, b"", [("Content-Length", "1000000000")])
        elif self.path == "/short":
            self._answer(200, b"abc", [("Content-Length", "9")])
        elif self.path == "/drip":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
            self._drip()
        elif self.path == "/dripbody":
            self._answer(200, b"", [])
            self._drip()
        elif self.path == "/loop":
            self._answer(302, b"", [("Location", "/loop")])
        elif self.path.startswith("/to/"):
            self._answer(302, b"", [("Location", self.path[4:])])
        else:
            self._answer(404, b"", [])

    def _answer(self, status: int, body: bytes, headers: list[tuple[str, str]]) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _drip(self) -> None:
        try:
            while not self.stop.wait(0.02):
                self.wfile.write(b"x")
        except OSError:
            return


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}"
    _Handler.stop.set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()


OPEN = MediaLimits(allow_urls=True, allow_http_urls=True, allow_private_urls=True, max_bytes=100_000)


class TestUrls:
    def test_urls_are_refused_unless_allowed(self) -> None:
        with pytest.raises(InvalidRequestError, match="data:"):
            load_bytes("https://example.com/a.png", LIMITS)

    def test_a_body_is_fetched(self, server: str) -> None:
        assert load_bytes(f"{server}/ok", OPEN) == b"media"

    def test_redirects_are_followed(self, server: str) -> None:
        assert load_bytes(f"{server}/to//ok", OPEN) == b"media"

    @pytest.mark.parametrize("path", ["/nolength", "/claims"])
    def test_a_body_over_the_limit_is_refused(self, server: str, path: str) -> None:
        with pytest.raises(LimitExceededError, match="limit of 100000"):
            load_bytes(server + path, OPEN)

    def test_a_body_that_ends_early_is_an_error(self, server: str) -> None:
        with pytest.raises(MediaError, match="3 of 9 bytes"):
            load_bytes(f"{server}/short", OPEN)

    def test_an_http_error_is_named(self, server: str) -> None:
        with pytest.raises(MediaError, match="HTTP 404"):
            load_bytes(f"{server}/missing", OPEN)

    @pytest.mark.parametrize("path", ["/drip", "/dripbody"])
    def test_a_peer_that_never_finishes_is_cut_off(self, server: str, path: str) -> None:
        with pytest.raises(MediaError, match=r"within 0\.3 seconds"):
            load_bytes(server + path, OPEN.model_copy(update={"url_timeout_seconds": 0.3}))

    def test_loopback_is_refused_by_default(self, server: str) -> None:
        with pytest.raises(InvalidRequestError, match="not public"):
            load_bytes(f"{server}/ok", MediaLimits(allow_urls=True, allow_http_urls=True))

    def test_a_name_with_one_private_address_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        infos = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in ("93.184.216.34", "10.0.0.1")
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
        with pytest.raises(InvalidRequestError, match="not public"):
            load_bytes("http://two-faced.example/x", MediaLimits(allow_urls=True, allow_http_urls=True))

    def test_a_redirect_to_a_private_address_is_refused(self, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fetch, "is_public_address", lambda address: address == "127.0.0.1")
        with pytest.raises(InvalidRequestError, match="not public"):
            load_bytes(f"{server}/to/http://127.0.0.2:1/", MediaLimits(allow_urls=True, allow_http_urls=True))

    @pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x"])
    def test_a_redirect_to_another_scheme_is_refused(self, server: str, target: str) -> None:
        with pytest.raises((InvalidRequestError, MediaError), match=r"not http|HTTP 302"):
            load_bytes(f"{server}/to/{target}", OPEN)

    def test_a_loop_of_redirects_ends(self, server: str) -> None:
        with pytest.raises(MediaError, match="HTTP 302"):
            load_bytes(f"{server}/loop", OPEN)

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "http://[::1/x", "http://a b/x", "http://h:port/x"])
    def test_unreachable_and_malformed_urls_are_errors(self, url: str) -> None:
        with pytest.raises(MediaError, match="could not be fetched"):
            load_bytes(url, OPEN)

    def test_a_tls_failure_is_an_error(self, server: str) -> None:
        with pytest.raises(MediaError, match="could not be fetched"):
            load_bytes(server.replace("http:", "https:") + "/ok", OPEN)

    def test_the_environments_proxy_is_not_used(self, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.delenv("no_proxy", raising=False)
        assert load_bytes(f"{server}/ok", OPEN) == b"media"

    @pytest.mark.parametrize(
        "address",
        [
            "127.0.0.1",
            "10.1.2.3",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
            "::1",
            "fe80::1%1",
            "fd00::1",
            "::",
            "::127.0.0.1",
            "::93.184.216.34",
            "::ffff:127.0.0.1",
            "2002:7f00:1::",
            "64:ff9b::a00:1",
        ],
    )
    def test_addresses_that_are_not_public(self, address: str) -> None:
        assert not fetch.is_public_address(address)

    @pytest.mark.parametrize("address", ["93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34"])
    def test_addresses_that_are_public(self, address: str) -> None:
        assert fetch.is_public_address(address)
