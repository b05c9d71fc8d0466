"""The sampler on a GPU gives what it gives on a CPU, in any batch, and reports failing rows."""

from __future__ import annotations

import math

import pytest
import torch

from omnistage.core.errors import StageError
from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling import batch
from omnistage.engines.ar.sampling.device_selection import DeviceSelector
from omnistage.engines.ar.sampling.sampler import Sampler

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
    greedy = DeviceSelector([SamplingParams(temperature=0.0)] * 64, 5000, x.device)
    assert torch.equal(greedy.select(x, torch.zeros(64, dtype=torch.float64, device="cuda")), x.argmax(-1))


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


@pytest.mark.parametrize("vocab", [300, 4096, 151_936])
def test_the_kernel_gives_the_tokens_of_a_sort(vocab: int) -> None:
    params = [p for p in REQUESTS.values() if not p.structured]
    selector = DeviceSelector(params, vocab, torch.device("cuda"))
    for trial in range(6):
        x = torch.randn(len(params), vocab, device="cuda") * (1 + trial)
        if trial % 2:
            x = (x * 2).round() / 2  # many ties
        u = torch.rand(len(params), dtype=torch.float64, device="cuda")
        assert torch.equal(selector.select(x, u), selector.select_sorted(x, u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_give_the_tokens_and_counts_of_the_plain_path(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, found, counts = list(REQUESTS), [], []
    torch.manual_seed(0)
    logits = (torch.randn(5, len(keys), 40_001, device="cuda") * 3).to(dtype)
    for kernels in (True, False):
        monkeypatch.setattr(batch, "has_kernels", lambda _device, kernels=kernels: kernels)
        sampler = Sampler(40_001, torch.device("cuda"), eos_token_ids=[0])
        for key in keys:
            sampler.add(key, REQUESTS[key], [1, 2])
        assert (sampler.block(keys) is not None) == kernels
        found.append([[sampled.token_id for sampled in sampler.sample(step, keys)] for step in logits])
        states = sampler._states.values()
        counts.append(
            [None if x is None else x.tolist() for state in states for x in (state.occurrences, state.counts)]
        )
    assert found[0] == found[1]
    assert counts[0] == counts[1]


def test_launching_a_step_waits_for_nothing() -> None:
    sampler = Sampler(32_000, torch.device("cuda"), eos_token_ids=[0])
    for key, params in REQUESTS.items():
        sampler.add(key, params, [1, 2])
    logits = torch.randn(len(REQUESTS), 32_000, device="cuda")
    for _ in range(3):
        sampler.sample(logits, list(REQUESTS))
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [sampler.launch(logits, list(REQUESTS)) for _ in range(2)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(sampled.token_id >= 0 for batch in pending for sampled in sampler.read(batch))
