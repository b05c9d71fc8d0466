"""The sampler: parity with transformers, seeds, processors, logprobs, failing rows."""

from __future__ import annotations

import math
import random
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omnistage.core.errors import InternalError, InvalidRequestError, StageError
from omnistage.core.params import SamplingParams, StructuredOutput
from omnistage.engines.ar.sampling.batch import BatchPlan
from omnistage.engines.ar.sampling.device_selection import DeviceSelector
from omnistage.engines.ar.sampling.processors import _Places, mix, uniform, uniforms
from omnistage.engines.ar.sampling.sampler import Sampled, Sampler
from omnistage.engines.ar.sampling.selection import (
    FAILED,
    MAX_FAST_TOP_K,
    UNCOVERED,
    TokenSelector,
    counts_to_look_at,
    is_filtered,
    top_rows,
)

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True, params=[True, False], ids=["host", "device"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where tokens are selected: every test runs in numpy on the host, and as on a device. True: on the host."""
    initialise = Sampler.__init__

    def with_path(self: Sampler, *args: object, **options: object) -> None:
        initialise(self, *args, **{"on_host": request.param, **options})

    monkeypatch.setattr(Sampler, "__init__", with_path)
    return request.param


def fix_random_number(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    """All requests draw the same number."""
    monkeypatch.setattr("omnistage.engines.ar.sampling.batch.uniform", lambda stream, step: u)
    monkeypatch.setattr("omnistage.engines.ar.sampling.batch.uniforms", lambda streams, steps: np.full(len(steps), u))


def params(**values: object) -> SamplingParams:
    return SamplingParams.parse(values)


def one(logits: torch.Tensor, p: SamplingParams, prompt: Sequence[int] = (), eos: Sequence[int] = ()) -> int:
    """The token that a fresh request gets from a single row."""
    sampler = Sampler(logits.shape[-1], CPU, eos_token_ids=eos)
    sampler.add("r", p, prompt)
    return sampler.sample(logits.view(1, -1), ["r"])[0].token_id


def sequence(p: SamplingParams, rows: torch.Tensor, prompt: Sequence[int] = (), eos: Sequence[int] = ()) -> list[int]:
    """The tokens that one request gets from successive rows."""
    sampler = Sampler(rows.shape[1], CPU, eos_token_ids=eos)
    sampler.add("r", p, prompt)
    return [sampler.sample(row[None], ["r"])[0].token_id for row in rows]


def test_residual_codes_have_numbers_of_their_own_request_and_step() -> None:
    """Row 0 is the temperature; a greedy request has none, and the same seed the same numbers beside any other."""
    sampler = Sampler(8, CPU)
    settings = {"greedy": GREEDY, "cool": params(temperature=0.5, seed=1), "warm": params(temperature=2.0, seed=2)}
    for key, each in settings.items():
        sampler.add(key, each, ())
    together = sampler.residual_numbers(["greedy", "cool", "warm"], 3, None)
    assert together[0].tolist() == [0.0, 0.5, 2.0]
    assert np.array_equal(together[:, 1:2], sampler.residual_numbers(["cool"], 3, None))
    assert sampler.residual_numbers(["greedy", "warm"], 3, 0.7)[0].tolist() == [0.0, 0.7]
    assert not sampler.residual_numbers(["greedy"], 3, None).any()
    assert len(np.unique(together[1:])) == 9
    sampler.sample(torch.zeros(2, 8), ["cool", "warm"])
    later = sampler.residual_numbers(["cool"], 3, None)
    assert len(np.unique(np.concatenate((together[1:, 1], later[1:, 0])))) == 6
    # The number is a part of what a seed means, and stays the same from one release to the next.
    assert later[1:, 0].tolist() == [uniform(mix(1) ^ 0xD1B54A32D192ED03, 3 + code) for code in range(3)]


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of the reference implementation for the seed 1234567."""
    expected = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert [uniform(1234567, step) for step in range(3)] == [(value >> 11) * 2.0**-53 for value in expected]


def test_without_being_told_it_samples_where_the_logits_are() -> None:
    assert Sampler(8, CPU, on_host=None)._arrays.host
    assert not Sampler(8, torch.device("meta"), on_host=None)._arrays.host


# ------------------------------------------------------------------------------------------------- greedy


def test_greedy_picks_the_largest_logit_of_each_row() -> None:
    logits = torch.randn(5, 300)
    sampler = Sampler(300, CPU)
    keys = [f"r{i}" for i in range(5)]
    for key in keys:
        sampler.add(key, GREEDY, [])
    assert [s.token_id for s in sampler.sample(logits, keys)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_breaks_ties_as_torch_does(dtype: torch.dtype) -> None:
    logits = torch.randint(0, 3, (8, 200)).to(dtype)
    sampler = Sampler(200, CPU)
    keys = [str(i) for i in range(8)]
    for key in keys:
        sampler.add(key, GREEDY, [])
    assert [s.token_id for s in sampler.sample(logits, keys)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-300])  # of the last two logits or itself overflow
@pytest.mark.parametrize("shape", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_a_vanishing_temperature_is_greedy_and_finite(temperature: float, shape: dict[str, object]) -> None:
    logits = torch.randn(64) * 30
    assert one(logits, params(temperature=temperature, seed=1, **shape)) == int(logits.argmax())


def test_logits_are_left_unchanged() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sampler = Sampler(50, CPU)
    sampler.add("a", params(logit_bias={3: 5.0}, suppress_token_ids=(1, 2), repetition_penalty=2.0), [4, 5])
    sampler.add("b", params(repetition_penalty=1.5), [4])
    sampler.sample(logits, ["a", "b"])
    assert torch.equal(logits, before)


def test_logits_may_carry_gradients_and_any_strides() -> None:
    logits = torch.randn(2000, 2, requires_grad=True).T
    sampler = Sampler(2000, CPU)
    sampler.add("a", GREEDY, [])
    sampler.add("b", params(top_k=1), [])
    for _ in range(2):
        assert [s.token_id for s in sampler.sample(logits, ["a", "b"])] == logits.argmax(-1).tolist()


# ----------------------------------------------------------------------------------- parity with transformers


def reference_support(p: SamplingParams, logits: torch.Tensor, prompt: list[int], eos: list[int]) -> torch.Tensor:
    """transformers' filtered probabilities of the first token."""
    steps = LogitsProcessorList()
    if p.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    if p.logit_bias:
        steps.append(SequenceBiasLogitsProcessor([[[t], v] for t, v in p.logit_bias.items()]))
    if p.suppress_token_ids:
        steps.append(SuppressTokensLogitsProcessor(list(p.suppress_token_ids)))
    if p.min_tokens:
        steps.append(MinNewTokensLengthLogitsProcessor(len(prompt), p.min_tokens, eos))
    if p.temperature != 1.0:
        steps.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k:
        steps.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        steps.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        steps.append(MinPLogitsWarper(p.min_p))
    scores = steps(torch.tensor([prompt]), logits[None].clone())
    return scores.softmax(-1)[0]


def random_params(rng: random.Random, vocab: int) -> SamplingParams:
    values: dict[str, object] = {"temperature": rng.choice([0.3, 0.7, 1.0, 1.7]), "seed": rng.getrandbits(40)}
    if rng.random() < 0.5:
        values["top_k"] = rng.choice([1, 2, 5, 40, vocab - 1, vocab, vocab * 2])
    if rng.random() < 0.5:
        values["top_p"] = rng.choice([0.05, 0.3, 0.73, 0.95, 0.999])
    if rng.random() < 0.4:
        values["min_p"] = rng.choice([0.01, 0.1, 0.5, 1.0])
    if rng.random() < 0.4:
        values["repetition_penalty"] = rng.choice([0.7, 1.3, 2.0])
    if rng.random() < 0.4:
        values["logit_bias"] = {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(4)}
    if rng.random() < 0.4:
        values["suppress_token_ids"] = tuple(rng.sample(range(vocab), 5))
    if rng.random() < 0.4:
        values["min_tokens"] = 3
    return params(**values)


def quantiles(expected: torch.Tensor) -> tuple[list[int], list[float]]:
    """Tokens in the order of their ids, and the middle of each one's stretch of [0, 1)."""
    order = (expected > expected.max() * 2**-30).nonzero()[:, 0]  # rarer ones round to never
    edges = expected[order].double().cumsum(0)
    return order.tolist(), (edges - expected[order].double() / 2).tolist()


@pytest.mark.parametrize("vocab", [50, 3000])
def test_the_filtered_distribution_is_that_of_transformers(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(vocab)
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(60):
        logits = torch.randn(vocab, generator=generator) * rng.choice([1.0, 3.0])
        prompt = [rng.randrange(vocab) for _ in range(10)]
        p = random_params(rng, vocab)
        expected = reference_support(p, logits, prompt, [7])
        order, middles = quantiles(expected)
        # In the middle of each kept token's stretch, the inverse of the distribution must give that token; so must
        # the very ends of [0, 1), which lie in the first and the last.
        chosen = rng.sample(range(len(order)), min(6, len(order)))
        trials = [(middles[i], order[i]) for i in chosen if expected[order[i]] > 1e-5]
        trials += [(0.0, order[0])]
        if len(order) < 50:
            trials.append((1 - 2**-53, order[-1]))
        for u, token in trials:
            fix_random_number(monkeypatch, u)
            assert one(logits, p, prompt, eos=[7]) == token, (p, u)


def test_top_k_keeps_every_tie_of_the_kth_value(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((4000,), -5.0)
    logits[[10, 20, 30, 40]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    fix_random_number(monkeypatch, 0.999)
    assert one(logits, params(top_k=2)) == 40


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    rows = torch.zeros(5, 6)
    rows[:, 2], rows[:, 3] = 1.0, 0.8
    # Token 2 leads by 0.2; each use costs 0.15, so it leads once more and then alternates with 3.
    assert sequence(params(temperature=0.0, frequency_penalty=0.15), rows, prompt=[2, 2, 2]) == [2, 2, 3, 2, 3]
    # A presence penalty does not grow with use: both end up 0.5 lower.
    assert sequence(params(temperature=0.0, presence_penalty=0.5), rows) == [2, 3, 2, 2, 2]


def test_penalties_count_beside_a_row_that_has_none() -> None:
    sampler = Sampler(3, CPU)
    sampler.add("plain", GREEDY, [])
    sampler.add("penalised", params(temperature=0.0, presence_penalty=0.5), [])
    logits = torch.tensor([[1.0, 0.8, 0.0]]).repeat(2, 1)
    steps = [[s.token_id for s in sampler.sample(logits, ["plain", "penalised"])] for _ in range(3)]
    assert steps == [[0, 0], [0, 1], [0, 0]]


def test_each_penalised_row_counts_its_own_tokens_in_its_own_place() -> None:
    """Three that are penalised, behind one whose logits are changed by something else."""
    sampler = Sampler(4, CPU)
    sampler.add("biased", params(temperature=0.0, logit_bias={3: 0.1}), [])
    penalised = {f"p{i}": params(temperature=0.0, frequency_penalty=0.3) for i in range(3)}
    for key, each in penalised.items():
        sampler.add(key, each, [])
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.8, 0.0, 0.0], [0.0, 1.0, 0.8, 0.0], [0.8, 0.0, 0.0, 1.0]])
    steps = [[s.token_id for s in sampler.sample(rows, ["biased", *penalised])] for _ in range(4)]
    assert steps == [[0, 0, 1, 3], [0, 1, 2, 0], [0, 0, 1, 3], [0, 1, 2, 0]]


def test_the_places_of_penalised_tokens_are_as_many_as_the_tokens() -> None:
    """However often one is sampled: a long output of few tokens costs no more than a short one."""
    prompts = [np.array(counts, dtype=np.int32) for counts in ([0, 1, 0, 0], [0, 0, 0, 1])]
    places = _Places(prompts, [0, 2])
    for ids in ([1, 9, 3], [2, 9, 3], [2, 9, 3], [1, 9, 0]):
        places.add(np.array(ids))
    assert sorted(places.in_stack.tolist()) == [1, 2, 4, 7]
    assert places.stack.tolist() == [[0, 3, 2, 0], [1, 0, 0, 4]]
    assert sorted(zip(places.row.tolist(), places.in_part.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 8), (1, 11)]


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    assert one(torch.tensor([2.0, 1.1, -9.0]), params(temperature=0.0, repetition_penalty=2.0), [0]) == 1
    assert one(torch.tensor([-1.0, -1.9, -9.0]), params(temperature=0.0, repetition_penalty=2.0), [0]) == 1


def test_repetition_penalty_covers_sampled_tokens_and_skips_foreign_prompt_ids() -> None:
    rows = torch.tensor([[3.0, 2.0, 1.8]]).repeat(3, 1)
    assert sequence(params(temperature=0.0, repetition_penalty=2.0), rows, prompt=[99, -4]) == [0, 1, 2]


@pytest.mark.parametrize("foreign", [-1, 3])
def test_the_ids_just_outside_the_vocabulary_penalise_nothing(foreign: int) -> None:
    p = params(temperature=0.0, repetition_penalty=2.0)
    assert one(torch.tensor([1.0, 1.5, 2.0]), p, prompt=[foreign]) == 2


def test_counts_survive_a_change_of_the_batch_and_many_steps() -> None:
    torch.manual_seed(3)
    rows = torch.randn(600, 40)
    p = params(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.01, presence_penalty=0.1)
    alone = sequence(p, rows, prompt=[1])
    sampler = Sampler(40, CPU)
    sampler.add("r", p, [1])
    mixed = []
    for step, row in enumerate(rows):
        keys = ["r"]
        if step % 7 == 3:
            sampler.add(f"other{step}", p, [2])
            keys = [f"other{step}", "r"]
        mixed.append(sampler.sample(row[None].repeat(len(keys), 1), keys)[-1].token_id)
    assert mixed == alone


def test_allowed_tokens_less_the_suppressed_ones() -> None:
    logits = torch.arange(100.0)
    assert one(logits, params(temperature=0.0, allowed_token_ids=(3, 50, 50, 7), suppress_token_ids=(50,))) == 7
    for seed in range(20):
        assert one(torch.zeros(5000), params(seed=seed, allowed_token_ids=(3, 50, 7))) in {3, 7, 50}


def test_min_tokens_holds_back_end_and_stop_tokens() -> None:
    rows = torch.tensor([[5.0, 4.0, 3.0, 2.0]]).repeat(4, 1)
    p = params(temperature=0.0, min_tokens=2, stop_token_ids=(1,))
    assert sequence(p, rows, eos=[0]) == [2, 2, 0, 0]
    ignoring = p.model_copy(update={"ignore_eos": True})
    assert sequence(ignoring, rows, eos=[0]) == [0, 0, 0, 0]


def test_min_tokens_ends_for_each_request_on_its_own_in_a_batch_that_changes() -> None:
    sampler = Sampler(3, CPU, eos_token_ids=[0])
    rows = torch.tensor([[5.0, 4.0, 3.0]])
    for key, least in (("long", 4), ("short", 1), ("late", 3)):
        sampler.add(key, params(temperature=0.0, min_tokens=least), [])
    tokens: dict[str, list[int]] = {"long": [], "short": [], "late": []}
    for keys in [["long", "short"]] * 2 + [["long", "short", "late"]] * 4:
        for key, sampled in zip(keys, sampler.sample(rows.repeat(len(keys), 1), keys), strict=True):
            tokens[key].append(sampled.token_id)
    assert tokens == {"long": [1, 1, 1, 1, 0, 0], "short": [1, 0, 0, 0, 0, 0], "late": [1, 1, 1, 0]}


@pytest.mark.parametrize("foreign", [-1, 4])
def test_end_tokens_outside_the_vocabulary_are_left_out(foreign: int) -> None:
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(2, 1)
    assert sequence(params(temperature=0.0, min_tokens=2), rows, eos=[foreign]) == [3, 3]


def test_min_tokens_never_leaves_nothing() -> None:
    p = params(temperature=0.0, min_tokens=4, allowed_token_ids=(0,))
    assert sequence(p, torch.randn(3, 8), eos=[0, 99]) == [0, 0, 0]


# --------------------------------------------------------------------------------------------- seeds, batches


SHAPES: list[dict[str, object]] = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 40},
    {"top_k": 1000, "top_p": 0.5},
    {"top_k": 1500},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_p": 0.8, "temperature": 2.0},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"top_k": 20, "presence_penalty": 0.4, "logit_bias": {5: 2.0}},
    {"temperature": 3.0},
    {"suppress_token_ids": (1, 2, 3), "min_tokens": 2},
]


