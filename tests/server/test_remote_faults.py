"""A remote server that misbehaves: each request ends with its own error, and the others go on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from omnistage.config import RemoteBudget, RemoteStageConfig
from omnistage.core.errors import ConfigError, InvalidRequestError, OmniError, QueueFullError, RemoteError
from omnistage.core.http_client import BrokenResponseError
from omnistage.core.messages import ChatMessage, ImagePart, TextPart, ToolCall
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.types import (
    ARInput,
    ChatInput,
    FinishReason,
    OmniTokensPrompt,
    RequestInfo,
    StageChunk,
    StageInput,
    TokenChunk,
)
from omnistage.engines.remote import connection, guard, server_process
from omnistage.engines.remote.events import StreamReader
from omnistage.engines.remote.server_process import ServerProcess
from omnistage.engines.remote.stage import RemoteStage
from omnistage.engines.remote.wire import check_params, request_body
from omnistage.pipeline.loop import StageLoop
from omnistage.pipeline.loop_threads import LoopThread
from tests.hang_guard import HANG_SECONDS
from tests.server import fake_llm
from tests.server.fake_llm import MODEL, FakeServer, fake_server
from tests.server.harness import until

_KEYS = (
    *("choices", "index", "text", "delta", "content", "token_ids", "logprobs", "tokens", "token_logprobs"),
    *("top_logprobs", "finish_reason", "token", "logprob", "bytes", "tool_calls", "function", "name", "arguments"),
    *("usage", "prompt_tokens", "completion_tokens", "error", "stop_reason"),
)
_names = st.sampled_from(_KEYS)
pytestmark = pytest.mark.timeout(300)
BUDGET = RemoteBudget(first_token_seconds=40.0, idle_seconds=40.0, connect_seconds=10.0, check_seconds=0.1)


def config(url: str, **more: object) -> RemoteStageConfig:
    values = {"engine": "remote", "url": url, "model": MODEL, "budget": BUDGET, **more}
    return RemoteStageConfig.model_validate(values)


class Client:
    """A stage in its loop."""

    def __init__(self, settings: RemoteStageConfig) -> None:
        self.stage = RemoteStage("think", settings)
        self.chunks: dict[str, list[StageChunk]] = {}
        self.loop: StageLoop[str] = StageLoop(self.stage, lambda owner, chunk: self.chunks[owner].append(chunk))
        LoopThread("remote", [self.loop]).start()

    def submit(self, prompt: str | ChatInput | ARInput, name: str | None = None, **params: object) -> str:
        payload = ChatInput(prompt=prompt) if isinstance(prompt, str) else prompt
        name = name or f"r{len(self.chunks)}"
        self.chunks[name] = []
        self.loop.submit(StageInput(RequestInfo(name), SamplingParams.model_validate(params), payload), name)
        return name

    def ended(self, name: str) -> StageChunk:
        """The last chunk of a request."""
        until(lambda: any(chunk.finish is not None for chunk in self.chunks[name]), "an end")
        [last] = [chunk for chunk in self.chunks[name] if chunk.finish is not None]
        return last

    def error(self, prompt: str) -> OmniError:
        last = self.ended(self.submit(prompt))
        assert last.finish is FinishReason.ERROR
        assert last.error is not None
        return last.error

    def text(self, name: str) -> str:
        assert self.ended(name).finish is FinishReason.STOP
        return "".join(c.payload.text for c in self.chunks[name] if isinstance(c.payload, TokenChunk))

    def close(self) -> None:
        self.loop.stop(drain=False)
        assert self.loop.join(HANG_SECONDS)
        self.stage.close()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    made = Client(config(server.url))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("prompt", "status", "words"),
    [
        ("hang", 504, r"no token within 0.5 s; .* raise think.budget.first_token_seconds"),
        ("stall", 504, r"no further token within 0.5 s; .* raise think.budget.idle_seconds"),
        ("cut", 502, "broke the response off"),
        ("unfinished", 502, "broke the response off"),
        ("garbage", 502, "broke the response off"),
        ("nonsense", 502, "broke the response off"),
        ("page", 502, "broke the response off"),
        ("noise", 502, "broke the response off"),
        ("error", 502, "ended the request with an error"),
        ("redirect", 502, "redirects, which is not followed"),
        ("500", 502, "failed with status 500"),
        ("401", 502, "refused this service's API key"),
        ("404", 502, "no such model or endpoint; check url and model"),
        ("503", 503, "accepts no requests at the moment; try again later"),
        ("504", 504, "gave up waiting"),
        ("400", 400, "refused the request: the reason"),
        ("413", 413, "shorten it"),
        ("full", 429, "has no room for another request"),
    ],
)
def test_a_failure_ends_its_own_request_with_what_to_do(
    client: Client, server: FakeServer, prompt: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = client.submit("slow one")
    until(lambda: bool(server.bodies), "a request with the usual budget")
    if key := {"hang": "first_token_seconds", "stall": "idle_seconds"}.get(prompt):
        tight = config(server.url, budget=BUDGET.model_copy(update={key: 0.5}))
        monkeypatch.setattr(client.stage._connection, "_config", tight)
    error = client.error(prompt)
    assert error.status == status
    with pytest.raises(type(error), match=words):
        raise error
    monkeypatch.undo()
    assert "secret" not in str(error)
    assert str(server.server_port) not in str(error)
    assert client.text(slow) == "Hello there"
    assert client.text(client.submit("good")) == "Hello there"
    assert all(path == "/v1/completions" for path, _, _ in server.bodies)  # nothing was sent anywhere else
    assert client.stage.unavailable is None
    if isinstance(error, QueueFullError):
        assert error.retry_after == 7.0


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
_values = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=4))


@given(st.lists(st.dictionaries(_names, _values, max_size=5) | _values, max_size=4))
def test_whatever_a_server_sends_is_read_or_refused(events: list[object]) -> None:
    reader = StreamReader("r", "think", None, SamplingParams(max_tokens=8, logprobs=2))
    try:
        for event in json.loads(json.dumps(events)):
            for chunk in reader.read(event):
                assert isinstance(chunk.payload, TokenChunk)
                to_json([chunk.payload.text, [asdict(each) for each in chunk.payload.logprobs]])
        list(reader.end())
    except (BrokenResponseError, RemoteError):
        pass


def test_a_stream_without_an_end_is_broken_off() -> None:
    reader = StreamReader("r", "think", None, SamplingParams(max_tokens=4))
    events = itertools.repeat({"choices": [{"index": 0, "text": "x" * 1000}]}, 100)
    with pytest.raises(BrokenResponseError):
        list(itertools.chain.from_iterable(map(reader.read, events)))


def test_a_server_that_goes_away_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    with fake_server() as first:
        port = first.server_port
        client = Client(config(first.url))
        assert client.text(client.submit("good")) == "Hello there"
    until(lambda: client.loop.health.unavailable is not None, "unavailable")
    assert not client.loop.health.available
    late = client.ended(client.submit("good"))  # one that was admitted just before
    assert late.error is not None
    assert late.error.status == 503
    with fake_server(port):
        until(lambda: client.loop.health.available, "available")
        assert client.text(client.submit("good")) == "Hello there"
    client.close()
    assert "does not answer" in caplog.text


def test_every_request_ends_once_while_the_server_comes_and_goes() -> None:
    names: list[str] = []
    with fake_server() as first:
        port = first.server_port
        client = Client(config(first.url))
        names += [client.submit(prompt) for prompt in ("slow", "cut", "good") * 8]
        until(lambda: len(first.bodies) >= 12, "requests at the server")
    for _ in range(3):  # those in flight were cut, and the address refuses connections for a while
        names += [client.submit("good") for _ in range(4)]
        with fake_server(port) as server:
            until(lambda: client.loop.health.available, "the server's return")
            names += [client.submit(prompt) for prompt in ("slow", "stall", "500", "good") * 2]
            while len(server.bodies) < 4:  # the loss of the last server may be noticed only now, and end some of them
                names.append(client.submit("good"))
                client.ended(names[-1])
    for name in names:
        assert client.ended(name).finish in (FinishReason.STOP, FinishReason.ERROR)  # exactly one chunk with a finish
    assert {client.ended(name).finish for name in names} == {FinishReason.STOP, FinishReason.ERROR}
    stats = client.stage.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    client.close()


def test_an_abort_is_seen_by_the_server_and_nothing_more_is_emitted(client: Client, server: FakeServer) -> None:
    name = client.submit("stall")
    until(lambda: len(client.chunks[name]) > 1, "a token")
    client.loop.abort(name, name)
    until(lambda: client.stage.stats().running == 0, "the end of the request")
    assert client.loop.wait_resting(HANG_SECONDS)
    assert all(chunk.finish is None for chunk in client.chunks[name])
    assert client.text(client.submit("good")) == "Hello there"


def test_what_is_sent_follows_the_parameters_and_the_conversation(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret-key")
    client = Client(config(server.url, api_key_env="A_KEY"))
    call = ToolCall("weather", {"city": "Rome"}, "c1")
    messages = (
        ChatMessage("system", (TextPart("Be brief."),)),
        ChatMessage("user", (TextPart("tools"),)),
        ChatMessage("assistant", (TextPart(""),), tool_calls=(call,)),
        ChatMessage("tool", (TextPart("sunny"),), name="weather", tool_call_id="c1"),
        ChatMessage("user", (TextPart("tools again"),)),
    )
    tools = ({"type": "function", "function": {"name": "weather"}},)
    structured = StructuredOutput(json_schema={"type": "object"})
    name = client.submit(ChatInput(messages, tools), temperature=0.5, seed=4, stop=("x",), structured=structured)
    assert client.text(name) == '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    [(path, body, headers)] = server.bodies
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret-key"
    assert body["messages"][2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert body["messages"][3] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}
    assert (body["temperature"], body["seed"], body["stop"], body["tools"]) == (0.5, 4, ["x"], [*tools])
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["repetition_penalty"] == 1.0  # or vLLM would take the model's own
    client.close()


def test_what_the_server_splits_off_as_reasoning_is_left_out(server: FakeServer) -> None:
    client = Client(config(server.url, chat_template_kwargs={"enable_thinking": False}))
    messages = (ChatMessage("user", (TextPart("think"),)),)
    assert client.text(client.submit(ChatInput(messages))) == "Hello"
    assert server.bodies[0][1]["chat_template_kwargs"] == {"enable_thinking": False}
    client.close()
    with pytest.raises(ValueError, match="not part of OpenAI's API"):
        config(server.url, server="openai", chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize(
    ("structured", "field"),
    [
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"grammar": "root ::= x"}, {"structured_outputs": {"grammar": "root ::= x"}}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        (
            {"structural_tag": {"type": "any_text"}},
            {"structured_outputs": {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'}},
        ),
    ],
)
def test_constraints_are_sent_in_the_servers_terms(structured: dict[str, object], field: dict[str, object]) -> None:
    params = SamplingParams(structured=StructuredOutput.model_validate(structured))
    path, body = request_body(ChatInput(prompt="x"), params, config("http://h"), None)
    assert path == "/v1/completions"
    assert field.items() <= body.items()
    if "structured_outputs" in field:
        with pytest.raises(InvalidRequestError, match="JSON schemas and JSON objects alone"):
            check_params(params, config("http://h", server="openai"))


def test_the_length_and_the_log_probabilities_are_named_as_each_endpoint_has_them() -> None:
    params = SamplingParams(max_tokens=50, logprobs=2)
    chat = ChatInput((ChatMessage("user", (TextPart("x"),)),))
    tokens = ARInput((5,) * 10, num_tokens=7, seed=3)
    vllm, openai = config("http://h"), config("http://h", server="openai")
    _, body = request_body(chat, params, vllm, None)
    assert (body["max_tokens"], body["logprobs"], body["top_logprobs"], body["return_token_ids"]) == (50, True, 2, True)
    _, body = request_body(chat, params, openai, None)
    assert body["max_completion_tokens"] == 50
    assert not body.keys() & {"max_tokens", "top_k", "return_token_ids"}
    path, body = request_body(tokens, params, vllm, 14)
    assert (path, body["max_tokens"], body["logprobs"], body["seed"]) == ("/v1/completions", 4, 2, 3)
    _, body = request_body(ChatInput(tokens=OmniTokensPrompt((1, 2))), params, vllm, None)
    assert body["prompt"] == [1, 2]


def test_pictures_and_rows_of_other_stages_are_refused(client: Client) -> None:
    from PIL import Image

    picture = ChatMessage("user", (ImagePart(Image.new("RGB", (2, 2))),))
    for payload in (ChatInput((picture,)), ARInput((1, 2), streaming=True)):
        last = client.ended(client.submit(payload))
        assert last.error is not None


def test_a_prompt_that_needs_no_token_is_not_sent(client: Client, server: FakeServer) -> None:
    prompt = ARInput((0,), num_tokens=0)
    last = client.ended(client.submit(prompt))
    assert last.finish is FinishReason.STOP
    assert isinstance(last.payload, TokenChunk)
    assert last.payload.prompt is prompt
    assert not server.bodies


def test_a_configuration_that_cannot_work_is_refused_when_it_is_loaded(server: FakeServer) -> None:
    for settings, words in (
        (config(server.url, model="other"), "has no model 'other'; it has lm"),
        (config(server.url, api_key_env="NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE is not set"),
        (config(server.url, server="openai", params={"top_k": 3}), "params.top_k: is not supported"),
    ):
        with pytest.raises(ConfigError, match=words):
            RemoteStage("think", settings)
    server.models_status = 401
    with pytest.raises(ConfigError, match="refused the API key"):
        RemoteStage("think", config(server.url))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://user:key@host/v1", "http://", "http://h/v1?x=1", "h:80"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not a server's address"):
        config(url)


# ---------------------------------------------------------------------------------------- servers of our own


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(port: int, log: Path, program: str = fake_llm.__file__) -> Client:
    command = [sys.executable, program, str(port)]
    return Client(config(f"http://127.0.0.1:{port}", command=command, log_file=str(log)))


def listeners(port: int) -> list[psutil.Process]:
    def listens(each: psutil.Process) -> bool:
        try:
            return each.cmdline()[-1:] == [str(port)]
        except psutil.Error:  # it has ended, as others' children do meanwhile
            return False

    return [each for each in psutil.Process().children(recursive=True) if listens(each)]


def test_a_server_of_our_own_is_started_logged_restarted_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerProcess.__init__, "__kwdefaults__", {"pauses": (0.05, 0.2)})
    log, port = tmp_path / "server.log", free_port()
    client = started(port, log)
    assert client.text(client.submit("good")) == "Hello there"
    assert "listening soon" in log.read_text()
    processes = listeners(port)
    assert len(processes) == 2  # the guard, and the server in a group of its own
    server = max(processes, key=lambda each: each.pid)
    server.send_signal(signal.SIGKILL)
    until(lambda: client.stage.stats().extra["server_restarts"] == 1, "a restart")
    until(lambda: client.loop.health.available and server not in listeners(port), "a new server")
    until(lambda: client.ended(client.submit("good")).finish is FinishReason.STOP, "an answer")
    client.close()
    until(lambda: not listeners(port), "the end of the server")


def test_a_server_that_never_comes_up_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("print('no such GPU', flush=True)\nraise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=r"command: ended with code 3 .*server.log.* no such GPU"):
        started(free_port(), tmp_path / "server.log", str(program))
    with pytest.raises(ConfigError, match="cannot be started"):
        Client(config(f"http://127.0.0.1:{free_port()}", command=["/no/such/program"], log_file=str(tmp_path / "l")))


def test_a_server_has_its_own_environment_and_a_log_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "_MAX_LOG_BYTES", 2000)
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("KEPT", "kept")
    lines = "import os; print(os.environ.get('PYTHONPATH'), os.environ['KEPT'], os.environ['OWN']);"
    command = [sys.executable, "-c", f"{lines} [print(i, 'x' * 100) for i in range(50)]"]
    process = ServerProcess("think", command, {"OWN": "own"}, str(tmp_path / "log"))
    process.start()
    until(lambda: process.exit_code is not None, "its end")
    process.stop(10)
    log, older = tmp_path / "log", tmp_path / "log.1"
    assert log.stat().st_size <= 2000
    assert older.stat().st_size <= 2000
    assert log.read_text().splitlines()[-1].startswith("49 x")
    assert process.last_lines.startswith("45 x")
    first = ServerProcess("think", [sys.executable, "-c", lines], {"OWN": "own"}, str(tmp_path / "other"))
    first.start()
    until(lambda: first.exit_code is not None, "its end")
    first.stop(10)
    assert (tmp_path / "other").read_text().split() == ["None", "kept", "own"]


def test_an_address_where_another_server_answers_is_not_used(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "STOP_SECONDS", -5.0)  # it is not waited for
    with pytest.raises(ConfigError, match="another server answers at its url"):
        RemoteStage("think", config(server.url, command=["never-started"]))


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_guard_ends_the_whole_group_when_the_service_is_gone(tmp_path: Path) -> None:
    program = tmp_path / "family.py"
    program.write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-I", "-S", guard.__file__, "0.2", sys.executable, str(program)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        assert os.getpgid(grandchild) != os.getpgid(process.pid)
        process.stdin.close()  # as the kernel does when the service is killed
        assert process.wait(HANG_SECONDS) != 0
    until(lambda: ended(grandchild), "its end")
