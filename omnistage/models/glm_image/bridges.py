"""From picture tokens to what is drawn of them. A pure fold over chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from omnistage.core.errors import BridgeError
from omnistage.core.family import BridgeResult
from omnistage.core.types import ARInput, FinishReason, RequestInfo, StageChunk, TokenChunk


@dataclass(slots=True)
class _PriorOutput:
    prompt: ARInput | None = None
    tokens: list[int] = field(default_factory=list)


def prior2encode(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """When the last token is there, the picture's own go on with the prompt; those of its preview came before them."""
    del request
    output = state if isinstance(state, _PriorOutput) else _PriorOutput()
    if chunk.index or not isinstance(chunk.payload, TokenChunk):
        return output, ()
    if chunk.payload.prompt is not None:
        output.prompt = chunk.payload.prompt
    output.tokens += chunk.payload.token_ids
    if chunk.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        return output, ()
    if output.prompt is None or output.prompt.drawing is None:
        raise BridgeError("the prior stage's first chunk has no drawing input")
    context = output.prompt.context
    rows, columns = context["grid"].tolist()
    drawing = replace(output.prompt.drawing, tokens=tuple(output.tokens[-rows * columns :]), context=context)
    return output, (drawing,)


BRIDGES = {"glm_image.prior2encode": prior2encode}
