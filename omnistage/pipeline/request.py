"""One request: its checked plan and its life over the graph."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Protocol

from omnistage.core.errors import (
    BridgeError,
    OmniError,
)
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    ChatInput,
    ChunkPayload,
    CodecFrames,
    CodecInput,
    DiffusionInput,
    FinishReason,
    ImageChunk,
    Latents,
    Modality,
    ModuleInput,
    ModuleOutput,
    Progress,
    RequestInfo,
    SideRows,
    StageChunk,
    StageFeed,
    StagePayloadIn,
    TokenChunk,
    VideoChunk,
)
from omnistage.pipeline.output import OutputAssembler, Sink
from omnistage.pipeline.outputs import StageTrace, Trace, Usage


class PipelineGraph(Protocol):
    """What the orchestrator reads of a pipeline's graph."""

    @property
    def entry(self) -> str:
        """The stage that takes the prompt."""
        ...

    @property
    def lead(self) -> str:
        """The stage that gives text, else the entry.

        Parameters given without a stage's name, `n`, the finish reason and the token counts are this stage's.
        """
        ...

    @property
    def order(self) -> tuple[str, ...]:
        """Every stage, sources before targets."""
        ...

    @property
    def outputs(self) -> Mapping[Modality, str]:
        """The stage that gives each modality."""
        ...

    def sources(self, stage: str) -> tuple[str, ...]: ...

    def targets(self, stage: str) -> tuple[str, ...]: ...

    def needed(self, modalities: frozenset[Modality]) -> frozenset[str]:
        """The stages that must run to give these modalities."""
        ...


@dataclass(frozen=True, slots=True)
class OmniRequest:
    """What the orchestrator takes: the entry stage's input, and what the request sets on each stage."""

    info: RequestInfo
    payload: StagePayloadIn
    params: Mapping[str, StageParams] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    """Of the lead stage; for a prompt that is made only on the way to it."""

    @property
    def prompt_tokens(self) -> int:
        """As far as they are known before anything has run."""
        return count_tokens(self.payload)


def count_tokens(payload: StagePayloadIn) -> int:
    """Prompt tokens in a stage's first input; 0 where they are still words."""
    if isinstance(payload, ARInput):
        return len(payload.token_ids) if payload.embeds is None else payload.embeds.shape[0]
    if isinstance(payload, ChatInput) and payload.tokens is not None:
        tokens = payload.tokens
        return len(tokens.prompt_token_ids) if tokens.prompt_embeds is None else tokens.prompt_embeds.shape[0]
    return len(payload.codes) if isinstance(payload, CodecInput) else 0


def count_media(payload: StagePayloadIn) -> dict[Modality, int]:
    """Prompt tokens that stand for media."""
    counts: dict[Modality, int] = {}
    for span in payload.media if isinstance(payload, ARInput) else ():
        counts[span.kind] = counts.get(span.kind, 0) + len(span.positions)
    return counts


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked request: which stages run, in graph order, and with which parameters."""

    request: OmniRequest
    stages: tuple[str, ...]
    params: Mapping[str, StageParams]
    lead: str
    """The graph's lead stage, or its entry where this request does not reach it."""
    answers: int = 1

    @property
    def info(self) -> RequestInfo:
        return self.request.info


def spread(given: Mapping[str, StageParams], types: Mapping[str, type[StageParams]]) -> dict[str, StageParams]:
    """Parameters by stage, those of a shared type made one set for all stages that take it."""
    result = dict(given)
    for kind in {kind for kind in types.values() if kind.shared}:
        parts = [part for name in types if isinstance(part := given.get(name), kind)]
        if parts:
            one = reduce(lambda merged, part: merged.merged(part), parts)
            result.update({name: one for name, taken in types.items() if taken is kind})
    return result


