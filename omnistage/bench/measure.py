"""Figures of one request as its client sees it: times, gaps, and whether a player would have stuttered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from omnistage.bench.workload import Kind
from omnistage.core.errors import InvalidRequestError

PCM_BYTES = 2
"""Bytes of a sample: raw audio is mono, 16 bits."""
_LIMITS = ("ttft", "ttfa", "tpot", "rtf", "latency")


@dataclass(slots=True)
class Outcome:
    """One request and its response. Times are seconds from the start of the run."""

    number: int
    kind: Kind
    due: float
    """When it should be sent; for a worker, when the worker was free."""
    sent: float
    ended: float = 0.0
    status: int | None = None
    error: str | None = None
    """The service's error code, or a name for what happened to the connection."""
    message: str | None = None
    retry_after: float | None = None
    token_times: list[float] = field(default_factory=list)
    """Arrival of each text chunk."""
    audio_chunks: list[tuple[float, int]] = field(default_factory=list)
    """Arrival and bytes of each audio chunk."""
    complete: bool = False
    """Whether an event stream had its end marker: a truncated one may look like one that ends."""
    pictures: int = 0
    prompt_tokens: int = 0
    text_tokens: int = 0
    """Generated text tokens; speech is counted in seconds."""
    audio_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def refused(self) -> bool:
        """Rejected because the service was full, as it should."""
        return self.status == 429

    @property
    def failed(self) -> bool:
        """Whether the service failed: a 5xx, an incomplete stream, no connection, a timeout."""
        return not self.ok and (self.status is None or self.status >= 500 or self.status < 400)

    @property
    def latency(self) -> float:
        return self.ended - self.sent

    @property
    def ttft(self) -> float | None:
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def ttfa(self) -> float | None:
        return self.audio_chunks[0][0] - self.sent if self.audio_chunks else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first."""
        if len(self.token_times) < 2 or self.text_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.text_tokens - 1)

    @property
    def rtf(self) -> float | None:
        """Real-time factor: seconds until all audio had arrived, per second of audio."""
        return (
            (self.audio_chunks[-1][0] - self.sent) / self.audio_seconds
            if self.audio_chunks and self.audio_seconds
            else None
        )

    def token_gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    def audio_gaps(self) -> list[float]:
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.audio_chunks)]

    def playback(self, buffer: float) -> Playback:
        total = sum(size for _, size in self.audio_chunks)
        chunks = [(arrival, self.audio_seconds * size / total) for arrival, size in self.audio_chunks] if total else []
        return play(chunks, buffer)


def count_event(outcome: Outcome, arrival: float, event: Mapping[str, Any]) -> None:
    """Add the contents of an event of a stream."""
    if (problem := event.get("error")) is not None:
        outcome.error, outcome.message = error_of({"error": problem}, "stream_error")
        return
    if str(event.get("type", "")).endswith(".completed"):
        outcome.pictures += 1
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        audio = delta.get("audio") or {}
        if delta.get("content") or audio.get("transcript") or delta.get("reasoning_content"):
            outcome.token_times.append(arrival)
        if choice.get("finish_reason"):
            outcome.complete = True
        if data := audio.get("data"):
            outcome.audio_chunks.append((arrival, len(data) * 3 // 4 - data.count("=", len(data) - 2)))
    if usage := event.get("usage"):
        details = usage.get("completion_tokens_details") or {}
        outcome.prompt_tokens = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        outcome.text_tokens = (usage.get("completion_tokens") or 0) - (details.get("audio_tokens") or 0)
        outcome.audio_seconds = details.get("audio_seconds") or 0.0


def error_of(body: object, default: str) -> tuple[str, str | None]:
    """The code and the message of an error body of OpenAI's API."""
    problem = body.get("error") if isinstance(body, Mapping) else None
    if not isinstance(problem, Mapping):
        return default, None
    message = problem.get("message")
    return str(problem.get("code") or problem.get("type") or default), str(message) if message else None


# -------------------------------------------------------------------------------------------------- playback


@dataclass(frozen=True, slots=True)
class Playback:
    """How a player got on with the audio of a request."""

    seconds: float = 0.0
    wait: float = 0.0
    """Silence because the next chunk had not arrived."""
    stalls: int = 0

    @property
    def share(self) -> float:
        """Waiting per second of audio."""
        return self.wait / self.seconds if self.seconds else 0.0


