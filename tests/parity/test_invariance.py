"""What a request is answered does not depend on who shares its batch, when it came, or how much room there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.family import LoadContext
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo, StageChunk, StageInput, TokenChunk
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.stage import ARStage
from omnistage.models.registry import REGISTRY

SLOW_MACHINE = [HealthCheck.too_slow]

SHARED = tuple((37 * i + 11) % 870 for i in range(48))
"""Prompts begin with pieces of this, so that they share prefixes."""
LONGEST = 48 + 4 + 12


def load_thinker(family: str, folder: Path) -> ARComponent:
    """The language model of a family's small checkpoint."""
    tiny = REGISTRY.family(family).tiny
    assert tiny is not None
    tiny(folder, seed=3)
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu", dtype="float32"), registry=REGISTRY)
    stage = resolved.config.pipeline.stages["thinker"]
    context = LoadContext(resolved.model, "thinker", stage, torch.device("cpu"), torch.float32)
    component = REGISTRY.component(stage.component)(context)
    assert isinstance(component, ARComponent)
    return component


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ARComponent:
    return load_thinker("causal_lm", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", params=["causal_lm", "qwen2_5_omni", "qwen3_omni_moe"])
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ARComponent:
    """Also with positions of three dimensions, and with a mixture of experts."""
    return load_thinker(request.param, tmp_path_factory.mktemp(request.param) / "tiny")


# ------------------------------------------------------------------------------------------- what is asked


@dataclass(frozen=True)
class Asked:
    """A request and, beside it, what must not matter: when it comes and goes and how urgent it is."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = field(default=0, compare=False)
    priority: int = field(default=0, compare=False)
    aborted_at: int | None = field(default=None, compare=False)

    def key(self) -> tuple[tuple[int, ...], str]:
        return self.prompt, self.params.model_dump_json()


PARAMS = st.sampled_from(
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 20},
        {"temperature": 1.2, "seed": 3, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 1.0, "seed": 4, "n": 2},
    ]
)
TAIL = st.lists(st.integers(0, 869), min_size=1, max_size=4)


@st.composite
def asked(draw: st.DrawFn, aborts: bool = True) -> Asked:
    prompt = (*SHARED[: draw(st.integers(0, 48))], *draw(TAIL))
    params = {"max_tokens": draw(st.integers(1, 12)), "logprobs": 2, "ignore_eos": draw(st.booleans()), **draw(PARAMS)}
    arrival = draw(st.integers(0, 12))
    stays = draw(st.none() | st.integers(0, 10)) if aborts else None
    return Asked(
        prompt,
        SamplingParams.parse(params),
        arrival=arrival,
        priority=draw(st.integers(-1, 1)),
        aborted_at=None if stays is None else arrival + stays,
    )


@st.composite
def budgets(draw: st.DrawFn) -> ARBudget:
    size = draw(st.sampled_from([8, 16, 32]))
    least = -(-LONGEST // size)  # room for the longest request alone, so that others are preempted for it
    return ARBudget(
        max_batch_tokens=draw(st.integers(3, 96)),
        prefill_chunk=draw(st.none() | st.integers(1, 40)),
        max_running=draw(st.integers(1, 8)),
        block_size=size,
        kv_blocks=draw(st.integers(least, 2 * least) | st.just(64)),
        prefix_caching=draw(st.booleans()),
        ageing_steps=draw(st.sampled_from([1, 8, 64])),
    )


# ------------------------------------------------------------------------------------------ what is answered


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None

    def take(self, chunk: StageChunk) -> None:
        assert self.finish is None, "a chunk after the last one"
        assert chunk.error is None
        self.finish = chunk.finish
        assert isinstance(chunk.payload, TokenChunk)
        self.tokens += chunk.payload.token_ids
        self.text += chunk.payload.text
        for item in chunk.payload.logprobs:
            self.logprobs += [item.chosen.logprob, *(other.logprob for other in item.top)]


Answers = dict[tuple[str, int], Answer]


def serve(stage: ARStage, requests: list[Asked]) -> Answers:
    """Submit and abort between steps as the requests say; check the stage after each of them."""
    answers: Answers = {}
    gone: set[str] = set()
    last = max(max(request.arrival, request.aborted_at or 0) for request in requests)
    for step in range(3000):
        for number, request in enumerate(requests):
            name = str(number)
            if request.arrival == step:
                info = RequestInfo(name, priority=request.priority)
                stage.submit(StageInput(info, request.params, ARInput(request.prompt)))
            if request.aborted_at == step:
                stage.abort(name)
                gone.add(name)
                stage.check_integrity()
        if step > last and not stage.has_work():
            break
        for chunk in stage.step():
            assert chunk.request_id not in gone, "a chunk after the abort"
            if chunk.payload is not None or chunk.finish is not None:
                answers.setdefault((chunk.request_id, chunk.index), Answer()).take(chunk)
        stage.check_integrity()
    else:
        raise AssertionError("requests were left after 3000 steps")
    stats = stage.stats()
    assert (stats.waiting, stats.running) == (0, 0)
    assert stats.extra["blocks_free"] == stats.extra["blocks"]
    return answers


_known: dict[tuple[ARComponent, tuple[int, ...], str], list[Answer]] = {}


def alone(model: ARComponent, request: Asked) -> list[Answer]:
    """The request's answers from a roomy stage of its own, each prompt in one piece."""
    key = (model, *request.key())
    if key not in _known:
        stage = ARStage("alone", model, ARBudget(kv_blocks=64, block_size=16, prefix_caching=False))
        answers = serve(stage, [Asked(request.prompt, request.params)])
        _known[key] = [answers["0", index] for index in range(request.params.n)]
    return _known[key]


def assert_same(got: Answer, expected: Answer) -> None:
    assert got.tokens == expected.tokens
    assert (got.text, got.finish) == (expected.text, expected.finish)
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@settings(max_examples=120, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(requests=st.lists(asked(), min_size=1, max_size=6), budget=budgets())
def test_answers_do_not_depend_on_company_time_or_room(
    model: ARComponent, requests: list[Asked], budget: ARBudget
) -> None:
    expected = [alone(model, request) for request in requests]
    stage = ARStage("thinker", model, budget)
    answers = serve(stage, requests)
    note(f"preemptions: {stage.stats().preemptions}")
    for number, request in enumerate(requests):
        for index in range(request.params.n):
            got = answers.get((str(number), index), Answer())
            if got.finish is None:
                # Aborted on the way: what came before is the beginning of the answer.
                assert request.aborted_at is not None
                assert got.tokens == expected[number][index].tokens[: len(got.tokens)]
            else:
                assert_same(got, expected[number][index])


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_answers_survive_many_preemptions(any_model: ARComponent, prefix_caching: bool) -> None:
    """The property above, on a case that is known to preempt often."""
    model = any_model
    params = [
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=9, max_tokens=12, logprobs=2, ignore_eos=True),
    ]
    requests = [Asked((*SHARED[i : 18 + i], i), params[i % 2], arrival=i) for i in range(8)]
    expected = [alone(model, request) for request in requests]
    stage = ARStage("thinker", model, ARBudget(kv_blocks=7, block_size=8, prefix_caching=prefix_caching))
    answers = serve(stage, requests)
    assert stage.stats().preemptions >= 3
    for number, (answer,) in enumerate(expected):
        assert_same(answers[str(number), 0], answer)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(requests=st.lists(asked(aborts=False), min_size=2, max_size=4), budget=budgets())
def test_a_second_round_over_a_used_pool_answers_the_same(
    model: ARComponent, requests: list[Asked], budget: ARBudget
) -> None:
    expected = [alone(model, request) for request in requests]
    stage = ARStage("thinker", model, budget)
    for _ in range(2):
        answers = serve(stage, requests)
        for number, request in enumerate(requests):
            for index in range(request.params.n):
                assert_same(answers[str(number), index], expected[number][index])
