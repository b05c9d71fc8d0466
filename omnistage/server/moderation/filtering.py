"""A content filter at work on one request: its prompt before it runs, its answers before they are sent."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import FinishReason, Modality, OmniTokensPrompt, TokenLogprobs
from omnistage.media.audio_output import AudioOutput
from omnistage.media.context import inspect_media
from omnistage.omni import AsyncOmni, OutputStream
from omnistage.pipeline.intake import ParamsLike, Prompt, RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.server.http.errors import AnswerFilteredError, ContentFilterError
from omnistage.server.moderation.filters import AnswerText, PromptText, Redact, Refuse, RequestFilter, Verdict
from omnistage.server.openai.audio.capabilities import read_text

if TYPE_CHECKING:
    from omnistage.media.context import Decoded

_MEDIA_KEYS = frozenset(("image", "images", "mask"))
"""Of the mapping form of a prompt: they are seen when they are decoded."""
_LITERAL = re.compile(r'"((?:[^"\\]++|\\.)*+)"?', re.DOTALL)
"""A string in JSON, or as much as there is of it."""


async def start_filtered(
    own: RequestFilter,
    omni: AsyncOmni,
    prompt: Prompt,
    params: ParamsLike,
    options: RequestOptions,
    request_id: str | None = None,
) -> OutputStream:
    """Start a request under a filter. Raises `ContentFilterError` for a prompt that is refused."""
    verdict = await own.check_prompt(tuple(prompt_texts(prompt, params, options)))
    if isinstance(verdict, Refuse | Redact):
        raise ContentFilterError("the content filter refuses this prompt; change it")

    def inspect(media: Decoded) -> None:
        if isinstance(own.check_media(media), Refuse | Redact):
            raise ContentFilterError("the content filter refuses this; send another")

    given = options.modalities
    asked = frozenset((given,) if isinstance(given, str) else given or ())
    # Speech is made of a text, and only a text that is seen can be filtered.
    unseen = Modality.AUDIO in asked and Modality.TEXT not in asked and Modality.TEXT in omni.modalities
    if (said := read_text(omni.processor, prompt)) is not None:
        await _check_said(own, said)
    elif unseen:
        options = replace(options, modalities=[*asked, Modality.TEXT])
    with inspect_media(inspect):
        stream = await omni.start(prompt, params, options, request_id)
    gives_text = not unseen and (Modality.TEXT in asked or (not asked and Modality.TEXT in omni.modalities))
    return FilteredStream(stream, own, omni, gives_text=gives_text)


async def _check_said(own: RequestFilter, text: str) -> None:
    """A text that is read aloud is its own answer, seen before a sound is made of it."""
    if isinstance(await own.check_output(AnswerText(held=text, ended=True)), Refuse | Redact):
        raise AnswerFilteredError("the content filter refuses to have this said; change it")


# ------------------------------------------------------------------------------------------------- prompts


def prompt_texts(prompt: Prompt, params: ParamsLike, options: RequestOptions) -> Iterator[PromptText]:
    """Everything that is written in a request. Raises for a prompt that nobody can read."""
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
        raise ContentFilterError("tokens cannot be read by the content filter; send text", param="prompt")
    elif isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt or "prompt_embeds" in prompt:
            raise ContentFilterError("tokens cannot be read by the content filter; send text", param="prompt")
        texts = [value for name, value in prompt.items() if name not in _MEDIA_KEYS]
        yield PromptText("\n".join(_strings(texts)))
    elif isinstance(prompt, Sequence):
        for message in prompt:
            if isinstance(message, Mapping):
                role = message.get("role")
                yield PromptText("\n".join(_message(message)), role if isinstance(role, str) else None)


def _message(message: Mapping[str, object]) -> Iterator[str]:
    # An answer that was refused may have its parts there instead.
    for content in (message.get("content"), message.get("refusal")):
        parts = content if isinstance(content, list | tuple) else (content,)
        if text := "".join(map(_part, parts)):  # joined: a word may be spelled over two parts
            yield text
    yield from _strings({key: value for key, value in message.items() if key not in ("role", "content", "refusal")})


def _part(part: object) -> str:
    """The text that the model reads of a part, and none of what would stand between it and the next part's."""
    if isinstance(part, Mapping):
        part = part.get("refusal" if part.get("type") == "refusal" else "text")
    return part if isinstance(part, str) else ""


def _strings(value: object) -> Iterator[str]:
    """The texts inside, names of fields too, in their order. Clients choose how deep it goes: nothing recurses."""
    left = [("", value)]
    while left:
        key, value = left.pop()
        if isinstance(value, str):
            yield value
            if key == "arguments":  # of a tool call: JSON that is read again, with its escapes
                yield from _literals(value)
        elif isinstance(value, Mapping):
            for name, item in reversed(list(value.items())):
                left += ((str(name), item), ("", str(name)))
        elif isinstance(value, list | tuple):
            left += [(key, item) for item in reversed(value)]


def _literals(text: str) -> Iterator[str]:
    """The strings of a JSON text as they read without their escapes, however deep they are; it may be broken off."""
    for found in _LITERAL.finditer(text):
        with suppress(ValueError):
            yield json.loads(f'"{found[1]}"', strict=False)


