"""Captured steps that sample, replayed without CUDA: the whole of `graphs.py` but the capture itself.

For Triton's interpreter only: `test_triton_sample.py` starts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omnistage.config.schema import ARBudget
from omnistage.core.types import StageInput
from omnistage.engines.ar import graphs, runner
from omnistage.engines.ar import stage as ar_stage
from omnistage.engines.ar.attention.triton_backend import TritonBackend
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.graphs import DecodeGraphs, StepTensors
from omnistage.engines.ar.sampling import batch, sampler
from omnistage.engines.ar.sampling.row_block import Block
from omnistage.engines.ar.stage import ARStage
from omnistage.engines.streams import Download
from omnistage.models.causal_lm.component import CausalLM
from tests.unit import test_code_predictor as frames
from tests.unit.test_ar_stage import Answers, drain, folder, model, request, run

__all__ = ["folder", "model"]

PROMPTS = [tuple((7 * i + j) % 800 for i in range(3 + 2 * j)) for j in range(4)]
SAMPLED: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.1, "seed": 2, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "min_tokens": 3, "logprobs": 1, "presence_penalty": 0.2},
]


class Replayed:
    """In place of a CUDA graph."""

    def __init__(self, step: Callable[[], StepTensors], result: StepTensors) -> None:
        self._step = step
        self._result = result

    def replay(self) -> None:
        for own, new in zip(self._result, self._step(), strict=True):
            if own is not None:
                own.copy_(new)


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Callable[[], StepTensors], _device: object, _pool: object) -> tuple[Replayed, StepTensors]:
        result = step()
        return Replayed(step, result), result

    def unpinned(create: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, pin_memory=False, **options: create(*args, **options)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch, "empty", unpinned(torch.empty))
    monkeypatch.setattr(torch, "zeros", unpinned(torch.zeros))
    # In the host's memory a download is the tensor itself, which the next replay overwrites.
    for module in (sampler, runner):
        monkeypatch.setattr(module, "Download", lambda *tensors: Download(*(tensor.clone() for tensor in tensors)))
    for module in (batch, runner):
        monkeypatch.setattr(module, "has_kernels", lambda _device: True)


def graph_stage(model: ARComponent, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], **budget: Any) -> ARStage:
    options = {"kv_blocks": 64, "block_size": 8, "run_ahead": True, "max_model_len": 64, **budget}
    with monkeypatch.context() as patch:
        patch.setattr(ar_stage, "make_backend", lambda *_, **__: TritonBackend())
        stage = ARStage("thinker", model, ARBudget(**options))
    with torch.inference_mode():
        stage.runner.graphs = DecodeGraphs(stage.runner, sizes, stage.max_length)
    return stage


def requests(max_tokens: int = 5) -> list[StageInput]:
    return [
        request(str(i), prompt, **{"max_tokens": max_tokens, "ignore_eos": True, **own})
        for i, (prompt, own) in enumerate(zip(PROMPTS, SAMPLED, strict=True))
    ]


def tokens(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: answer.tokens for key, answer in answers.items()}


@pytest.fixture(scope="module")
def expected(model: CausalLM) -> dict[tuple[str, int], list[int]]:
    """On the host, without a kernel."""
    return tokens(run(ARStage("thinker", model, ARBudget(kv_blocks=64, block_size=8, run_ahead=False)), *requests()))


@pytest.fixture
def in_graph(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each step whose tokens were sampled in the graph."""
    rows: list[int] = []
    launch = sampler.Sampler.launch

    def spy(self: sampler.Sampler, logits: torch.Tensor, keys: list[str], ids: torch.Tensor | None = None) -> Any:
        rows.extend([] if ids is None else [len(ids)])
        return launch(self, logits, keys, ids)

    monkeypatch.setattr(sampler.Sampler, "launch", spy)
    return rows


def test_captured_steps_sample_the_hosts_tokens_also_after_preemption(
    model: CausalLM,
    expected: dict[tuple[str, int], list[int]],
    in_graph: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = graph_stage(model, monkeypatch, (1, 4), kv_blocks=5, prefix_caching=False)
    assert tokens(run(stage, *requests())) == expected
    assert stage.stats().preemptions > 0
    assert len(set(in_graph)) > 1


def test_a_batch_of_several_replays_is_sampled_after_them(
    model: CausalLM,
    expected: dict[tuple[str, int], list[int]],
    in_graph: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = tokens(run(graph_stage(model, monkeypatch, (2,)), *requests(3)[1:]))
    assert found == {key: tokens[:3] for key, tokens in expected.items() if key != ("0", 0)}
    assert not in_graph


def test_a_batch_may_become_one_that_is_sampled_after_its_step_and_back(
    model: CausalLM,
    expected: dict[tuple[str, int], list[int]],
    in_graph: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when a request with a grammar joins and ends; the counts of the others' penalties go on."""
    build = sampler.Sampler.block

    def block(self: sampler.Sampler, keys: list[str]) -> Block | None:
        return None if any(self._states[key].params.seed == 99 for key in keys) else build(self, keys)

    monkeypatch.setattr(sampler.Sampler, "block", block)
    stage = graph_stage(model, monkeypatch, (1, 2, 4))
    answers = Answers()
    for item in requests()[1:3]:
        stage.submit(item)
    for _ in range(2):
        answers.take(stage.step())
    before = list(in_graph)
    stage.submit(request("joins", PROMPTS[0], max_tokens=2, seed=99, ignore_eos=True))
    found = tokens(drain(stage, answers))
    assert found.pop(("joins", 0)) is not None
    assert found == {key: expected[key] for key in (("1", 0), ("2", 0))}
    assert before
    assert len(before) < len(in_graph) < 4


@pytest.mark.parametrize(("sizes", "max_running"), [((4,), 3), ((2,), 8)])
def test_codes_that_are_predicted_in_a_step_are_those_after_it(
    model: CausalLM, sizes: tuple[int, ...], max_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph for more sequences than may run; and in a batch of two replays, which predict nothing themselves."""
    jobs = {name: (ids, p.model_copy(update={"max_tokens": 3})) for name, (ids, p) in frames.JOBS.items()}
    monkeypatch.setattr(frames, "JOBS", jobs)
    expected = frames.run(frames.stage_of(frames.Framed(model)), "abc")
    stage = graph_stage(frames.Framed(model), monkeypatch, sizes, max_running=max_running)
    assert stage.runner.last_codes is not None
    stage.runner.last_codes.fill_(7)
    stage.runner.last_ids.fill_(7)
    with torch.inference_mode():
        stage.runner.graphs._captured[sizes[0], 64].graph.replay()  # type: ignore[union-attr]
    assert (stage.runner.last_codes == 7).all()
    assert (stage.runner.last_ids == 7).all()
    found = frames.run(stage, "abc")
    assert {name: got.frames for name, got in found.items()} == {name: got.frames for name, got in expected.items()}
    assert all(len(got.frames) == 3 for got in found.values())


def test_the_last_token_of_a_prompt_is_no_frame(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come alone, as one that a captured step takes; but that embeds frames."""
    framed = frames.Framed(model)
    job = PROMPTS[1], frames.GREEDY.model_copy(update={"max_tokens": 3})
    expected = frames.plain(frames.stage_of(framed), job)
    stage = graph_stage(framed, monkeypatch, (1,), prefill_chunk=len(PROMPTS[1]) - 1)
    assert frames.plain(stage, job) == expected
