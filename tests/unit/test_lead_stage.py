"""Pipelines whose entry is not the language model: what follows the stage that gives text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from omnistage.config import LimitsConfig
from omnistage.config.graph import graph_of
from omnistage.config.schema import PipelineConfig
from omnistage.core.errors import (
    BridgeError,
    CapacityError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    PromptTooLongError,
    StageError,
)
from omnistage.core.family import Bridge, BridgeResult
from omnistage.core.graph import PipelineGraph
from omnistage.core.messages import ChatMessage, ImagePart, TextPart
from omnistage.core.params import CodecParams, DiffusionParams, SamplingParams, StageParams
from omnistage.core.types import (
    ARInput,
    AudioChunk,
    ChatInput,
    FinishReason,
    MediaSpan,
    Modality,
    ModuleInput,
    ModuleOutput,
    OmniTokensPrompt,
    RequestInfo,
    StageChunk,
    StagePayloadIn,
    TokenChunk,
)
from omnistage.engines.codec import Job, ModuleComponent, ModuleStage
from omnistage.omni import Omni
from omnistage.pipeline.intake import RequestFactory, RequestOptions
from omnistage.pipeline.orchestrator import Orchestrator
from omnistage.pipeline.request import OmniRequest, RequestRun, count_tokens
from tests.unit.fakes import AUDIO, TEXT, FakeStage, Recorder, make_graph

pytestmark = pytest.mark.timeout(300)
BUDGET = SimpleNamespace(max_batch=4)


class Ears(ModuleComponent):
    """The prompt of the model behind it: as many tokens to give as the text has words, and `length` tokens long."""

    input_type = ChatInput

    def __init__(self) -> None:
        self.length = 5
        self.error: OmniError | None = None

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        if self.error is not None:
            raise self.error
        return [ModuleOutput(text="heard", prompt=self._prompt(job)) for job in jobs]

    def _prompt(self, job: Job) -> ARInput:
        chat = job.payload
        assert isinstance(chat, ChatInput)
        span = MediaSpan(AUDIO, b"k", np.array([1, 2]), {})  # type: ignore[arg-type]
        return ARInput((len(_words(chat).split()), *[0] * (self.length - 1)), media=(span,))


class Mouth(ModuleComponent):
    """Ten samples a piece."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        pieces = [job.payload for job in jobs if isinstance(job.payload, ModuleInput)]
        self.said += [piece.text for piece in pieces]
        return [AudioChunk(np.zeros(10, np.float32), 100) for _ in pieces]


def _words(chat: ChatInput) -> str:
    parts = [part for message in chat.messages for part in message.parts]
    return chat.prompt or " ".join(part.text for part in parts if isinstance(part, TextPart))


