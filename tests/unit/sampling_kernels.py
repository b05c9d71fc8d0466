"""The sampling kernels give the host's tokens. For Triton's interpreter only: `test_triton_sample.py` starts it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from omnistage.core.params import SamplingParams
from omnistage.engines.ar.sampling import batch, triton_sample, triton_select
from omnistage.engines.ar.sampling.device_selection import NOTHING
from omnistage.engines.ar.sampling.processors import RowState, mix, uniform
from omnistage.engines.ar.sampling.row_block import FIELDS, Field
from omnistage.engines.ar.sampling.sampler import Sampler
from omnistage.engines.ar.sampling.selection import FAILED

CPU = torch.device("cpu")
EOS = 2
PROMPT = (1, 5, 9, 9)
FILTERS: list[dict[str, object]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 3.0},
    {"temperature": 1e-9},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.3},
    {"min_p": 0.1},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 100, "top_p": 0.5},
    {"top_p": 0.999, "temperature": 0.3},
    {"min_p": 0.02, "top_p": 0.8, "temperature": 2.0},
    {"top_k": 7, "min_p": 0.2, "top_p": 0.7},
]
PROCESSORS: list[dict[str, object]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.5},
    {"presence_penalty": -0.4, "frequency_penalty": 0.3},
    {"logit_bias": {5: 2.0, 7: -3.5}},
    {"allowed_token_ids": (3, 4, 31, 32, 33, 49), "suppress_token_ids": (4,)},
    {"suppress_token_ids": (0, 1, 31, 32)},
    {"min_tokens": 2},
    {"min_tokens": 3, "stop_token_ids": (4, 8), "repetition_penalty": 1.1, "logit_bias": {8: 50.0}},
    {"min_tokens": 2, "allowed_token_ids": (EOS, 8), "stop_token_ids": (8,)},
    {"min_tokens": 4, "allowed_token_ids": (EOS, 8, 9), "stop_token_ids": (8,), "frequency_penalty": 0.7},
]
# Each filter with two of the processors, and each processor with at least two of the filters.
PAIRS = [(i, (i + shift) % len(PROCESSORS)) for shift in (0, 5) for i in range(len(FILTERS))]
REQUESTS = {str(i): SamplingParams.parse({"seed": i, **FILTERS[f], **PROCESSORS[p]}) for i, (f, p) in enumerate(PAIRS)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sample, "_BLOCK", 64)
    monkeypatch.setattr(triton_select, "_BLOCK", 128)
    monkeypatch.setattr(batch, "has_kernels", lambda _device: True)


def make_sampler(vocab: int, keys: Sequence[str], *, host: bool = False) -> Sampler:
    sampler = Sampler(vocab, CPU, eos_token_ids=[EOS], on_host=host)
    for key in keys:
        sampler.add(key, REQUESTS[key], PROMPT)
    return sampler


def launch(sampler: Sampler, x: torch.Tensor, keys: Sequence[str], *, kernels: bool = True) -> list[int]:
    """Ids as a device gives them."""
    pending = sampler.launch(x, keys)
    assert pending.plan is not None
    assert pending.ids is not None
    assert (pending.plan.block is not None) == kernels
    ids: list[int] = pending.ids.tolist()
    return ids


def logits(vocab: int, rows: int, steps: int, *, ties: bool = False) -> torch.Tensor:
    x = torch.randn(steps, rows, vocab, generator=torch.Generator().manual_seed(vocab + ties)) * 2
    return (x * 2).round() / 2 if ties else x


@pytest.mark.parametrize(("vocab", "ties"), [(150, False), (50, True)])
def test_the_tokens_and_counts_are_the_hosts(vocab: int, ties: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if vocab > 100:  # candidates settle some of the rows with filters; in others they are too many, or not enough
        monkeypatch.setattr(triton_sample, "_GROUP", 8)
        monkeypatch.setattr(triton_sample, "_LIKELIEST", 8)
        monkeypatch.setattr(triton_sample, "_CANDIDATES", 32)
    keys = list(REQUESTS)[:: 1 if ties else -1][: len(FILTERS)]
    host, kernels, sort = (make_sampler(vocab, keys, host=on_host) for on_host in (True, False, False))
    for step in logits(vocab, len(keys), 3 if ties else 2, ties=ties):
        monkeypatch.setattr(batch, "has_kernels", lambda _device: False)
        expected = launch(sort, step, keys, kernels=False)
        monkeypatch.setattr(batch, "has_kernels", lambda _device: True)
        assert launch(kernels, step, keys) == expected
        assert [sampled.token_id for sampled in host.sample(step, keys)] == expected
        assert min(expected) >= 0
    for key in keys:
        own, reference = kernels._states[key], host._states[key]
        for counts, counts_there in ((own.occurrences, reference.occurrences), (own.counts, reference.counts)):
            assert (counts is None) == (counts_there is None)
            assert counts is None or counts.tolist() == counts_there.tolist()


def test_a_row_gets_its_token_in_any_batch() -> None:
    keys = ["0", "5", "8"]
    x = logits(100, len(keys), 2).bfloat16()
    together = make_sampler(100, keys)
    found = [launch(together, step, keys) for step in x]
    backwards = make_sampler(100, keys)
    assert [launch(backwards, step.flip(0), keys[::-1])[::-1] for step in x] == found
    for i, key in enumerate(keys):
        alone = make_sampler(100, [key])
        assert [launch(alone, step[i : i + 1], [key]) for step in x] == [[row[i]] for row in found]


def test_random_numbers_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens weigh the same, so that the token tells the number."""
    sampler = Sampler(4096, CPU, on_host=False)
    monkeypatch.setattr(triton_sample, "_BLOCK", 1024)
    seeds = [0, 1, 2**63 - 1, 77]
    for seed in seeds:
        sampler.add(str(seed), SamplingParams(seed=seed), [])
    for step in range(3):
        found = launch(sampler, torch.zeros(len(seeds), 4096), [str(seed) for seed in seeds])
        assert found == [int(uniform(mix(seed), step) * 4096) for seed in seeds]


