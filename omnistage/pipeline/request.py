"""One request: from what a caller gives, to a checked plan, to its life over the graph."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from omnistage.errors import (
    BridgeError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from omnistage.pipeline.output import OutputAssembler, Sink
from omnistage.pipeline.registry import InputProcessor
from omnistage.types import (
    SHOWN_CHARS,
    ARInput,
    AudioChunk,
    CodecFrames,
    CodecInput,
    FinishReason,
    Modality,
    OmniTokensPrompt,
    RequestInfo,
    SideRows,
    StageChunk,
    StageFeed,
    StageParams,
    StagePayloadIn,
    StageTrace,
    TokenChunk,
    Trace,
    Usage,
    is_utf8,
    short_repr,
)

if TYPE_CHECKING:
    import torch

    from omnistage.chat import ChatMessage
    from omnistage.config import LimitsConfig

Prompt = str | OmniTokensPrompt | Mapping[str, object] | Sequence[Mapping[str, object]]
"""Text, tokens, a mapping with one of `prompt`, `prompt_token_ids`, `prompt_embeds`, or a list of chat messages."""
ParamsLike = StageParams | Mapping[str, StageParams | Mapping[str, object]] | None
"""Parameters of the entry stage, or by stage name."""
MAX_PRIORITY = 1000
"""Either way from 0: further out, waiting could never make up for it."""


class GraphView(Protocol):
    """What the orchestrator reads of a pipeline's graph."""

    @property
    def entry(self) -> str:
        """The stage that takes the prompt."""
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

    @property
    def prompt_tokens(self) -> int:
        if isinstance(self.payload, ARInput):
            return len(self.payload.token_ids) if self.payload.embeds is None else self.payload.embeds.shape[0]
        return len(self.payload.codes)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """A checked request: which stages run, in graph order, and with which parameters."""

    request: OmniRequest
    stages: tuple[str, ...]
    params: Mapping[str, StageParams]
    answers: int = 1

    @property
    def info(self) -> RequestInfo:
        return self.request.info


class Phase(StrEnum):
    """Where a request stands in one stage. It only ever moves forward."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


_FEED_FOR: dict[type[StagePayloadIn], type[StageFeed]] = {ARInput: SideRows, CodecInput: CodecFrames}


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
    starved_without: bool = False
    """Its input streams and the bridge has not said yet that it is complete."""
    feed_type: type[StageFeed] | None = None
    fold_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held over a bridge call and the queueing of what it gave: several sources may fold at once."""
    state: object = None
    """The bridge's own."""

    def begin(self, payload: StagePayloadIn, now: float) -> None:
        self.phase = Phase.RUNNING
        self.trace.submitted = now
        self.feed_type = _FEED_FOR[type(payload)]
        self.starved_without = payload.streaming if isinstance(payload, ARInput) else not payload.final

    def accept(self, feed: StageFeed) -> None:
        if self.feed_type is None or not isinstance(feed, self.feed_type):
            raise BridgeError(
                f"the bridge into {self.name!r} gave a {type(feed).__name__}, which does not continue its input"
            )
        self.starved_without = self.starved_without and not feed.final


class RequestRun:
    """An admitted request.

    `lock` guards the state below and is never held over a call into a bridge, a sink or a stage. `emit_lock`
    serialises the sink; it may be taken first, never the other way round. Whoever sets the reason first, through
    `end`, is the one that ends the request.
    """

    def __init__(self, plan: RequestPlan, graph: GraphView, sink: Sink) -> None:
        self.plan = plan
        self.info = plan.info
        self.sink = sink
        self.lock = threading.Lock()
        self.emit_lock = threading.RLock()  # a sink may abort its own request
        self.reason: FinishReason | None = None
        self.error: OmniError | None = None
        self.timer: int | None = None
        self.trace = Trace(plan.info.request_id, plan.info.arrival)
        self.entry = graph.entry
        self.stages = {name: self._stage_run(name, graph) for name in plan.stages}
        self.trace.stages = {name: stage.trace for name, stage in self.stages.items()}
        asked = {stage: modality for modality, stage in graph.outputs.items() if modality in plan.info.modalities}
        self.output = OutputAssembler(plan.info.request_id, asked, plan.answers)

    def _stage_run(self, name: str, graph: GraphView) -> StageRun:
        needed = set(self.plan.stages)
        return StageRun(
            name,
            targets=tuple(target for target in graph.targets(name) if target in needed),
            open_sources={source for source in graph.sources(name) if source in needed},
            open_answers=set(range(self.plan.answers if name == graph.entry else 1)),
            trace=StageTrace(name),
        )

    @property
    def over(self) -> bool:
        return self.reason is not None

    def since_arrival(self, time: float) -> float:
        return time - self.info.arrival

    def record(self, chunk: StageChunk) -> bool:
        """Note a chunk in the trace. False: the request is over and the chunk must be ignored."""
        at = self.since_arrival(chunk.time)
        with self.lock:
            if self.over:
                return False
            stage = self.stages[chunk.stage]
            trace = stage.trace
            if trace.started is None and (chunk.payload is not None or chunk.finish is None):
                trace.started = at
            if _carries_output(chunk):
                trace.first_chunk = at if trace.first_chunk is None else trace.first_chunk
                trace.last_chunk = at
                trace.chunks += 1
                trace.tokens += len(chunk.payload.token_ids) if isinstance(chunk.payload, TokenChunk) else 0
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
            if stage.phase is Phase.RUNNING and stage.starved_without:
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
            return self.stages[self.entry].reason

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
        return Usage(self.plan.request.prompt_tokens, tokens[self.entry], stage_tokens=tokens)

    def trace_now(self) -> Trace:
        """A copy of the trace, which the stages no longer change."""
        with self.lock:
            stages = {name: replace(trace) for name, trace in self.trace.stages.items()}
            return replace(self.trace, stages=stages)