class Phase(StrEnum):
    """Where a request stands in one stage. It only ever moves forward."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


_FEED_FOR: dict[type, type[StageFeed]] = {
    ARInput: SideRows,
    CodecInput: CodecFrames,
    Latents: Latents,
    ModuleInput: ModuleInput,
}
"""What may follow a first input; the others are complete by themselves."""


def _is_open(payload: StagePayloadIn) -> bool:
    """Whether a first input says that more will follow."""
    if isinstance(payload, ARInput):
        return payload.streaming
    return not payload.final if isinstance(payload, CodecInput | Latents | ModuleInput) else False


@dataclass(slots=True)
class StageRun:
    """A request in one stage. Guarded by the request's lock, but for `state`, which `fold_lock` guards."""

    name: str
    targets: tuple[str, ...]
    open_sources: set[str]
    open_answers: set[int]
    trace: StageTrace
    phase: Phase = Phase.WAITING
    reason: FinishReason | None = None
    """Why its first answer ended."""
    awaiting_final_input: bool = False
    """Its input streams and the bridge has not said yet that it is complete."""
    feed_type: type[StageFeed] | None = None
    fold_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held over a bridge call and the queueing of what it gave: several sources may fold at once."""
    state: object = None
    """The bridge's own."""

    def begin(self, payload: StagePayloadIn, now: float) -> None:
        self.phase = Phase.RUNNING
        self.trace.submitted = now
        self.feed_type = _FEED_FOR.get(type(payload))
        self.awaiting_final_input = _is_open(payload)

    def accept(self, feed: StageFeed) -> None:
        if self.feed_type is None or not isinstance(feed, self.feed_type):
            raise BridgeError(
                f"the bridge into {self.name!r} gave a {type(feed).__name__}, which does not continue its input"
            )
        self.awaiting_final_input = self.awaiting_final_input and not feed.final


class RequestRun:
    """An admitted request.

    `lock` guards the state below and is never held over a call into a bridge, a sink or a stage. `emit_lock`
    serialises the sink; it may be taken first, never the other way round. Whoever sets the reason first, through
    `end`, is the one that ends the request.
    """

    def __init__(self, plan: RequestPlan, graph: PipelineGraph, sink: Sink, model: str = "") -> None:
        self.plan = plan
        self.info = plan.info
        self.sink = sink
        self.lock = threading.Lock()
        self.emit_lock = threading.RLock()  # a sink may abort its own request
        self.reason: FinishReason | None = None
        self.error: OmniError | None = None
        self.timer: int | None = None
        self.steps = 0
        """Denoising steps done."""
        self.cached_tokens = 0
        self.trace = Trace(plan.info.request_id, plan.info.arrival)
        self.lead = plan.lead
        self.prompt_tokens = 0
        self.prompt_media: dict[Modality, int] = {}
        if plan.lead == graph.entry:
            self.note_prompt(plan.request.payload)
        self.stages = {name: self._stage_run(name, graph) for name in plan.stages}
        self.trace.stages = {name: stage.trace for name, stage in self.stages.items()}
        asked = {stage: modality for modality, stage in graph.outputs.items() if modality in plan.info.modalities}
        self.output = OutputAssembler(plan.info.request_id, asked, plan.answers, _metadata(plan, model))

    def _stage_run(self, name: str, graph: PipelineGraph) -> StageRun:
        needed = set(self.plan.stages)
        return StageRun(
            name,
            targets=tuple(target for target in graph.targets(name) if target in needed),
            open_sources={source for source in graph.sources(name) if source in needed},
            open_answers=set(range(self.plan.answers if name == self.lead else 1)),
            trace=StageTrace(name),
        )

    def note_prompt(self, payload: StagePayloadIn) -> None:
        """Count the prompt: the lead stage's own first input."""
        self.prompt_tokens, self.prompt_media = count_tokens(payload), count_media(payload)

    @property
    def over(self) -> bool:
        return self.reason is not None

    def since_arrival(self, time: float) -> float:
        return time - self.info.arrival

    def record(self, chunk: StageChunk) -> bool:
        """Note a chunk in the trace. False: the request is over and the chunk must be ignored."""
        at = chunk.time - self.info.arrival
        payload = chunk.payload
        with self.lock:
            if self.reason is not None:
                return False
            stage = self.stages[chunk.stage]
            trace = stage.trace
            if trace.started is None and (payload is not None or chunk.finish is None):
                trace.started = at
            if isinstance(payload, TokenChunk):
                carries_output = bool(payload.token_ids or payload.text)
                trace.tokens += len(payload.token_ids)
                if chunk.stage == self.lead and chunk.index == 0:
                    self.cached_tokens += payload.cached_tokens
            elif isinstance(payload, Progress):
                carries_output = False
                trace.tokens = self.steps = payload.step
            else:
                carries_output = payload is not None and _carries_output(payload)
            if carries_output:
                trace.first_chunk = at if trace.first_chunk is None else trace.first_chunk
                trace.last_chunk = at
                trace.chunks += 1
            if chunk.finish is not None:
                stage.open_answers.discard(chunk.index)
                if chunk.index == 0:
                    stage.reason = chunk.finish
            return True

    def source_ended(self, source: str, target: str) -> bool:
        """Take note that `source` is done with feeding `target`. True: no source is left and it was never started."""
        with self.lock:
            stage = self.stages[target]
            stage.open_sources.discard(source)
            if stage.open_sources or self.over:
                return False
            if stage.phase is Phase.WAITING:
                stage.open_answers.clear()
                stage.reason = FinishReason.STOP
                return True
            if stage.phase is Phase.RUNNING and stage.awaiting_final_input:
                raise BridgeError(
                    f"the bridge into {target!r} saw the end of its sources and left the stage waiting for input; "
                    "its last input must be final"
                )
            return False

    def stage_ended(self, name: str) -> FinishReason | None:
        """Mark a stage ended. The request's reason if that was its last stage, else None."""
        with self.lock:
            if self.over:
                return None
            stage = self.stages[name]
            stage.phase = Phase.ENDED
            stage.trace.finish = stage.reason
            if any(other.phase is not Phase.ENDED for other in self.stages.values()):
                return None
            return self.stages[self.lead].reason

    def end(self, reason: FinishReason, error: OmniError | None, now: float) -> list[str] | None:
        """Fix the reason. The stages to abort, or None if the request was over already."""
        with self.lock:
            if self.over:
                return None
            self.reason, self.error = reason, error
            self.trace.finished = self.since_arrival(now)
            running = [stage for stage in self.stages.values() if stage.phase is Phase.RUNNING]
            for stage in running:
                stage.trace.finish = stage.reason if not stage.open_answers else reason
            return [stage.name for stage in running]

    def usage(self) -> Usage:
        tokens = {name: stage.trace.tokens for name, stage in self.stages.items()}
        return Usage(
            self.prompt_tokens,
            tokens[self.lead],
            stage_tokens=tokens,
            steps=self.steps,
            cached_tokens=self.cached_tokens,
            prompt_media=self.prompt_media,
        )

    def trace_now(self) -> Trace:
        """A copy of the trace, which the stages no longer change."""
        with self.lock:
            stages = {name: replace(trace) for name, trace in self.trace.stages.items()}
            return replace(self.trace, stages=stages)


