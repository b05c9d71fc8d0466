"""Expectations of models' lists, tokens, responses, speech, transcriptions and pictures."""

from __future__ import annotations

import base64
import struct
from typing import Any

from .expectation import Answer, Expectation, clip
from .expected_chat import ALL, MODEL, SAY, SCHEMA, TOOL, refused, sent, status


def get(source: str, says: str, path: str, holds: Any, method: str = "GET", **headers: str) -> None:
    ALL.append(Expectation(source, says, path, None, holds, method, headers))


def post(source: str, says: str, path: str, holds: Any, **body: Any) -> None:
    ALL.append(Expectation(source, says, path, sent(body), holds))


def form(source: str, says: str, holds: Any, path: str = "/v1/audio/transcriptions", **fields: Any) -> None:
    parts = {"model": MODEL, "file": clip()} | fields
    body = b""
    for name, value in parts.items():
        if value is ...:
            continue
        head = f'--XX\r\nContent-Disposition: form-data; name="{name}"'
        if isinstance(value, bytes):
            head += '; filename="a.wav"\r\nContent-Type: audio/wav'
        body += head.encode() + b"\r\n\r\n" + (value if isinstance(value, bytes) else str(value).encode()) + b"\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=XX"}
    ALL.append(Expectation(source, says, path, body + b"--XX--\r\n", holds, headers=headers))


def png(answer: Answer, place: int = 0) -> tuple[int, int]:
    data = base64.b64decode(answer.data["data"][place]["b64_json"])
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def output(answer: Answer) -> str:
    return "".join(p["text"] for item in answer.data["output"] if item["type"] == "message" for p in item["content"])


def kinds(answer: Answer) -> list[str]:
    return [event["type"] for event in answer.events]


