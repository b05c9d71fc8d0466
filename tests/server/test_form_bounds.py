"""One form cannot stop the service: parts, fields and headers are counted, and no client chooses the codec."""

from __future__ import annotations

import httpx
import pytest

from omnistage.server.http.routing import MAX_FORM_FIELDS, MAX_FORM_FILES, MAX_URL_ENCODED_BYTES
from tests.server.harness import Running, longest_pause

MULTIPART = "multipart/form-data; boundary=B"
URL_ENCODED = "application/x-www-form-urlencoded"
END = b"--B--\r\n"


def part(name: str, data: bytes, filename: str | None = None, headers: str = "") -> bytes:
    disposition = f'form-data; name="{name}"' + (f'; filename="{filename}"' if filename is not None else "")
    return f"--B\r\nContent-Disposition: {disposition}\r\n{headers}\r\n".encode() + data + b"\r\n"


def refusal(server: Running, path: str, body: bytes, kind: str = MULTIPART) -> tuple[int, str]:
    with longest_pause(server):
        answer = httpx.post(f"{server.url}/v1/{path}", content=body, headers={"Content-Type": kind}, timeout=120)
    return answer.status_code, answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["audio/transcriptions", "images/edits", "videos"])
def test_many_tiny_parts_are_refused(empty: Running, path: str) -> None:
    assert refusal(empty, path, part("a", b"") * 200_000 + END)[0] == 400
    assert refusal(empty, path, part("file", b"", "f") * 200_000 + END)[0] == 400


def test_the_refusal_has_the_number(empty: Running) -> None:
    fields, files = part("keywords[]", b"a") * (MAX_FORM_FIELDS + 1), part("image[]", b"a", "f") * (MAX_FORM_FILES + 1)
    assert str(MAX_FORM_FIELDS) in refusal(empty, "audio/transcriptions", fields + END)[1]
    assert str(MAX_FORM_FILES) in refusal(empty, "images/edits", files + END)[1]


def test_a_huge_field_and_huge_headers_are_refused(empty: Running) -> None:
    for body in (
        part("prompt", b"a" * 20 * 2**20),
        part("prompt", b"", headers=f"X: {'a' * 20 * 2**20}\r\n"),
        part("prompt", b"", headers="X: a\r\n" * 2**20),
    ):
        status, _ = refusal(empty, "audio/transcriptions", body + END)
        assert status == 400


@pytest.mark.parametrize("charset", ["punycode", "utf-7", "unicode_escape", "idna", "nothing"])
def test_a_client_cannot_choose_a_codec(empty: Running, charset: str) -> None:
    """Punycode takes quadratic time: 90 seconds for the 1 MiB that a field may have."""
    body = part("prompt", b"a-" + b"b" * 300_000) + END
    status, message = refusal(empty, "audio/transcriptions", body, f"{MULTIPART}; charset={charset}")
    assert status == 400
    assert "charset" in message


def test_a_form_without_files_is_small(empty: Running) -> None:
    for byte in (b"&", b"%", b"a=%41&"):
        status, message = refusal(empty, "videos", byte * (8 * 2**20 // len(byte)), URL_ENCODED)
        assert (status, str(MAX_URL_ENCODED_BYTES) in message) == (413, True)
        assert refusal(empty, "videos", (byte * MAX_URL_ENCODED_BYTES)[:MAX_URL_ENCODED_BYTES], URL_ENCODED)[0] == 400


def test_forms_of_ordinary_size_are_read(empty: Running) -> None:
    parts = part("model", b"nobody") + part("file", b"\r\n--A" * 2**20, "a.wav") + part("keywords[]", b"a") * 100
    for kind in (MULTIPART, f"{MULTIPART}; charset=UTF-8"):
        status, message = refusal(empty, "audio/transcriptions", parts + END, kind)
        assert (status, "no model" in message) == (404, True)
    status, message = refusal(empty, "videos", b"model=nobody&prompt=%E4%BD%A0", URL_ENCODED)
    assert (status, "no model" in message) == (404, True)