# ------------------------------------------------------------------------------------------------- answers


@dataclass(slots=True)
class _Answer:
    text: AnswerText
    tokens: list[int] = field(default_factory=list)
    """Of text that is held back in part. They go out once all of it has: their spelling would tell the rest."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    told: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


class FilteredStream(OutputStream):
    """A request's stream behind a filter.

    Sound waits while text is held back, since nobody knows which of the words it says. What is refused ends the
    request with `FinishReason.CONTENT_FILTER`; where no text was asked for, which could carry the reason, with an
    error.
    """

    def __init__(self, inner: OutputStream, own: RequestFilter, omni: AsyncOmni, *, gives_text: bool) -> None:
        self.request_id = inner.request_id
        self._inner = inner
        self._filter = own
        self._omni = omni
        self._gives_text = gives_text
        self._answers: dict[int, _Answer] = {}
        self._out: deque[OutputChunk] = deque()
        self._waiting: list[OutputChunk] = []
        self._samples = 0
        """Of sound that went out."""
        self._refused = False

    async def __anext__(self) -> OutputChunk:
        while not self._out:
            await self._take(await anext(self._inner))
        item = self._out.popleft()
        if item.audio is not None:
            self._samples += len(item.audio.samples)
        return item

    def close(self) -> None:
        self._inner.close()

    async def _take(self, item: OutputChunk) -> None:
        if item.final is not None:
            await self._settle()
            self._out.append(replace(item, final=self._rewritten(item.final)))
        elif self._refused:
            return  # what the stages still had on its way
        elif item.modality is Modality.TEXT and item.progress is None:
            await self._read(item)
        else:
            made = item.audio or item.image or item.video
            if made is not None and isinstance(await self._filter.check_made(made), Refuse | Redact):
                self._refuse()
            elif self._holding:
                self._waiting.append(item)
            else:
                self._out.append(item)

    @property
    def _holding(self) -> bool:
        return any(answer.text.held for answer in self._answers.values())

    async def _read(self, item: OutputChunk) -> None:
        answer = self._answers.setdefault(item.index, _Answer(AnswerText(item.index)))
        answer.text.held += item.text
        answer.text.ended = item.finish_reason is not None
        answer.tokens += item.token_ids
        answer.logprobs += item.logprobs
        verdict = await self._filter.check_output(answer.text)
        if isinstance(verdict, Refuse):
            self._refuse()
            return
        answer.finish = item.finish_reason
        self._release(answer, verdict, item)

    def _release(self, answer: _Answer, verdict: Verdict, item: OutputChunk) -> None:
        """Send what the filter lets through, and the sound that waited for it."""
        text = answer.text
        if isinstance(verdict, Redact):
            text.held = verdict.text
            answer.logprobs = []  # they spell what was there
        hold = 0 if text.ended or isinstance(verdict, Refuse) else max(0, min(verdict.hold, len(text.held)))
        cut = len(text.held) - hold
        out, text.held = text.held[:cut], text.held[cut:]
        if out:
            text.pieces.append(out)
        tokens: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if not text.held:
            tokens, logprobs = tuple(answer.tokens), tuple(answer.logprobs)
            answer.told += answer.logprobs
            answer.tokens, answer.logprobs = [], []
        if self._gives_text and (out or tokens or text.ended):
            self._out.append(replace(item, text=out, token_ids=tokens, logprobs=logprobs))
        if not self._holding:
            self._out.extend(self._waiting)
            self._waiting.clear()

    async def _settle(self) -> None:
        """Answers that were broken off end here: the filter sees them as they stand."""
        for index, answer in self._answers.items():
            if self._refused or answer.text.ended:
                continue
            await self._read(OutputChunk(self.request_id, Modality.TEXT, index, finish_reason=FinishReason.ABORT))
            answer.finish = None

    def _refuse(self) -> None:
        self._refused = True
        self._waiting.clear()
        self._omni.orchestrator.abort(self.request_id, FinishReason.CONTENT_FILTER)

    def _rewritten(self, final: OmniRequestOutput) -> OmniRequestOutput:
        """The whole answer as it was let through."""
        for output in final.outputs:
            answer = self._answers.get(output.index)
            output.text = answer.text.sent if answer is not None else ""
            output.logprobs = answer.told if answer is not None else []
            if self._refused and (answer is None or answer.finish is None):
                output.finish_reason = FinishReason.CONTENT_FILTER
        if not self._gives_text:
            final.outputs = []
        if not self._refused:
            return final
        final.finish_reason = FinishReason.CONTENT_FILTER
        final.images, final.videos = [], []
        final.audio = self._heard(final.audio)
        final.usage.audio_seconds = final.audio.seconds if final.audio is not None else 0.0
        if not self._gives_text:
            final.error = ContentFilterError("the content filter ended this answer; ask for something else")
        return final

    def _heard(self, audio: AudioOutput | None) -> AudioOutput | None:
        """The sound that went out; what was made of the refused text stays here."""
        if audio is None or not self._samples:
            return None
        return AudioOutput(audio.samples[: self._samples], audio.sample_rate)