def _basic() -> None:
    b = "vllm test_basic"
    get(b, "health", "/health", status(200))
    get(b, "version", "/version", lambda a: a.data["version"])
    get(b, "metrics", "/metrics", lambda a: b"_total" in a.raw)
    get(b, "ping", "/ping", status(200))
    get(b, "an OpenAPI document", "/openapi.json", lambda a: "/v1/chat/completions" in a.data["paths"])
    get(b, "server_load", "/load", status(200))
    get(b, "an unknown path is 404, as JSON", "/v1/nothing", lambda a: a.status == 404 and a.error["message"])
    get(b, "another method is 405", "/v1/chat/completions", status(405))
    post(
        b,
        "X-Request-Id comes back",
        "/v1/chat/completions",
        lambda a: a.headers["x-request-id"],
        model=MODEL,
        messages=SAY,
        max_tokens=1,
    )
    ALL.append(
        Expectation(
            b,
            "the client's X-Request-Id comes back",
            "/v1/chat/completions",
            {"model": MODEL, "messages": SAY, "max_tokens": 1},
            lambda a: a.headers["x-request-id"] == "mine-1",
            headers={"X-Request-Id": "mine-1"},
        )
    )
    ALL.append(Expectation(b, "JSON that is none is 400", "/v1/chat/completions", b'{"model": ', status(400)))
    ALL.append(Expectation(b, "a body that is a list is 400", "/v1/chat/completions", b"[1]", status(400)))
    ALL.append(
        Expectation(
            b,
            "another content type is refused",
            "/v1/chat/completions",
            b"a=b",
            lambda a: a.status in (400, 415),
            headers={"Content-Type": "text/plain"},
        )
    )
    m = "vllm test_models"
    get(m, "the list", "/v1/models", lambda a: a.data["object"] == "list" and a.data["data"][0]["id"] == MODEL)
    get(
        m,
        "object, owner, time",
        "/v1/models",
        lambda a: (
            a.data["data"][0]["object"] == "model" and a.data["data"][0]["created"] and a.data["data"][0]["owned_by"]
        ),
    )
    get(m, "max_model_len", "/v1/models", lambda a: a.data["data"][0]["max_model_len"] > 0)
    get("sglang test_openai_server", "one model", f"/v1/models/{MODEL}", lambda a: a.data["id"] == MODEL)
    get(
        "sglang test_openai_server",
        "one that is not there",
        "/v1/models/nobody",
        lambda a: a.status == 404 and a.error["code"] == "model_not_found",
    )
    get("sglang test_srt_endpoint", "health_generate", "/health_generate", status(200))
    get("sglang test_srt_endpoint", "model info", "/get_model_info", status(200))
    t = "vllm test_tokenization"
    post(
        t,
        "a text",
        "/tokenize",
        lambda a: a.data["count"] == len(a.data["tokens"]) and a.data["max_model_len"],
        model=MODEL,
        prompt="Hello there",
    )
    post(t, "a chat", "/tokenize", lambda a: a.data["count"] > 5, model=MODEL, messages=SAY)
    post(t, "a chat with tools", "/tokenize", lambda a: a.data["count"] > 20, model=MODEL, messages=SAY, tools=[TOOL])
    post(
        t,
        "add_generation_prompt",
        "/tokenize",
        lambda a: a.data["count"] > 5,
        model=MODEL,
        messages=SAY,
        add_generation_prompt=False,
    )
    post(
        t,
        "continue_final_message",
        "/tokenize",
        lambda a: a.data["count"] > 5,
        model=MODEL,
        messages=[*SAY, {"role": "assistant", "content": "Hello"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    post(
        t,
        "both exclude each other",
        "/tokenize",
        refused,
        model=MODEL,
        messages=SAY,
        add_generation_prompt=True,
        continue_final_message=True,
    )
    post(
        t,
        "return_token_strs",
        "/tokenize",
        lambda a: len(a.data["token_strs"]) == a.data["count"],
        model=MODEL,
        prompt="Hello there",
        return_token_strs=True,
    )
    post(t, "add_special_tokens", "/tokenize", status(200), model=MODEL, prompt="Hello", add_special_tokens=False)
    post(t, "back again", "/detokenize", lambda a: isinstance(a.data["prompt"], str), model=MODEL, tokens=[28, 29])
    post(t, "tokens outside of the vocabulary", "/detokenize", refused, model=MODEL, tokens=[9_999_999])
    post(t, "an unknown model", "/tokenize", status(404), model="nobody", prompt="x")
    get(t, "tokenizer_info", "/tokenizer_info", status(200))


def _responses() -> None:
    r, path = "vllm test_response_api", "/v1/responses"
    asked: dict[str, Any] = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 16, "temperature": 0}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    form = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}}
    tool = {"type": "function", **TOOL["function"]}
    post(r, "a text", path, lambda a: output(a) and a.data["object"] == "response", **asked)
    post(
        r,
        "status: the length ends it",
        path,
        lambda a: a.data["status"] == "incomplete" and a.data["incomplete_details"]["reason"] == "max_output_tokens",
        **asked | {"max_output_tokens": 2},
    )
    post(
        r,
        "usage",
        path,
        lambda a: a.data["usage"]["total_tokens"] == a.data["usage"]["input_tokens"] + a.data["usage"]["output_tokens"],
        **asked,
    )
    post(
        r,
        "instructions",
        path,
        lambda a: output(a) and a.data["instructions"] == "Be brief.",
        instructions="Be brief.",
        **asked,
    )
    post(r, "a conversation as input", path, output, **asked | {"input": turns})
    post(
        r,
        "parts as input",
        path,
        output,
        **asked | {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
    )
    post(
        r,
        "a stream of events in order",
        path,
        lambda a: (
            kinds(a)[0] == "response.created"
            and kinds(a)[-1] in ("response.completed", "response.incomplete")
            and [e["sequence_number"] for e in a.events] == list(range(len(a.events)))
        ),
        stream=True,
        **asked,
    )
    post(
        r,
        "deltas of text",
        path,
        lambda a: "response.output_text.delta" in kinds(a) and "response.output_text.done" in kinds(a),
        stream=True,
        **asked,
    )
    post(
        r,
        "log probabilities",
        path,
        lambda a: a.data["output"][-1]["content"][0]["logprobs"],
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        **asked,
    )
    post(r, "a JSON schema", path, lambda a: "name" in output(a), text=form, **asked | {"max_output_tokens": 80})
    post(
        r,
        "a function is called",
        path,
        lambda a: a.data["output"][-1]["type"] == "function_call",
        tools=[tool],
        tool_choice="required",
        **asked | {"max_output_tokens": 80},
    )
    post(
        r,
        "a function's result",
        path,
        output,
        tools=[tool],
        **asked
        | {
            "input": [
                {"role": "user", "content": "Rain?"},
                {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "Rain."},
            ]
        },
    )
    post(
        r,
        "reasoning as input",
        path,
        output,
        **asked
        | {
            "input": [
                turns[0],
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
                turns[1],
                turns[2],
            ]
        },
    )
    post(
        r,
        "a previous response that is not there",
        path,
        lambda a: a.status in (400, 404) and a.error["message"],
        previous_response_id="resp_nothing",
        **asked,
    )
    post(r, "in the background", path, status(200), background=True, **asked)
    post(r, "no input", path, refused, model=MODEL)
    post(r, "top_k and seed", path, status(200), top_k=5, seed=1, **asked)
    post(r, "truncation auto", path, status(200), truncation="auto", **asked)
    post(r, "metadata comes back", path, lambda a: a.data["metadata"] == {"a": "b"}, metadata={"a": "b"}, **asked)
    post(r, "store false", path, lambda a: a.data["store"] is False, store=False, **asked)
    post(
        r,
        "tokens of the input",
        path + "/input_tokens",
        lambda a: a.data["input_tokens"] > 2,
        model=MODEL,
        input="Say hello.",
    )
    get(r, "one that is not stored", path + "/resp_nothing", status(404))
    get(r, "cancel one that is not there", path + "/resp_nothing/cancel", status(404), "POST")


def _audio() -> None:
    s, path = "vllm-omni test_openai_speech", "/v1/audio/speech"
    asked: dict[str, Any] = {"model": MODEL, "input": "Hello there.", "voice": "alloy"}
    for kind, start in {
        "wav": b"RIFF",
        "mp3": b"",
        "flac": b"fLaC",
        "opus": b"OggS",
        "pcm": b"",
        "aac": b"\xff",
    }.items():
        post(
            s,
            f"speech as {kind}",
            path,
            lambda a, start=start: a.status == 200 and a.raw.startswith(start) and len(a.raw) > 1000,
            response_format=kind,
            **asked,
        )
    post(s, "an unknown format", path, refused, response_format="ogg9", **asked)
    post(s, "an unknown voice", path, refused, **asked | {"voice": "nobody"})
    post(s, "an empty input", path, refused, **asked | {"input": ""})
    post(s, "speed", path, status(200), speed=1.5, **asked)
    post(s, "a speed out of bounds", path, refused, speed=9, **asked)
    post(s, "streamed", path, lambda a: a.events, stream_format="sse", **asked)
    post(s, "instructions", path, status(200), instructions="Be glad.", **asked)
    post(s, "no voice: the model's own", path, status(200), model=MODEL, input="Hello there.")
    get(s, "a list of voices", "/v1/audio/voices", status(200))
    t = "vllm test_transcription_validation"
    form(t, "a transcription", lambda a: isinstance(a.data["text"], str))
    form(t, "usage of whole seconds", lambda a: a.data["usage"] == {"type": "duration", "seconds": 1})
    form(t, "as text", status(200), response_format="text")
    form(t, "verbose_json", status(200), response_format="verbose_json")
    form(t, "an unknown language", refused, language="xx-nothing")
    form(t, "a language", status(200), language="en")
    form(t, "an unknown model", status(404), model="nobody")
    form(t, "no file", refused, file=...)
    form(t, "a file that is no audio", refused, file=b"nothing of the kind")
    form(t, "a stream", lambda a: a.events, stream="true")
    form(t, "a stream with usage", lambda a: a.events, stream="true", stream_include_usage="true")
    form(t, "a prompt", status(200), prompt="names: Ann")
    form(t, "temperature", status(200), temperature="0.0")
    form(t, "a seed", status(200), seed="1")
    form(t, "timestamps of words", status(200), response_format="verbose_json", **{"timestamp_granularities[]": "word"})
    form("vllm test_translation_validation", "a translation", status(200), "/v1/audio/translations")


def _pictures() -> None:
    p, path = "vllm-omni test_image_server", "/v1/images/generations"
    asked: dict[str, Any] = {"model": MODEL, "prompt": "a red fox"}
    post(p, "a picture", path, lambda a: png(a) and a.data["created"], **asked)
    post(p, "two pictures", path, lambda a: png(a, 1), n=2, **asked)
    post(
        p,
        "size 1024x1024, or the nearest that is said",
        path,
        lambda a: a.data["size"] == "{}x{}".format(*png(a)),
        size="1024x1024",
        **asked,
    )
    post(p, "size auto", path, png, size="auto", **asked)
    post(p, "a size that is none", path, refused, size="large", **asked)
    post(p, "a size of nothing", path, refused, size="0x0", **asked)
    post(p, "no picture", path, refused, n=0, **asked)
    post(p, "eleven pictures", path, refused, n=11, **asked)
    post(p, "num_inference_steps", path, png, num_inference_steps=4, **asked)
    post(p, "guidance_scale", path, png, guidance_scale=2.0, **asked)
    post(
        p,
        "true_cfg_scale where the model has none",
        path,
        lambda a: a.status in (200, 400),
        true_cfg_scale=2.0,
        **asked,
    )
    post(p, "a seed gives the same", path, png, seed=3, **asked)
    post(p, "an empty prompt", path, refused, **asked | {"prompt": ""})
    post(p, "no prompt", path, refused, model=MODEL)
    post(p, "b64_json", path, png, response_format="b64_json", **asked)
    post(p, "an unknown response_format", path, refused, response_format="gif", **asked)
    post(
        p,
        "webp",
        path,
        lambda a: base64.b64decode(a.data["data"][0]["b64_json"])[8:12] == b"WEBP",
        output_format="webp",
        **asked,
    )
    post(p, "an unknown model", path, status(404), **asked | {"model": "nobody"})
    c = "vllm-omni test_qwen3_omni"
    said: dict[str, Any] = {"model": MODEL, "messages": SAY, "max_tokens": 12}
    chats = "/v1/chat/completions"
    post(c, "text alone", chats, lambda a: a.message.get("audio") is None, modalities=["text"], **said)
    post(
        c,
        "text and speech",
        chats,
        lambda a: base64.b64decode(a.message["audio"]["data"])[:4] == b"RIFF",
        modalities=["text", "audio"],
        audio={"format": "wav", "voice": "alloy"},
        **said,
    )
    post(
        c,
        "speech, streamed",
        chats,
        lambda a: any(x["delta"].get("audio", {}).get("data") for e in a.events for x in e["choices"]),
        stream=True,
        modalities=["text", "audio"],
        audio={"format": "pcm16", "voice": "alloy"},
        **said,
    )
    post(c, "an unknown modality", chats, refused, modalities=["smell"], **said)
    heard = {"type": "input_audio", "input_audio": {"data": base64.b64encode(clip()).decode(), "format": "wav"}}
    post(
        c,
        "speech as input",
        chats,
        lambda a: a.status in (200, 400),
        **said | {"messages": [{"role": "user", "content": [heard]}]},
    )
    post(
        c,
        "speech that is none",
        chats,
        refused,
        **said
        | {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}
            ]
        },
    )


for part in (_basic, _responses, _audio, _pictures):
    part()
