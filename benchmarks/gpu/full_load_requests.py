"""The requests of `full_load.py`: text of all lengths, pictures and sound, answered in text or speech."""

from __future__ import annotations

import base64
import io
import json
import random
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from omnistage.models._tiny_common import TRAINING_TEXT

# Of each ten requests. The longest ones take the place of a long one every now and then.
KINDS = ("text", "long text", "text", "picture", "text", "speech", "text", "sound", "long text", "picture to speech")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    kind: str
    body: bytes
    streamed: bool


class RandomText:
    """Words in random order, by their number of tokens."""

    def __init__(self, tokenizer: Path, rng: random.Random) -> None:
        self._words, self._rng = TRAINING_TEXT.split(), rng
        sample = " ".join(rng.choices(self._words, k=2000))
        self._tokens_per_word = len(Tokenizer.from_file(str(tokenizer)).encode(sample).ids) / 2000

    def __call__(self, tokens: int) -> str:
        return " ".join(self._rng.choices(self._words, k=max(1, int(tokens / self._tokens_per_word))))


def picture(rng: random.Random) -> dict[str, Any]:
    """A colour gradient, so that its file is small; no two are alike."""
    width, height = rng.randint(100, 1000), rng.randint(100, 1000)
    across, down = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    red, blue = np.broadcast_to(across, (height, width)), np.broadcast_to(down, (height, width))
    pixels = np.stack([red, np.full((height, width), rng.uniform(0, 255)), blue], axis=-1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def sound(rng: random.Random) -> dict[str, Any]:
    """Up to 20 seconds of noise."""
    samples = np.random.default_rng(rng.randrange(2**32)).normal(0, 3000, int(16000 * rng.uniform(0.5, 20)))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(samples.astype("<i2").tobytes())
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file.getvalue()).decode(), "format": "wav"}}


def kind_of(number: int) -> str:
    if number % 100 == 11:
        return "text longer than the model"
    if number % 50 == 31:
        return "longest text"
    return KINDS[number % len(KINDS)]


def build_request(number: int, rng: random.Random, text: RandomText, *, context: int, longest: int) -> LoadRequest:
    kind, answer = kind_of(number), rng.randint(8, 96)
    room = 300  # for the chat template, the answer, and words that have more tokens than others
    lengths = {
        "long text": min(context, longest) - room,
        "longest text": longest * 49 // 50 - room,
        "text longer than the model": longest * 5 // 4,
    }
    if kind == "long text":
        length = rng.randint(lengths[kind] // 4, lengths[kind])
    else:
        length = lengths.get(kind) or rng.randint(8, min(512, context // 2))
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{number}: {text(length)}"}]
    if "picture" in kind:
        content += [picture(rng) for _ in range(rng.randint(1, 2))]
    if "sound" in kind:
        content.append(sound(rng))
    streamed = "speech" in kind or rng.random() < 0.5
    body: dict[str, Any] = {
        "model": "omni",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": answer,
        "ignore_eos": True,
        "seed": number,
        "temperature": rng.choice((0.0, 1.0)),
        "stream": streamed,
        "modalities": ["text", "audio"] if "speech" in kind else ["text"],
    }
    if "speech" in kind:
        body["audio"] = {"format": "pcm16"}
    return LoadRequest(kind, json.dumps(body).encode(), streamed)


def build_requests(count: int, tokenizer: Path, *, context: int, longest: int) -> list[LoadRequest]:
    """The same ones each time."""
    rng = random.Random(0)
    text = RandomText(tokenizer, rng)
    return [build_request(number, rng, text, context=context, longest=longest) for number in range(count)]
