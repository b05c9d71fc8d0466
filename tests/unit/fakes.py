"""Scripted stages, graphs and bridges: a whole pipeline without a network, driven turn by turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.family import Bridge, BridgeResult
from omnistage.core.graph import Edge, PipelineGraph
from omnistage.core.messages import ChatMessage, TextPart
from omnistage.core.params import CodecParams, SamplingParams, StageParams
from omnistage.core.stage import Stage, StageStats
from omnistage.core.types import (
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
    StageInput,
    StagePayloadIn,
    TokenChunk,
)
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.request import OmniRequest
from omnistage.pipeline.supervision import Rebuild
from tests.hang_guard import HANG_SECONDS

RATE = 100
TEXT, AUDIO = Modality.TEXT, Modality.AUDIO


class FakeClock:
    """Time that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_graph(
    order: Sequence[str], edges: Mapping[str, tuple[str, ...]], outputs: Mapping[Modality, str]
) -> PipelineGraph:
    """A graph from target → sources, the entry first."""
    gives = {stage: modality for modality, stage in outputs.items()}
    return PipelineGraph.build(
        {name: gives.get(name) for name in order},
        [Edge(sources, target, "test.bridge") for target, sources in edges.items()],
        order[0],
    )


def linear() -> PipelineGraph:
    return make_graph(
        ("thinker", "talker", "vocoder"),
        {"talker": ("thinker",), "vocoder": ("talker",)},
        {TEXT: "thinker", AUDIO: "vocoder"},
    )


@dataclass
class _Job:
    info: RequestInfo
    todo: list[deque[int]]
    """Units of output still to give, for each answer."""
    closed: bool
    started: bool = False
    fed: int = 0


class FakeStage(Stage):
    """Gives one token (or one sound) a step for every unit of input, to every request at once.

    An entry stage gives as many tokens as the prompt's first id says, times its answers. A stage with streaming input
    gives one for each row or code that it was fed, and ends after the final one. `calls` records what was asked of it;
    `fail_*` raise; `before_step` runs at the start of each step.
    """

    def __init__(self, name: str, *, audio: bool = False, clock: Callable[[], float] | None = None) -> None:
        self.name = name
        self.params_type = CodecParams if audio else SamplingParams
        self.audio = audio
        self.clock = clock
        self.calls: list[tuple[str, str]] = []
        self.inputs: dict[str, StageInput] = {}
        self.jobs: dict[str, _Job] = {}
        self.steps = 0
        self.closed = 0
        self.finish = FinishReason.STOP
        self.fail_check: Exception | None = None
        self.fail_submit: dict[str, Exception] = {}
        self.fail_feed: dict[str, Exception] = {}
        self.fail_abort: Exception | None = None
        self.fail_step: Exception | None = None
        self.fail_request: dict[str, OmniError | None] = {}
        self.before_step: Callable[[], None] | None = None

    def check(self, stage_input: StageInput) -> None:
        if self.fail_check is not None:
            raise self.fail_check

    def submit(self, stage_input: StageInput) -> None:
        request_id, payload = stage_input.info.request_id, stage_input.payload
        self.calls.append(("submit", request_id))
        if request_id in self.fail_submit:
            raise self.fail_submit[request_id]
        if request_id in self.jobs:
            raise InvalidRequestError("in use")
        self.inputs[request_id] = stage_input
        answers = stage_input.params.n if isinstance(stage_input.params, SamplingParams) else 1
        if isinstance(payload, CodecInput):
            units, closed = list(payload.codes), payload.final
        else:
            units, closed = ([], False) if payload.streaming else (list(range(payload.token_ids[0])), True)
        self.jobs[request_id] = _Job(stage_input.info, [deque(units) for _ in range(answers)], closed)

    def feed(self, request_id: str, feed: StageFeed) -> None:
        self.calls.append(("feed", request_id))
        if request_id in self.fail_feed:
            raise self.fail_feed[request_id]
        job = self.jobs.get(request_id)
        if job is not None:
            count = len(feed.codes if isinstance(feed, CodecFrames) else feed.rows)
            job.todo[0].extend(feed.codes if isinstance(feed, CodecFrames) else range(job.fed, job.fed + count))
            job.fed += count
            job.closed = job.closed or feed.final

    def abort(self, request_id: str) -> None:
        self.calls.append(("abort", request_id))
        self.jobs.pop(request_id, None)
        if self.fail_abort is not None:
            raise self.fail_abort

    def has_work(self) -> bool:
        return any(job.closed or any(job.todo) for job in self.jobs.values())

    def step(self) -> list[StageChunk]:
        self.steps += 1
        if self.before_step is not None:
            self.before_step()
        if self.fail_step is not None:
            error, self.fail_step = self.fail_step, None
            raise error
        chunks: list[StageChunk] = []
        for request_id, job in list(self.jobs.items()):
            if not job.closed and not any(job.todo):
                continue
            if request_id in self.fail_request:
                del self.jobs[request_id]
                chunks.append(self._chunk(job, finish=FinishReason.ERROR, error=self.fail_request[request_id]))
                continue
            if not job.started:
                job.started = True
                chunks.append(self._chunk(job))
            chunks.extend(self._advance(request_id, job))
        return chunks

    def _advance(self, request_id: str, job: _Job) -> list[StageChunk]:
        chunks = []
        for index, todo in enumerate(job.todo):
            if todo or job.closed:
                payload = self._payload(todo.popleft(), index) if todo else None
                finish = self.finish if job.closed and not todo else None
                chunks.append(self._chunk(job, payload, index, finish))
        if job.closed and not any(job.todo):
            del self.jobs[request_id]
        return chunks

    def _payload(self, unit: int, index: int) -> TokenChunk | AudioChunk:
        if self.audio:
            return AudioChunk(np.full(10, unit, dtype=np.float32), RATE)
        return TokenChunk(token_ids=(unit,), text=f"{chr(97 + index)}{unit} ")

    def _chunk(
        self,
        job: _Job,
        payload: TokenChunk | AudioChunk | None = None,
        index: int = 0,
        finish: FinishReason | None = None,
        error: OmniError | None = None,
    ) -> StageChunk:
        chunk = StageChunk(job.info.request_id, self.name, payload, index, finish, error)
        if self.clock is None:
            return chunk
        return StageChunk(chunk.request_id, self.name, payload, index, finish, error, time=self.clock())

    def stats(self) -> StageStats:
        return StageStats(running=len(self.jobs), steps=self.steps)

    def close(self) -> None:
        self.closed += 1


