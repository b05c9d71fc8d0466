"""Reasoning: the think block that some models write before their answer, apart from the answer.

A model that thinks writes `<think>...</think>` first; some chat templates write the start themselves. Clients get what
is inside as `reasoning`, without the white space around it, and the rest as `text`. A constraint begins behind the
block. What is spoken is not split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from omnistage.core.errors import InvalidRequestError
from omnistage.core.family import THINK_END, THINK_START, ThinkBlock, Thinking
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.core.types import Modality
from omnistage.pipeline.intake import ParamsLike, Prompt, RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.stream import OutputStream

ParamT = TypeVar("ParamT")


def plan_thinking(
    thinking: Thinking | None, prompt: Prompt, params: ParamsLike, options: RequestOptions, *, speaks: bool = True
) -> tuple[ParamsLike, ThinkBlock | None]:
    """The request's parameters, and the block in its answers if they may have one; `speaks`: the model has speech.

    Raises `InvalidRequestError` where a request asks for what the model does not do.
    """
    block = None if thinking is None else thinking.think_block(options.thinking)
    if options.thinking and block is None:
        raise InvalidRequestError("this model does not think; leave it out", param="thinking")
    template = options.template
    opens = template.generation_prompt and not template.continue_final
    if block is None or not isinstance(prompt, list | tuple) or not opens:
        return params, None
    if options.thinking is False and block.opened:
        raise InvalidRequestError("this model always thinks; leave it out", param="thinking")
    if speaks and Modality.AUDIO in (options.modalities or ()):
        if block.opened or options.thinking:
            raise InvalidRequestError(
                "reasoning would be spoken; turn thinking off, or leave audio out of modalities", param="thinking"
            )
        return params, None
    if not isinstance(params, Mapping) or not any(map(_structured, params.values())):
        return params, block
    if not (block.opened or options.thinking):  # it is not known whether there would be a block: there is none
        return params, None
    return {name: _behind(block, value) for name, value in params.items()}, block


def _structured(params: object) -> StructuredOutput | None:
    return params.structured if isinstance(params, SamplingParams) else None


def _behind(block: ThinkBlock, params: ParamT) -> ParamT:
    """The parameters with their constraint, if they have one, behind the block."""
    structured = _structured(params)
    if structured is None or not isinstance(params, SamplingParams):
        return params
    later = structured.model_copy(update={"after_token": block.end_token})
    return params.model_copy(update={"structured": later})


@dataclass(slots=True)
class ReasoningReader:
    """Splits the text of one answer as it arrives into reasoning and the rest."""

    opened: bool
    """The text begins inside of the block."""
    inside: bool = False
    over: bool = False
    """From here on all is the answer."""
    _pending: str = ""
    _begun: bool = False
    """There has been reasoning, or some of the answer."""

    @property
    def passes(self) -> bool:
        """Whether the rest is the answer as it stands."""
        return self.over and self._begun and not self._pending

    def push(self, text: str) -> tuple[str, str]:
        """The reasoning and the text that this piece completes."""
        self._pending += text
        reasoning = self._read_block() if not self.over else ""
        return reasoning, self._read_answer() if self.over else ""

    def end(self) -> tuple[str, str]:
        """What is left when the text is over."""
        rest, self._pending = self._pending, ""
        if self.over:
            return "", ""  # white space behind a block
        return (rest.strip() if not self._begun else rest.rstrip(), "") if self.inside else ("", rest)

    def _read_block(self) -> str:
        if not self.inside:
            start = self._pending.lstrip()
            if THINK_START.startswith(start[: len(THINK_START)]) and len(start) < len(THINK_START):
                return ""  # it may become the beginning of a block
            self.inside = self.opened or start.startswith(THINK_START)
            if not self.inside:
                self.over = self._begun = True
                return ""
            self._pending = start.removeprefix(THINK_START)
        before, end, after = self._pending.partition(THINK_END)
        if not self._begun:
            before = before.lstrip()
        if end:
            self._pending, self.over, self._begun = after, True, False
            return before.rstrip()
        ready = before[: len(before) - _overlap(before)].rstrip()
        self._pending = before[len(ready) :]
        self._begun |= bool(ready)
        return ready

    def _read_answer(self) -> str:
        text, self._pending = self._pending, ""
        if self._begun:
            return text
        text = text.lstrip()
        self._begun = bool(text)
        return text


def _overlap(text: str) -> int:
    """How much of the end of `text` may be the beginning of the block's end."""
    return next(n for n in range(min(len(text), len(THINK_END) - 1), -1, -1) if text.endswith(THINK_END[:n]))


class ReasoningStream(OutputStream):
    """A request's stream with the reasoning of its answers apart from their text."""

    def __init__(self, inner: OutputStream, block: ThinkBlock) -> None:
        self.request_id, self.trace = inner.request_id, inner.trace
        self._inner = inner
        self._block = block
        self._readers: dict[int, ReasoningReader] = {}

    async def take(self) -> list[OutputChunk]:
        return [chunk for item in await self._inner.take() for chunk in self._split(item)]

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    def close(self) -> None:
        self._inner.close()

    def _split(self, chunk: OutputChunk) -> list[OutputChunk]:
        if chunk.final is not None:
            return [*self._cut_off(), replace(chunk, final=self._split_final(chunk.final))]
        if chunk.modality is not Modality.TEXT or not (chunk.text or chunk.finish_reason):
            return [chunk]
        reader = self._readers.get(chunk.index)
        if reader is None:
            reader = self._readers[chunk.index] = ReasoningReader(self._block.opened)
        if reader.passes:
            return [chunk]
        reasoning, text = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            rest = reader.end()
            reasoning, text = reasoning + rest[0], text + rest[1]
        return [replace(chunk, text=text, reasoning=reasoning)]

    def _cut_off(self) -> list[OutputChunk]:
        """What was held back of answers that ended without a word."""
        ends = ((index, *reader.end()) for index, reader in self._readers.items())
        return [
            OutputChunk(self.request_id, Modality.TEXT, index, text, reasoning=reasoning)
            for index, reasoning, text in ends
            if reasoning or text
        ]

    def _split_final(self, final: OmniRequestOutput) -> OmniRequestOutput:
        for output in final.outputs:
            reader = ReasoningReader(self._block.opened)
            pushed, rest = reader.push(output.text), reader.end()
            output.reasoning, output.text = pushed[0] + rest[0], pushed[1] + rest[1]
            if reader.inside:
                ids, end = output.token_ids, self._block.end_token
                final.usage.reasoning_tokens += ids.index(end) + 1 if end in ids else len(ids)
        return final
