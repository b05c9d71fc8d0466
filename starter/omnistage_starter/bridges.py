"""The starter's bridges: hear → think, think → speak, think → draw."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omnistage.core.errors import BridgeError
from omnistage.core.family import BridgeResult
from omnistage.core.sentences import Sentences
from omnistage.core.types import (
    ARInput,
    Condition,
    FinishReason,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
    StageChunk,
    TokenChunk,
)
from omnistage.engines.streams import complete

SIZE = 96
"""Pixels: width and height of an image."""
TEXT_ROWS = 24
"""Rows of hidden states, the last ones of the last message and the template's end, that condition an image."""
SUBJECT = "subject"
"""Key of a prompt's context: `int64 [2]`, from the first row of the last message to the end of the prompt."""
VERBATIM = "verbatim"
"""Key of a prompt's context: UTF-8 bytes of a text to be spoken verbatim in place of the answer."""
_EPSILON = 1e-6
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


def hear2think(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """The hear stage gives the language model's prompt."""
    del request
    payload = chunk.payload
    return state, (payload.prompt,) if isinstance(payload, ModuleOutput) and payload.prompt is not None else ()


@dataclass(slots=True)
class _SpeakState:
    sentences: Sentences = field(default_factory=Sentences)
    verbatim: bool = False
    """The text came with the prompt, and the answer is not spoken."""
    started: bool = False


def think2speak(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """Each sentence as soon as it is complete, so that speech starts while the answer is still generated."""
    del request
    speech = state if isinstance(state, _SpeakState) else _SpeakState()
    if chunk.index or not isinstance(chunk.payload, TokenChunk):
        return speech, ()
    payload, text = chunk.payload, "" if speech.verbatim else chunk.payload.text
    if payload.prompt is not None and VERBATIM in payload.prompt.context:
        speech.verbatim, text = True, bytes(payload.prompt.context[VERBATIM].tolist()).decode()
    speech.sentences, sentences = speech.sentences.push(text)
    finished = chunk.finish in _ENDS
    if finished:
        sentences += speech.sentences.finish()
    pieces = [ModuleInput(text=sentence, final=False) for sentence in sentences]
    speech.started = speech.started or bool(pieces)
    if finished and speech.started:
        last = pieces.pop().text if pieces else ""
        pieces.append(ModuleInput(text=last, final=True))
    return speech, pieces


@dataclass(slots=True)
class _DrawState:
    prompt: ARInput | None = None
    rows: list[torch.Tensor] = field(default_factory=list)
    """Of the subject so far, in order."""
    count: int = 0
    """Rows of the prompt so far."""
    emitted: bool = False


def think2draw(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """The condition of the image, from the last message's hidden states, as soon as the prompt is computed."""
    del request
    draw = state if isinstance(state, _DrawState) else _DrawState()
    payload = chunk.payload
    if draw.emitted or chunk.index or not isinstance(payload, TokenChunk):
        return draw, ()
    draw.prompt = payload.prompt or draw.prompt
    if draw.prompt is None or payload.hidden is None:
        return draw, ()
    if SUBJECT not in draw.prompt.context:
        raise BridgeError("the prompt does not say which of its rows are the subject of the image")
    start, end = draw.prompt.context[SUBJECT].tolist()
    first = max(start, end - TEXT_ROWS)
    if payload.hidden_start != draw.count:
        raise BridgeError("rows of hidden states from think are missing or repeated")
    new, offset = payload.hidden, draw.count
    draw.rows.append(new[max(first - offset, 0) : max(end - offset, 0)])
    draw.count += len(new)
    if draw.count < end:
        return draw, ()
    draw.emitted = True
    with complete(payload.hidden.device):
        condition = condition_of(torch.cat(draw.rows))
    draw.rows.clear()
    return draw, (condition,)


def condition_of(rows: torch.Tensor) -> Condition:
    """The denoiser's condition from hidden states `[n, H]`, n at most `TEXT_ROWS`: RMS-normalised, zero-padded."""
    values = rows.float()
    scaled = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + _EPSILON)
    embeds = values.new_zeros(TEXT_ROWS, values.shape[1])
    embeds[: len(scaled)] = scaled
    return Condition({"embeds": embeds}, {"embeds": torch.zeros_like(embeds)}, width=SIZE, height=SIZE)


BRIDGES = {
    "starter.hear2think": hear2think,
    "starter.think2speak": think2speak,
    "starter.think2draw": think2draw,
}
