"""What an answer was worth to its client: when things came, and whether a player would have stuttered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from omnistage.bench.workload import Kind
from omnistage.core.errors import InvalidRequestError

PCM_BYTES = 2
"""Bytes of a sample: raw sound is mono, 16 bits."""
_LIMITS = ("ttft", "ttfa", "tpot", "rtf", "latency")


@dataclass(slots=True)
class Outcome:
    """One request that was sent and how it went. Moments are seconds from the run's start."""

    number: int
    kind: Kind
    due: float
    """When it was to be sent; for a worker that sends when it is free, the moment at which it was."""
    sent: float
    ended: float = 0.0
    status: int | None = None
    error: str | None = None
    """What went wrong, in a word or two: the service's code, or what happened to the connection."""
    message: str | None = None
    retry_after: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When each piece of text came."""
    sounds: list[tuple[float, int]] = field(default_factory=list)
    """When each piece of sound came, and its bytes."""
    whole: bool = False
    """Whether a stream of events has said that it is at its end: one that is cut may look like one that ends."""
    pictures: int = 0
    prompt_tokens: int = 0
    text_tokens: int = 0
    """Of the answer; what was spoken is counted in seconds."""
    audio_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def refused(self) -> bool:
        """Turned away because the service was full: it did what it should."""
        return self.status == 429

    @property
    def failed(self) -> bool:
        """Whether the service is to blame: a 5xx, a stream that broke off, no connection, no end in time."""
        return not self.ok and (self.status is None or self.status >= 500 or self.status < 400)

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def ttfa(self) -> float | None:
        return self.sounds[0][0] - self.sent if self.sounds else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token behind the first."""
        if len(self.token_times) < 2 or self.text_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.text_tokens - 1)

    @property
    def rtf(self) -> float | None:
        """Seconds until all the sound was there, for each second of it."""
        return (self.sounds[-1][0] - self.sent) / self.audio_seconds if self.sounds and self.audio_seconds else None

    def token_gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    def sound_gaps(self) -> list[float]:
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.sounds)]

    def playback(self, buffer: float) -> Playback:
        total = sum(size for _, size in self.sounds)
        lengths = [(moment, self.audio_seconds * size / total) for moment, size in self.sounds] if total else []
        return play(lengths, buffer)


def count_event(outcome: Outcome, moment: float, event: Mapping[str, Any]) -> None:
    """Add what an event of a stream brought."""
    if (problem := event.get("error")) is not None:
        outcome.error, outcome.message = error_of({"error": problem}, "stream_error")
        return
    if str(event.get("type", "")).endswith(".completed"):
        outcome.pictures += 1
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        sound = delta.get("audio") or {}
        if delta.get("content") or sound.get("transcript") or delta.get("reasoning_content"):
            outcome.token_times.append(moment)
        if choice.get("finish_reason"):
            outcome.whole = True
        if data := sound.get("data"):
            outcome.sounds.append((moment, len(data) * 3 // 4 - data.count("=", len(data) - 2)))
    if usage := event.get("usage"):
        details = usage.get("completion_tokens_details") or {}
        outcome.prompt_tokens = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        outcome.text_tokens = (usage.get("completion_tokens") or 0) - (details.get("audio_tokens") or 0)
        outcome.audio_seconds = details.get("audio_seconds") or 0.0


def error_of(body: object, otherwise: str) -> tuple[str, str | None]:
    """The code and the message of OpenAI's error body."""
    problem = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(problem, Mapping):
        return otherwise, None
    message = problem.get("message")
    return str(problem.get("code") or problem.get("type") or otherwise), str(message) if message else None


# -------------------------------------------------------------------------------------------------- playback


@dataclass(frozen=True, slots=True)
class Playback:
    """What a listener heard."""

    seconds: float = 0.0
    waited: float = 0.0
    """Silence in the middle, because what came next was not there yet."""
    stalls: int = 0

    @property
    def share(self) -> float:
        """Waiting for each second of sound."""
        return self.waited / self.seconds if self.seconds else 0.0


def play(pieces: Iterable[tuple[float, float]], buffer: float) -> Playback:
    """Play pieces (arrival, seconds) as a player does that begins `buffer` seconds after the first has arrived.

    Where a piece is late the player waits for it, and goes on at once when it is there.
    """
    clock: float | None = None
    seconds = waited = 0.0
    stalls = 0
    for arrival, length in pieces:
        if clock is None:
            clock = arrival + buffer
        if arrival > clock:
            waited += arrival - clock
            stalls += 1
            clock = arrival
        clock += length
        seconds += length
    return Playback(seconds, waited, stalls)


# ------------------------------------------------------------------------------------------------- summaries


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity is spread over its samples."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None where there is nothing to measure: a figure that stands for nothing would be taken for one."""
        if not values:
            return None
        import numpy as np

        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(len(values), float(np.mean(values)), p50, p90, p99, float(max(values)))


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread | None]:
    """Every quantity over the requests that succeeded, in seconds but for `rtf`."""
    good = [outcome for outcome in outcomes if outcome.ok]

    def each(name: str) -> list[float]:
        return [value for outcome in good if (value := getattr(outcome, name)) is not None]

    return {
        "ttft": Spread.of(each("ttft")),
        "token_gap": Spread.of([gap for outcome in good for gap in outcome.token_gaps()]),
        "tpot": Spread.of(each("tpot")),
        "ttfa": Spread.of(each("ttfa")),
        "sound_gap": Spread.of([gap for outcome in good for gap in outcome.sound_gaps()]),
        "rtf": Spread.of(each("rtf")),
        "latency": Spread.of(each("latency")),
    }


@dataclass(frozen=True, slots=True)
class Stutter:
    """What listeners of all requests heard."""

    underrun_seconds: float
    underrun_share: float
    """Of the sound's length."""
    requests_share: float
    """Of the requests with sound: those in which the player had to wait at all."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], buffer: float) -> Stutter | None:
        heard = [outcome.playback(buffer) for outcome in outcomes if outcome.ok and outcome.sounds]
        seconds = sum(playback.seconds for playback in heard)
        if not seconds:
            return None
        waited = sum(playback.waited for playback in heard)
        return cls(waited, waited / seconds, sum(playback.stalls > 0 for playback in heard) / len(heard))


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:0.5,ttfa:1.0` as limits in seconds."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        if name not in _LIMITS:
            raise InvalidRequestError(f"{name!r} cannot be bound; use {', '.join(_LIMITS)}", param="--goodput")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if not 0 < limits[name] < float("inf"):
            raise InvalidRequestError(f"{part.strip()!r} needs a limit above 0, like {name}:0.5", param="--goodput")
    return limits


def within(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request was answered within the limits; one for what its kind does not give says nothing of it."""
    if not outcome.ok:
        return False
    given = {name: getattr(outcome, name) for name in limits}
    return all(value is None or value <= limits[name] for name, value in given.items())
