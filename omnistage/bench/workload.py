"""Which requests are sent, and when: the same for the same seed, whatever the service makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from omnistage.core.errors import InvalidRequestError

_WORDS = ("river", "stone", "lamp", "garden", "winter", "paper", "bridge", "morning", "copper", "letter", "window")
_MOST_WEIGHT = 10_000


class Kind(StrEnum):
    """What is asked for."""

    TEXT = "text"
    """A conversation answered in text."""
    SPEECH = "speech"
    """A conversation answered in text and speech."""
    TTS = "tts"
    """A text read aloud by `/v1/audio/speech`, as raw samples."""
    IMAGE = "image"

    @property
    def modality(self) -> str:
        """What a model must give for it."""
        return "audio" if self in (Kind.SPEECH, Kind.TTS) else str(self)


@dataclass(frozen=True, slots=True)
class Span:
    """A number drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> Span:
        low, dots, high = text.partition("..")
        try:
            span = cls(int(low), int(high if dots else low))
        except ValueError:
            raise InvalidRequestError(
                f"{text!r} is neither a number nor LOW..HIGH, like 32..256", param=param
            ) from None
        if not 1 <= span.low <= span.high:
            raise InvalidRequestError(f"{text!r} must begin at 1 or above and not end below its begin", param=param)
        return span

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


def parse_mix(text: str) -> dict[Kind, int]:
    """`text=8,speech=1` as weights; a kind alone weighs 1."""
    mix: dict[Kind, int] = {}
    for part in text.split(","):
        name, given, weight = part.strip().partition("=")
        if name not in list(Kind):
            raise InvalidRequestError(f"{name!r} is no kind of request; kinds: {', '.join(Kind)}", param="--mix")
        if Kind(name) in mix:
            raise InvalidRequestError(f"{name} is named twice; give it one weight", param="--mix")
        if given and not (weight.isdecimal() and len(weight) <= 5 and 1 <= int(weight) <= _MOST_WEIGHT):
            raise InvalidRequestError(f"the weight of {name} must be 1 to {_MOST_WEIGHT}, like {name}=2", param="--mix")
        mix[Kind(name)] = int(weight) if given else 1
    return mix


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send."""

    kind: Kind
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt of a user's own, from a line of `--prompts`."""

    kind: Kind
    messages: list[dict[str, Any]]
    prompt: str
    max_tokens: int | None = None


def read_prompts(file: Path, mix: Mapping[Kind, int]) -> dict[Kind, list[Line]]:
    """The lines of a JSON-lines file by kind. Raises for a line that says nothing and for a kind without lines."""
    found: dict[Kind, list[Line]] = {}
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if text.strip():
            line = _line(text, f"--prompts, line {number}")
            found.setdefault(line.kind, []).append(line)
    for kind in mix:
        if kind not in found:
            raise InvalidRequestError(
                f'no line is of kind {kind}; add {{"kind": "{kind}", "prompt": ...}} or take it out of --mix',
                param="--prompts",
            )
    return found


def _line(text: str, where: str) -> Line:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"is not JSON ({error}); write one object a line", param=where) from error
    if not isinstance(value, dict):
        raise InvalidRequestError('must be an object, like {"prompt": "Hello"}', param=where)
    unknown = set(value) - {"kind", "prompt", "messages", "max_tokens"}
    if unknown:
        known = "kind, prompt, messages, max_tokens"
        raise InvalidRequestError(f"{sorted(unknown)[0]!r} is not known; known: {known}", param=where)
    kind, prompt, messages = value.get("kind", "text"), value.get("prompt"), value.get("messages")
    if kind not in list(Kind):
        raise InvalidRequestError(f"kind must be one of {', '.join(Kind)}", param=where)
    most = value.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise InvalidRequestError("max_tokens must be a whole number above 0", param=where)
    if isinstance(messages, list) and messages and prompt is None and Kind(kind) in (Kind.TEXT, Kind.SPEECH):
        return Line(Kind(kind), messages, "", most)
    if not isinstance(prompt, str) or not prompt or messages is not None:
        raise InvalidRequestError(
            "needs a prompt (a text); text and speech may have messages (a conversation) instead", param=where
        )
    return Line(Kind(kind), [{"role": "user", "content": prompt}], prompt, most)


@dataclass(frozen=True, slots=True)
class Workload:
    """Makes the requests. Each is a function of the seed and its number alone."""

    mix: Mapping[Kind, int]
    models: Mapping[Kind, str]
    seed: int = 0
    prompt_tokens: Span = Span(32, 256)
    max_tokens: Span = Span(16, 128)
    ignore_eos: bool = True
    image_size: str | None = None
    steps: int | None = None
    voice: str | None = None
    lines: Mapping[Kind, list[Line]] = field(default_factory=dict)
    tokens_per_word: float = 1.0
    """Measured on the service: how long a prompt of so many tokens is depends on the model."""
    tokens_around: float = 0.0
    """What the chat template adds to a prompt."""

    def request(self, number: int) -> Request:
        """Request `number`; negative ones are for warming up."""
        return self.of_kind(self.kind(number), number)

    def kind(self, number: int) -> Kind:
        """Kinds are dealt from a shuffled deck, so that a short run has its shares too."""
        deck = [kind for kind, weight in self.mix.items() for _ in range(weight)]
        random.Random(f"{self.seed}:deck:{number // len(deck)}").shuffle(deck)
        return deck[number % len(deck)]

    def of_kind(self, kind: Kind, number: int) -> Request:
        rng = random.Random(f"{self.seed}:request:{number}")
        words = max(1, round((self.prompt_tokens.draw(rng) - self.tokens_around) / self.tokens_per_word))
        prompt, most = " ".join(rng.choices(_WORDS, k=words)), self.max_tokens.draw(rng)
        line = Line(kind, [{"role": "user", "content": prompt}], prompt)
        if own := self.lines.get(kind):
            line = own[number % len(own)]
        body = {"model": self.models[kind], **self._fields(kind, line, line.max_tokens or most, rng.getrandbits(31))}
        return Request(kind, _PATHS[kind], json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())

    def probe(self, kind: Kind, words: int) -> Request:
        """A request of one token with a prompt of a known number of words: its usage tells how words are counted."""
        messages = [{"role": "user", "content": " ".join((_WORDS * (words // len(_WORDS) + 1))[:words])}]
        body = {"model": self.models[kind], "messages": messages, "modalities": ["text"], "max_tokens": 1, **_STREAM}
        return Request(Kind.TEXT, _PATHS[Kind.TEXT], json.dumps(body).encode())

    def _fields(self, kind: Kind, line: Line, most: int, seed: int) -> dict[str, Any]:
        if kind is Kind.IMAGE:
            drawing = {"size": self.image_size, "steps": self.steps, "seed": seed}
            given = {name: value for name, value in drawing.items() if value is not None}
            return {"prompt": line.prompt, "stream": True, **given}
        if kind is Kind.TTS:
            voice = {"voice": self.voice} if self.voice is not None else {}
            return {"input": line.prompt, "response_format": "pcm", **voice}
        fields: dict[str, Any] = {"messages": line.messages, "max_tokens": most, "seed": seed, **_STREAM}
        if self.ignore_eos:
            fields["ignore_eos"] = True
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
    """Seconds from the start at which requests arrive by themselves, `rate` a second on average: a Poisson process."""
    rng, moment = random.Random(f"{seed}:arrivals"), 0.0
    while True:
        moment += rng.expovariate(rate)
        yield moment
