"""A small server that speaks enough of OpenAI's API, and misbehaves on demand: the prompt's first word says how.

Also a program: `python fake_llm.py PORT`.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "lm"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def piece(text: str, finish: str | None = None, **more: object) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


GOOD = (
    piece("Hello", token_ids=[1]),
    piece(" there", token_ids=[2]),
    piece("", "stop"),
    event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}),
    b"data: [DONE]\n\n",
)


class Handler(BaseHTTPRequestHandler):
    server: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.checks += 1
        self._json(self.server.models_status, {"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append((self.path, body, dict(self.headers)))
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        how = prompt.split()[0] if isinstance(prompt, str) else "good"
        behaviour: Callable[[], None] = getattr(self, f"do_{how}", self.do_good)
        behaviour()

    def do_good(self) -> None:
        self._stream(*GOOD)

    def do_tools(self) -> None:
        first = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"city": '}}
        second = {"index": 0, "function": {"arguments": '"Rome"}'}}
        deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}, {"tool_calls": [first]}]
        choices = [{"index": 0, "delta": delta} for delta in (*deltas, {"tool_calls": [second]})]
        ended = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
        self._stream(*(event({"choices": [choice]}) for choice in (*choices, ended)), b"data: [DONE]\n\n")

    def do_think(self) -> None:
        deltas = [{"reasoning_content": "Hm."}, {"reasoning": "Hm."}, {"content": "Hello"}]
        choices: list[dict[str, object]] = [{"index": 0, "delta": delta} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
        self._stream(*(event({"choices": [choice]}) for choice in choices), b"data: [DONE]\n\n")

    def do_hang(self) -> None:
        self.server.held.wait()

    def do_stall(self) -> None:
        self._stream(*GOOD[:1], end=False)
        self.server.held.wait()

    def do_slow(self) -> None:
        time.sleep(0.3)
        self._stream(*GOOD)

    def do_cut(self) -> None:
        self._stream(*GOOD[:2], end=False)
        self.connection.shutdown(socket.SHUT_RDWR)

    def do_unfinished(self) -> None:
        self._stream(*GOOD[:2], b"data: [DONE]\n\n")

    def do_garbage(self) -> None:
        self._stream(GOOD[0], b"data: {no json\n\n")

    def do_nonsense(self) -> None:
        self._stream(GOOD[0], event({"choices": [{"index": 7, "text": 5}]}))

    def do_page(self) -> None:
        self._send(200, b"<html>a proxy's page</html>", "text/html")

    def do_noise(self) -> None:
        self.connection.sendall(b"\x00\x01\x02 not HTTP at all\r\n\r\n")
        self.close_connection = True

    def do_error(self) -> None:
        self._stream(GOOD[0], event({"error": {"message": "secret of the server", "code": 500}}))

    def do_redirect(self) -> None:
        self.send_response(302)
        self.send_header("Location", f"http://127.0.0.1:{self.server.server_port}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_full(self) -> None:
        self._json(429, {"error": {"message": "full"}}, ("Retry-After", "7"))

    def __getattr__(self, name: str) -> Any:
        """`do_500` and the like."""
        status = name.removeprefix("do_")
        if status == name or not status.isdecimal():
            raise AttributeError(name)
        return lambda: self._json(int(status), {"error": {"message": "the reason", "code": "c"}})

    def _json(self, status: int, value: object, *headers: tuple[str, str]) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", *headers)

    def _send(self, status: int, body: bytes, kind: str, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, *events: bytes, end: bool = True) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for data in (*events, *((b"",) if end else ())):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()


class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.bodies: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.checks = 0
        self.models_status = 200
        self.held = threading.Event()
        self.connections: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        request, address = super().get_request()
        self.connections.append(request)
        return request, address

    def disconnect(self) -> None:
        """As a process that ends does."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients leave in the middle: that is what is tested

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def fake_server(port: int = 0) -> Iterator[FakeServer]:
    with FakeServer(port) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.held.set()
            server.shutdown()
            server.disconnect()


if __name__ == "__main__":
    print("listening soon", flush=True)
    FakeServer(int(sys.argv[1])).serve_forever()
