"""The events of a server's stream as chunks of a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from omnistage.core.errors import RemoteError
from omnistage.core.http_client import BrokenResponseError
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason, StageChunk, TokenChunk, TokenLogprob, TokenLogprobs
from omnistage.core.validation import is_utf8
from omnistage.engines.remote.wire import call_text

UNKNOWN_ID = -1
"""In log probabilities, of tokens that the server gives as text alone."""
_FINISH = {"length": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}
_FAILED = ("abort", "error")
_MAX_CHARS = 1024
"""Of one token: far more than any has, and an end to a stream that has none."""
_MIN_LOGPROB = -9999.0
"""vLLM's, in place of minus infinity, which JSON does not have."""


@dataclass(slots=True)
class _Answer:
    announced: bool = False
    num_listed: int = 0
    """Tokens whose ids came."""
    finish: FinishReason | None = None
    calls: dict[int, list[str]] = field(default_factory=dict)
    """Calls that the server has parsed: name and arguments by their index."""


class StreamReader:
    """Reads one request's stream: `read` each event, then `end`. Raises `BrokenResponseError` for what is no answer."""

    def __init__(self, request_id: str, stage: str, prompt: ARInput | None, params: SamplingParams) -> None:
        self._request_id = request_id
        self._stage = stage
        self._prompt = prompt
        self._alternatives = params.logprobs
        self._room = params.n * (params.max_tokens + 1) * _MAX_CHARS
        """Characters that may still come."""
        nothing = prompt is not None and prompt.num_tokens == 0
        self._answers = [_Answer(finish=FinishReason.STOP if nothing else None) for _ in range(params.n)]
        self._usage: Mapping[str, Any] = {}

    def read(self, event: object) -> Iterator[StageChunk]:
        if not isinstance(event, dict):
            raise BrokenResponseError("an event is not an object")
        if event.get("error"):
            raise RemoteError(f"the server of stage {self._stage!r} ended the request with an error; send it again")
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            try:
                chunk = self._choice(choice)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise BrokenResponseError("an event does not follow OpenAI's API") from error
            if chunk is not None:
                yield chunk

    def end(self) -> Iterator[StageChunk]:
        """The last chunk of each answer: its finish reason, and with the first what the server has counted."""
        if any(answer.finish is None for answer in self._answers):
            raise BrokenResponseError("the stream ended before the answer did")
        details = self._usage.get("prompt_tokens_details")
        num_reported, num_listed = (
            _count(self._usage, "completion_tokens"),
            sum(each.num_listed for each in self._answers),
        )
        for index, answer in enumerate(self._answers):
            payload = TokenChunk(
                text=call_text([(name, arguments) for name, arguments in answer.calls.values()]),
                prompt=None if answer.announced else self._prompt,
                prompt_tokens=0 if index else _count(self._usage, "prompt_tokens"),
                cached_tokens=0 if index else _count(details if isinstance(details, dict) else {}, "cached_tokens"),
                unlisted_tokens=0 if index else max(0, num_reported - num_listed),
            )
            yield StageChunk(self._request_id, self._stage, payload, index, answer.finish)

    def _choice(self, choice: Mapping[str, Any]) -> StageChunk | None:
        index = choice["index"]
        if index < 0:
            raise IndexError(index)
        answer = self._answers[index]
        delta = choice.get("delta")
        text = choice.get("text", "") if delta is None else delta.get("content")
        text = self._checked(text or "")
        ids = tuple(map(int, choice.get("token_ids") or ()))
        logprobs = self._logprobs(choice.get("logprobs") or {}, ids)
        for call in (delta or {}).get("tool_calls") or ():
            call_parts = answer.calls.setdefault(int(call["index"]), ["", ""])
            call_parts[0] += self._checked(call["function"].get("name") or "")
            call_parts[1] += self._checked(call["function"].get("arguments") or "")
        ended_by, stop = None, None
        if (reason := choice.get("finish_reason")) is not None:
            if reason in _FAILED:
                raise RemoteError(f"the server of stage {self._stage!r} abandoned the request; send it again")
            answer.finish = self._finish(reason)
            stop = choice.get("stop_reason")
            ended_by = stop if isinstance(stop, int) else None
        if not text and not ids and not logprobs:
            return None
        answer.num_listed += len(ids)
        prompt, answer.announced = (None if answer.announced else self._prompt), True
        reason_to_stop = stop if isinstance(stop, int | str) else None
        payload = TokenChunk(ids, text, logprobs, prompt=prompt, ended_by=ended_by, stop_reason=reason_to_stop)
        return StageChunk(self._request_id, self._stage, payload, index)

    def _checked(self, text: str) -> str:
        """A text that can be passed on: JSON can spell halves of characters. Raises where there is far too much."""
        self._room -= len(text)
        if self._room < 0:
            raise ValueError("more text than all tokens together can be")
        return text if is_utf8(text) else text.encode(errors="replace").decode()

    def _finish(self, reason: str) -> FinishReason:
        finish = _FINISH.get(reason, FinishReason.STOP)
        if finish is FinishReason.LENGTH and self._prompt is not None and self._prompt.num_tokens is not None:
            return FinishReason.STOP  # it has all the tokens that were asked for
        return finish

    def _logprobs(self, wire: Mapping[str, Any], ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        """Of a chat (a list of objects) or of a plain completion (lists side by side)."""
        if self._alternatives is None or not wire:
            return ()
        if (content := wire.get("content")) is not None:
            entries = [(_entry(each), [_entry(other) for other in each.get("top_logprobs") or ()]) for each in content]
        else:
            tops = wire.get("top_logprobs") or [{}] * len(wire["tokens"])
            entries = [
                (_token(text, value), [_token(*pair) for pair in (top or {}).items()])
                for text, value, top in zip(wire["tokens"], wire["token_logprobs"], tops, strict=True)
            ]
        token_ids = ids if len(ids) == len(entries) else (UNKNOWN_ID,) * len(entries)
        return tuple(
            self._ranked(TokenLogprob(token_id, token.logprob, token.text, token.spelling), top)
            for token_id, (token, top) in zip(token_ids, entries, strict=True)
        )

    def _ranked(self, sampled: TokenLogprob, top: list[TokenLogprob]) -> TokenLogprobs:
        # A plain completion lists alternatives by their text, and of equal texts the last: the best may be missing.
        if top and sampled.logprob > max(token.logprob for token in top):
            top = [sampled, *top]
        return TokenLogprobs(sampled, tuple(sorted(top, key=lambda token: -token.logprob)[: self._alternatives]))


def _entry(wire: Mapping[str, Any]) -> TokenLogprob:
    spelling = wire.get("bytes")
    return _token(wire["token"], wire["logprob"], None if spelling is None else bytes(spelling))


def _token(text: str, logprob: float, spelling: bytes | None = None) -> TokenLogprob:
    value = float(logprob)
    if value != value:
        raise ValueError("not a number")
    spelling = text.encode(errors="replace") if spelling is None else spelling
    return TokenLogprob(UNKNOWN_ID, max(value, _MIN_LOGPROB), text if is_utf8(text) else spelling.decode(), spelling)


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