def _carries_output(chunk: StageChunk) -> bool:
    """Whether a chunk holds tokens, text or samples, rather than only hidden rows or an end."""
    payload = chunk.payload
    if isinstance(payload, AudioChunk):
        return len(payload.samples) > 0
    return payload is not None and bool(payload.token_ids or payload.text)


# ------------------------------------------------------------------------------------- what callers give


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller may say about a request besides its prompt and sampling parameters."""

    modalities: Sequence[str] | None = None
    voice: str | None = None
    priority: int = 0
    timeout: float | None = None
    use_audio_in_video: bool = False


class RequestFactory:
    """Turns what a caller gives into an `OmniRequest`, or raises what is wrong with it. Thread-safe.

    It decodes media and tokenises, so it belongs in a worker thread, never in an event loop.
    """

    def __init__(
        self,
        graph: GraphView,
        params_types: Mapping[str, type[StageParams]],
        processor: InputProcessor,
        limits: LimitsConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._graph = graph
        self._params_types = params_types
        self._processor = processor
        self._limits = limits
        self._clock = clock

    def build(
        self, prompt: Prompt, params: ParamsLike, options: RequestOptions, request_id: str | None = None
    ) -> OmniRequest:
        arrival = self._clock()
        info = RequestInfo(
            checked_request_id(request_id),
            modalities=self._modalities(options.modalities),
            priority=_priority(options.priority),
            deadline=self._deadline(arrival, options.timeout),
            voice=self._voice(options.voice),
            arrival=arrival,
        )
        stage_params = self._params(params)  # before the prompt: all that is cheap to check comes first
        request = OmniRequest(info, self._payload(prompt, options), stage_params)
        most = self._limits.max_prompt_tokens
        if request.prompt_tokens == 0:
            raise InvalidRequestError("is empty; give at least one token", param="prompt")
        if most is not None and request.prompt_tokens > most:
            raise PromptTooLongError(
                f"has {request.prompt_tokens} tokens, over the limit of {most}; shorten it", param="prompt"
            )
        return request

    def _modalities(self, names: Sequence[str] | None) -> frozenset[Modality]:
        given = self._graph.outputs
        if names is None:
            return frozenset({Modality.TEXT}) if Modality.TEXT in given else frozenset(given)
        if not isinstance(names, str | list | tuple | set | frozenset):
            raise InvalidRequestError(
                f"must be a list of {', '.join(given)}, got {type(names).__name__}", param="modalities"
            )
        asked = (names,) if isinstance(names, str) else tuple(names)
        if not asked:
            raise InvalidRequestError("is empty; ask for at least one modality", param="modalities")
        for name in asked:
            if not isinstance(name, str) or name not in given:
                shown = str(name) if isinstance(name, Modality) else name
                raise UnsupportedModalityError(
                    f"this model does not give {short_repr(shown)}; it gives {', '.join(given)}", param="modalities"
                )
        return frozenset(Modality(name) for name in asked)

    def _deadline(self, arrival: float, timeout: float | None) -> float | None:
        if timeout is None:
            return None
        if not _is_number(timeout) or timeout <= 0:
            raise InvalidRequestError(
                f"must be a number of seconds above 0, got {short_repr(timeout)}", param="timeout"
            )
        if timeout > self._limits.max_deadline_seconds:
            raise LimitExceededError(
                f"{short_repr(timeout)} s is over the limit of {self._limits.max_deadline_seconds} s; ask for less",
                param="timeout",
            )
        return arrival + timeout

    def _voice(self, voice: str | None) -> str | None:
        voices = self._processor.voices()
        if voice is None or (isinstance(voice, str) and voice in voices):
            return voice
        known = f"voices: {', '.join(voices)}" if voices else "this model has none; leave it out"
        raise InvalidRequestError(f"there is no voice {short_repr(voice)}; {known}", param="voice")

    def _params(self, given: ParamsLike) -> dict[str, StageParams]:
        if given is None:
            return {}
        if isinstance(given, StageParams):
            return {self._graph.entry: given}
        if not isinstance(given, Mapping):
            raise InvalidRequestError(
                f"must be SamplingParams or a mapping from stage to parameters, got {type(given).__name__}",
                param="sampling_params",
            )
        return {name: self._stage_params(name, value) for name, value in given.items()}

    def _stage_params(self, name: str, value: object) -> StageParams:
        path = f"sampling_params.{name[:SHOWN_CHARS] if isinstance(name, str) else short_repr(name)}"
        if name not in self._params_types:
            raise InvalidRequestError(f"there is no such stage; stages: {', '.join(self._graph.order)}", param=path)
        if isinstance(value, StageParams):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"must be parameters or a mapping, got {type(value).__name__}", param=path)
        try:
            return self._params_types[name].parse(value)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param=f"{path}.{error.param}" if error.param else path) from error

    def _payload(self, prompt: Prompt, options: RequestOptions) -> ARInput:
        if isinstance(prompt, str):
            return self._text(prompt)
        if isinstance(prompt, OmniTokensPrompt):
            return self._processor.tokens(prompt)
        if isinstance(prompt, Mapping):
            return self._mapping(prompt)
        if isinstance(prompt, list | tuple):
            from omnistage.chat import parse_messages

            messages = parse_messages(prompt, self._limits.media, use_audio_in_video=options.use_audio_in_video)
            self._check_media(messages)
            return self._processor.chat(messages)
        raise InvalidRequestError(
            "must be text, an OmniTokensPrompt, a mapping with prompt, prompt_token_ids or prompt_embeds, or a list "
            f"of chat messages; got {type(prompt).__name__}",
            param="prompt",
        )

    def _text(self, prompt: str) -> ARInput:
        most = self._limits.media.max_text_chars
        if len(prompt) > most:
            raise LimitExceededError(f"{len(prompt)} characters exceed the limit of {most}; shorten it", param="prompt")
        return self._processor.text(prompt)

    def _mapping(self, prompt: Mapping[str, object]) -> ARInput:
        known = ("prompt", "prompt_token_ids", "prompt_embeds")
        if unknown := [short_repr(key) for key in prompt if key not in known]:
            raise InvalidRequestError(
                f"has unknown keys {', '.join(unknown[:3])}; known: {', '.join(known)}. Media go into chat messages",
                param="prompt",
            )
        given = {key: value for key, value in prompt.items() if value is not None}
        text = given.get("prompt")
        if isinstance(text, str) and len(given) == 1:
            return self._text(text)
        if text is not None or not given:
            raise InvalidRequestError(
                "give either prompt, a string, or prompt_token_ids and prompt_embeds", param="prompt"
            )
        return self._processor.tokens(
            OmniTokensPrompt(_token_ids(given.get("prompt_token_ids", ())), _embeds(given.get("prompt_embeds")))
        )

    def _check_media(self, messages: Sequence[ChatMessage]) -> None:
        from omnistage.chat import AudioPart, ImagePart, VideoPart

        kinds = {ImagePart: Modality.IMAGE, AudioPart: Modality.AUDIO, VideoPart: Modality.VIDEO}
        present = {kinds[type(part)] for message in messages for part in message.parts if type(part) in kinds}
        taken = self._processor.input_modalities
        if refused := sorted(present - taken):
            raise UnsupportedModalityError(
                f"this model does not take {', '.join(refused)}; it takes {', '.join(sorted(taken))}", param="messages"
            )


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def checked_request_id(value: object) -> str:
    """A caller's request id, or a new one for None. Raises `InvalidRequestError`."""
    if value is None:
        return new_request_id()
    if not isinstance(value, str) or not value or not is_utf8(value):
        raise InvalidRequestError(f"must be text, and not empty; got {short_repr(value)}", param="request_id")
    return value


def is_conversation(value: object) -> bool:
    """Whether this is one conversation: a non-empty list of messages, each a mapping with a role."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in value)


def _priority(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {short_repr(value)}", param="priority"
        )
    return value


def _is_number(value: object) -> bool:
    """Whether this is a number other than NaN and infinity; whole ones may be too large for a float."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise InvalidRequestError("must be a list of whole numbers", param="prompt_token_ids")
    return tuple(value)


def _embeds(value: object) -> torch.Tensor | None:
    import torch

    if value is not None and not isinstance(value, torch.Tensor):
        raise InvalidRequestError(f"must be a tensor [n, hidden], got {type(value).__name__}", param="prompt_embeds")
    return value
