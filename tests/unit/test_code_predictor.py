"""Stages whose tokens begin frames of several codes: the residual codes, and what is fed back for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from omnistage.config.schema import ARBudget
from omnistage.core.errors import StageError
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo, SideRows, StageInput, TokenChunk
from omnistage.engines.ar.component import ARComponent, Choose, ResidualCodes
from omnistage.engines.ar.residual import CodePredictor
from omnistage.engines.ar.stage import ARStage
from omnistage.models.causal_lm.component import CausalLM
from tests.unit.test_ar_stage import PROMPT, Around, FakeGraphs, folder, model  # noqa: F401  (fixtures)

CODES, COUNT, SIDE = 32, 3, 5


class Framed(Around):
    """The tiny model with frames: its token, then `COUNT` codes that follow from the hidden row and those before."""

    def __init__(self, inner: CausalLM) -> None:
        width = inner.spec.embed_size
        residual = ResidualCodes(COUNT, CODES, width, top_k=8, top_p=0.9)
        super().__init__(inner, residual=residual, side_input=True, side_size=SIDE)
        self.tokenizer, self.eos_token_ids = None, ()
        generator = torch.Generator().manual_seed(5)
        self.tables = [torch.randn(CODES, width, generator=generator) * 0.3 for _ in range(COUNT)]
        self.code_heads = [torch.randn(CODES, width, generator=generator) for _ in range(COUNT)]
        self.project = torch.randn(SIDE, width, generator=generator)
        self.batches: list[int] = []

    def embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        rows = [self.embed(frames[:, 0]), *(t[frames[:, i + 1]] for i, t in enumerate(self.tables))]
        return torch.stack(rows, dim=1).sum(1)

    def predict(self, hidden: torch.Tensor, token_ids: torch.Tensor, choose: Choose) -> torch.Tensor:
        self.batches.append(len(hidden))
        state, codes = hidden + self.embed(token_ids), []
        for index in range(COUNT):
            codes.append(choose((state[:, None] * self.code_heads[index]).sum(-1), index))
            state = state + self.tables[index][codes[-1]]
        return torch.stack(codes, dim=1)

    def add_side(self, embeds: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return embeds + (rows[:, :, None] * self.project).sum(1)

    def final_side_rows(self) -> torch.Tensor:
        return torch.full((2, SIDE), 0.25)


@dataclass
class Got:
    frames: list[tuple[int, ...]] = field(default_factory=list)
    finish: FinishReason | None = None
    error: Exception | None = None


GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
JOBS = {
    "a": (PROMPT, GREEDY),
    "b": (PROMPT[:4], SAMPLED),
    "c": (PROMPT[2:], SAMPLED.model_copy(update={"seed": 4})),
    "d": (PROMPT[::-1], GREEDY),
}


def stage_of(component: ARComponent, **budget: object) -> ARStage:
    options: dict[str, object] = {"kv_blocks": 64, "block_size": 8, "run_ahead": False, **budget}
    return ARStage("talker", component, ARBudget(**options))  # type: ignore[arg-type]


def side_rows(name: str) -> torch.Tensor:
    return torch.randn(7, SIDE, generator=torch.Generator().manual_seed(ord(name)))


def run(stage: ARStage, names: Sequence[str]) -> dict[str, Got]:
    """All in one batch, with side rows that come one at a time."""
    got = {name: Got() for name in names}
    for name in names:
        ids, params = JOBS[name]
        stage.submit(StageInput(RequestInfo(name), params, ARInput(ids, streaming=True)))
    fed = dict.fromkeys(names, 0)
    for _ in range(200):
        for name in names:
            if fed[name] < 7:
                fed[name] += 1
                stage.feed(name, SideRows(side_rows(name)[fed[name] - 1 : fed[name]], final=fed[name] == 7))
        for chunk in stage.step() if stage.has_work() else []:
            if isinstance(chunk.payload, TokenChunk):
                got[chunk.request_id].frames.extend(chunk.payload.frames)
                assert [frame[0] for frame in chunk.payload.frames] == list(chunk.payload.token_ids)
            got[chunk.request_id].finish = chunk.finish
            got[chunk.request_id].error = chunk.error
    assert not stage.has_work()
    stage.check_integrity()
    return got


def alone(component: ARComponent) -> dict[str, list[tuple[int, ...]]]:
    return {name: run(stage_of(component), [name])[name].frames for name in JOBS}


@pytest.fixture(name="framed")
def _framed(model: CausalLM) -> Framed:  # noqa: F811
    return Framed(model)


def reference(component: Framed, name: str) -> list[tuple[int, ...]]:
    """The same with nothing of the engine but its forward: the whole sequence again for each frame."""
    ids, params = JOBS[name]
    assert params.greedy
    embeds, frames = component.embed(torch.tensor(ids)), list[tuple[int, ...]]()
    sides = torch.cat((side_rows(name), component.final_side_rows()))
    inner = component.inner
    inner.decoder.set_attn_implementation("sdpa")
    try:
        for index in range(params.max_tokens):
            hidden = inner.decoder(inputs_embeds=embeds[None], use_cache=False).last_hidden_state[0, -1:]
            token = component.inner.logits(hidden).argmax(-1)
            codes = component.predict(hidden, token, lambda logits, _: logits.argmax(-1))
            frames.append((int(token), *codes[0].tolist()))
            row = component.embed_frames(torch.tensor([frames[-1]]))
            embeds = torch.cat((embeds, component.add_side(row, sides[min(index, len(sides) - 1)][None])))
    finally:
        inner.decoder.set_attn_implementation("omnistage_paged")
    return frames


@torch.inference_mode()
def test_frames_are_those_of_a_loop_without_an_engine(framed: Framed) -> None:
    for name in "ad":
        got = run(stage_of(framed), [name])[name]
        assert got.frames == reference(framed, name)
        assert (len(got.frames), got.finish) == (12, FinishReason.LENGTH)


@pytest.mark.parametrize(
    "budget",
    [
        {},
        {"run_ahead": True},
        {"prefill_chunk": 3, "max_batch_tokens": 5},
        {"prefill_chunk": 2, "max_batch_tokens": 4, "run_ahead": True},
        {"kv_blocks": 5},
        {"kv_blocks": 5, "run_ahead": True},
    ],
    ids=["batched", "ahead", "chunked", "chunked ahead", "preempted", "preempted ahead"],
)
def test_company_does_not_change_a_frame(framed: Framed, budget: dict[str, object]) -> None:
    expected = alone(framed)
    assert len({tuple(frames) for frames in expected.values()}) == len(JOBS)
    stage = stage_of(framed, **budget)
    framed.batches.clear()
    got = run(stage, list(JOBS))
    assert {name: answer.frames for name, answer in got.items()} == expected
    assert (stage.stats().preemptions > 0) == ("kv_blocks" in budget)
    assert max(framed.batches) > 1


def test_a_captured_step_gives_the_row_that_codes_are_predicted_from(framed: Framed) -> None:
    expected = alone(framed)
    stage = stage_of(framed)
    stage.runner.graphs = FakeGraphs(stage)  # type: ignore[assignment]
    assert {name: answer.frames for name, answer in run(stage, list(JOBS)).items()} == expected


def plain(stage: ARStage, *jobs: tuple[tuple[int, ...], SamplingParams]) -> list[list[tuple[int, ...]]]:
    """Frames of prompts without side rows, in one batch."""
    for i, (ids, params) in enumerate(jobs):
        stage.submit(StageInput(RequestInfo(str(i)), params, ARInput(ids)))
    frames: list[list[tuple[int, ...]]] = [[] for _ in jobs]
    while stage.has_work():
        for chunk in stage.step():
            if isinstance(chunk.payload, TokenChunk):
                frames[int(chunk.request_id)].extend(chunk.payload.frames)
    stage.check_integrity()
    return frames


def test_the_prefix_cache_has_prompts_and_no_frames(framed: Framed) -> None:
    """A frame is more than its first code: a prompt that spells those of another request is something else."""
    prompt = (*PROMPT, *PROMPT[::-1])
    uncached = stage_of(framed, prefix_caching=False)
    (frames,) = plain(uncached, (prompt, GREEDY))
    spelled = (*prompt, *(frame[0] for frame in frames))
    (expected,) = plain(uncached, (spelled, GREEDY))
    stage = stage_of(framed)
    assert plain(stage, (prompt, GREEDY)) == [frames]
    assert plain(stage, (spelled, GREEDY)) == [expected]
    assert stage.scheduler.pool.hits == len(prompt) // 8
    # As it is after a preemption: the frames are computed again, from all of their codes.
    jobs = [(prompt, GREEDY), (spelled, GREEDY), (prompt, GREEDY)]
    crowded = stage_of(framed, kv_blocks=8)
    assert plain(crowded, *jobs) == [frames, expected, frames]
    assert crowded.stats().preemptions > 0


def test_codes_are_sampled_at_the_temperature_of_the_first_unless_they_have_their_own(framed: Framed) -> None:
    for own, expected in ((None, 0.4), (1.0, 1.0)):
        framed.spec = replace(framed.spec, residual=ResidualCodes(COUNT, CODES, 1, temperature=own))
        stage = stage_of(framed)
        for key, temperature in (("greedy", 0.0), ("cool", 0.4)):
            stage.runner.sampler.add(key, SamplingParams(temperature=temperature), ())
        numbers = stage.runner._residual_numbers(["greedy", "cool"])
        assert numbers is not None
        assert numbers[0].tolist() == [0.0, expected]


def test_sampled_codes_follow_their_seed_and_vary(framed: Framed) -> None:
    first, again = (run(stage_of(framed), ["b"])["b"].frames for _ in range(2))
    assert first == again
    assert all(left[1:] != right[1:] for left, right in pairwise(first))


def test_codes_that_cannot_be_chosen_end_their_request_alone(framed: Framed) -> None:
    expected = alone(framed)
    predict = framed.predict

    def broken(hidden: torch.Tensor, token_ids: torch.Tensor, choose: Choose) -> torch.Tensor:
        wrong = torch.where(token_ids == expected["a"][5][0], torch.nan, 0.0)
        return predict(hidden + wrong[:, None], token_ids, choose)

    framed.predict = broken  # type: ignore[method-assign]
    got = run(stage_of(framed), ["a", "d"])
    assert isinstance(got["a"].error, StageError)
    assert len(got["a"].frames) <= 6
    assert got["d"].frames == expected["d"]


@torch.inference_mode()
def test_a_batch_may_be_padded_to_the_size_that_was_captured(framed: Framed) -> None:
    """As a graph of the next larger size does it: the rows of the batch come first, the others are stale."""
    hidden = torch.randn(3, framed.spec.embed_size, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([4, 9, 11])
    numbers = torch.rand(1 + COUNT, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).numpy()
    numbers[0] = (0.0, 1.0, 1.0)
    plain, padded = CodePredictor(framed), CodePredictor(framed)
    expected = plain.run(hidden, ids, numbers)
    padded.run(torch.randn(8, framed.spec.embed_size), torch.arange(8), torch.rand(1 + COUNT, 8).double().numpy())
    padded._captured = [8]
    assert torch.equal(padded.run(hidden, ids, numbers), expected)


def test_a_component_without_a_predictor_says_so(model: CausalLM) -> None:  # noqa: F811
    with pytest.raises(StageError, match="no code predictor"):
        model.predict(torch.zeros(1, 1), torch.zeros(1), lambda logits, _: logits)
    with pytest.raises(StageError, match="no code predictor"):
        model.embed_frames(torch.zeros(1, 1))
    assert replace(model.spec).residual is None