def hear2think(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    payload = chunk.payload
    return state, [payload.prompt] if isinstance(payload, ModuleOutput) and payload.prompt is not None else []


def think2speak(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
    text = chunk.payload.text if isinstance(chunk.payload, TokenChunk) else ""
    final = chunk.finish is not None
    return state, [ModuleInput(text=text, final=final)] if text or final else []


GRAPH = make_graph(
    ("hear", "think", "speak"), {"think": ("hear",), "speak": ("think",)}, {TEXT: "think", AUDIO: "speak"}
)


class Starter:
    """hear -> think -> speak, without threads."""

    def __init__(self, bridges: Mapping[str, Bridge] | None = None, graph: PipelineGraph = GRAPH) -> None:
        self.ears, self.mouth = Ears(), Mouth()
        self.think = FakeStage("think")
        self.stages = {
            "hear": ModuleStage("hear", self.ears, BUDGET),
            "think": self.think,
            "speak": ModuleStage("speak", self.mouth, BUDGET),
        }
        self.bridges: dict[str, Bridge] = {"think": hear2think, "speak": think2speak, **(bridges or {})}
        self.graph = graph
        self.orchestrator = Orchestrator(self.graph, self.stages, self.bridges, {}, threads=False)

    def submit(
        self,
        text: str = "one two three",
        *,
        modalities: Sequence[Modality] = (TEXT, AUDIO),
        params: Mapping[str, StageParams] | None = None,
        most: int | None = None,
    ) -> Recorder:
        sink = Recorder()
        info = RequestInfo("r", frozenset(modalities))
        chat = ChatInput((ChatMessage("user", (TextPart(text),)),))
        self.orchestrator.submit(OmniRequest(info, chat, params or {}, most), sink)
        return sink

    def run(self, text: str = "one two three", **kwargs: object) -> Recorder:
        sink = self.submit(text, **kwargs)  # type: ignore[arg-type]
        self.orchestrator.run_until_idle()
        self.orchestrator.check_idle()
        return sink


# ---------------------------------------------------------------------------------------------- the graph


def pipeline(*, entry_gives: str | None) -> PipelineGraph:
    stages = {
        "hear": {"engine": "codec", "component": "a.b"},
        "think": {"engine": "autoregressive", "component": "a.b", "output": entry_gives},
        "speak": {"engine": "codec", "component": "a.b", "output": "audio"},
    }
    edges = [{"from": "hear", "to": "think", "bridge": "a.b"}, {"from": "think", "to": "speak", "bridge": "a.b"}]
    config = PipelineConfig.model_validate({"name": "p", "stages": stages, "edges": edges})
    return graph_of(config)


def test_the_lead_is_the_stage_that_gives_text_else_the_entry() -> None:
    assert pipeline(entry_gives="text").lead == "think"
    assert pipeline(entry_gives=None).lead == "hear"


# ------------------------------------------------------------------------------------- counting and ending


def test_tokens_and_media_are_those_of_the_lead_s_own_prompt() -> None:
    starter = Starter()
    final = starter.run().final
    assert final.text == "a0 a1 a2 "
    assert final.audio is not None
    assert starter.mouth.said == ["a0 ", "a1 ", "a2 "]
    usage = final.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3)
    assert usage.prompt_media == {AUDIO: 2}
    assert usage.stage_tokens == {"hear": 0, "think": 3, "speak": 0}
    assert final.trace is not None
    assert {name: stage.chunks for name, stage in final.trace.stages.items()} == {"hear": 1, "think": 3, "speak": 3}
    assert list(final.trace.stages) == ["hear", "think", "speak"]


def test_cached_tokens_are_those_of_the_lead() -> None:
    starter = Starter()
    starter.submit()
    [run] = starter.orchestrator._runs.values()
    for stage in ("hear", "think"):
        run.record(StageChunk("r", stage, TokenChunk(cached_tokens=7)))
    assert run.usage().cached_tokens == 7


def test_a_request_that_ends_before_its_prompt_is_made_has_no_prompt_tokens() -> None:
    starter = Starter()
    sink = starter.submit()
    starter.orchestrator.abort("r")
    assert sink.final.usage.prompt_tokens == 0
    starter.orchestrator.run_until_idle()
    starter.orchestrator.check_idle()


def test_the_finish_reason_is_the_lead_s() -> None:
    starter = Starter()
    starter.think.finish = FinishReason.LENGTH
    final = starter.run().final
    assert final.finish_reason is FinishReason.LENGTH
    assert final.outputs[0].finish_reason is FinishReason.LENGTH
    assert final.trace is not None
    assert final.trace.stages["hear"].finish is FinishReason.STOP


def test_speech_comes_while_the_lead_still_writes() -> None:
    starter = Starter()
    sink = starter.submit("one two three four five")
    while not any(item.audio is not None for item in sink.items):
        assert starter.orchestrator.run_once()
    assert starter.think.jobs
    starter.orchestrator.run_until_idle()
    assert sink.final.finish_reason is FinishReason.STOP


def test_an_answer_without_words_is_an_answer_without_sound() -> None:
    starter = Starter()
    final = starter.run(" ").final
    assert (final.text, final.finish_reason, final.audio) == ("", FinishReason.STOP, None)
    assert starter.mouth.said == []


# ------------------------------------------------------------------------------------------------- answers


def test_several_answers_are_the_lead_s() -> None:
    starter = Starter()
    final = starter.run(modalities=(TEXT,), params={"think": SamplingParams(n=2)}).final
    assert [answer.text for answer in final.outputs] == ["a0 a1 a2 ", "b0 b1 b2 "]
    assert final.usage.completion_tokens == 6


def test_several_answers_are_not_spoken() -> None:
    with pytest.raises(InvalidRequestError, match=r"modalities=\['text'\]"):
        Starter().submit(params={"think": SamplingParams(n=2)})


def test_a_request_that_does_not_reach_the_lead_is_led_by_its_entry() -> None:
    """Text is a side branch here: sound alone never runs it."""
    graph = make_graph(
        ("hear", "think", "speak"), {"think": ("hear",), "speak": ("hear",)}, {TEXT: "think", AUDIO: "speak"}
    )

    def hear2speak(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        return state, [ModuleInput(text="beep")] if isinstance(chunk.payload, ModuleOutput) else []

    starter = Starter({"speak": hear2speak}, graph)
    final = starter.run(modalities=(AUDIO,)).final
    assert final.finish_reason is FinishReason.STOP
    assert final.audio is not None
    assert starter.think.calls == []
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (0, 0)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", [PromptTooLongError, CapacityError, InvalidRequestError])
def test_what_the_lead_refuses_later_ends_the_request_with_that_very_error(kind: type[OmniError]) -> None:
    starter = Starter()
    starter.think.fail_submit["r"] = kind("too long; shorten it", param="prompt")
    final = starter.run().final
    assert final.finish_reason is FinishReason.ERROR
    assert final.error is starter.think.fail_submit["r"]


def test_a_prompt_that_turns_out_longer_than_the_limit_is_refused_as_at_the_door() -> None:
    starter = Starter()
    final = starter.run(most=4).final
    assert isinstance(final.error, PromptTooLongError)
    assert (final.error.status, str(final.error)) == (400, "prompt: has 5 tokens, over the limit of 4; shorten it")
    assert starter.think.calls == []
    assert Starter().run(most=5).final.finish_reason is FinishReason.STOP


def test_what_the_entry_finds_wrong_stays_the_client_s_fault() -> None:
    starter = Starter()
    starter.ears.error = LimitExceededError("the clip is too long; send less", param="messages.0")
    assert starter.run().final.error is starter.ears.error


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([ModuleInput(text="a", final=False)], "left the stage waiting"),
        ([ModuleInput(text="a"), ChatInput()], "a second time"),
        ([ChatInput()], "takes ModuleInput"),
        ([ARInput((1,))], "takes ModuleInput"),
    ],
)
def test_a_bridge_that_gives_a_module_what_it_cannot_take_ends_its_request(
    inputs: list[StagePayloadIn], says: str
) -> None:
    def bridge(request: RequestInfo, state: object, chunk: StageChunk) -> BridgeResult:
        return True, inputs if state is None else []

    final = Starter({"speak": bridge}).run().final
    assert isinstance(final.error, BridgeError | StageError)
    assert says in str(final.error)


