"""The edge of CSM's pipeline: frames to the codec. A pure fold over chunks."""

from __future__ import annotations

from omnistage.core.family import BridgeResult
from omnistage.core.types import CodecFrames, CodecInput, FinishReason, RequestInfo, StageChunk, TokenChunk

END_CODE = "end_code"
"""Names the code of the frame that ends an answer, in the prompt's context."""


def frames2codec(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """Frames as they come; neither the end token nor a frame of end codes is sound."""
    del request
    payload = chunk.payload
    if not isinstance(payload, TokenChunk):
        return state, ()
    end, started = state if isinstance(state, tuple) else (None, False)
    if payload.prompt is not None and END_CODE in payload.prompt.context:
        end = int(payload.prompt.context[END_CODE])
    frames = payload.frames if payload.ended_by is None else payload.frames[:-1]
    frames = tuple(frame for frame in frames if set(frame) != {end})
    final = chunk.finish in (FinishReason.STOP, FinishReason.LENGTH)
    if not frames and not final:
        return (end, started), ()
    item: CodecInput | CodecFrames = CodecFrames(frames, final) if started else CodecInput(frames, final)
    return (end, True), (item,)