@pytest.mark.parametrize("own", [{}, {"temperature": 0.0}, {"top_k": 3}, {"suppress_token_ids": (1,), "min_tokens": 2}])
def test_a_row_without_numbers_fails_alone(own: dict[str, object]) -> None:
    names = ["nan", "inf", "none", "fine", "ruled out"]
    sampler = Sampler(40, CPU, on_host=False, eos_token_ids=[EOS])
    for name in names:
        rules = {"allowed_token_ids": (3, 4)} if name == "ruled out" else {}
        sampler.add(name, SamplingParams.parse({**own, **rules}), [])
    x = torch.zeros(len(names), 40)
    x[0, 7], x[1, 39], x[2], x[4, 3:5] = math.nan, math.inf, -math.inf, -math.inf
    *failed, fine, ruled_out = launch(sampler, x, names)
    assert max(failed) < 0
    assert failed[:2] == [FAILED, FAILED]
    assert fine >= 0
    assert ruled_out == NOTHING


def test_stops_that_are_held_stay_where_the_model_leaves_nothing_else() -> None:
    keys = ["greedy", "random", "filtered"]
    x = torch.full((3, 40), -math.inf)
    x[:, EOS], x[:, 30] = 1.0, 0.5
    found = []
    for host in (True, False):
        sampler = Sampler(40, CPU, on_host=host, eos_token_ids=[EOS])
        for key, own in zip(keys, ({"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}), strict=True):
            sampler.add(key, SamplingParams.parse({"seed": 3, "min_tokens": 9, "stop_token_ids": (30,), **own}), [])
        found.append([sampled.token_id for sampled in sampler.sample(x, keys)])
    assert found[0] == found[1]
    assert found[0][0] == EOS


class Grammar:
    """Allows the same ids for ever."""

    def __init__(self, vocab: int, ids: Sequence[int]) -> None:
        flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
        flags[list(ids)] = 1
        self.mask = torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32)[None])
        self.width, self.ready, self.failure = self.mask.shape[1], False, None

    def wait(self) -> None:
        self.ready = True

    def accept(self, token: int) -> bool:
        return bool(self.mask[0, token >> 5] >> (token & 31) & 1)


def test_grammars_mask_their_rows_alone() -> None:
    pytest.importorskip("xgrammar")
    requests: dict[str, tuple[dict[str, object], tuple[int, ...] | None]] = {
        "free": ({}, None),
        "constrained": ({}, (3, 33, 39)),
        "suppressed": ({"suppress_token_ids": (33,), "top_k": 5}, (3, 33, 39)),
        "held": ({"min_tokens": 9}, (EOS, 33)),
        "ended": ({"min_tokens": 9, "repetition_penalty": 1.2}, (EOS,)),
        "none": ({"allowed_token_ids": (1,)}, (3, 33)),
    }
    found = []
    for host in (True, False):
        sampler = Sampler(40, CPU, on_host=host, eos_token_ids=[EOS])
        for key, (own, ids) in requests.items():
            sampler.add(key, SamplingParams.parse({"seed": 1, **own}), [])
            sampler._states[key].grammar = None if ids is None else Grammar(40, ids)  # type: ignore[assignment]
        keys = list(requests)
        assert sampler.block(keys) is None
        found.append([[s.token_id for s in sampler.sample(x, keys)] for x in logits(40, len(keys), 2)])
    assert found[0] == found[1]
    *sampled, none = found[0][0]
    assert min(sampled) >= 0
    assert none == FAILED


def test_nothing_is_sampled_or_counted_for_rows_that_are_not_active() -> None:
    state = RowState(REQUESTS["1"], stream=1)
    state.occurrences = torch.zeros(40, dtype=torch.int32)
    block = np.zeros((FIELDS, 3), dtype=np.int64)
    block[Field.OCCURRENCES] = state.occurrences.data_ptr()
    block[Field.ACTIVE, 1] = 1
    out = torch.full((2,), 99)  # fewer than the rows: what is beyond must not be written
    triton_sample.sample(torch.eye(3, 40), torch.from_numpy(block), out)
    assert out.tolist() == [99, 1]
    assert state.occurrences.tolist() == [0, 1] + [0] * 38