@pytest.mark.parametrize("vocab", [600, 6000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    rows = (torch.randn(4, len(SHAPES), vocab) * 2).to(dtype)
    wanted = {f"r{i}": params(seed=i, **shape) for i, shape in enumerate(SHAPES)}
    together = Sampler(vocab, CPU, eos_token_ids=[0])
    for key, p in wanted.items():
        together.add(key, p, [1, 2])
    batched = [[s.token_id for s in together.sample(step, list(wanted))] for step in rows]
    for i, p in enumerate(wanted.values()):
        assert sequence(p, rows[:, i], prompt=[1, 2], eos=[0]) == [step[i] for step in batched], p


def test_all_ways_to_select_agree() -> None:
    """What few candidates settle is what sorting everything gives, and what a device gives."""
    torch.manual_seed(0)
    shapes = [params(**{"temperature": 1.0, **shape}) for shape in SHAPES if shape.get("temperature") != 0.0]
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(len(shapes), 9000) * 2.5).to(dtype).float()
        *few, everything = (TokenSelector(shapes, 9000, attempt) for attempt in range(3))
        on_device = DeviceSelector(shapes, 9000, CPU)
        for _ in range(25):
            u = torch.rand(len(shapes), dtype=torch.float64)
            whole = everything.select(x, u.tolist())
            assert min(whole) >= 0
            for selector in few:
                ids = selector.select(x, u.tolist())
                assert all(token in (UNCOVERED, right) for token, right in zip(ids, whole, strict=True))
            assert on_device.select(x, u).tolist() == whole


def test_top_k_says_how_many_tokens_are_looked_at_first() -> None:
    limits = np.array([5, MAX_FAST_TOP_K, MAX_FAST_TOP_K + 1, 32000])
    assert counts_to_look_at(limits, 0).tolist() == [5, MAX_FAST_TOP_K, 128, 128]
    assert counts_to_look_at(limits, 1).tolist() == [4096] * 4


@pytest.mark.parametrize(
    ("values", "filters"),
    [
        ({"top_k": 10}, False),
        ({"top_k": 0}, False),
        ({"top_k": 9}, True),
        ({"top_p": 1.0}, False),
        ({"top_p": 0.99}, True),
        ({"min_p": 0.0}, False),
        ({"min_p": 0.01}, True),
    ],
)
def test_a_filter_that_keeps_every_token_is_none(values: dict[str, object], filters: bool) -> None:
    assert is_filtered(params(**values), 10) is filters


def test_tokens_that_tie_only_once_scaled_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third likeliest is not among the two that are looked at first, and equals the second by its temperature."""
    second, temperature = np.float32(1.901), np.float32(0.95)
    third = np.nextafter(second, np.float32(0))
    assert second / temperature == third / temperature
    logits = torch.full((32_000,), -9.0)
    logits[[7, 5, 2]] = torch.tensor([2.0, float(second), float(third)])
    fix_random_number(monkeypatch, 0.0)
    assert one(logits, params(top_k=2, temperature=float(temperature))) == 2


def test_logits_that_differ_least_are_ranked() -> None:
    """The smaller the numbers, the smaller the differences that float32 knows."""
    x = torch.tensor([[1e-10, 2e-10, -1e-10, 0.0, -3e-10, -2e-10]])
    values, ids = top_rows(x, 6)
    assert ids.tolist() == [[1, 0, 3, 2, 5, 4]]
    assert torch.equal(values, x[:, ids[0]])
    for index, token in enumerate((1, 0, 3, 2, 5, 4)):
        assert TokenSelector([params(top_k=1)], 6).select(x, [0.0]) == [token], index
        x[0, token] = -1.0


@pytest.mark.parametrize("shape", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_batch_of_nothing_but_rows_with_nothing_left_fails(shape: dict[str, object]) -> None:
    nothing = torch.full((2, 6000), -torch.inf)
    assert TokenSelector([params(**shape)] * 2, 6000).select(nothing, [0.5, 0.5]) == [FAILED, FAILED]


def test_a_selector_looks_at_few_tokens_unless_it_is_told_to_try_again() -> None:
    x = torch.full((1, 20_000), -50.0)
    x[0, :1000] = torch.arange(1000.0) * -1e-3  # 500 of them or so make half of the mass
    half = [params(top_p=0.5)]
    assert TokenSelector(half, 20_000).select(x, [0.999]) == [UNCOVERED]
    assert 300 < TokenSelector(half, 20_000, 1).select(x, [0.999])[0] < 500


def test_the_largest_random_number_picks_the_last_token() -> None:
    """The mass of a row may be large: a number below 1 still points below it."""
    u = math.nextafter(1.0, 0.0)
    for vocab_size in (3, 1000, 150_000):
        assert TokenSelector([params()], vocab_size).select(torch.zeros(1, vocab_size), [u]) == [vocab_size - 1]


def test_few_candidates_settle_a_peaked_row() -> None:
    x = -2.0 * (torch.arange(32000.0) + 1).log()[None]
    for shape in ({"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"temperature": 0.8}):
        assert TokenSelector([params(**shape)], 32000).select(x, [0.5])[0] >= 0
    shapes = [params(top_k=40, top_p=0.9), params(top_p=0.9), params(min_p=0.05)]
    assert min(TokenSelector(shapes, 32000).select(x.repeat(3, 1), [0.5] * 3)) >= 0


def test_requests_without_a_seed_differ() -> None:
    rows = torch.zeros(8, 1000)
    assert sequence(params(), rows) != sequence(params(), rows)


def test_a_request_without_a_seed_draws_one_from_all_that_a_client_could_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(8, 1000)
    monkeypatch.setattr("omnistage.engines.ar.sampling.sampler.secrets.randbits", lambda bits: 2**bits - 1)
    assert sequence(params(), rows) == sequence(params(seed=2**63 - 1), rows)


def test_the_nth_token_of_a_request_takes_the_nth_number_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recorded(stream: int, step: int) -> float:
        asked.append((int(stream), int(step)))
        return 0.5

    monkeypatch.setattr("omnistage.engines.ar.sampling.batch.uniform", recorded)
    monkeypatch.setattr(
        "omnistage.engines.ar.sampling.batch.uniforms",
        lambda streams, steps: np.array([recorded(*pair) for pair in zip(streams, steps, strict=True)]),
    )
    sequence(params(seed=9), torch.zeros(3, 10))
    assert asked == [(mix(9), 0), (mix(9), 1), (mix(9), 2)]


def test_numbers_for_many_streams_are_those_of_each() -> None:
    streams = [mix(seed) for seed in range(50)]
    steps = [seed * 37 for seed in range(50)]
    many = uniforms(np.array(streams, dtype=np.uint64), np.array(steps, dtype=np.uint64))
    assert many.tolist() == [uniform(stream, step) for stream, step in zip(streams, steps, strict=True)]


def test_a_row_that_is_not_settled_is_looked_at_more_widely_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []
    initialise = TokenSelector.__init__

    def recorded(self: TokenSelector, params: Sequence[SamplingParams], vocab_size: int, attempt: int = 0) -> None:
        attempts.append((attempt, len(params)))
        initialise(self, params, vocab_size, attempt)

    monkeypatch.setattr(TokenSelector, "__init__", recorded)
    fix_random_number(monkeypatch, 0.999)
    logits = torch.stack([torch.arange(20_000.0), torch.arange(20_000) * 1e-4])
    sampler = Sampler(20_000, CPU, on_host=True)
    sampler.add("peaked", params(top_p=0.99), [])
    sampler.add("flat", params(top_p=0.99), [])
    peaked, flat = sampler.sample(logits, ["peaked", "flat"])
    assert attempts == [(0, 2), (1, 1), (2, 1)]
    assert peaked.token_id > 19_990
    assert flat.token_id > 19_900


# ------------------------------------------------------------------------------------------- what rows pay for


@pytest.mark.parametrize("shape", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.5}, {"min_tokens": 3}])
def test_a_row_that_nothing_changes_is_sampled_from_the_logits_as_they_are(shape: dict[str, object]) -> None:
    sampler = Sampler(10, CPU)
    sampler.add("a", params(**shape), [1])
    plan = sampler._make_plan(("a",))
    (group,) = (*plan.host_groups, *plan.device_groups)
    logits = torch.randn(1, 10)
    assert group.unchanged
    assert group.prepare(logits) is logits


def test_random_rows_on_the_host_pay_neither_for_greedy_ones_nor_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nobody needs this")

    monkeypatch.setattr("omnistage.engines.ar.sampling.batch.argmax_host", refuse)
    monkeypatch.setattr(BatchPlan, "pick_on_device", refuse)
    sampler = Sampler(3, CPU, on_host=True)
    sampler.add("r", params(seed=1), [])
    assert sampler.sample(torch.tensor([[0.0, 90.0, 0.0]]), ["r"])[0].token_id == 1


def test_a_plan_lasts_until_the_batch_or_one_of_its_requests_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(4, CPU)
    for key in "abc":
        sampler.add(key, GREEDY, [])
    made = []
    make = sampler._make_plan
    monkeypatch.setattr(sampler, "_make_plan", lambda keys: made.append(keys) or make(keys))

    def plans(*keys: str) -> int:
        sampler.sample(torch.zeros(len(keys), 4), keys)
        return len(made)

    assert [plans("a", "b"), plans("a", "b")] == [1, 1]
    sampler.remove("c")
    sampler.remove("never added")
    assert plans("a", "b") == 1
    assert plans("b", "a") == 2
    sampler.remove("a")
    sampler.add("a", GREEDY, [])
    assert plans("b", "a") == 3


def test_a_preempted_request_goes_on_where_it_was() -> None:
    rows = torch.randn(6, 1, 100)
    sampler = Sampler(100, CPU)
    sampler.add("a", params(seed=5), [])
    sampler.add("b", params(seed=6), [])
    tokens = [sampler.sample(row, ["a"])[0].token_id for row in rows[:3]]
    sampler.sample(rows[0], ["b"])
    tokens += [sampler.sample(row, ["a"])[0].token_id for row in rows[3:]]
    assert tokens == sequence(params(seed=5), rows[:, 0])


def test_the_draw_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, -torch.inf])
    expected = logits.softmax(-1).double()
    draws = 20_000
    sampler = Sampler(6, CPU)
    keys = [str(seed) for seed in range(100)]
    for seed, key in enumerate(keys):
        sampler.add(key, params(seed=seed), [])
    counts = torch.zeros(6, dtype=torch.float64)
    for _ in range(draws // len(keys)):
        for sampled in sampler.sample(logits.repeat(len(keys), 1), keys):
            counts[sampled.token_id] += 1
    assert counts[5] == 0
    statistic = ((counts[:5] - draws * expected[:5]) ** 2 / (draws * expected[:5])).sum()
    assert statistic < 13.28  # chi-square, 4 degrees of freedom, 1 %


def test_uniforms_fill_the_unit_interval() -> None:
    stream = mix(42)
    values = torch.tensor([uniform(stream, step) for step in range(20_000)], dtype=torch.float64)
    assert values.min() >= 0
    assert values.max() < 1
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 36.2  # 19 degrees of freedom, 1 %
    neighbours = torch.tensor([uniform(mix(seed), 0) for seed in range(20_000)])
    assert abs(torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]) < 0.02
    assert abs(neighbours.mean() - 0.5) < 0.01


# --------------------------------------------------------------------------------------------------- logprobs


class Letters:
    """As much of a tokenizer as logprobs need."""

    def decode(self, ids: list[int]) -> str:
        return chr(97 + ids[0])


@pytest.mark.parametrize("vocab", [8, 4000])
def test_logprobs_are_of_the_raw_logits(vocab: int) -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, vocab)
    sampler = Sampler(vocab, CPU, tokenizer=Letters())  # type: ignore[arg-type]
    best = int(logits[0].argmax())
    sampler.add("a", params(temperature=0.0, logprobs=3, suppress_token_ids=(best,)), [])
    sampler.add("b", params(temperature=0.5, top_p=0.1, seed=1), [])
    sampler.add("c", params(temperature=0.5, logprobs=0, seed=1), [])
    for _ in range(2):
        a, b, c = sampler.sample(logits, ["a", "b", "c"])
        expected = logits.log_softmax(-1)
        assert a.logprobs is not None
        assert a.token_id != best
        assert a.logprobs.chosen.logprob == pytest.approx(expected[0, a.token_id].item(), abs=1e-5)
        assert a.logprobs.chosen.text == chr(97 + a.token_id)
        top = expected[0].topk(3)
        assert [t.token_id for t in a.logprobs.top] == top.indices.tolist()
        assert [t.logprob for t in a.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert b.logprobs is None
        assert c.logprobs is not None
        assert c.logprobs.top == ()
        assert c.logprobs.chosen.logprob == pytest.approx(expected[2, c.token_id].item(), abs=1e-5)


def test_more_logprobs_than_tokens_gives_all_tokens() -> None:
    sampler = Sampler(4, CPU)
    sampler.add("a", params(temperature=0.0, logprobs=20), [])
    found = sampler.sample(torch.tensor([[1.0, 2.0, -torch.inf, 0.0]]), ["a"])[0].logprobs
    assert found is not None
    assert [t.token_id for t in found.top] == [1, 0, 3, 2]
    assert found.top[0].text == ""


def test_each_row_has_as_many_logprobs_as_it_asked_for() -> None:
    torch.manual_seed(2)
    logits = torch.randn(4, 30)
    expected = logits.log_softmax(-1)
    sampler = Sampler(30, CPU)
    wanted = {"two": 2, "five": 5, "none": 0, "three": 3}
    for key, count in wanted.items():
        sampler.add(key, params(temperature=0.0, logprobs=count), [])
    for row, (count, sampled) in enumerate(zip(wanted.values(), sampler.sample(logits, list(wanted)), strict=True)):
        assert sampled.logprobs is not None
        top = expected[row].topk(count)
        assert [t.token_id for t in sampled.logprobs.top] == top.indices.tolist()
        assert [t.logprob for t in sampled.logprobs.top] == pytest.approx(top.values.tolist(), abs=1e-5)


def test_the_logprob_of_the_first_token_of_the_vocabulary_alone() -> None:
    sampler = Sampler(3, CPU)
    sampler.add("a", params(temperature=0.0, logprobs=0), [])
    found = sampler.sample(torch.tensor([[3.0, 1.0, 0.0]]), ["a"])[0].logprobs
    assert found is not None
    assert found.top == ()
    assert found.chosen.token_id == 0
    assert found.chosen.logprob == pytest.approx(-math.log(1 + math.exp(-2) + math.exp(-3)), abs=1e-5)


def test_a_row_that_fails_takes_no_logprobs_from_its_neighbour() -> None:
    logits = torch.tensor([[1.0, math.nan, 0.0], [0.0, 1.0, 3.0]])
    sampler = Sampler(3, CPU)
    for key in "ab":
        sampler.add(key, params(temperature=0.0, logprobs=1), [])
    a, b = sampler.sample(logits, ["a", "b"])
    assert (a.token_id, a.logprobs) == (-1, None)
    assert isinstance(a.error, StageError)
    assert b.logprobs is not None
    assert b.logprobs.chosen == b.logprobs.top[0]
    assert b.logprobs.chosen.logprob == pytest.approx(logits[1].log_softmax(-1)[2].item(), abs=1e-5)


def test_logprobs_with_most_of_the_vocabulary_ruled_out() -> None:
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [9, 4000]] = torch.tensor([1.0, 2.0])
    sampler = Sampler(5000, CPU)
    sampler.add("a", params(temperature=0.0, logprobs=3), [])
    found = sampler.sample(logits, ["a"])[0].logprobs
    assert found is not None
    assert [t.token_id for t in found.top[:2]] == [4000, 9]
    assert found.top[2].logprob == -math.inf


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [600, 6000])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(shape: dict[str, object], vocab: int, bad: float, path: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, vocab)
    logits[1] = -math.inf if bad == -math.inf else logits[1]
    logits[1, vocab - 1] = bad
    sampler = Sampler(vocab, CPU)
    for i, key in enumerate("abc"):
        sampler.add(key, params(seed=i, **shape), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b, c = sampler.sample(logits, ["a", "b", "c"])
    assert isinstance(b.error, StageError)
    what = ("NaN" if math.isnan(bad) else "infinite") if path else "NaN or infinite"  # nothing is read again there
    assert b.error.message == f"the model returned {what} logits"
    assert b.token_id == -1
    for i, (row, sampled) in enumerate(((0, a), (2, c))):
        assert sampled == Sampled(one(logits[row], params(seed=(0, 2)[i], **shape)))


def test_a_row_with_nothing_left_says_so() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 3] = -math.inf
    sampler = Sampler(10, CPU)
    sampler.add("a", params(allowed_token_ids=(3,)), [])
    error = sampler.sample(logits, ["a"])[0].error
    assert isinstance(error, InvalidRequestError)
    assert "no token" in error.message


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"stop_token_ids": (100,)}, "stop_token_ids"),
        ({"allowed_token_ids": (1, 100)}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"suppress_token_ids": (100,)}, "suppress_token_ids"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (1, 2), "suppress_token_ids": (2, 1, 3)}, "allowed_token_ids"),
        ({"suppress_token_ids": tuple(range(100))}, "suppress_token_ids"),
        ({"stop": ("x",)}, "stop"),
        ({"structured": {"json_object": True}}, "structured"),
        ({"structured": {"json_object": True}, "stop_token_ids": (1,)}, "structured"),
    ],
)
def test_impossible_parameters_are_refused(values: dict[str, object], param: str) -> None:
    sampler = Sampler(100, CPU)
    with pytest.raises(InvalidRequestError) as refused:
        sampler.check(params(**values))
    assert refused.value.param == param


@pytest.mark.parametrize(
    "values", [{"repetition_penalty": 1e-40}, {"logit_bias": {1: 1e39}}, {"logit_bias": {1: -1e10}}]
)
def test_parameters_that_would_make_logits_infinite_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        params(**values)
    extreme = params(temperature=0.0, repetition_penalty=0.01, logit_bias={1: 1e9})
    assert one(torch.tensor([2.0, 1e4, -1e4]), extreme, [0, 1, 2]) == 1


@pytest.mark.parametrize("token", [0, 99])
def test_the_first_and_the_last_token_may_be_named(token: int) -> None:
    sampler = Sampler(100, CPU)
    sampler.check(params(logit_bias={token: 1.0}, stop_token_ids=(token,), allowed_token_ids=(token,)))
    sampler.check(params(suppress_token_ids=(token,)))


def test_what_a_model_never_samples_no_request_gets() -> None:
    sampler = Sampler(10, CPU, eos_token_ids=(3,), suppress_token_ids=(9, 8, 12), suppress_ignored_ends=True)
    wishes = {
        "plain": ({}, 7),
        "own": ({"suppress_token_ids": (7, 8)}, 6),
        "allowed": ({"allowed_token_ids": (2, 9)}, 2),
        "end": ({"allowed_token_ids": (2, 3, 9)}, 3),
        "end ignored": ({"allowed_token_ids": (2, 3, 9), "ignore_eos": True}, 2),
    }
    for name, (values, _) in wishes.items():
        sampler.check(params(temperature=0.0, **values))
        sampler.add(name, params(temperature=0.0, **values), [])
    results = sampler.sample(torch.arange(10.0).repeat(len(wishes), 1), list(wishes))
    assert [result.token_id for result in results] == [token for _, token in wishes.values()]
    with pytest.raises(InvalidRequestError, match="removes every allowed token"):
        sampler.check(params(allowed_token_ids=(8, 9)))


def test_misuse_is_reported() -> None:
    sampler = Sampler(10, CPU)
    sampler.add("a", GREEDY, [])
    with pytest.raises(InternalError, match="already holds"):
        sampler.add("a", GREEDY, [])
    with pytest.raises(InternalError, match="more than once"):
        sampler.sample(torch.zeros(2, 10), ["a", "a"])
    with pytest.raises(StageError, match="shape"):
        sampler.sample(torch.zeros(1, 11), ["a"])
    with pytest.raises(InternalError, match="does not hold"):
        sampler.sample(torch.zeros(1, 10), ["b"])
    assert sampler.sample(torch.zeros(0, 10), []) == []


def test_a_removed_request_can_come_back_fresh() -> None:
    rows = torch.tensor([[3.0, 2.0]]).repeat(2, 1)
    sampler = Sampler(2, CPU)
    p = params(temperature=0.0, presence_penalty=2.0)
    sampler.remove("unknown")
    for _ in range(2):
        sampler.add("a", p, [])
        assert [sampler.sample(row[None], ["a"])[0].token_id for row in rows] == [0, 1]
        sampler.remove("a")


def test_check_runs_beside_the_engine() -> None:
    sampler = Sampler(1000, CPU)
    sampler.add("a", params(seed=1), [])
    threads = [
        threading.Thread(target=lambda: [sampler.check(params(logit_bias={1: 1.0})) for _ in range(50)])
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    tokens = [sampler.sample(torch.zeros(1, 1000), ["a"])[0].token_id for _ in range(50)]
    for thread in threads:
        thread.join()
    assert tokens == sequence(params(seed=1), torch.zeros(50, 1000))


# --------------------------------------------------------------------------------------------------- grammars


class OneToken:
    """A grammar that allows one token, and notes what was sampled."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.accepted: list[int] = []

    def accept(self, token: int) -> bool:
        self.accepted.append(token)
        return token == self.token


class OneTokenMask:
    """In place of xgrammar's mask."""

    def __init__(self, states: Sequence[OneToken], device: torch.device) -> None:
        self._states = states

    def __len__(self) -> int:
        return len(self._states)

    def apply(self, x: torch.Tensor) -> None:
        for row, state in zip(x, self._states, strict=True):
            value = row[state.token].clone()
            row.fill_(-math.inf)
            row[state.token] = value


class OneTokenCompiler:
    """Takes the regular expression `7` for the grammar of token 7; in place of xgrammar's compiler."""

    def __init__(self) -> None:
        self.compiled: list[str | None] = []
        self.started: list[tuple[OneToken, tuple[int, ...]]] = []

    def compile(self, structured: StructuredOutput) -> None:
        self.compiled.append(structured.regex)

    def start(self, structured: StructuredOutput, ends: tuple[int, ...], owner: str | None) -> OneToken:
        assert structured.regex is not None
        self.started.append((OneToken(int(structured.regex)), ends))
        return self.started[-1][0]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> OneTokenCompiler:
    made = OneTokenCompiler()
    monkeypatch.setattr("omnistage.engines.ar.sampling.grammar.compiler_for", lambda *_: made)
    monkeypatch.setattr("omnistage.engines.ar.sampling.grammar_state.GrammarMask", OneTokenMask)
    return made


def only(token: int, **values: object) -> SamplingParams:
    return params(temperature=0.0, structured={"regex": str(token)}, **values)


def test_a_grammar_is_compiled_when_it_is_checked(compiler: OneTokenCompiler) -> None:
    sampler = Sampler(10, CPU, tokenizer=Letters(), eos_token_ids=[0])  # type: ignore[arg-type]
    sampler.check(GREEDY)
    assert compiler.compiled == []
    sampler.check(only(7))
    assert compiler.compiled == ["7"]


def test_the_token_after_which_a_grammar_begins_is_one_of_the_vocabulary(compiler: OneTokenCompiler) -> None:
    sampler = Sampler(10, CPU, tokenizer=Letters(), eos_token_ids=[0])  # type: ignore[arg-type]
    for token, allowed in ((9, True), (10, False)):
        constrained = params(structured={"regex": "7", "after_token": token})
        with nullcontext() if allowed else pytest.raises(InvalidRequestError, match="outside the vocabulary") as caught:
            sampler.check(constrained)
        assert allowed or caught.value.param == "structured.after_token"


def test_a_grammar_needs_a_token_that_can_end_it(compiler: OneTokenCompiler) -> None:
    sampler = Sampler(10, CPU, tokenizer=Letters())  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="no end token"):
        sampler.check(only(7))
    sampler.check(only(7, stop_token_ids=(2,)))
    assert compiler.compiled == ["7"]


