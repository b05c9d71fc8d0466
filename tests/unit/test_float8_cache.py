"""Keys and values in float8: what is stored, what attention makes of it, and that no answer depends on company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage import Omni
from omnistage.config import OmniEngineArgs, resolve
from omnistage.config.schema import ARBudget
from omnistage.core.errors import ConfigError
from omnistage.core.params import SamplingParams
from omnistage.core.types import OmniTokensPrompt
from omnistage.engines.ar.attention import BatchLayout, KVCache, PagedContext, ScoreOptions, make_backend
from omnistage.engines.ar.attention.float8_cache import (
    FLOAT8,
    exponents_of,
    float8_bytes,
    from_float8,
    new_caches,
    read_slots,
    to_float8,
    write_slots,
)
from omnistage.engines.ar.attention.sdpa import SdpaBackend
from omnistage.engines.ar.component import ARSpec, OwnState, StateShape
from omnistage.engines.ar.memory import block_bytes, effective_budget
from omnistage.models.causal_lm.component import CausalLM
from omnistage.models.causal_lm.tiny import write
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import plan_memory

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
SPEC = ARSpec(num_layers=1, num_kv_heads=2, head_dim=16, vocab_size=8, embed_size=16, max_length=64)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_numbers_come_back_within_half_a_step_of_three_bits_whatever_their_size() -> None:
    torch.manual_seed(0)
    rows = torch.randn(50, 3, 32) * torch.logspace(-20, 20, 50)[:, None, None]
    numbers, exponents = to_float8(rows)
    again = from_float8(numbers, exponents, torch.float32)
    largest = rows.abs().amax(-1, keepdim=True)
    # Three bits behind the leading one; below 2^-6 of e4m3 steps are equal: largest / 128 * 2^-9.
    assert ((again - rows).abs() <= (rows.abs() / 16).maximum(largest * 2.0**-17)).all()
    scaled = largest[..., 0] * 2.0 ** -exponents.double()
    assert ((scaled >= 128) & (scaled < 256)).all()
    assert torch.equal(from_float8(*to_float8(again), torch.float32), again), "rounding again changes nothing"


def test_zeros_stay_and_what_is_no_number_stays_none() -> None:
    rows = torch.zeros(3, 1, 4)
    rows[1, 0, 2], rows[2, 0, 1] = float("nan"), float("inf")
    again = from_float8(*to_float8(rows), torch.float32)
    assert torch.equal(again[0], rows[0])
    assert not again[1].isfinite().all()
    assert not again[2].isfinite().all()


def test_slots_hold_what_was_written_and_their_neighbours_stay() -> None:
    torch.manual_seed(0)
    [(keys, values)] = new_caches(replace(SPEC, layer_shapes=((2, 16, 8),)), 4, 8, FLOAT8, zeros)
    assert (keys.shape, values.shape) == ((4, 8, 2, 16), (4, 8, 2, 8))
    assert keys.untyped_storage().nbytes() + values.untyped_storage().nbytes() == 4 * 8 * 2 * (16 + 8 + 2)
    slots, rows = torch.tensor([9, 31, 0, 17]), torch.randn(4, 2, 16) * 100
    write_slots(keys, slots, rows)
    assert torch.equal(read_slots(keys, slots, torch.float32), from_float8(*to_float8(rows), torch.float32))
    others = torch.tensor([slot for slot in range(32) if slot not in slots.tolist()])
    assert not read_slots(keys, others, torch.float32).any()
    assert int((exponents_of(keys) != 0).sum()) <= 8
    assert not values.float().any()


def _attend(cache: KVCache, layout: BatchLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    backend = SdpaBackend()
    slots = [
        each[length - count : length]
        for each, length, count in zip(layout.slots, layout.sequence_lengths, layout.query_lengths, strict=True)
    ]
    mapping = torch.from_numpy(np.concatenate(slots))
    paged = PagedContext(backend, mapping, backend.plan(layout, CPU), layout)
    return backend.attend(q, k, v, cache, paged, ScoreOptions(0.25, None))


def _layout(queries: list[int], lengths: list[int], slots: list[np.ndarray]) -> BatchLayout:
    return BatchLayout(np.array(queries, np.int32), np.array(lengths, np.int32), slots, [np.zeros(1, np.int32)] * 2)


def test_attention_is_that_over_rounded_keys_and_values_and_near_the_full_one() -> None:
    """A prompt and then, beside another prompt, a token."""
    torch.manual_seed(0)
    slots = [np.arange(24, dtype=np.int64)[::-1].copy(), np.arange(24, 40, dtype=np.int64)]
    steps = [_layout([20, 3], [20, 3], slots), _layout([1, 5], [21, 8], slots)]
    rows = [tuple(torch.randn(count, heads, 16) for heads in (4, 2, 2)) for count in (23, 6)]
    results = []
    for dtype, rounded in ((FLOAT8, False), (torch.float32, True), (torch.float32, False)):
        [cache] = new_caches(SPEC, 5, 8, dtype, zeros)
        out = []
        for layout, (q, k, v) in zip(steps, rows, strict=True):
            k, v = (from_float8(*to_float8(each), torch.float32) if rounded else each for each in (k, v))
            out.append(_attend(cache, layout, q, k, v))
        results.append(torch.cat(out))
    ours, explicit, full = results
    torch.testing.assert_close(ours, explicit, atol=1e-6, rtol=1e-6)
    error = float((ours - full).norm() / full.norm())
    assert 1e-4 < error < 0.05


# ----------------------------------------------------------------------------------------------- stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write(path)
    return path


PROMPTS = [tuple(range(3, 3 + length)) for length in (4, 40, 17, 33, 12)]
PROMPTS += [(*PROMPTS[1][:32], 7, 9), (*PROMPTS[1][:16], 5)]


def _answers(folder: Path, prompts: list[tuple[int, ...]], *alone: bool, **budget: object) -> list[list[float]]:
    """Tokens and their log probabilities; those of `alone` one request after the other."""
    overrides = [f"thinker.budget.{name}={value}" for name, value in {"kv_dtype": "float8", **budget}.items()]
    with Omni(str(folder), device="cpu", dtype="float32", overrides=overrides, progress=False) as omni:
        given = [OmniTokensPrompt(ids) for ids in prompts]
        groups = [[each] for each in given] if alone else [given]
        outputs = [output for group in groups for output in omni.generate(group, GREEDY, progress=False)]
        stats = omni.orchestrator.stages["thinker"].stats()
        if budget.get("kv_blocks"):
            assert stats.preemptions > 0
    found = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        found.append([*map(float, completion.token_ids), *(each.chosen.logprob for each in completion.logprobs)])
    return found


@pytest.fixture(scope="module")
def together(folder: Path) -> list[list[float]]:
    return _answers(folder, PROMPTS)


def _same(ours: list[list[float]], theirs: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=0)


def test_answers_are_the_same_alone_and_together(folder: Path, together: list[list[float]]) -> None:
    _same(_answers(folder, PROMPTS, True), together)


@pytest.mark.parametrize(
    "budget",
    [
        {"prefill_chunk": 5, "max_batch_tokens": 24},
        {"kv_blocks": 12, "block_size": 8},
        {"prefix_caching": "false"},
        {"block_size": 32, "run_ahead": "true"},
    ],
    ids=["chunks", "preemption", "no prefixes", "ahead"],
)
def test_answers_do_not_depend_on_the_cut_nor_on_preemption_nor_on_prefixes(
    folder: Path, together: list[list[float]], budget: dict[str, object]
) -> None:
    _same(_answers(folder, PROMPTS, **budget), together)


def test_answers_are_near_those_over_the_full_cache(folder: Path, together: list[list[float]]) -> None:
    full = _answers(folder, PROMPTS, kv_dtype="auto")
    ours, theirs = torch.tensor(together), torch.tensor(full)
    same = ours[:, 0] == theirs[:, 0]  # the first token; random weights choose between equals
    assert same.sum() >= len(PROMPTS) - 2
    error = (ours - theirs)[same, GREEDY.max_tokens].abs()  # of its log probability
    assert 0 < error.max() < 0.5


def test_blocks_hold_nearly_twice_the_tokens_and_the_plan_knows_it(folder: Path) -> None:
    spec = replace(SPEC, num_kv_heads=8, head_dim=128, num_layers=32)
    assert spec.num_layers * 8 * 128 * 2 * 2 / float8_bytes(spec) > 1.98

    def cache(**budget: object) -> int:
        overrides = tuple(f"thinker.budget.{name}={value}" for name, value in {"kv_blocks": 10, **budget}.items())
        given = {"model": str(folder), "device": "cpu", "overrides": overrides}
        resolved = resolve(OmniEngineArgs.parse(given), registry=REGISTRY)
        return plan_memory(resolved, anywhere=True).stages["thinker"].memory.kv_cache

    assert cache() == 10 * 16 * 3 * 2 * (16 + 16) * 4
    assert cache(kv_dtype="float8") == 10 * 16 * 3 * 2 * (17 + 17)
    with Omni(str(folder), device="cpu", overrides=["thinker.budget.kv_dtype=float8"], progress=False) as omni:
        component = omni.orchestrator.stages["thinker"].component  # type: ignore[attr-defined]
        module = component.attention_modules[0]
        assert module.kv_cache[0].dtype == FLOAT8
        assert block_bytes(component, 16, FLOAT8) == 3 * sum(
            each.untyped_storage().nbytes() // len(each) for each in module.kv_cache
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"own_state": OwnState(1, 0)}, "own cache"),
        ({"grouped": True}, "own forward"),
        ({"states": ((StateShape("conv_states", 0, (2,), torch.float32),),)}, "recurrent"),
        ({"num_layers": 0}, "no attention"),
    ],
)
def test_models_that_keep_their_keys_elsewhere_are_refused_by_name(change: dict[str, object], reason: str) -> None:
    component = object.__new__(CausalLM)
    component.spec = replace(SPEC, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"CausalLM does not support kv_dtype: float8.*{reason}"):
        effective_budget(component, ARBudget(kv_dtype="float8"))


def test_a_backend_without_float8_is_refused_by_name() -> None:
    assert make_backend("auto", CPU, float8=True).name == "sdpa"
