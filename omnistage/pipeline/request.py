"""One request: its checked plan and its life over the graph."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Self

from omnistage.core.errors import BridgeError, OmniError
from omnistage.core.failures import internal_error, log_defect
from omnistage.core.graph import PipelineGraph
from omnistage.core.params import DiffusionParams, StageParams
from omnistage.core.transcripts import Transcript
from omnistage.core.types import (
    TOKEN_IDS,
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
from omnistage.media.budget import MediaHold
from omnistage.pipeline.output_assembler import OutputAssembler, Sink
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, StageTrace, Trace, Usage


@dataclass(frozen=True, slots=True)
class OmniRequest:
    """What the orchestrator takes: the entry stage's input, and what the request sets on each stage."""

    info: RequestInfo
    payload: StagePayloadIn
    params: Mapping[str, StageParams] = field(default_factory=dict)
    max_prompt_tokens: int | None = None
    """Of the lead stage; for a prompt that is made only on the way to it."""
    media: MediaHold | None = None
    """The memory of what the payload holds of its media: it is given back with the request."""


def count_tokens(payload: StagePayloadIn) -> int:
    """Prompt tokens in a stage's first input; 0 where they are still words."""
    if isinstance(payload, ARInput):
        return len(payload.token_ids) if payload.embeds is None else payload.embeds.shape[0]
    if isinstance(payload, ChatInput) and payload.tokens is not None:
        tokens = payload.tokens
        return len(tokens.prompt_token_ids) if tokens.prompt_embeds is None else tokens.prompt_embeds.shape[0]
    if isinstance(payload, ModuleInput):
        return len(payload.arrays.get(TOKEN_IDS, ()))
    return len(payload.codes) if isinstance(payload, CodecInput) else 0


def media_bytes(payload: StagePayloadIn) -> int | None:
    """Bytes of its media's features; None where it may hold the decoded media themselves."""
    if not isinstance(payload, ARInput) or payload.drawing is not None:
        return None
    return sum(tensor.nbytes for span in payload.media for tensor in span.inputs.values())


