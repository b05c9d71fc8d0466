"""Applies a content filter to one request: to its prompt before it runs, to its outputs before they are sent."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import FinishReason, Modality, OmniTokensPrompt, SpeechPrompt, TextBatch, TokenLogprobs
from omnistage.media.audio_output import AudioOutput
from omnistage.media.context import inspect_media
from omnistage.omni import AsyncOmni
from omnistage.pipeline.intake import ParamsLike, Prompt, RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.stream import OutputStream
from omnistage.server.http.errors import AnswerFilteredError, ContentFilterError
from omnistage.server.moderation.filters import AnswerText, Pass, PromptText, Redact, Refuse, RequestFilter
from omnistage.server.openai.audio.capabilities import read_text

if TYPE_CHECKING:
    from omnistage.media.context import Decoded

_MEDIA_KEYS = frozenset(("image", "images", "mask"))
"""Of the mapping form of a prompt: these are checked when they are decoded."""
_STRING_LITERAL = re.compile(r'"((?:[^"\\]++|\\.)*+)"?', re.DOTALL)
"""A string in JSON, which may be cut off."""


async def start_filtered(
    request_filter: RequestFilter,
    omni: AsyncOmni,
    prompt: Prompt,
    params: ParamsLike,
    options: RequestOptions,
    request_id: str | None = None,
    admitted: Callable[[], None] | None = None,
) -> OutputStream:
    """Start a request under a filter. Raises `ContentFilterError` for a prompt that is refused."""
    verdict = await request_filter.check_prompt(tuple(prompt_texts(prompt, params, options)))
    if isinstance(verdict, Refuse | Redact):
        raise ContentFilterError("the content filter refuses this prompt; change it")

    def inspect(media: Decoded) -> None:
        if isinstance(request_filter.check_media(media), Refuse | Redact):
            raise ContentFilterError("the content filter refuses this media item; send another")

    modalities = options.modalities
    requested = frozenset((modalities,) if isinstance(modalities, str) else modalities or ())
    # Speech is filtered by its text, which is generated with it even where it was not requested.
    hidden_text = Modality.AUDIO in requested and Modality.TEXT not in requested and Modality.TEXT in omni.modalities
    if (speech_text := read_text(omni.processor, prompt)) is not None:
        # A text that is read aloud is its own output, checked before any audio is generated.
        verdict = await request_filter.check_output(AnswerText(held=speech_text, ended=True))
        if isinstance(verdict, Refuse | Redact):
            raise AnswerFilteredError("the content filter refuses this text; change it")
    elif hidden_text:
        options = replace(options, modalities=[*requested, Modality.TEXT])
    with inspect_media(inspect):
        stream = await omni.start(prompt, params, options, request_id, admitted)
    returns_text = Modality.TEXT in (requested or omni.modalities)
    return FilteredStream(stream, request_filter, omni, returns_text=returns_text)


# ------------------------------------------------------------------------------------------------- prompts


def prompt_texts(prompt: Prompt, params: ParamsLike, options: RequestOptions) -> Iterator[PromptText]:
    """All text of a request. Raises for a prompt of tokens, which cannot be checked."""
    for tool in options.tools:
        yield PromptText("\n".join(_strings(tool)))
    if isinstance(params, StageParams):
        params = {"": params}
    for part in (params or {}).values():
        if isinstance(part, DiffusionParams) and part.negative_prompt:
            yield PromptText(part.negative_prompt)
    if isinstance(prompt, str):
        yield PromptText(prompt)
    elif isinstance(prompt, OmniTokensPrompt):
        raise ContentFilterError("tokens cannot be checked by the content filter; send text", param="prompt")
    elif isinstance(prompt, SpeechPrompt):
        yield PromptText(prompt.options.prompt)
    elif isinstance(prompt, TextBatch):
        for text in (*prompt.texts, *prompt.seconds):
            if not isinstance(text, str):
                raise ContentFilterError("tokens cannot be checked by the content filter; send text", param="input")
            yield PromptText(text)
    elif isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt or "prompt_embeds" in prompt:
            raise ContentFilterError("tokens cannot be checked by the content filter; send text", param="prompt")
        texts = [value for name, value in prompt.items() if name not in _MEDIA_KEYS]
        yield PromptText("\n".join(_strings(texts)))
    elif isinstance(prompt, Sequence):
        for message in prompt:
            if isinstance(message, Mapping):
                role = message.get("role")
                yield PromptText("\n".join(_message(message)), role if isinstance(role, str) else None)


def _message(message: Mapping[str, object]) -> Iterator[str]:
    # A refused answer may have its parts in `refusal`.
    for content in (message.get("content"), message.get("refusal")):
        parts = content if isinstance(content, list | tuple) else (content,)
        if text := "".join(map(_part, parts)):  # joined: a word may be spelled over two parts
            yield text
    yield from _strings({key: value for key, value in message.items() if key not in ("role", "content", "refusal")})


def _part(part: object) -> str:
    """The text of a part as the model reads it."""
    if isinstance(part, Mapping):
        part = part.get("refusal" if part.get("type") == "refusal" else "text")
    return part if isinstance(part, str) else ""


def _strings(value: object) -> Iterator[str]:
    """All strings inside, keys too, in order. Iterative: clients choose the depth."""
    stack = [("", value)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, str):
            yield value
            if key == "arguments":  # of a tool call: JSON with escapes of its own
                yield from _literals(value)
        elif isinstance(value, Mapping):
            for name, item in reversed(list(value.items())):
                stack += ((str(name), item), ("", str(name)))
        elif isinstance(value, list | tuple):
            stack += [(key, item) for item in reversed(value)]


def _literals(text: str) -> Iterator[str]:
    """The strings of a JSON text, unescaped; the text may be cut off."""
    for match in _STRING_LITERAL.finditer(text):
        with suppress(ValueError):
            yield json.loads(f'"{match[1]}"', strict=False)


# ------------------------------------------------------------------------------------------------- outputs


@dataclass(slots=True)
class _Output:
    text: AnswerText
    tokens: list[int] = field(default_factory=list)
    """Withheld until all of their text is released: they would reveal the rest."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    released_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