class _Rows:
    """Stands for a tensor of side rows: only its length matters here."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


def stream_into(*, audio: bool = False, sources: int = 1) -> Bridge:
    """A bridge that starts its target at the first token and feeds it one unit a token, until all sources ended."""

    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        started, ended = state if isinstance(state, tuple) else (False, 0)
        tokens = chunk.payload.token_ids if isinstance(chunk.payload, TokenChunk) else ()
        ended += chunk.finish is not None
        inputs: list[StagePayloadIn | StageFeed] = []
        if tokens and not started:
            inputs.append(CodecInput() if audio else ARInput((1,), streaming=True))
            started = True
        final = ended == sources
        if started and (tokens or final):
            rows: StageFeed = SideRows(_Rows(len(tokens)), final)  # type: ignore[arg-type]
            inputs.append(CodecFrames(tokens, final) if audio else rows)
        return (started, ended), inputs

    return bridge


class Recorder:
    """A sink that keeps everything. `wait` blocks until the request has ended."""

    def __init__(self) -> None:
        self.items: list[OutputChunk] = []
        self.ended = threading.Event()

    def __call__(self, item: OutputChunk) -> None:
        self.items.append(item)
        if item.final is not None:
            self.ended.set()

    @property
    def finals(self) -> list[OmniRequestOutput]:
        return [item.final for item in self.items if item.final is not None]

    @property
    def final(self) -> OmniRequestOutput:
        (final,) = self.finals
        if self.items[-1].final is None:
            raise AssertionError("items came after the final one")
        return final

    @property
    def text(self) -> str:
        return "".join(item.text for item in self.items)

    def wait(self) -> OmniRequestOutput:
        if not self.ended.wait(HANG_SECONDS):
            raise AssertionError("the request did not end")
        return self.final


class Pipeline:
    """An orchestrator over fake stages, with everything that a test wants to look at."""

    def __init__(
        self,
        graph: PipelineGraph | None = None,
        *,
        bridges: Mapping[str, Bridge] | None = None,
        defaults: Mapping[str, StageParams] | None = None,
        threads: bool = False,
        max_inflight: int = 100,
        trace_history: int = 100,
        rebuilds: Mapping[str, Rebuild] | None = None,
        max_step_seconds: float | None = None,
    ) -> None:
        self.graph = graph or linear()
        self.clock = FakeClock()
        audio = self.graph.outputs.get(AUDIO)
        clock = None if threads else self.clock
        self.stages = {name: FakeStage(name, audio=name == audio, clock=clock) for name in self.graph.order}
        self.bridges = {
            name: stream_into(audio=name == audio, sources=len(self.graph.sources(name)))
            for name in self.graph.order
            if self.graph.sources(name)
        }
        self.bridges.update(bridges or {})
        kwargs = {} if threads else {"clock": self.clock}
        self.orchestrator = Orchestrator(
            self.graph,
            self.stages,
            self.bridges,
            defaults or {},
            max_inflight=max_inflight,
            trace_history=trace_history,
            threads=threads,
            rebuilds=rebuilds,
            max_step_seconds=max_step_seconds,
            **kwargs,
        )
        self.threads = threads

    def request(
        self,
        request_id: str = "r",
        tokens: int = 3,
        modalities: Sequence[Modality] = (TEXT, AUDIO),
        params: Mapping[str, StageParams] | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> OmniRequest:
        now = RequestInfo("now").arrival if self.threads else self.clock()
        deadline = None if timeout is None else now + timeout
        info = RequestInfo(request_id, frozenset(modalities), priority, deadline, arrival=now)
        return OmniRequest(info, ARInput((tokens,)), params or {})

    def submit(self, request_id: str = "r", **kwargs: object) -> Recorder:
        sink = Recorder()
        self.orchestrator.submit(self.request(request_id, **kwargs), sink)  # type: ignore[arg-type]
        return sink

    def run(self) -> None:
        self.orchestrator.run_until_idle()

    def calls(self, stage: str) -> list[str]:
        return [what for what, _ in self.stages[stage].calls]


class FakeProcessor:
    """The prompt's length in words says how many tokens the entry stage gives."""

    input_modalities = frozenset({TEXT})

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def _input(self, words: int) -> ARInput:
        self.threads.add(threading.get_ident())
        return ARInput((words,)) if words else ARInput(())

    def chat(self, messages: Sequence[ChatMessage]) -> ARInput:
        texts = [part.text for message in messages for part in message.parts if isinstance(part, TextPart)]
        return self._input(sum(len(text.split()) for text in texts))

    def text(self, prompt: str) -> ARInput:
        return self._input(len(prompt.split()))

    def tokens(self, prompt: OmniTokensPrompt) -> ARInput:
        if prompt.prompt_embeds is not None:
            return ARInput((len(prompt.prompt_embeds),), embeds=prompt.prompt_embeds)
        return ARInput(prompt.prompt_token_ids)

    def voices(self) -> Sequence[str]:
        return ("Chelsie", "Ethan")
