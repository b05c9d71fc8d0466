"""The proxies' files of deploy/, really run before a live service: a stream stays a stream, an upgrade an upgrade."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from omnistage.omni import AsyncOmni
from omnistage.server.service import Service
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import Held, Running, serving

DEPLOY = Path(__file__).parents[2] / "deploy"
GIVEN = {"model": "lm", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 24, "temperature": 0}
REALTIME = "/v1/realtime?model=omni"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def certificate(folder: Path) -> None:
    """A certificate for localhost that nobody else trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "privkey.pem").write_bytes(private)
    (folder / "fullchain.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))


@contextlib.contextmanager
def proxy(command: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a proxy until the block ends; it listens when the block begins."""
    with log.open("wb") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written, env={**os.environ, "HOME": str(log.parent)})
    try:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            assert process.poll() is None, log.read_text(encoding="utf-8", errors="replace")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            assert time.monotonic() < deadline, log.read_text(encoding="utf-8", errors="replace")
        yield
    finally:
        process.terminate()
        process.wait(HANG_SECONDS)


@pytest.fixture
def limited(service: Service) -> Iterator[Running]:
    with serving(service, max_body_bytes=2**20) as running:
        yield running


@pytest.fixture
def nginx(limited: Running, tmp_path: Path) -> Iterator[str]:
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed")
    certificate(tmp_path)
    plain, secure = free_port(), free_port()
    site = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    changes = {
        "127.0.0.1:8000": limited.url.removeprefix("http://"),
        "listen 80;": f"listen 127.0.0.1:{plain};",
        "listen 443 ssl;": f"listen 127.0.0.1:{secure} ssl;",
        "/etc/ssl/omnistage/": f"{tmp_path}/",
        "api.example.org": "localhost",
        "client_max_body_size 64m;": "client_max_body_size 1m;",
    }
    for old, new in changes.items():
        assert old in site
        site = site.replace(old, new)
    (tmp_path / "site.conf").write_text(site, encoding="utf-8")
    places = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};" for kind in ("proxy", "client_body", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log stderr; daemon off; master_process off; events {{}}\n"
        f"http {{ access_log off; {places} include {tmp_path}/site.conf; }}",
        encoding="utf-8",
    )
    with proxy([program, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")], secure, tmp_path / "log"):
        yield f"https://localhost:{secure}"


@pytest.fixture
def caddy(limited: Running, tmp_path: Path) -> Iterator[str]:
    program = shutil.which("caddy")
    if program is None:
        pytest.skip("caddy is not installed")
    port = free_port()
    site = (DEPLOY / "Caddyfile").read_text(encoding="utf-8")
    changes = {
        "127.0.0.1:8000": limited.url.removeprefix("http://"),
        "api.example.org": f"http://localhost:{port}",  # a certificate would have to be asked for
    }
    for old, new in changes.items():
        assert old in site
        site = site.replace(old, new)
    (tmp_path / "Caddyfile").write_text(f"{{\n\tadmin off\n}}\n{site}", encoding="utf-8")
    command = [program, "run", "--adapter", "caddyfile", "--config", str(tmp_path / "Caddyfile")]
    with proxy(command, port, tmp_path / "log"):
        yield f"http://localhost:{port}"


def check_proxy(url: str, lm: AsyncOmni, monkeypatch: pytest.MonkeyPatch) -> None:
    trusting = httpx.Client(verify=False, timeout=60)
    with trusting, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=trusting) as client:
        assert trusting.get(f"{url}/ready").json()["status"] == "ready"
        whole = client.chat.completions.create(**GIVEN)  # type: ignore[call-overload]
        with monkeypatch.context() as patch:
            held = Held(lm.orchestrator.stages[lm.orchestrator.graph.entry], patch, free=6)
            with trusting.stream("POST", f"{url}/v1/chat/completions", json={**GIVEN, "stream": True}) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
                lines = stream.iter_lines()
                # These come while the model waits: a proxy that held them back would never give them.
                told = [next(lines) for _ in range(4)]
                held.go.set()
                told += lines
        assert "data: [DONE]" in told
        events = [json.loads(line[6:]) for line in told if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        assert text == whole.choices[0].message.content
        large = trusting.post(f"{url}/v1/chat/completions", content=b"x" * (2 * 2**20))
        assert large.status_code == 413


def upgrade(url: str) -> str:
    """The first event of a realtime session through a proxy."""
    from websockets.sync.client import connect

    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    address = re.sub("^http", "ws", url) + REALTIME
    with connect(address, ssl=trusting if address.startswith("wss") else None, open_timeout=60) as socket_:
        return str(json.loads(socket_.recv(timeout=60))["type"])


def test_nginx_streams_refuses_and_upgrades(
    nginx: str, models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_proxy(nginx, models["lm"], monkeypatch)
    assert upgrade(nginx) == "session.created"


def test_caddy_streams_refuses_and_upgrades(
    caddy: str, models: dict[str, AsyncOmni], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_proxy(caddy, models["lm"], monkeypatch)
    assert httpx.get(f"{caddy}/metrics").status_code == 404
    assert upgrade(caddy) == "session.created"
