"""What OpenAI's clients may send, and how it is said what is wrong with it: completions, responses, paths of fields."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.responses import response_create_params

from omnistage.core.errors import StageError
from omnistage.core.params import SamplingParams
from omnistage.core.types import FinishReason, Modality
from omnistage.omni import AsyncOmni
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk, Usage
from omnistage.pipeline.stream import OutputStream
from omnistage.server.access.keys import Holder, Keyring, digest_of
from omnistage.server.http import sse
from omnistage.server.openai import completions
from omnistage.server.openai.chat.request import ChatRequest
from omnistage.server.openai.chat.response import StreamWriter
from omnistage.server.openai.completions import CompletionRequest
from omnistage.server.openai.request_models import SamplesText
from omnistage.server.openai.response_models import usage_of
from omnistage.server.openai.responses.request import ResponsesRequest
from omnistage.server.openai.responses.response import ResponseWriter
from omnistage.server.service import Service
from tests.server.harness import SERVE_LIMITS, Held, Running, make, serving, until

PLAIN: dict[str, Any] = {"model": "lm", "max_tokens": 6, "temperature": 0}
PROMPTS = ["Once upon a time", "There was", "a light at the end"]
KEY = "a-key-for-these-tests"
ASKED: dict[str, Any] = {"model": "lm", "input": "Hello there", "max_output_tokens": 6, "temperature": 0}


def error_of(answer: httpx.Response, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def posted(server: Running, path: str, body: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60, **more)


# ------------------------------------------------------------------------------------------ several prompts


def test_every_field_of_the_clients_completions_is_known() -> None:
    sent = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    assert sent - set(CompletionRequest.model_fields) == set()


def test_several_prompts_stream_as_choices_of_their_own(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {**PLAIN, "prompt": PROMPTS, "n": 2, "temperature": 1, "seed": 3, "logprobs": 1}
    whole = client.completions.create(**given)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts, offsets, ends = [""] * 6, [[] for _ in range(6)], [[] for _ in range(6)]
    events = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    for event in events[:-1]:
        (choice,) = event.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
        ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert offsets == [choice.logprobs.text_offset for choice in whole.choices if choice.logprobs]
    assert all(len(set(places)) > 1 for places in offsets)
    assert ends == [[choice.finish_reason] for choice in whole.choices]
    assert len({event.id for event in events}) == 1
    assert events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_an_answer_says_what_was_cached_and_what_each_stage_made(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {**PLAIN, "prompt": "a long way to go " * 40}
    client.completions.create(**given)  # now it is known
    whole = client.completions.create(**given).usage
    streamed = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))[-1].usage
    twice = client.completions.create(**{**given, "prompt": [given["prompt"]] * 2}).usage
    assert whole is not None
    assert twice is not None
    assert whole.prompt_tokens_details.cached_tokens > 0
    assert whole == streamed
    assert twice.prompt_tokens_details.cached_tokens == 2 * whole.prompt_tokens_details.cached_tokens
    made = [usage.model_dump()["completion_tokens_details"]["stage_tokens"] for usage in (whole, twice)]
    assert made[0]
    assert made[1] == {stage: 2 * count for stage, count in made[0].items()}


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_token_ids_are_named_as_the_client_sent_them(server: Running, stream: bool) -> None:
    for prompt, param in (
        ([5, 10**6], "prompt"),
        ([-1], "prompt"),
        ([[5], [10**6]], "prompt[1]"),
        (["a", ""], "prompt[1]"),
    ):
        error = error_of(posted(server, "completions", {**PLAIN, "prompt": prompt, "stream": stream}))
        assert error["param"] == param, error
        assert error["message"].startswith(f"{param}: ")


class Told(OutputStream):
    """A stream that gives these items, and raises those that are errors."""

    def __init__(self, *items: OutputChunk | Exception) -> None:
        self.request_id = "req-1"
        self._items = list(items)

    async def __anext__(self) -> OutputChunk:
        if not self._items:
            raise StopAsyncIteration
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item


def piece(text: str) -> OutputChunk:
    return OutputChunk("req-1", Modality.TEXT, text=text)


@pytest.mark.parametrize("carried", [False, True])
def test_one_prompt_that_fails_ends_a_stream_that_has_begun_with_an_error(carried: bool) -> None:
    error = StageError("it broke")
    final = OmniRequestOutput("req-1", [CompletionOutput()], finish_reason=FinishReason.ERROR, error=error)
    failure = OutputChunk("req-1", Modality.TEXT, final=final) if carried else error
    body = CompletionRequest(model="lm", prompt=("a", "b"))

    async def told(*streams: OutputStream) -> list[dict[str, Any]]:
        return [made async for made in completions._events(body, streams, 1)]

    events = asyncio.run(told(Told(piece("x"), piece("y")), Told(piece("z"), failure)))
    assert [made["choices"][0]["text"] for made in events[:-1]][:2] == ["x", "z"]
    assert "it broke" in events[-1]["error"]["message"]
    with pytest.raises(StageError):  # nothing was sent, so that it can have its status
        asyncio.run(told(Told(failure), Told(piece("z"))))


def test_streams_are_merged_until_the_last_ends_and_none_is_left_waiting() -> None:
    class Endless(Told):
        ended = False

        async def __anext__(self) -> OutputChunk:
            try:
                await asyncio.Event().wait()
            finally:
                Endless.ended = True
            raise AssertionError

    async def all_of(merged: AsyncGenerator[tuple[int, OutputChunk]]) -> list[tuple[int, str]]:
        return [(place, item.text) async for place, item in merged]

    async def first_of(merged: AsyncGenerator[tuple[int, OutputChunk]]) -> None:
        assert (await anext(merged))[1].text == "a"
        await merged.aclose()
        assert Endless.ended
        assert len(asyncio.all_tasks()) == 1

    both = (Told(piece("a"), piece("b")), Told(piece("c")))
    assert sorted(asyncio.run(all_of(completions._merged(both)))) == [(0, "a"), (0, "b"), (1, "c")]
    asyncio.run(first_of(completions._merged((Told(piece("a")), Endless()))))


def test_a_client_that_leaves_ends_all_of_its_prompts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.service.models["lm"].omni.orchestrator
    held = Held(engine.stages[engine.graph.entry], monkeypatch, free=20)
    body = {"model": "lm", "prompt": PROMPTS, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()  # kept: dropping it would close the connection
            next(lines)
            assert engine.stats().inflight == len(PROMPTS)
        until(lambda: engine.stats().inflight == 0, "the end of all three")
        assert not held.go.is_set()
    finally:
        held.go.set()


# ------------------------------------------------------------------------------------------------------ keys


@pytest.fixture
def keyed(models: dict[str, AsyncOmni]) -> Iterator[tuple[Running, Holder]]:
    holder = Holder("ann", digest_of(KEY), rate=2.0, max_concurrent=4)
    service = Service(keyring=Keyring([holder], clock=lambda: 0.0))
    service.add("lm", models["lm"])
    service.loading = False
    with serving(service) as running:
        yield running, holder
    models["lm"].orchestrator.check_idle()


def test_a_key_counts_running_prompts_and_starting_requests(keyed: tuple[Running, Holder]) -> None:
    server, holder = keyed
    asked = {"headers": {"Authorization": f"Bearer {KEY}"}}
    answer = posted(server, "completions", {**PLAIN, "prompt": PROMPTS}, **asked)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 3
    assert holder.use.counts["requests"] == 0
    trace = httpx.get(f"{server.url}/v1/requests/{answer.json()['id']}", **asked)
    assert trace.status_code == 200
    holder.use.counts["requests"] = 2  # with three more it would have more than four
    error_of(posted(server, "completions", {**PLAIN, "prompt": PROMPTS}, **asked), 429)
    holder.use.counts["requests"] = 1
    streamed = posted(server, "completions", {**PLAIN, "prompt": PROMPTS, "stream": True}, **asked)
    assert streamed.status_code == 200
    assert streamed.text.endswith("data: [DONE]\n\n")
    holder.use.counts["requests"] = 0
    told = error_of(posted(server, "completions", {**PLAIN, "prompt": PROMPTS}, **asked), 429)
    assert "a minute" in told["message"]  # the third of two


# ------------------------------------------------------------------------------------------------- responses

HARMLESS: dict[str, Any] = {
    "truncation": "disabled",
    "include": [],
    "service_tier": "auto",
    "background": False,
    "top_logprobs": 0,
    "stream_options": {"include_obfuscation": False},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "max_tool_calls": 3,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "medium"},
    "image": {"context_compression": "auto"},
    "metadata": {"a": "b"},
    "store": True,
    "user": "u",
    "tools": [],
    "conversation": None,
    "prompt": None,
    "previous_response_id": None,
    "moderation": None,
    "context_management": [],
    "access_programs": None,
}


def test_every_field_of_the_clients_responses_is_known() -> None:
    sent = set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"}
    assert sent - set(ResponsesRequest.model_fields) == set()


def test_what_changes_nothing_in_a_response_is_taken(client: openai.OpenAI) -> None:
    plain = client.responses.create(**ASKED)
    answer = client.responses.create(**ASKED, extra_body=HARMLESS)
    assert answer.output_text == plain.output_text
    assert (answer.service_tier, plain.service_tier) == ("default", None)
    assert (answer.truncation, answer.background, answer.top_logprobs) == ("disabled", False, 0)
    assert (answer.safety_identifier, answer.prompt_cache_key, answer.max_tool_calls) == ("s", "k", 3)
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "medium"
    assert answer.text is not None
    assert answer.text.verbosity == "medium"
    wanted = ["reasoning.encrypted_content", "web_search_call.action.sources"]  # of items that no answer has
    assert client.responses.create(**ASKED, include=wanted).output_text == plain.output_text


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("previous_response_id", "resp_1", "send the conversation in input"),
        ("conversation", "conv_1", "the conversation so far in input"),
        ("prompt", {"id": "p"}, "not stored"),
        ("moderation", {"model": "m"}, "leave it out"),
        ("access_programs", {"cyber": "standard"}, "leave it out"),
        ("context_management", [{"type": "compaction"}], "never truncated"),
        ("background", True, "not supported"),
        ("top_logprobs", 30, "less than or equal to 20"),
        ("truncation", "auto", "never truncated"),
        ("service_tier", "gold", "auto"),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}, "not supported"),
        ("image.context_compression", {"image": {"context_compression": "enabled"}}, "auto"),
        (
            "tools[1].type",
            {"tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]},
            "other tools",
        ),
        ("tools[0].name", {"tools": [{"type": "function"}]}, "is missing"),
        ("tool_choice", {"type": "web_search_preview"}, "other tools"),
        ("text.format.schema", {"text": {"format": {"type": "json_schema"}}}, "send both or neither"),
        ("audio", {"voice": "Ethan"}, "add audio to modalities"),
        (
            "audio.format",
            {"model": "omni", "stream": True, "modalities": ["text", "audio"], "audio": {"format": "mp3"}},
            "pcm16",
        ),
        ("audio.voice", {"model": "omni", "modalities": ["text", "audio"], "audio": {"voice": "nobody"}}, "nobody"),
    ],
)
def test_what_would_change_a_response_is_refused_by_name(server: Running, field: str, value: Any, says: str) -> None:
    change = value if isinstance(value, dict) and field.partition(".")[0].partition("[")[0] in value else {field: value}
    error = error_of(posted(server, "responses", {**ASKED, **change}))
    assert error["param"] == field, error
    assert says in error["message"]


def test_speech_counts_in_a_response_as_it_does_in_a_chat() -> None:
    usage = Usage(40, 8, audio_seconds=1.5, stage_tokens={"thinker": 8, "talker": 60})
    final = OmniRequestOutput("req-1", [CompletionOutput()], finish_reason=FinishReason.STOP, usage=usage)
    told = ResponseWriter("req-1", ResponsesRequest(model="omni", input="Hi")).response(final)["usage"]
    assert told is not None
    chat = usage_of(usage)
    assert (told["input_tokens"], told["output_tokens"], told["total_tokens"]) == (40, 68, 108)
    assert (told["output_tokens"], told["total_tokens"]) == (chat["completion_tokens"], chat["total_tokens"])
    assert (told["output_tokens_details"]["text_tokens"], told["output_tokens_details"]["audio_tokens"]) == (8, 60)


def test_deltas_are_padded_where_it_is_asked_for() -> None:
    body = {"model": "lm", "input": "Hi", "stream": True, "stream_options": {"include_obfuscation": True}}
    writer = ResponseWriter("req-1", ResponsesRequest.model_validate(body))
    events = [made for text in ("a", "longer", "x" * 70) for made in writer.events(piece(text))]
    padded = [made for made in events if made["type"].endswith(".delta")]
    assert len(padded) == 3
    assert {len(json.dumps(made, ensure_ascii=False, separators=(",", ":"))) % 64 for made in padded} == {0}
    assert not any("obfuscation" in made for made in events if not made["type"].endswith(".delta"))


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("tier", [None, "auto"])
def test_an_event_of_text_is_written_as_any_other_event(usage: bool, tier: str | None) -> None:
    model = 'a "model": \\ "content":"" é'
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "n": 2, "stream": True}
    body |= {"stream_options": {"include_usage": usage}, "service_tier": tier}
    stream = SimpleNamespace(request_id="req-1")
    one, other = (StreamWriter(stream, ChatRequest.model_validate(body), lambda *_: 0) for _ in range(2))
    other._head["created"] = one._head["created"]
    texts = ["Once", ' "quoted" \\', "é\n\t\x00\x7f", "\u2028 😀", '"content":""', "", "</script>"]
    items = [OutputChunk("req-1", Modality.TEXT, index, text, (1,)) for text in texts for index in (0, 1)]
    assert b"".join(map(one.write, items)) == b"".join(sse.event(made) for item in items for made in other.events(item))


# ---------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, ResponsesRequest])
def test_a_sampling_parameter_is_a_field_or_listed_as_not_exposed(kind: type[SamplesText]) -> None:
    exposed = kind.model_fields.keys() | kind.derived
    assert set(SamplingParams.model_fields) - kind.not_exposed <= exposed
    assert not kind.not_exposed & kind.model_fields.keys()
    assert kind.not_exposed <= set(SamplingParams.model_fields)


def test_every_sampling_field_that_is_sent_reaches_the_engine() -> None:
    values: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.6,
        "n": 2,
        "stop": ("end",),
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 1.0},
        "seed": 7,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": (9,),
        "allowed_token_ids": (5, 9),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "max_tokens": 4,
        "logprobs": 2,
        "lora": ({"name": "a", "weight": 0.5},),
    }
    assert values.keys() | {"structured"} == SamplingParams.model_fields.keys() - CompletionRequest.not_exposed
    body = CompletionRequest(model="lm", prompt="Hi", **values)
    assert body.sampling_params("max_tokens") == SamplingParams(**values)


# ---------------------------------------------------------------------------------------------------- videos


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make("wan", tmp_path_factory.mktemp("mends") / "wan")
    omni = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, progress=False)
    service = Service(keyring=Keyring())
    service.add("film", omni)
    service.loading = False
    with serving(service) as running:
        yield running
    asyncio.run(omni.shutdown(drain=False))


@pytest.mark.parametrize(
    ("modalities", "param"), [(None, "model"), (["video"], "modalities"), (["text", "video"], "modalities")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_sends_those_who_want_videos_to_their_endpoint(
    film: Running, modalities: list[str] | None, param: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "film", "messages": [{"role": "user", "content": "a cat"}], "stream": stream}
    error = error_of(posted(film, "chat/completions", {**asked, "modalities": modalities}))
    assert error["param"] == param
    assert "/v1/videos" in error["message"]
    assert film.service.models["film"].omni.orchestrator.stats().inflight == 0


def test_videos_say_what_is_wrong_with_a_body_without_our_names(film: Running) -> None:
    error = error_of(posted(film, "videos", [1]))
    assert "JSON object" in error["message"]
    error = error_of(posted(film, "videos", {"prompt": "secret"}))
    assert error["param"] == "model"
    assert error["message"] == "model: is missing; give it"
    error = error_of(posted(film, "videos", {"model": "film", "prompt": "a", "input_reference": "secret"}))
    assert error["param"] == "input_reference"
    assert "ImageReference" not in error["message"]
    answer = httpx.post(f"{film.url}/v1/videos", content=b'{"model": "film"}', headers={"Content-Type": "text/plain"})
    assert "application/json" in error_of(answer)["message"]


# ---------------------------------------------------------------------------------------------------- paths

CHAT: dict[str, Any] = {"model": "lm", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
DRAW: dict[str, Any] = {"model": "draw", "prompt": "a cat"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat/completions", {**CHAT, "stop": ""}, "stop"),
        ("chat/completions", {**CHAT, "stop": ["a", ""]}, "stop"),
        ("completions", {**PLAIN, "prompt": "a", "stop": ""}, "stop"),
        ("chat/completions", {**CHAT, "min_tokens": 9}, "min_tokens"),
        ("chat/completions", {**CHAT, "stop_token_ids": [-1]}, "stop_token_ids"),
        ("chat/completions", {**CHAT, "drawing": {"negative_prompt": 5}}, "drawing.negative_prompt"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat/completions", {**CHAT, "messages": ["a"]}, "messages[0]"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ("chat/completions", {**CHAT, "modalities": ["text", "smell"]}, "modalities[1]"),
        ("chat/completions", {**CHAT, "tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ("chat/completions", {**CHAT, "logit_bias": {"5": "much"}}, "logit_bias.5"),
        ("images/generations", {**DRAW, "output_compression": 50}, "output_compression"),
        ("images/generations", {**DRAW, "stream": True, "response_format": "url"}, "response_format"),
    ],
)
def test_a_400_names_the_fields_path(server: Running, path: str, body: Any, param: str) -> None:
    error = error_of(posted(server, path, body))
    assert error["param"] == param, error
    assert error["message"].startswith(f"{param}: ")


# ------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "sent",
    [
        {"data": {"model": "lm", "prompt": "secret"}},
        {"content": b'{"model": "lm", "prompt": "secret"}', "headers": {"Content-Type": "text/plain"}},
        {"content": b'{"model": "lm", "prompt": "secret"}'},
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "images/generations"])
def test_json_that_is_sent_as_something_else_is_told_so(server: Running, path: str, sent: dict[str, Any]) -> None:
    error = error_of(httpx.post(f"{server.url}/v1/{path}", **sent))
    assert "send Content-Type: application/json" in error["message"]
    assert "secret" not in error["message"]
    assert error["param"] is None


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ({}, "the body is missing"),
        ({"json": ["secret"]}, "must be a JSON object"),
        ({"json": "secret"}, "must be a JSON object"),
        ({"json": {"model": "lm", "prompt": "a", "stream_options": "secret"}}, "must be an object"),
    ],
)
def test_a_body_that_is_no_object_is_not_repeated(server: Running, sent: dict[str, Any], says: str) -> None:
    error = error_of(httpx.post(f"{server.url}/v1/completions", **sent))
    assert says in error["message"]
    assert "secret" not in error["message"]


def test_a_form_is_told_which_part_must_be_a_file(server: Running) -> None:
    url = f"{server.url}/v1/images/edits"
    error = error_of(httpx.post(url, data={**DRAW, "image": "data:image/png;base64,AAAA"}))
    assert error["param"] == "image"
    assert "must be a file" in error["message"]
    assert "UploadFile" not in error["message"]
    error = error_of(httpx.post(url, json=DRAW))
    assert "multipart/form-data" in error["message"]


def test_too_many_prompts_for_a_key_are_the_prompt_s_fault(keyed: tuple[Running, Holder]) -> None:
    server, _ = keyed
    asked = {"headers": {"Authorization": f"Bearer {KEY}"}}
    told = error_of(posted(server, "completions", {**PLAIN, "prompt": ["a"] * 5}, **asked), 413)
    assert told["param"] == "prompt"
    assert "5 answers at once are over this key's limit of 4" in told["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_answers_count_for_a_key(keyed: tuple[Running, Holder], path: str) -> None:
    server, holder = keyed
    prompt = {"prompt": PROMPTS[0]} if path == "completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    asked = {"headers": {"Authorization": f"Bearer {KEY}"}}
    told = error_of(posted(server, path, {**PLAIN, **prompt, "n": 5}, **asked), 413)
    assert told["param"] == "n"
    assert "5 answers at once are over this key's limit of 4" in told["message"]
    holder.use.counts["requests"] = 1
    error_of(posted(server, path, {**PLAIN, **prompt, "n": 4}, **asked), 429)
    answer = posted(server, path, {**PLAIN, **prompt, "n": 3}, **asked)
    assert answer.status_code == 200, answer.text
    assert holder.use.counts["requests"] == 1
    holder.use.counts["requests"] = 0
