"""More connections than the process may have open: the service goes on, and says so once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omnistage.core.errors import ConfigError
from omnistage.omni import AsyncOmni
from omnistage.server.http import listening
from omnistage.server.http.listening import ListeningSocket, connections_below, raise_descriptor_limit
from omnistage.server.service import Service
from tests.server.command_harness import Command
from tests.server.harness import SHORT, Held, make, raw, serving, status_of, until

DESCRIPTORS, CONNECTIONS = 64, 150
LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from omnistage.cli import app
app()
"""
MAX_LOG_LINES = 20


@contextlib.contextmanager
def connections(url: str, count: int) -> Iterator[list[socket.socket]]:
    host, port = url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)), timeout=20)) for _ in range(count)]


def test_a_service_out_of_descriptors_answers_and_does_not_flood_its_log(tmp_path: Path) -> None:
    folder = make("causal_lm", tmp_path / "lm")
    command = Command(str(folder), "--port", "0", "--dtype", "float32", "--device", "cpu", script=LIMITED)
    try:
        url = command.line(r"ready: (http://127\.0\.0\.1:\d+)/v1").group(1)
        lines = command.text.count("\n")
        with connections(url, CONNECTIONS):
            for _ in range(20):
                assert httpx.get(f"{url}/health").status_code == 200
            body = {"model": "lm", "prompt": "Once", "max_tokens": 2}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        assert command.text.count("\n") - lines < MAX_LOG_LINES
    finally:
        command.process.terminate()
        assert command.end() == 0


def test_idle_connections_make_room_for_new_ones(service: Service) -> None:
    with serving(service, max_connections=8) as server, connections(server.url, 40) as opened:
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code == 200
        opened[0].settimeout(20)
        assert opened[0].recv(1) == b""  # the oldest was closed


def test_without_idle_connections_only_probes_are_answered(service: Service, lm: AsyncOmni, held: Held) -> None:
    body = b'{"model": "lm", "prompt": "Once", "max_tokens": 2}'
    with serving(service, max_connections=4) as server, contextlib.ExitStack() as stack:
        running = [stack.enter_context(raw(server, body)) for _ in range(4)]
        until(lambda: lm.stats().inflight == 4, "the start of the requests")
        assert httpx.get(f"{server.url}/health").status_code == 200
        refused = httpx.post(f"{server.url}/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert int(refused.headers["retry-after"]) > 0
        held.go.set()
        assert [status_of(line) for line in running] == [200] * 4
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT, timeout=60).status_code == 200


def test_a_listening_socket_without_descriptors_closes_what_it_cannot_serve(caplog: pytest.LogCaptureFixture) -> None:
    with ListeningSocket(socket.AF_INET, socket.SOCK_STREAM) as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(8)
        clients = [stack.enter_context(socket.create_connection(server.getsockname(), timeout=20)) for _ in range(3)]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            with caplog.at_level(logging.WARNING):
                for _ in clients:
                    with pytest.raises(BlockingIOError):
                        server.accept()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [client.recv(1) for client in clients] == [b""] * 3
        assert len(caplog.records) == 1
        assert "ulimit -n" in caplog.text


def test_the_limit_of_descriptors_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(now=pair))
    assert raise_descriptor_limit() == 4096
    limits["now"] = (1024, resource.RLIM_INFINITY)
    assert raise_descriptor_limit() == listening.MAX_DESCRIPTORS
    limits["now"] = (2**20, 2**20)
    assert raise_descriptor_limit() == 2**20

    def refused(_kind: int, _pair: tuple[int, int]) -> None:
        raise OSError(errno.EPERM, "no")

    limits["now"] = (1024, 4096)
    monkeypatch.setattr(resource, "setrlimit", refused)
    assert raise_descriptor_limit() == 1024


def test_more_connections_than_descriptors_are_refused_at_the_start() -> None:
    assert connections_below(None) is None
    assert connections_below(1024) == 880
    assert connections_below(1024, 100) == 100
    with pytest.raises(ConfigError, match="the process may open 1024 files, which is enough for 880"):
        connections_below(1024, 900)
