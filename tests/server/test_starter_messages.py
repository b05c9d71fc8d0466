"""What the starter's doors say when they refuse: the field as the client sent it, and what to change."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
from typing import Any

import openai
import pytest
from PIL import Image
from starlette.datastructures import UploadFile

from omnistage.core.errors import QueueFullError, ShutdownError
from omnistage.core.types import Modality
from omnistage.omni import AsyncOmni
from omnistage.server.http.executor import Workers
from tests.hang_guard import HANG_SECONDS
from tests.server.harness import awaited
from tests.server.starter_harness import HELLO, SHORT, server, starter

__all__ = ["server", "starter"]  # fixtures

DRAWN: dict[str, Any] = {"modalities": ["text", "image"]}


def png() -> bytes:
    encoded = io.BytesIO()
    Image.new("RGB", (96, 96)).save(encoded, "PNG")
    return encoded.getvalue()


# -------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("image_input", [False, True])
def test_an_edit_is_refused_before_the_image_is_read(
    client: openai.OpenAI, starter: AsyncOmni, monkeypatch: pytest.MonkeyPatch, image_input: bool
) -> None:
    async def read(file: UploadFile, size: int = -1) -> bytes:
        pytest.fail("it is read")

    monkeypatch.setattr(UploadFile, "read", read)
    if image_input:
        monkeypatch.setattr(starter.processor, "input_modalities", frozenset({Modality.TEXT, Modality.IMAGE}))
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(model="starter", prompt="At night.", image=("a.png", png()))
    assert (refused.value.param, refused.value.code) == ("image", "unsupported_modality")
    assert "this model does not edit images; use one that does" in refused.value.message


def test_an_unsupported_size_is_refused_under_its_own_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="starter", prompt="A red fox.", size="1024x1024", extra_body={"strict_size": True})
    assert refused.value.param == "size"
    assert "generates 96x96 images, got a width of 1024; ask for 96x96" in refused.value.message


@pytest.mark.parametrize("size", ["96", "96x", "x96", "96 x 96", "96X96", "5x5", "96x96\n", "large", ""])
def test_an_invalid_size_is_refused(client: openai.OpenAI, size: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.generate(model="starter", prompt="A red fox.", size=size)
    assert refused.value.param == "size"
    assert "must be WIDTHxHEIGHT in pixels" in refused.value.message
    assert f"got {size!r}" in refused.value.message
    assert "\\d" not in refused.value.message


# ------------------------------------------------------------------------------------------------------------ chat


@pytest.mark.parametrize(
    "drawing",
    [
        {"width": 1024},
        {"height": 1024},
        {"scheduler": "NoSuchScheduler"},
        {"negative_prompt": "fog"},
        {"strength": 0.5},
        {"true_cfg": 2.0},
        {"num_frames": 8},
        {"steps": 0},
    ],
    ids=lambda drawing: next(iter(drawing)),
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_image_field_is_named_where_it_was_sent(
    client: openai.OpenAI, drawing: dict[str, Any], stream: bool
) -> None:
    with pytest.raises(openai.APIError) as refused:
        list(
            client.chat.completions.create(
                **SHORT, messages=HELLO, stream=stream, extra_body={**DRAWN, "drawing": drawing}
            )
        )
    assert refused.value.param == f"drawing.{next(iter(drawing))}"


def test_a_field_of_the_request_itself_keeps_its_name(client: openai.OpenAI) -> None:
    both = {**DRAWN, "drawing": {"n": 2}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**SHORT, n=2, messages=HELLO, extra_body=both)
    assert refused.value.param == "n"


# ---------------------------------------------------------------------------------------------------------- speech


@pytest.mark.parametrize(
    "text",
    ["你好\uff0c世界", "😀", " ", "...", "```python\nprint('Hello')\n```"],
    ids=["han", "emoji", "blank", "dots", "code"],
)
@pytest.mark.parametrize("stream_format", ["audio", "sse"])
def test_a_text_without_speakable_words_is_refused(client: openai.OpenAI, text: str, stream_format: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.speech.create(model="starter", input=text, voice="heart", stream_format=stream_format)
    assert refused.value.param == "input"
    told = refused.value.message
    assert "speaks English words (Latin letters and digits) and leaves out code, pictures and other scripts" in told


# -------------------------------------------------------------------------------------------------- transcriptions


@awaited
async def test_a_full_queue_says_what_is_in_it() -> None:
    workers, go = Workers(1, 2, "test"), threading.Event()

    async def run(work: Any) -> Any:
        with contextlib.ExitStack() as held:
            return await workers.run(work, workers.reserve(held), held)

    taken = [asyncio.ensure_future(run(lambda over: go.wait(HANG_SECONDS))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="2 clips are queued already"):
        await run(lambda over: None)
    go.set()
    assert all(await asyncio.gather(*taken))
    await workers.close(0)


@awaited
async def test_a_stop_waits_for_clips_that_are_still_decoded() -> None:
    workers = Workers(1, 2, "test")
    with contextlib.ExitStack() as held:
        place = workers.reserve(held)
        closing = asyncio.ensure_future(workers.close(30))
        await asyncio.sleep(0)
        with pytest.raises(ShutdownError):
            workers.reserve(contextlib.ExitStack())
        assert await workers.run(lambda over: 1, place, held) == 1
    await closing
    with contextlib.ExitStack() as held, pytest.raises(ShutdownError):
        await workers.run(lambda over: 1, place, held)