def _metadata(plan: RequestPlan, model: str) -> dict[str, object]:
    """What a picture says about its making; empty for a request that makes none."""
    params = next((p for p in plan.params.values() if isinstance(p, DiffusionParams)), None)
    if params is None:
        return {}
    values = {name: value for name, value in params.model_dump().items() if value is not None and name != "seed"}
    return {"model": model, "prompt": _drawn(plan.request.payload), "parameters": values}


def _drawn(payload: StagePayloadIn) -> str:
    """The words that a picture was asked for with, where there are any."""
    if isinstance(payload, ChatInput):
        from omnistage.core.messages import TextPart

        asked = [message.parts for message in payload.messages if message.role == "user"]
        words = [part.text for part in asked[-1] if isinstance(part, TextPart)] if asked else []
        return payload.prompt if payload.prompt is not None else "\n".join(words)
    drawing = payload.drawing if isinstance(payload, ARInput) else payload
    return drawing.prompt if isinstance(drawing, DiffusionInput) else ""


def _carries_output(payload: ChunkPayload) -> bool:
    """Whether a chunk's payload holds something generated, rather than a preview or nothing."""
    if isinstance(payload, AudioChunk):
        return len(payload.samples) > 0
    if isinstance(payload, ImageChunk | VideoChunk | Latents):
        return not payload.preview
    if isinstance(payload, ModuleOutput):
        return bool(payload.arrays or payload.text) or payload.prompt is not None
    return True
