"""The responses endpoint with OpenAI's own client."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile

from omnistage.core.errors import InternalError
from omnistage.core.types import FinishReason, Modality
from omnistage.media.audio_output import AudioOutput
from omnistage.pipeline.outputs import CompletionOutput, OmniRequestOutput, OutputChunk
from omnistage.server.openai.responses.request import ResponsesRequest
from omnistage.server.openai.responses.response import ResponseWriter
from tests.server.harness import Running, data_url

GIVEN: dict[str, Any] = {"model": "lm", "input": "Hello there", "max_output_tokens": 8, "temperature": 0}


def test_a_text_is_answered_as_a_chat_would_be(client: openai.OpenAI) -> None:
    answer = client.responses.create(**GIVEN)
    chat = client.chat.completions.create(
        model="lm", messages=[{"role": "user", "content": "Hello there"}], max_tokens=8, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.object == "response"
    assert answer.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    if answer.status == "incomplete":
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_instructions_and_items_make_a_conversation(client: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Again"}]},
    ]
    answer = client.responses.create(**{**GIVEN, "input": items, "instructions": "Be brief."})
    chat = client.chat.completions.create(
        model="lm",
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Again"},
        ],
        max_tokens=8,
        temperature=0,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.instructions == "Be brief."


def test_a_stream_is_typed_events_in_their_order(client: openai.OpenAI) -> None:
    whole = client.responses.create(**GIVEN)
    events = list(client.responses.create(**GIVEN, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert last.response.id == events[0].response.id


def test_the_clients_own_stream_helper_reads_it(client: openai.OpenAI) -> None:
    whole = client.responses.create(**{**GIVEN, "max_output_tokens": 300})
    with client.responses.stream(**{**GIVEN, "max_output_tokens": 300}) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == whole.output_text


def test_speech_and_pictures(client: openai.OpenAI) -> None:
    content: list[Any] = [
        {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    given: dict[str, Any] = {
        **GIVEN,
        "model": "omni",
        "input": [{"role": "user", "content": content}],
        "extra_body": {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie"}},
    }
    events = list(client.with_options(timeout=300.0).responses.create(**given, stream=True))
    streamed = b"".join(base64.b64decode(e.delta) for e in events if e.type == "response.audio.delta")
    assert len(streamed) > 2000
    assert [e.type for e in events].count("response.audio.done") == 1
    last: Any = events[-1]
    text, sound = last.response.output[0].to_dict(warnings=False)["content"]
    assert sound["transcript"] == text["text"] == last.response.output_text
    assert base64.b64decode(sound["data"]) == streamed
    details = last.response.usage.output_tokens_details.to_dict()
    assert details["audio_tokens"] > 0
    assert last.response.usage.output_tokens == details["audio_tokens"] + details["text_tokens"]


@pytest.mark.parametrize("format", ["wav", "flac"])
def test_a_whole_answer_holds_its_sound(format: str) -> None:
    body = ResponsesRequest.model_validate(
        {"model": "omni", "input": "Hi", "modalities": ["text", "audio"], "audio": {"format": format}}
    )
    sound = AudioOutput(np.linspace(-0.5, 0.5, 2400, dtype=np.float32), 24_000)
    final = OmniRequestOutput("req-1", [CompletionOutput(text="Hello")], sound, FinishReason.STOP)
    answer = ResponseWriter("req-1", body).response(final)
    text, spoken = answer["output"][0]["content"]
    assert (answer["id"], answer["status"], text["text"], spoken["transcript"]) == (
        "resp_1",
        "completed",
        "Hello",
        "Hello",
    )
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(spoken["data"])))
    assert (rate, len(samples)) == (24_000, 2400)


def test_a_failure_ends_the_stream_and_says_nothing_of_our_insides() -> None:
    writer = ResponseWriter("req-1", ResponsesRequest(model="lm", input="Hi"))
    final = OmniRequestOutput("req-1", error=InternalError("secret"), finish_reason=FinishReason.ERROR)
    *_, failed = writer.events(OutputChunk("req-1", Modality.TEXT, final=final))
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert "secret" not in json.dumps(failed)


def test_json_is_json(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    answer = client.responses.create(**{**GIVEN, "max_output_tokens": 64}, text=form)
    assert answer.output_text.lstrip().startswith("{")
    if answer.status == "completed":
        assert json.loads(answer.output_text)["n"] in (1, 2)


@pytest.mark.parametrize(
    ("change", "status", "named"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": "draw"}, 400, "model"),
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "nobody", "content": "a"}]}, 400, "input[1].role"),
        ({"instructions": "x", "input": [{"role": "user", "content": ""}]}, 400, "input[0].content"),
        ({"input": [{"type": "computer_call_output", "output": "1"}]}, 400, "input[0].type"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id: there is no response"),
        ({"modalities": ["text", "audio"]}, 400, "modalities"),
        ({"audio": {"voice": "Chelsie"}}, 400, "audio"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format.schema"),
        ({"text": {"format": {"type": "smell"}}}, 400, "text.format.type"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(server: Running, change: dict[str, Any], status: int, named: str, stream: bool) -> None:
    answer = httpx.post(f"{server.url}/v1/responses", json={**GIVEN, **change, "stream": stream})
    assert answer.status_code == status, answer.text
    assert named in answer.json()["error"]["message"]


def test_the_answers_id_names_its_trace(server: Running, client: openai.OpenAI) -> None:
    answer = client.responses.create(**GIVEN)
    trace = httpx.get(f"{server.url}/v1/requests/{answer.id}")
    assert trace.status_code == 200
    assert trace.json()["finished"] is not None
