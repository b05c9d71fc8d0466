"""The sampler on a GPU gives what it gives on a CPU, in any batch, and reports failing rows."""

from __future__ import annotations

import math

import pytest
import torch

from omnistage.core.errors import StageError
from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling.sampler import Sampler
from omnistage.engines.ar.sampling.selection import argmax_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES: list[dict[str, object]] = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 40},
    {"top_k": 1000, "top_p": 0.5},
    {"top_k": 1500},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.8, "temperature": 2.0},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"top_k": 20, "presence_penalty": 0.4, "frequency_penalty": 0.1, "logit_bias": {5: 2.0}},
    {"temperature": 3.0, "allowed_token_ids": tuple(range(20, 80))},
    {"suppress_token_ids": (1, 2, 3), "min_tokens": 2},
]
REQUESTS = {f"r{i}": SamplingParams.parse({"seed": i, **shape}) for i, shape in enumerate(SHAPES)}


def tokens(rows: torch.Tensor, keys: list[str], device: str) -> list[list[int]]:
    sampler = Sampler(rows.shape[2], torch.device(device), eos_token_ids=[0])
    for key in keys:
        sampler.add(key, REQUESTS[key], [1, 2])
    return [[s.token_id for s in sampler.sample(step.to(device), keys)] for step in rows]


@pytest.mark.parametrize("vocab", [600, 6000, 151_936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_the_cpus_and_the_same_in_any_batch(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    rows = (torch.randn(4, len(REQUESTS), vocab) * 2).to(dtype)
    together = tokens(rows, list(REQUESTS), "cuda")
    assert together == tokens(rows, list(REQUESTS), "cpu")
    for i, key in enumerate(REQUESTS):
        assert [row[0] for row in tokens(rows[:, i : i + 1], [key], "cuda")] == [row[i] for row in together]


def test_greedy_breaks_ties_as_torch_does() -> None:
    x = torch.randint(0, 3, (64, 5000), device="cuda").float()
    assert torch.equal(argmax_rows(x), x.argmax(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    for key in REQUESTS:
        logits = torch.randn(3, 6000, device="cuda")
        logits[1] = bad
        sampler = Sampler(6000, torch.device("cuda"))
        for name in "abc":
            sampler.add(name, REQUESTS[key], [])
        first, second, third = sampler.sample(logits, ["a", "b", "c"])
        assert isinstance(second.error, StageError)
        assert first.error is None
        assert third.error is None


def test_an_ordinary_step_synchronises_once() -> None:
    sampler = Sampler(32_000, torch.device("cuda"), eos_token_ids=[0])
    for key, params in REQUESTS.items():
        sampler.add(key, params, [1, 2])
    # Flat logits need a second look at three of them, and the logprobs of r8 are fetched by themselves.
    keys = [key for key in REQUESTS if key not in ("r0", "r4", "r6", "r8")]
    logits = -2.0 * (torch.arange(32_000, device="cuda") + 1).log().repeat(len(keys), 1)
    for _ in range(3):
        sampler.sample(logits, keys)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sampler.sample(logits, keys)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("cudaStreamSynchronize", 0) <= 1
    assert calls.get("aten::nonzero", 0) == 0