def play(chunks: Iterable[tuple[float, float]], buffer: float) -> Playback:
    """Play chunks (arrival, seconds) from `buffer` seconds after the first arrival.

    The player waits for a late chunk and goes on as soon as it arrives.
    """
    clock: float | None = None
    seconds = stall_seconds = 0.0
    stalls = 0
    for arrival, length in chunks:
        if clock is None:
            clock = arrival + buffer
        if arrival > clock:
            stall_seconds += arrival - clock
            stalls += 1
            clock = arrival
        clock += length
        seconds += length
    return Playback(seconds, stall_seconds, stalls)


# ------------------------------------------------------------------------------------------------- summaries


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a quantity."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without values."""
        if not values:
            return None
        import numpy as np

        p50, p90, p99 = (float(value) for value in np.percentile(values, (50, 90, 99)))
        return cls(len(values), float(np.mean(values)), p50, p90, p99, float(max(values)))


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity that is measured for each request."""

    label: str
    values: Callable[[Outcome], Sequence[float | None]]

    def of(self, outcomes: Iterable[Outcome]) -> list[float]:
        """Its values over the requests that succeeded."""
        values = (value for outcome in outcomes if outcome.ok for value in self.values(outcome))
        return [value for value in values if value is not None]


FIGURES = {
    "ttft": Figure("time to first token", lambda outcome: [outcome.ttft]),
    "token_gap": Figure("gap between tokens", Outcome.token_gaps),
    "tpot": Figure("time per token", lambda outcome: [outcome.tpot]),
    "ttfa": Figure("time to first audio", lambda outcome: [outcome.ttfa]),
    "sound_gap": Figure("gap between audio chunks", Outcome.audio_gaps),
    "rtf": Figure("real-time factor", lambda outcome: [outcome.rtf]),
    "latency": Figure("whole request", lambda outcome: [outcome.latency]),
}
"""In seconds, but for `rtf`."""
RATES = {
    "requests": Figure("requests/s", lambda outcome: [1]),
    "prompt_tokens": Figure("prompt tokens/s", lambda outcome: [outcome.prompt_tokens]),
    "output_tokens": Figure("output tokens/s", lambda outcome: [outcome.text_tokens]),
    "audio_seconds": Figure("seconds of audio/s", lambda outcome: [outcome.audio_seconds]),
    "pictures": Figure("pictures/s", lambda outcome: [outcome.pictures]),
}
"""Summed over the requests, per second of the run."""


def spreads(outcomes: Sequence[Outcome]) -> dict[str, Spread | None]:
    return {name: Spread.of(figure.of(outcomes)) for name, figure in FIGURES.items()}


@dataclass(frozen=True, slots=True)
class Stutter:
    """Playback over all requests."""

    underrun_seconds: float
    underrun_share: float
    """Of the duration of the audio."""
    requests_share: float
    """Of the requests with audio: those in which the player had to wait."""

    @classmethod
    def of(cls, outcomes: Iterable[Outcome], buffer: float) -> Stutter | None:
        playbacks = [outcome.playback(buffer) for outcome in outcomes if outcome.ok and outcome.audio_chunks]
        seconds = sum(playback.seconds for playback in playbacks)
        if not seconds:
            return None
        total = sum(playback.wait for playback in playbacks)
        return cls(total, total / seconds, sum(playback.stalls > 0 for playback in playbacks) / len(playbacks))


def parse_goodput(text: str) -> dict[str, float]:
    """`ttft:0.5,ttfa:1.0` as limits in seconds."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        if name not in _LIMITS:
            raise InvalidRequestError(f"{name!r} has no limit; use {', '.join(_LIMITS)}", param="--goodput")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if not 0 < limits[name] < float("inf"):
            raise InvalidRequestError(f"{part.strip()!r} needs a limit above 0, like {name}:0.5", param="--goodput")
    return limits


def within(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether a request succeeded within the limits; those for what its kind does not output are ignored."""
    if not outcome.ok:
        return False
    values = {name: getattr(outcome, name) for name in limits}
    return all(value is None or value <= limits[name] for name, value in values.items())