@dataclass(frozen=True, slots=True)
class Route:
    """The part of the graph that requests for certain modalities run over."""

    stages: tuple[str, ...]
    """In graph order."""
    entry: str
    lead: str
    """The graph's lead stage, or its entry where these requests do not reach it."""
    writes: bool
    """The lead gives text."""
    ends_with_lead: bool
    """Whether every stage is on the way to the lead, the only one that may give several answers."""
    sources: Mapping[str, frozenset[str]]
    targets: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, Modality]
    """What was asked for, by the stages that give it."""
    emits_hidden: frozenset[str]
    """Stages whose hidden states another one reads."""

    @classmethod
    def over(cls, graph: PipelineGraph, modalities: frozenset[Modality]) -> Self:
        stages = graph.stages_for(modalities)
        lead = graph.lead if graph.lead in stages else graph.entry
        order = tuple(name for name in graph.order if name in stages)
        return cls(
            order,
            graph.entry,
            lead,
            graph.outputs.get(Modality.TEXT) == lead,
            stages == graph.ancestors([lead]),
            {name: stages.intersection(graph.sources(name)) for name in order},
            {name: tuple(target for target in graph.targets(name) if target in stages) for name in order},
            {stage: modality for modality, stage in graph.outputs.items() if modality in modalities},
            frozenset(source for name in order for source in graph.sources(name) if graph.incoming[name].reads_hidden),
        )


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked request: where it runs, and with which parameters."""

    request: OmniRequest
    route: Route
    params: Mapping[str, StageParams]
    answers: int
    """Completions of the lead stage."""
    places: int
    """What it counts in `max_inflight`: its completions, or its pictures where they are more."""


def spread(params: Mapping[str, StageParams], types: Mapping[str, type[StageParams]]) -> dict[str, StageParams]:
    """Parameters by stage, those of a shared type made one set for all stages that take it."""
    result = dict(params)
    for kind in {kind for kind in types.values() if kind.shared}:
        sets = [each for name in types if isinstance(each := params.get(name), kind)]
        if sets:
            merged = reduce(lambda left, right: left.merged(right), sets)
            result.update({name: merged for name, params_type in types.items() if params_type is kind})
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
        if isinstance(payload, ARInput):
            self.awaiting_final_input = payload.streaming
        elif isinstance(payload, CodecInput | Latents | ModuleInput):
            self.awaiting_final_input = not payload.final

    def accept(self, feed: StageFeed) -> None:
        if self.feed_type is None or not isinstance(feed, self.feed_type):
            raise BridgeError(
                f"the bridge into {self.name!r} gave a {type(feed).__name__}, which does not continue its input"
            )
        self.awaiting_final_input = self.awaiting_final_input and not feed.final


class RequestRun:
    """An admitted request.

    `lock` guards the state below and is never held over a call into a bridge, a sink or a stage. `emit_lock`
    serialises the sink; it may be taken first, never the other way round. The thread that sets the reason first,
    through `end`, is the one that ends the request.
    """

    def __init__(self, plan: RequestPlan, sink: Sink, model: str = "") -> None:
        route = plan.route
        self.plan = plan
        self.info = plan.request.info
        self.sink = sink
        self.lock = threading.Lock()
        self.emit_lock = threading.RLock()  # a sink may abort its own request
        self.over = False
        self.reason: FinishReason | None = None
        self.error: OmniError | None = None
        self.final_due = False
        """It is over and its sink has not got the last item yet."""
        self.timer: int | None = None
        self.steps = 0
        """Denoising steps done."""
        self.cached_tokens = 0
        self.trace = Trace(self.info.request_id, self.info.arrival)
        self.lead, self.writes = route.lead, route.writes
        self.prompt_tokens = 0
        self.prompt_media: dict[Modality, int] = {}
        if route.lead == route.entry:
            self.note_prompt(plan.request.payload)
        self.stages = {
            name: StageRun(
                name,
                route.targets[name],
                open_sources=set(route.sources[name]),
                open_answers=set(range(plan.answers if name == route.lead else 1)),
                trace=StageTrace(name),
            )
            for name in route.stages
        }
        self.trace.stages = {name: stage.trace for name, stage in self.stages.items()}
        self.output = OutputAssembler(self.info.request_id, route.outputs, plan.answers, _metadata(plan, model))

    def note_prompt(self, payload: StagePayloadIn) -> None:
        """Count the prompt, the lead stage's own first input, and its tokens that stand for media."""
        self.prompt_tokens, media = count_tokens(payload), Counter[Modality]()
        for span in payload.media if isinstance(payload, ARInput) else ():
            media[span.kind] += len(span.positions)
        self.prompt_media = dict(media)

    def record(self, chunk: StageChunk) -> bool:
        """Note a chunk in the trace. False: the request is over and the chunk must be ignored."""
        at = chunk.time - self.info.arrival
        payload = chunk.payload
        with self.lock:
            if self.over:
                return False
            stage = self.stages[chunk.stage]
            trace = stage.trace
            if trace.started is None and (payload is not None or chunk.finish is None):
                trace.started = at
            if isinstance(payload, TokenChunk):
                carries_output = bool(payload.token_ids or payload.text)
                trace.tokens += len(payload.token_ids) + payload.unlisted_tokens
                if chunk.stage == self.lead and chunk.index == 0:
                    self.cached_tokens += payload.cached_tokens
                    self.prompt_tokens = payload.prompt_tokens or self.prompt_tokens
            elif isinstance(payload, Transcript):
                carries_output = bool(payload.token_ids or payload.text)
                trace.tokens += len(payload.token_ids)
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

    def stage_ended(self, name: str) -> tuple[list[str], FinishReason | None]:
        """Mark a stage ended. The targets that can no longer start, and the request's reason if it was the last."""
        skipped: list[str] = []
        with self.lock:
            if self.over:
                return skipped, None
            stage = self.stages[name]
            for target in map(self.stages.__getitem__, stage.targets):
                target.open_sources.discard(name)
                if target.open_sources:
                    continue
                if target.phase is Phase.WAITING:
                    target.open_answers.clear()
                    target.reason = FinishReason.STOP
                    skipped.append(target.name)
                elif target.phase is Phase.RUNNING and target.awaiting_final_input:
                    raise BridgeError(
                        f"the bridge into {target.name!r} saw the end of its sources and left the stage waiting for "
                        "input; its last input must be final"
                    )
            stage.phase = Phase.ENDED
            stage.trace.finish = stage.reason
            over = all(other.phase is Phase.ENDED for other in self.stages.values())
            return skipped, self._reason() if over else None

    def _reason(self) -> FinishReason | None:
        """The lead stage's, unless another was cut at its limit: its output is not whole either."""
        reasons = [stage.reason for stage in self.stages.values()]
        return FinishReason.LENGTH if FinishReason.LENGTH in reasons else self.stages[self.lead].reason

    def end(self, reason: FinishReason, error: OmniError | None, now: float) -> list[str] | None:
        """Fix the reason. The stages to abort, or None if the request was over already."""
        with self.lock:
            if self.over:
                return None
            self.reason, self.error, self.over = reason, error, True
            self.final_due = True
            self.trace.finished = now - self.info.arrival
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
            writes=self.writes,
        )

    def emit_final(self) -> None:
        """Give the sink of a request that is over its last item, once.

        Where another thread is in the sink, that one does it when it comes out: no thread waits for a consumer, least
        of all the thread that ends requests at their deadlines.
        """
        while self.final_due and self.emit_lock.acquire(blocking=False):
            try:
                if self.final_due:
                    self.final_due = False
                    self.sink(self._final_item())
            except BaseException as failure:
                # The boundary of a consumer: it is gone or broken, and its request is over anyway.
                log_defect("the consumer of a request's last item", failure)
            finally:
                self.emit_lock.release()

    def _final_item(self) -> OutputChunk:
        try:
            return self.output.final(self.reason or FinishReason.ERROR, self.error, self.usage(), self.trace)
        except BaseException as failure:
            # Every request must end: one whose output cannot be put together ends without it.
            output = OmniRequestOutput(self.info.request_id, finish_reason=FinishReason.ERROR, trace=self.trace)
            output.error = self.error or internal_error("assembling the output", failure)
            return OutputChunk(self.info.request_id, Modality.TEXT, final=output)

    def trace_now(self) -> Trace:
        """A copy of the trace, which the stages no longer change."""
        with self.lock:
            stages = {name: replace(trace) for name, trace in self.trace.stages.items()}
            return replace(self.trace, stages=stages)


def _metadata(plan: RequestPlan, model: str) -> dict[str, object]:
    """What a picture's metadata say about its generation; empty for a request without pictures."""
    params = next((p for p in plan.params.values() if isinstance(p, DiffusionParams)), None)
    if params is None:
        return {}
    values = {name: value for name, value in params.model_dump(exclude={"seed"}).items() if value not in (None, ())}
    return {"model": model, "prompt": _drawing_prompt(plan.request.payload), "parameters": values}


def _drawing_prompt(payload: StagePayloadIn) -> str:
    """The prompt of a picture, where there is one."""
    if isinstance(payload, ChatInput):
        from omnistage.core.messages import TextPart

        user = [message.parts for message in payload.messages if message.role == "user"]
        words = [part.text for part in user[-1] if isinstance(part, TextPart)] if user else []
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