@dataclass
class Mask:
    """As much of a grammar's state as its mask's readiness needs."""

    ready: bool
    prepared: bool = False
    """`prepare` makes it ready at once."""
    slow: bool = False

    def prepare(self) -> bool:
        self.ready = self.ready or self.prepared
        return self.ready


def test_rows_whose_masks_do_not_come_within_the_wait_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[list[Mask]] = []

    def wait(masks: list[Mask]) -> None:
        waits.append(list(masks))
        masks[0].ready = True

    monkeypatch.setattr("omnistage.engines.ar.sampling.grammar_state.await_masks", wait)
    sampler = Sampler(10, CPU)
    masks = {"ready": Mask(True), "quick": Mask(False, prepared=True), "soon": Mask(False), "late": Mask(False)}
    sampler.constrained.update(masks)  # type: ignore[arg-type]
    assert sampler.late(["free", "ready", "quick"]) == frozenset()
    assert waits == []
    assert sampler.late(["free", "soon", "late", "ready"]) == {"late"}
    assert waits == [[masks["soon"], masks["late"]]]


def test_rows_whose_last_mask_took_long_are_slow() -> None:
    sampler = Sampler(10, CPU)
    sampler.constrained.update({"slow": Mask(True, slow=True), "fast": Mask(True)})  # type: ignore[arg-type]
    assert sampler.slow(["free", "fast", "slow"]) == {"slow"}


