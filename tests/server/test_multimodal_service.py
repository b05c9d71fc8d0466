"""Pictures, sounds and videos of OpenAI's own client, to four multimodal LMs that have no code of their own here."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

from omnistage.omni import AsyncOmni
from tests.server.harness import SERVE_LIMITS, data_url, make
from tests.small_multimodal import write


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, AsyncOmni]]:
    place = tmp_path_factory.mktemp("served")
    made = {}
    for variant in ("qwen2_5_vl", "llava", "qwen2_audio"):
        folder = make("multimodal_lm", place / variant, variant=variant)
        made[variant] = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, progress=False)
    # Its pictures attend both ways, so that transformers' own forward and cache serve it.
    (place / "gemma3").mkdir()
    folder = write("gemma3", place / "gemma3")
    made["gemma3"] = AsyncOmni(folder, device="cpu", dtype="float32", overrides=SERVE_LIMITS, progress=False)
    yield made
    for omni in made.values():
        asyncio.run(omni.shutdown(drain=False))


def sound(count: int = 8_000) -> dict[str, Any]:
    data = io.BytesIO()
    samples = 0.1 * np.random.default_rng(0).standard_normal(count)
    soundfile.write(data, samples, 16_000, format="WAV")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data.getvalue()).decode(), "format": "wav"}}


def recording(samples: Any, rate: int) -> dict[str, Any]:
    data = io.BytesIO()
    soundfile.write(data, samples, rate, format="WAV", subtype="FLOAT")
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data.getvalue()).decode(), "format": "wav"}}


def encoded(image: Image.Image, cut: int | None = None) -> dict[str, Any]:
    data = io.BytesIO()
    image.save(data, "TIFF" if image.mode == "CMYK" else "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()[:cut]).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def video() -> dict[str, Any]:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(8):
            pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    url = f"data:video/mp4;base64,{base64.b64encode(data.getvalue()).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


def picture(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(seed)}}


def ask(client: openai.OpenAI, model: str, *parts: dict[str, Any], **options: Any) -> Any:
    content: Any = [*parts, {"type": "text", "text": "What is it?"}]
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0, **options
    )


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("llava", [picture(0)]),
        ("llava", [picture(0), picture(1)]),
        ("gemma3", [picture(0), picture(1)]),
        ("qwen2_5_vl", [picture(0), video()]),
        ("qwen2_audio", [sound(), sound()]),
    ],
)
def test_media_of_the_official_client_are_answered(
    client: openai.OpenAI, model: str, parts: list[dict[str, Any]]
) -> None:
    text, answer = ask(client, model), ask(client, model, *parts)
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("length", "stop")
    assert answer.usage.prompt_tokens > text.usage.prompt_tokens + 4 * len(parts)
    assert answer.choices[0].message.content != text.choices[0].message.content


def test_pictures_and_texts_at_once_get_the_answers_that_each_gets_alone(client: openai.OpenAI) -> None:
    def sampled(parts: list[dict[str, Any]]) -> list[float]:
        answer = ask(client, "gemma3", *parts, logprobs=True)
        return [round(token.logprob, 3) for token in answer.choices[0].logprobs.content]

    requests = [[picture(0)], [], [picture(1)], [picture(0), picture(1)], []]
    alone = [sampled(parts) for parts in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(sampled, requests)) == alone
    assert len({tuple(each) for each in alone}) == 4


@pytest.mark.parametrize(("model", "part"), [("llava", sound()), ("gemma3", video()), ("qwen2_audio", picture(0))])
def test_media_that_a_model_does_not_take_are_refused(client: openai.OpenAI, model: str, part: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="does not take"):
        ask(client, model, part)


def logprobs(client: openai.OpenAI, model: str, *parts: dict[str, Any]) -> list[float]:
    answer = ask(client, model, *parts, logprobs=True)
    return [round(token.logprob, 3) for token in answer.choices[0].logprobs.content]


GREY = np.random.default_rng(5).integers(0, 2, (40, 60), dtype=np.uint8) * np.uint8(255)
UNUSUAL = {
    "one bit": Image.fromarray(GREY).convert("1"),
    "grey": Image.fromarray(GREY),
    "sixteen bits": Image.fromarray(GREY.astype(np.uint16) * 257),
    "palette": Image.fromarray(GREY).convert("P"),
    "alpha": Image.fromarray(GREY).convert("RGBA"),
    "CMYK": Image.fromarray(GREY).convert("RGB").convert("CMYK"),
}


@pytest.mark.parametrize("mode", UNUSUAL)
def test_a_picture_is_answered_alike_however_its_pixels_are_stored(client: openai.OpenAI, mode: str) -> None:
    plain = logprobs(client, "qwen2_5_vl", encoded(Image.fromarray(GREY).convert("RGB")))
    assert logprobs(client, "qwen2_5_vl", encoded(UNUSUAL[mode])) == plain
    assert logprobs(client, "qwen2_5_vl", encoded(Image.fromarray(255 - GREY))) != plain


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 2), (1, 150), (150, 1), (27, 29), (2000, 1500)])
def test_pictures_of_odd_sizes_are_answered(client: openai.OpenAI, width: int, height: int) -> None:
    for model in ("qwen2_5_vl", "llava"):
        assert ask(client, model, encoded(Image.new("RGB", (width, height), (9, 80, 200)))).usage.completion_tokens > 0


def test_a_clip_of_eight_kilohertz_in_stereo_is_mixed_and_resampled(client: openai.OpenAI) -> None:
    tone = (0.2 * np.sin(np.arange(8_000) * 0.2)).astype(np.float32)
    both = logprobs(client, "qwen2_audio", recording(np.stack((tone, tone), axis=1), 8_000))
    assert both == logprobs(client, "qwen2_audio", recording(tone, 8_000))
    quiet = recording(np.stack((tone, -tone), axis=1), 8_000)
    assert both != logprobs(client, "qwen2_audio", quiet)


@pytest.mark.parametrize(
    ("model", "parts", "reason"),
    [
        ("qwen2_5_vl", [encoded(Image.new("RGB", (1, 4000)))], "aspect ratio"),
        ("qwen2_5_vl", [picture(0), encoded(Image.new("RGB", (60, 40)), cut=60)], r"content\[1\].*does not decode"),
        ("llava", [picture(0)] * 65, "over the limit of 64"),
        ("qwen2_audio", [recording(np.zeros(0, np.float32), 16_000)], "no samples"),
        ("qwen2_audio", [recording(np.full(16_000, np.nan, np.float32), 16_000)], "NaN or infinite"),
    ],
)
def test_media_that_cannot_be_used_end_their_request_alone(
    client: openai.OpenAI, model: str, parts: list[dict[str, Any]], reason: str
) -> None:
    good = sound() if model == "qwen2_audio" else picture(1)
    alone = logprobs(client, model, good)

    def refused(parts: list[dict[str, Any]]) -> None:
        with pytest.raises(openai.APIStatusError, match=reason) as caught:
            ask(client, model, *parts)
        assert caught.value.status_code in (400, 413)

    with ThreadPoolExecutor(4) as pool:
        wrong = [pool.submit(refused, parts) for _ in range(2)]
        right = [pool.submit(logprobs, client, model, good) for _ in range(2)]
        for each in wrong:
            each.result()
        assert [each.result() for each in right] == [alone, alone]


@pytest.mark.parametrize("count", [1, 100, 400])
def test_a_clip_too_short_for_a_token_is_refused(client: openai.OpenAI, count: int) -> None:
    with pytest.raises(openai.BadRequestError, match=r"at least 0\.03 s"):
        ask(client, "qwen2_audio", sound(count))
