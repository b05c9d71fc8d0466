"""Which requests are sent, and when: equal for equal seeds, whatever the service does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from omnistage.core.errors import InvalidRequestError
from omnistage.core.validation import field_path, first_problem

_WORDS = ("river", "stone", "lamp", "garden", "winter", "paper", "bridge", "morning", "copper", "letter", "window")
_MAX_WEIGHT = 10_000


class Kind(StrEnum):
    """What a request asks for."""

    TEXT = "text"
    """A conversation, text out."""
    SPEECH = "speech"
    """A conversation, text and speech out."""
    TTS = "tts"
    """A text read aloud by `/v1/audio/speech`, as raw samples."""
    IMAGE = "image"

    @property
    def modality(self) -> str:
        """The output modality that a model needs for it."""
        return "audio" if self in (Kind.SPEECH, Kind.TTS) else str(self)


@dataclass(frozen=True, slots=True)
class Range:
    """A whole number from `low` to `high`, both included, sampled uniformly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> Range:
        low, dots, high = text.partition("..")
        try:
            value = cls(int(low), int(high if dots else low))
        except ValueError:
            raise InvalidRequestError(
                f"{text!r} is neither a number nor LOW..HIGH, like 32..256", param=param
            ) from None
        if not 1 <= value.low <= value.high:
            raise InvalidRequestError(f"{text!r} must start at 1 or above and not end below its start", param=param)
        return value

    def sample(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


def parse_mix(text: str) -> dict[Kind, int]:
    """`text=8,speech=1` as weights; a kind alone weighs 1."""
    mix: dict[Kind, int] = {}
    for part in text.split(","):
        name, equals, weight = part.strip().partition("=")
        if name not in list(Kind):
            raise InvalidRequestError(f"{name!r} is not a kind of request; use {', '.join(Kind)}", param="--mix")
        if Kind(name) in mix:
            raise InvalidRequestError(f"{name} is named twice; give it one weight", param="--mix")
        if equals and not (weight.isdecimal() and len(weight) <= 5 and 1 <= int(weight) <= _MAX_WEIGHT):
            raise InvalidRequestError(f"the weight of {name} must be 1 to {_MAX_WEIGHT}, like {name}=2", param="--mix")
        mix[Kind(name)] = int(weight) if equals else 1
    return mix


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send."""

    kind: Kind
    path: str
    body: bytes


class Prompt(BaseModel):
    """A prompt, generated or from a line of `--prompts`: a text, or for text and speech also a conversation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind = Kind.TEXT
    prompt: str | None = Field(default=None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    max_tokens: StrictInt | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        conversation = self.messages is not None and self.kind in (Kind.TEXT, Kind.SPEECH)
        if (self.prompt is None) == (self.messages is None) or not (self.prompt or conversation):
            raise ValueError("needs a prompt (a text); text and speech may have messages (a conversation) instead")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]]:
        return self.messages or [{"role": "user", "content": self.prompt}]


def read_prompts(file: Path, mix: Mapping[Kind, int]) -> dict[Kind, list[Prompt]]:
    """The prompts of a JSON-lines file by kind. Raises for a line without a prompt and for a kind without lines."""
    prompts: dict[Kind, list[Prompt]] = {}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if text.strip():
            prompt = _prompt(text, f"--prompts, line {number}")
            prompts.setdefault(prompt.kind, []).append(prompt)
    for kind in mix:
        if kind not in prompts:
            raise InvalidRequestError(
                f'no line is of kind {kind}; add {{"kind": "{kind}", "prompt": ...}} or remove it from --mix',
                param="--prompts",
            )
    return prompts