def test_a_stage_without_text_says_that_it_takes_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="generates no text"):
        Sampler(10, CPU, eos_token_ids=[0]).check(only(7))


@pytest.mark.parametrize("others", [(), ("biased",), ("free",), ("biased", "free")])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_constrained_row_gets_its_own_token_wherever_it_stands(
    others: tuple[str, ...], place: str, compiler: OneTokenCompiler
) -> None:
    sampler = Sampler(10, CPU, tokenizer=Letters(), eos_token_ids=[0])  # type: ignore[arg-type]
    sampler.add("constrained", only(7, stop_token_ids=(3,)), [])
    sampler.add("biased", params(temperature=0.0, logit_bias={5: 9.0}), [])
    sampler.add("free", GREEDY, [])
    keys = ["constrained", *others] if place == "first" else [*others, "constrained"]
    logits = torch.zeros(len(keys), 10)
    logits[:, 2] = 1.0
    right = {"constrained": 7, "biased": 5, "free": 2}
    for _ in range(2):
        assert sampler.sample(logits, keys) == [Sampled(right[key]) for key in keys]
    ((grammar, ends),) = compiler.started
    assert grammar.accepted == [7, 7]
    assert ends == (0, 3)


def test_a_token_that_its_grammar_refuses_fails_that_row_alone(
    compiler: OneTokenCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneTokenMask, "apply", lambda self, x: None)
    sampler = Sampler(10, CPU, tokenizer=Letters(), eos_token_ids=[0])  # type: ignore[arg-type]
    for token in (1, 2):
        sampler.add(f"only {token}", only(token), [])
    logits = torch.zeros(2, 10)
    logits[:, 2] = 1.0
    refused, taken = sampler.sample(logits, ["only 1", "only 2"])
    assert refused.token_id == -1
    assert isinstance(refused.error, StageError)
    assert taken == Sampled(2)