class FilteredStream(OutputStream):
    """A request's stream behind a filter.

    Audio waits while text is held back, since it is unknown which words it speaks. A refusal ends the request with
    `FinishReason.CONTENT_FILTER`, or with an error where no text is returned that could carry the reason.
    """

    def __init__(
        self, inner: OutputStream, request_filter: RequestFilter, omni: AsyncOmni, *, returns_text: bool
    ) -> None:
        self.request_id, self.trace = inner.request_id, inner.trace
        self._inner = inner
        self._filter = request_filter
        self._omni = omni
        self._returns_text = returns_text
        self._outputs: dict[int, _Output] = {}
        self._released: deque[OutputChunk] = deque()
        self._waiting: list[OutputChunk] = []
        self._samples_sent = 0
        self._refused = False

    async def __anext__(self) -> OutputChunk:
        while not self._released:
            await self._check(await anext(self._inner))
        chunk = self._released.popleft()
        if chunk.audio is not None:
            self._samples_sent += len(chunk.audio.samples)
        return chunk

    async def take(self) -> list[OutputChunk]:
        chunk = await anext(self, None)  # one at a time: a filter may have to wait for its verdict
        return [] if chunk is None else [chunk]

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    def close(self) -> None:
        self._inner.close()

    async def _check(self, chunk: OutputChunk) -> None:
        if chunk.final is not None:
            await self._end_texts()
            self._released.append(replace(chunk, final=self._filter_final(chunk.final)))
        elif self._refused:
            return  # still under way in the stages
        elif chunk.modality is Modality.TEXT and chunk.progress is None:
            await self._check_text(chunk)
        else:
            media = chunk.audio or chunk.image or chunk.video
            if media is not None and isinstance(await self._filter.check_made(media), Refuse | Redact):
                self._refuse()
            elif self._holding:
                self._waiting.append(chunk)
            else:
                self._released.append(chunk)

    @property
    def _holding(self) -> bool:
        return any(output.text.held for output in self._outputs.values())

    async def _check_text(self, chunk: OutputChunk) -> None:
        output = self._outputs.setdefault(chunk.index, _Output(AnswerText(chunk.index)))
        output.text.held += chunk.text
        output.text.ended = chunk.finish_reason is not None
        output.tokens += chunk.token_ids
        output.logprobs += chunk.logprobs
        verdict = await self._filter.check_output(output.text)
        if isinstance(verdict, Refuse):
            self._refuse()
            return
        output.finish = chunk.finish_reason
        self._release(output, verdict, chunk)

    def _release(self, output: _Output, verdict: Pass | Redact, chunk: OutputChunk) -> None:
        """Release what the filter lets through, and the audio that waited for it."""
        text = output.text
        if isinstance(verdict, Redact):
            text.held = verdict.text
            output.logprobs = []  # they spell the original text
        hold = 0 if text.ended else max(0, min(verdict.hold, len(text.held)))
        cut = len(text.held) - hold
        released, text.held = text.held[:cut], text.held[cut:]
        if released:
            text.pieces.append(released)
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if not text.held:
            tokens, logprobs = tuple(output.tokens), tuple(output.logprobs)
            output.released_logprobs += output.logprobs
            output.tokens, output.logprobs = [], []
        if self._returns_text and (released or tokens or text.ended):
            self._released.append(replace(chunk, text=released, token_ids=tokens, logprobs=logprobs))
        if not self._holding:
            self._released.extend(self._waiting)
            self._waiting.clear()

    async def _end_texts(self) -> None:
        """Check texts that were cut off, as they are."""
        for index, output in self._outputs.items():
            if self._refused or output.text.ended:
                continue
            await self._check_text(OutputChunk(self.request_id, Modality.TEXT, index, finish_reason=FinishReason.ABORT))
            output.finish = None

    def _refuse(self) -> None:
        self._refused = True
        self._waiting.clear()
        self._omni.orchestrator.abort(self.request_id, FinishReason.CONTENT_FILTER)

    def _filter_final(self, final: OmniRequestOutput) -> OmniRequestOutput:
        """The complete output, with only what was released."""
        for completion in final.outputs:
            output = self._outputs.get(completion.index)
            completion.text = output.text.sent if output is not None else ""
            completion.logprobs = output.released_logprobs if output is not None else []
            if self._refused and (output is None or output.finish is None):
                completion.finish_reason = FinishReason.CONTENT_FILTER
        if not self._returns_text:
            final.outputs = []
        if not self._refused:
            return final
        final.finish_reason = FinishReason.CONTENT_FILTER
        final.images, final.videos = [], []
        audio, final.audio = final.audio, None
        if audio is not None and self._samples_sent:
            final.audio = AudioOutput(audio.samples[: self._samples_sent], audio.sample_rate)
        final.usage.audio_seconds = final.audio.seconds if final.audio is not None else 0.0
        if not self._returns_text:
            final.error = ContentFilterError("the content filter ended this request; change the prompt")
        return final