# ------------------------------------------------------------------------------------------- pictures' words


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (ChatInput(prompt="a red cat"), "a red cat"),
        (ChatInput(tokens=OmniTokensPrompt((1, 2))), ""),
        (
            ChatInput(
                (
                    ChatMessage("user", (TextPart("a dog"),)),
                    ChatMessage("user", (ImagePart(Image.new("RGB", (1, 1))), TextPart("a red"), TextPart("cat"))),
                    ChatMessage("assistant", (TextPart("meow"),)),
                )
            ),
            "a red\ncat",
        ),
        (ChatInput((ChatMessage("system", (TextPart("draw"),)),)), ""),
    ],
)
def test_a_picture_says_what_the_user_asked_for_last(chat: ChatInput, words: str) -> None:
    starter = Starter()
    starter.stages["speak"].params_type = DiffusionParams  # only the parameters matter here
    orchestrator = Orchestrator(GRAPH, starter.stages, starter.bridges, {}, model="starter", threads=False)
    plan = orchestrator.plan(OmniRequest(RequestInfo("r", frozenset({AUDIO})), chat))
    run = RequestRun(plan, Recorder(), "starter")
    assert (run.output.metadata["model"], run.output.metadata["prompt"]) == ("starter", words)


# --------------------------------------------------------------------------------------------------- intake


class Chats:
    """Leaves all of it to the stage that hears."""

    input_modalities = frozenset({TEXT})

    def chat(self, messages: Sequence[ChatMessage]) -> ChatInput:
        return ChatInput(tuple(messages))

    def text(self, prompt: str) -> ChatInput:
        return ChatInput(prompt=prompt)

    def tokens(self, prompt: OmniTokensPrompt) -> ChatInput:
        return ChatInput(tokens=prompt)

    def voices(self) -> Sequence[str]:
        return ()


def intake(**limits: object) -> RequestFactory:
    types: dict[str, type[StageParams]] = {"hear": CodecParams, "think": SamplingParams, "speak": CodecParams}
    return RequestFactory(GRAPH, types, Chats(), LimitsConfig(**limits))  # type: ignore[arg-type]


def test_parameters_without_a_stage_s_name_are_the_lead_s() -> None:
    request = intake().build("hello", SamplingParams(max_tokens=3), RequestOptions())
    assert request.params == {"think": SamplingParams(max_tokens=3)}


@pytest.mark.parametrize("prompt", ["", {"prompt": ""}, OmniTokensPrompt(), {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused_at_the_door(prompt: object) -> None:
    with pytest.raises(InvalidRequestError, match="is empty; give at least one token"):
        intake().build(prompt, None, RequestOptions())  # type: ignore[arg-type]


def test_tokens_are_counted_at_the_door_and_words_on_the_way() -> None:
    with pytest.raises(PromptTooLongError, match="has 3 tokens, over the limit of 2"):
        intake(max_prompt_tokens=2).build(OmniTokensPrompt((1, 2, 3)), None, RequestOptions())
    request = intake(max_prompt_tokens=2).build([{"role": "user", "content": "a b c"}], None, RequestOptions())
    assert (count_tokens(request.payload), request.max_prompt_tokens) == (0, 2)


def test_the_whole_way_through_a_door() -> None:
    starter = Starter()
    limits = LimitsConfig(max_prompt_tokens=5)
    with Omni.from_parts(GRAPH, starter.stages, starter.bridges, {}, Chats(), limits=limits) as omni:
        question = [{"role": "user", "content": "one two"}]
        final = omni.chat(question, SamplingParams(max_tokens=9), modalities=["text", "audio"])
        assert starter.think.inputs[final.request_id].params == SamplingParams(max_tokens=9)
        assert (final.text, final.usage.prompt_tokens, final.usage.completion_tokens) == ("a0 a1 ", 5, 2)
        starter.ears.length = 6
        with pytest.raises(PromptTooLongError):
            omni.chat(question)
        omni.orchestrator.check_idle()
