"""Every row of the table of fields in docs/api.md, by one request."""

from __future__ import annotations

import asyncio
import io
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai.types import audio, chat, completion_create_params, image_generate_params
from openai.types.responses import response_create_params

from omnistage.hf import transformers
from omnistage.omni import AsyncOmni
from omnistage.server.openai.audio.speech import SpeechRequest
from omnistage.server.openai.audio.transcriptions import TranscriptionForm
from omnistage.server.openai.base import WireModel
from omnistage.server.openai.chat.request import ChatRequest
from omnistage.server.openai.completions import CompletionRequest
from omnistage.server.openai.images import ImageRequest
from omnistage.server.openai.responses.request import ResponsesRequest
from tests.parity.adapter_checkpoints import CONFIGS, with_adapters
from tests.server.field_table import BASE, FIELDS, Row
from tests.server.harness import HANG_SECONDS, SERVE_LIMITS, Running, make, serving
from tests.server.starter_harness import service_of, starter
from tools.make_field_table import written

__all__ = ["starter"]  # fixtures

MODELS: dict[str, type[WireModel]] = {
    "chat/completions": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "audio/speech": SpeechRequest,
    "audio/transcriptions": TranscriptionForm,
    "images/generations": ImageRequest,
}
OPENAI: dict[str, Any] = {
    "chat/completions": chat.completion_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
    "responses": response_create_params.ResponseCreateParamsBase,
    "audio/speech": audio.speech_create_params.SpeechCreateParams,
    "audio/transcriptions": audio.transcription_create_params.TranscriptionCreateParamsBase,
    "images/generations": image_generate_params.ImageGenerateParamsBase,
}


@pytest.fixture(scope="module")
def running(starter: AsyncOmni, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = make("causal_lm", tmp_path_factory.mktemp("fields") / "lm")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with_adapters(model, {"french": CONFIGS["attention"]}, folder.with_name("adapters"))
    adapters = {"french": folder.with_name("adapters") / "french"}
    lm = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, adapters=adapters, progress=False)
    service = service_of(starter)
    service.add("lm", lm)
    with serving(service) as server:
        yield server
    asyncio.run(lm.shutdown(drain=False))


def clip() -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(b"\0\x20\0\x10" * 16_000)
    return buffer.getvalue()


def send(running: Running, endpoint: str, body: dict[str, Any]) -> httpx.Response:
    url = f"{running.url}/v1/{endpoint}"
    if endpoint == "audio/transcriptions":
        return httpx.post(url, data=body, files={"file": ("a.wav", clip())}, timeout=HANG_SECONDS)
    return httpx.post(url, json=body, timeout=HANG_SECONDS)


def content(answer: httpx.Response) -> tuple[int, bytes]:
    """A response without what differs from one to the next: ids, times, what was still cached."""
    scrubbed = re.sub(rb'"(created|created_at|completed_at|cached_tokens|expires_at)":[0-9.]+', b"", answer.content)
    return answer.status_code, re.sub(rb"[a-z_]+[_-][0-9a-f]{16,}", b"", scrubbed)


@pytest.mark.parametrize(
    ("endpoint", "name", "row"),
    [pytest.param(e, name, row, id=f"{e}-{name}") for e, rows in FIELDS.items() for name, row in rows.items()],
)
def test_a_field_does_what_the_table_says(running: Running, endpoint: str, name: str, row: Row) -> None:
    key, body = name.partition(".")[0], {**BASE[endpoint], **row.beside}
    answer = send(running, endpoint, {**body, key: row.value} if row.value is not None else body)
    noted = answer.headers.get("x-omnistage-ignored", "").split(", ")
    if row.outcome == "refused":
        assert answer.status_code == 400, answer.text
        param = str(answer.json()["error"]["param"])
        assert param.removesuffix("[]").startswith(name.removesuffix("[]")), answer.text
        return
    assert answer.status_code == 200, answer.text
    assert (name.removesuffix("[]") in noted) == (row.outcome == "ignored"), answer.headers
    if row.outcome == "yes" and row.value is not None:
        without = send(running, endpoint, {field: value for field, value in body.items() if field != key})
        same = content(without) == content(answer)
        assert same == bool(row.unseen), (without.text[:2000], answer.text[:2000])


@pytest.mark.parametrize("endpoint", FIELDS)
def test_the_table_has_every_field(endpoint: str) -> None:
    names = {field.alias or name for name, field in MODELS[endpoint].model_fields.items()}
    listed = {name.partition(".")[0] for name in FIELDS[endpoint]}
    assert names - listed == set()
    lists = {name.removesuffix("[]") for name in listed}
    assert set(OPENAI[endpoint].__annotations__) - lists == set()


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert written(page) == page
