"""Qwen3-Omni checkpoints without a talker behind the service: a Captioner and a Thinking one, with OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile

from omnistage.core.clips import AudioClip
from omnistage.core.messages import AudioPart, ChatMessage
from omnistage.models.qwen3_omni_moe.reference import Reference
from omnistage.omni import AsyncOmni
from tests.server.harness import SERVE_LIMITS, make

VARIANTS = ("captioner", "thinking")
TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    return {variant: make("qwen3_omni_moe", root / variant, variant=variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> Iterator[dict[str, AsyncOmni]]:
    limits = tuple(each for each in SERVE_LIMITS if each.startswith("thinker."))
    models = {
        variant: AsyncOmni(folder, device="cpu", dtype="float32", overrides=limits, progress=False)
        for variant, folder in folders.items()
    }
    yield models
    for model in models.values():
        asyncio.run(model.shutdown(drain=False))


def recording(seconds: float) -> tuple[np.ndarray, list[Any]]:
    """Samples, and a message with them alone, as the model card of the Captioner has it."""
    noise = np.random.default_rng(3).integers(-9000, 9000, int(16_000 * seconds), dtype=np.int16)
    file = io.BytesIO()
    soundfile.write(file, noise, 16_000, format="WAV")
    audio = {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}
    content = [{"type": "input_audio", "input_audio": audio}]
    return (noise / 32768).astype(np.float32), [{"role": "user", "content": content}]


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    options = {"model": "captioner", "temperature": 0, "max_completion_tokens": TOKENS, **options}
    return client.chat.completions.create(messages=messages, **options)


@pytest.mark.parametrize("seconds", [0.8, 9.5], ids=["one window of the encoder", "two windows"])
def test_a_recording_is_captioned_as_by_the_reference(
    client: openai.OpenAI, folders: dict[str, Path], seconds: float
) -> None:
    samples, messages = recording(seconds)
    reference = Reference(folders["captioner"])
    chat = [ChatMessage("user", (AudioPart(AudioClip(samples, 16_000)),))]
    expected = reference.run(chat, max_tokens=TOKENS).token_ids
    answer = ask(client, messages)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.choices[0].message.content == reference.processor.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.choices[0].message.audio is None
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(client, messages, stream=True) if chunk.choices]
    assert "".join(pieces) == answer.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1


def test_another_recording_has_another_caption(client: openai.OpenAI) -> None:
    captions = {ask(client, recording(seconds)[1]).choices[0].message.content for seconds in (0.8, 2.0, 9.5)}
    assert len(captions) == 3


@pytest.mark.parametrize("model", VARIANTS)
def test_speech_is_refused_by_name(client: openai.OpenAI, model: str) -> None:
    speech = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "wav"}}
    with pytest.raises(openai.BadRequestError, match="this model has no output 'audio'; its outputs: text") as refused:
        ask(client, recording(0.8)[1], model=model, **speech)
    assert refused.value.param == "modalities"
    with pytest.raises(openai.BadRequestError, match="audio"):
        client.audio.speech.create(model=model, voice="Ethan", input="Hello")
    listed = client.models.retrieve(model).model_dump()
    assert "audio" not in listed.get("output_modalities", [])
    assert not listed.get("voices")


def test_a_thinking_checkpoint_answers_in_text_about_a_recording(client: openai.OpenAI) -> None:
    """Its answer begins inside a think block, of which a random model may find no end."""
    message = ask(client, recording(0.8)[1], model="thinking").choices[0].message
    assert message.reasoning_content or message.content
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    message = ask(client, recording(0.8)[1], model="thinking", extra_body=plain).choices[0].message
    assert message.content
    assert not getattr(message, "reasoning_content", None)
