"""The starter's edges: hear → think, think → speak, think → draw. Folds over chunks, nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omnistage.core.errors import BridgeError
from omnistage.core.family import BridgeResult
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
from omnistage_starter.speaking import Sentences

SIZE = 96
"""Pixels: width and height of a picture."""
TEXT_ROWS = 24
"""Hidden rows of the last message, the template's end behind it, that a picture is drawn from."""
SUBJECT = "subject"
"""Key of a prompt's context: `int64 [2]`, from the first row of the last message to the end of the prompt."""
SPOKEN = "spoken"
"""Key of a prompt's context: UTF-8 bytes of a text to be spoken as it is, whatever is thought of it."""
_EPSILON = 1e-6
_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


def hear2think(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """What was heard comes as the language model's prompt already."""
    del request
    payload = chunk.payload
    return state, (payload.prompt,) if isinstance(payload, ModuleOutput) and payload.prompt is not None else ()


@dataclass(slots=True)
class _Reading:
    sentences: Sentences = field(default_factory=Sentences)
    given: bool = False
    """The answer is not what is spoken: the text came with the prompt."""
    begun: bool = False


def think2speak(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """Each sentence as soon as it is complete, so that the first is spoken while the rest is still written."""
    del request
    reading = state if isinstance(state, _Reading) else _Reading()
    if chunk.index or not isinstance(chunk.payload, TokenChunk):
        return reading, ()
    payload, text = chunk.payload, "" if reading.given else chunk.payload.text
    if payload.prompt is not None and SPOKEN in payload.prompt.context:
        reading.given, text = True, bytes(payload.prompt.context[SPOKEN].tolist()).decode()
    reading.sentences, sentences = reading.sentences.push(text)
    over = chunk.finish in _ENDS
    if over:
        sentences += reading.sentences.finish()
    pieces = [ModuleInput(text=sentence, final=False) for sentence in sentences]
    reading.begun = reading.begun or bool(pieces)
    if over and reading.begun:
        last = pieces.pop().text if pieces else ""
        pieces.append(ModuleInput(text=last, final=True))
    return reading, pieces


@dataclass(slots=True)
class _Watching:
    prompt: ARInput | None = None
    rows: list[torch.Tensor] = field(default_factory=list)
    """Those of the subject so far, in order."""
    count: int = 0
    """Rows of the prompt seen so far."""
    drawn: bool = False


def think2draw(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """As soon as the prompt is computed, its last message's hidden rows become what is drawn."""
    del request
    watching = state if isinstance(state, _Watching) else _Watching()
    payload = chunk.payload
    if watching.drawn or chunk.index or not isinstance(payload, TokenChunk):
        return watching, ()
    watching.prompt = payload.prompt or watching.prompt
    if watching.prompt is None or payload.hidden is None:
        return watching, ()
    if SUBJECT not in watching.prompt.context:
        raise BridgeError("the prompt does not say which of its rows are to be drawn")
    start, end = watching.prompt.context[SUBJECT].tolist()
    first = max(start, end - TEXT_ROWS)
    if payload.hidden_start != watching.count:
        raise BridgeError("the thinker's rows do not add up")
    new, begin = payload.hidden, watching.count
    watching.rows.append(new[max(first - begin, 0) : max(end - begin, 0)])
    watching.count += len(new)
    if watching.count < end:
        return watching, ()
    watching.drawn = True
    rows = torch.cat(watching.rows)
    watching.rows.clear()
    return watching, (condition_of(rows),)


def condition_of(rows: torch.Tensor) -> Condition:
    """What the denoiser takes of the last hidden rows `[n, H]` of a message, n at most `TEXT_ROWS`."""
    wide = rows.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + _EPSILON)
    embeds = wide.new_zeros(TEXT_ROWS, wide.shape[1])
    embeds[: len(scaled)] = scaled
    return Condition({"embeds": embeds}, {"embeds": torch.zeros_like(embeds)}, width=SIZE, height=SIZE)


BRIDGES = {
    "starter.hear2think": hear2think,
    "starter.think2speak": think2speak,
    "starter.think2draw": think2draw,
}