# ------------------------------------------------------------------------------------- the path of a device

ON_DEVICE: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "greedy, changed": {"temperature": 0.0, "repetition_penalty": 1.3},
    "random": {"seed": 1},
    "random, few": {"seed": 2, "top_k": 3, "top_p": 0.9},
    "random, changed": {"seed": 3, "logit_bias": {5: 2.0}, "top_k": 20},
}


@pytest.mark.parametrize(
    "keys",
    [
        ("greedy",),
        ("random",),
        ("greedy", "random"),
        ("random, few", "greedy", "random"),
        ("greedy, changed", "random, changed"),
        ("random, changed", "greedy", "greedy, changed", "random", "random, few"),
    ],
)
def test_a_device_gives_the_tokens_of_the_host(keys: tuple[str, ...]) -> None:
    torch.manual_seed(len(keys))
    samplers = [Sampler(600, CPU, eos_token_ids=[0], on_host=on_host) for on_host in (True, False)]
    for sampler in samplers:
        for key in keys:
            sampler.add(key, SamplingParams.parse(ON_DEVICE[key]), [1, 2])
    for _ in range(4):
        logits = torch.randn(len(keys), 600) * 2
        on_host, on_device = ([s.token_id for s in sampler.sample(logits, keys)] for sampler in samplers)
        assert on_device == on_host
        assert on_host != [0] * len(keys)


def test_a_batch_may_be_sampled_again_before_it_is_read() -> None:
    """Tokens of successive steps, each read a step late: penalties and random numbers have moved on by themselves."""
    shapes = {"plain": {"seed": 1}, "counted": {"seed": 2, "repetition_penalty": 1.4, "frequency_penalty": 0.3}}
    rows = torch.randn(6, 2, 40)
    read, pending = [], None
    sampler, reference = Sampler(40, CPU, on_host=False), Sampler(40, CPU, on_host=False)
    for key, shape in shapes.items():
        sampler.add(key, params(**shape), [3])
        reference.add(key, params(**shape), [3])
    for row in rows:
        launched = sampler.launch(row, list(shapes))
        if pending is not None:
            read.append([sampled.token_id for sampled in sampler.read(pending)])
        pending = launched
    expected = [[sampled.token_id for sampled in reference.sample(row, list(shapes))] for row in rows]
    assert read == expected[:-1]
