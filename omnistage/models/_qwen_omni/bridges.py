"""The two edges of a Qwen-Omni pipeline: thinker → talker and talker → codec. Pure folds over chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from omnistage.core.errors import BridgeError
from omnistage.core.family import BridgeResult
from omnistage.core.types import (
    ARInput,
    Code,
    CodecFrames,
    CodecInput,
    FinishReason,
    RequestInfo,
    SideRows,
    StageChunk,
    StageFeed,
    StagePayloadIn,
    TokenChunk,
)
from omnistage.engines.streams import complete


@dataclass(slots=True)
class _PendingTalker:
    """thinker2talker before the talker has started: rows of the prompt and of the first reply token gather here."""

    prompt: ARInput | None = None
    first_token: int | None = None
    rows: list[torch.Tensor] = field(default_factory=list)
    count: int = 0
    started: bool = False


def thinker2talker(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """Hidden rows of the thinker become the talker's prompt, then one side row a reply token.

    The talker's prompt is the thinker's prompt rows and the row of the first reply token, so it starts when the
    thinker has computed that token. The thinker's last token is never computed: it has no row.
    """
    del request
    if not isinstance(chunk.payload, TokenChunk):
        return state, ()
    pending = state if isinstance(state, _PendingTalker) else _PendingTalker()
    payload, inputs = chunk.payload, list[StagePayloadIn | StageFeed]()
    if payload.prompt is not None:
        pending.prompt = payload.prompt
    if pending.first_token is None and payload.token_ids:
        pending.first_token = payload.token_ids[0]
    final = chunk.finish is not None
    rows = payload.hidden
    if not pending.started:
        if rows is not None:
            pending.rows.append(rows)
            pending.count += len(rows)
        start = _start_talker(pending)
        if start is not None:
            inputs.append(start)
            if final:
                inputs.append(SideRows(pending.rows[0], final=True))
    elif rows is not None or final:
        inputs.append(SideRows(pending.rows[0] if rows is None else rows, final=final))
    return pending, inputs


def _start_talker(pending: _PendingTalker) -> ARInput | None:
    """The talker's input once the first reply token has been computed, else None."""
    if pending.prompt is None or pending.first_token is None:
        return None
    start = len(pending.prompt.token_ids) + 1
    if pending.count < start:
        return None
    with complete(pending.rows[0].device):
        rows = torch.cat(pending.rows)
        later = rows[start:].clone()  # views, even of no rows, would hold all of the prompt's while it is spoken
    if len(rows) != pending.count:
        raise BridgeError("rows of the thinker are missing or repeated")
    pending.started = True
    pending.rows = [later[:0].clone()]
    return ARInput(
        token_ids=(*pending.prompt.token_ids, pending.first_token),
        embeds=rows[:start],
        context=pending.prompt.context,
        streaming=True,
        side_rows=later,
    )


def talker2codec(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    """Codes as they come, a frame's together where it has several; the end token is not a code."""
    del request
    if not isinstance(chunk.payload, TokenChunk):
        return state, ()
    codes: tuple[Code, ...] = chunk.payload.frames or chunk.payload.token_ids
    if chunk.payload.ended_by is not None:
        codes = codes[:-1]
    final = chunk.finish in (FinishReason.STOP, FinishReason.LENGTH)
    if not codes and not final:
        return state, ()
    item: CodecInput | CodecFrames = CodecInput(codes, final) if state is None else CodecFrames(codes, final)
    return True, (item,)
