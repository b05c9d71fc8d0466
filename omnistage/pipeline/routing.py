"""Checks on what crosses an edge: a bridge's result, the length of a prompt that a bridge made."""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.core.errors import BridgeError, OmniError, PromptTooLongError
from omnistage.core.failures import log_defect
from omnistage.core.family import Bridge
from omnistage.core.types import RequestInfo, StageChunk, StageFeed, StagePayloadIn
from omnistage.pipeline.request import count_tokens


def call_bridge(
    bridge: Bridge, info: RequestInfo, state: object, chunk: StageChunk, target: str
) -> tuple[object, Sequence[StagePayloadIn | StageFeed]]:
    """One step of a bridge's fold; whatever goes wrong in it is a `BridgeError`."""
    try:
        result = bridge(info, state, chunk)
    except OmniError as error:
        raise BridgeError(f"the bridge into {target!r} failed: {error}") from error
    except BaseException as error:
        log_defect(f"the bridge into {target!r}", error)
        raise BridgeError(f"the bridge into {target!r} failed with {type(error).__name__}") from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], list | tuple):
        raise BridgeError(f"the bridge into {target!r} must return (state, a list of inputs)")
    for value in result[1]:
        if not isinstance(value, StagePayloadIn | StageFeed):
            raise BridgeError(
                f"the bridge into {target!r} returned a {type(value).__name__}, which is not a stage input"
            )
    return result


def check_length(payload: StagePayloadIn, limit: int | None) -> None:
    if limit is not None and (tokens := count_tokens(payload)) > limit:
        raise PromptTooLongError(f"has {tokens} tokens, over the limit of {limit}; shorten it", param="prompt")


def no_inputs(info: RequestInfo, state: object, chunk: StageChunk) -> tuple[object, list[StagePayloadIn | StageFeed]]:
    """In place of a bridge whose edge is folded in another process."""
    return None, []