def _prompt(text: str, where: str) -> Prompt:
    try:
        return Prompt.model_validate_json(text)
    except ValidationError as error:
        unknown = f"unknown field; known: {', '.join(Prompt.model_fields)}"
        words = {"extra_forbidden": unknown, "json_invalid": "is not JSON; write one object per line"}
        problem = first_problem(error, words=words)
        path = f"{field_path(problem.path)}: " if problem.path else ""
        raise InvalidRequestError(f"{path}{problem.message}", param=where) from error


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests. Each depends on the seed and its number alone."""

    mix: Mapping[Kind, int]
    models: Mapping[Kind, str]
    seed: int = 0
    prompt_tokens: Range = Range(32, 256)
    max_tokens: Range = Range(16, 128)
    ignore_eos: bool = True
    temperature: float | None = None
    """Of text; None: what the service takes where a request says nothing."""
    image_size: str | None = None
    steps: int | None = None
    voice: str | None = None
    prompts: Mapping[Kind, list[Prompt]] = field(default_factory=dict)
    tokens_per_word: float = 1.0
    """Measured on the service, for it depends on the tokenizer."""
    template_tokens: float = 0.0
    """Tokens that the chat template adds to a prompt."""

    def request(self, number: int) -> Request:
        """Request `number`; negative ones are for warming up."""
        return self.of_kind(self.kind(number), number)

    def kind(self, number: int) -> Kind:
        """Kinds come from a shuffled deck, so that a short run has the shares of the mix too."""
        deck = [kind for kind, weight in self.mix.items() for _ in range(weight)]
        random.Random(f"{self.seed}:deck:{number // len(deck)}").shuffle(deck)
        return deck[number % len(deck)]

    def of_kind(self, kind: Kind, number: int) -> Request:
        rng = random.Random(f"{self.seed}:request:{number}")
        words = max(1, round((self.prompt_tokens.sample(rng) - self.template_tokens) / self.tokens_per_word))
        text, max_tokens = " ".join(rng.choices(_WORDS, k=words)), self.max_tokens.sample(rng)
        prompt = Prompt(kind=kind, prompt=text)
        if prompts := self.prompts.get(kind):
            prompt = prompts[number % len(prompts)]
        fields = self._fields(kind, prompt, prompt.max_tokens or max_tokens, rng.getrandbits(31))
        body = {"model": self.models[kind], **fields}
        return Request(kind, _PATHS[kind], json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())

    def probe(self, kind: Kind, words: int) -> Request:
        """A request of one token with a prompt of a known number of words: its usage has their count in tokens."""
        messages = [{"role": "user", "content": " ".join((_WORDS * (words // len(_WORDS) + 1))[:words])}]
        body = {"model": self.models[kind], "messages": messages, "modalities": ["text"], "max_tokens": 1, **_STREAM}
        return Request(Kind.TEXT, _PATHS[Kind.TEXT], json.dumps(body).encode())

    def _fields(self, kind: Kind, prompt: Prompt, max_tokens: int, seed: int) -> dict[str, Any]:
        if kind is Kind.IMAGE:
            params = {"size": self.image_size, "steps": self.steps, "seed": seed}
            params = {name: value for name, value in params.items() if value is not None}
            return {"prompt": prompt.prompt, "stream": True, **params}
        if kind is Kind.TTS:
            voice = {"voice": self.voice} if self.voice is not None else {}
            return {"input": prompt.prompt, "response_format": "pcm", **voice}
        fields: dict[str, Any] = {"messages": prompt.conversation, "max_tokens": max_tokens, "seed": seed, **_STREAM}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if kind is Kind.SPEECH:
            fields["modalities"] = ["text", "audio"]
            fields["audio"] = {"format": "pcm16", **({"voice": self.voice} if self.voice is not None else {})}
        return fields


_STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_PATHS = {
    Kind.TEXT: "/v1/chat/completions",
    Kind.SPEECH: "/v1/chat/completions",
    Kind.TTS: "/v1/audio/speech",
    Kind.IMAGE: "/v1/images/generations",
}


def arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests are sent, `rate` per second on average: a Poisson process."""
    rng, moment = random.Random(f"{seed}:arrivals"), 0.0
    while True:
        moment += rng.expovariate(rate)
        yield moment
