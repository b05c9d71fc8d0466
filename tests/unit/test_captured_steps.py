"""Captured steps under random loads: frames and tokens are those of each request alone, and nothing is left behind.

All of `graphs.py` and `prefill_graphs.py` runs but the capture itself. Attention and the sampling kernels have
stand-ins in torch and numpy, so that hundreds of steps take a second; `sampling_graphs.py` has the kernels themselves.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from omnistage.config.schema import ARBudget
from omnistage.core.params import SamplingParams
from omnistage.core.types import ARInput, FinishReason, RequestInfo, SideRows, StageInput, TokenChunk
from omnistage.engines.ar import prefill_graphs
from omnistage.engines.ar import stage as ar_stage
from omnistage.engines.ar.attention import KVCache, PagedContext, ScoreOptions
from omnistage.engines.ar.attention.triton_backend import TritonBackend, TritonPlan
from omnistage.engines.ar.component import ARComponent
from omnistage.engines.ar.graphs import DecodeGraphs
from omnistage.engines.ar.prefill_graphs import ForwardRows, PrefillGraphs
from omnistage.engines.ar.sampling import triton_sample
from omnistage.engines.ar.sampling.device_selection import DeviceSelector
from omnistage.engines.ar.sampling.processors import uniform
from omnistage.engines.ar.sampling.row_block import Field
from omnistage.engines.ar.stage import ARStage
from omnistage.models.causal_lm.component import CausalLM
from tests.unit.sampling_graphs import _without_cuda  # noqa: F401  (a fixture)
from tests.unit.test_ar_stage import folder, model  # noqa: F401  (fixtures)
from tests.unit.test_code_predictor import Framed, side_rows

Job = tuple[str, ARInput, SamplingParams]
SIDES = 4
PROMPTS = [tuple((7 * i + 3 * j) % 800 for i in range(length)) for j, length in enumerate((1, 3, 8, 9, 16, 17, 23, 40))]
PROMPTS += [PROMPTS[-1][:length] for length in (8, 9, 17, 25, 33)]


class Attention(TritonBackend):
    """What the kernels compute, sequence by sequence."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        paged: PagedContext,
        scores: ScoreOptions,
    ) -> torch.Tensor:
        plan, size = paged.plan, cache[0].shape[1]
        assert isinstance(plan, TritonPlan)
        keys, values = (side.view(-1, *side.shape[2:]) for side in cache)
        known = paged.slot_mapping >= 0
        keys[paged.slot_mapping[known]], values[paged.slot_mapping[known]] = key[known], value[known]
        out, starts = torch.zeros(query.shape), plan.query_start_loc.tolist()
        for row, length in enumerate(plan.seq_lens.tolist()):
            first, end = starts[row : row + 2]
            if first == end or not length:
                continue
            blocks = plan.block_tables[row, : -(-length // size), None].long()
            slots = (blocks * size + torch.arange(size)).view(-1)[:length]
            q, k, v = (x.transpose(0, 1)[None] for x in (query[first:end], keys[slots], values[slots]))
            mask = torch.arange(length) <= torch.arange(length - (end - first), length)[:, None]
            attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scores.scale, enable_gqa=True)
            out[first:end] = attended[0].transpose(0, 1)
        return out


def sample(logits: torch.Tensor, block: torch.Tensor, out: torch.Tensor) -> None:
    """What `triton_sample.sample` computes, row by row, from the same block."""
    longs, vocab = block.numpy(), logits.shape[1]
    numbers = longs.view(np.float64)

    def at(row: int, field: Field, kind: type[Any], size: int = vocab) -> np.ndarray | None:
        address = int(longs[field, row])
        return np.ctypeslib.as_array((kind * size).from_address(address)) if address else None

    for row in np.flatnonzero(longs[Field.ACTIVE]):
        x = logits[row].float().numpy().copy()
        seen, counts = at(row, Field.OCCURRENCES, ctypes.c_int32), at(row, Field.COUNTS, ctypes.c_int32)
        factor, frequency, presence = (
            np.float32(numbers[f, row]) for f in (Field.REPETITION, Field.FREQUENCY, Field.PRESENCE)
        )
        if seen is not None:
            x = np.where(seen != 0, np.where(x < 0, x * factor, x / factor), x)
        if counts is not None:
            x = np.where(counts != 0, x - frequency * counts.astype(np.float32) - presence, x)
        if (bias := at(row, Field.BIAS, ctypes.c_float)) is not None:
            x = x + bias
        if (words := at(row, Field.MASK, ctypes.c_int32, -(-vocab // 32))) is not None:
            x = np.where(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab] != 0, x, -np.inf)
        selector = DeviceSelector([SamplingParams()], vocab, out.device)
        selector.temperature = torch.tensor([numbers[Field.TEMPERATURE, row]]).float()
        selector.top_k, selector.top_p = torch.from_numpy(longs[Field.TOP_K, row, None]), torch.ones(1).double()
        selector.top_p[0] = numbers[Field.TOP_P, row]
        u = uniform(int(longs.view(np.uint64)[Field.STREAM, row]), int(longs[Field.STEP, row]))
        token = int(selector.select(torch.from_numpy(x)[None], torch.tensor([u], dtype=torch.float64)))
        out[row] = token
        for counted in (seen, counts):
            if counted is not None:
                counted[token] += 1


class Again:
    """In place of the graph of a step with prompts."""

    def __init__(self, step: Callable[[], ForwardRows], rows: ForwardRows) -> None:
        self._step, self._rows = step, rows

    def replay(self) -> None:
        for own, new in zip(self._rows, self._step(), strict=True):
            if own is not None and new is not None:
                own.copy_(new)


def captured_stage(component: ARComponent, dice: random.Random, patch: pytest.MonkeyPatch) -> ARStage:
    def capture(step: Callable[[], ForwardRows], *_: object) -> tuple[Again, ForwardRows]:
        rows = step()
        return Again(step, rows), rows

    patch.setattr(triton_sample, "sample", sample)
    patch.setattr(prefill_graphs, "capture", capture)
    patch.setattr(ar_stage, "make_backend", lambda *_, **__: Attention())
    budget = {
        "kv_blocks": dice.choice([9, 12, 20]),
        "prefill_chunk": dice.choice([1, 4, 64]),
        "max_batch_tokens": dice.choice([8, 64]),
        "max_running": dice.choice([3, 5, 9]),
    }
    stage = ARStage("thinker", component, ARBudget(block_size=8, max_model_len=64, run_ahead=True, **budget))
    with torch.inference_mode():
        stage.runner.graphs = DecodeGraphs(stage.runner, dice.choice([(1, 2), (4,), (1, 2, 4, 8)]), stage.max_length)
        stage.runner.prefill_graphs = PrefillGraphs(stage.runner, (8, 16), stage.max_length)
    return stage


def make_job(name: str, dice: random.Random, *, streams: bool) -> Job:
    params: dict[str, Any] = {"temperature": dice.choice([0.0, 0.9]), "seed": dice.randrange(9), "ignore_eos": True}
    params["max_tokens"] = dice.randrange(1, 14)
    for field, value in (("top_k", 5), ("top_p", 0.8), ("repetition_penalty", 1.2), ("frequency_penalty", 0.4)):
        if dice.random() < 0.25:
            params[field] = value
    if dice.random() < 0.25:
        params["stop_token_ids"] = tuple(dice.sample(range(900), 200))
        params["min_tokens"] = dice.randrange(params["max_tokens"])
    prompt = ARInput(dice.choice(PROMPTS), streaming=streams and dice.random() < 0.5)
    return name, prompt, SamplingParams(**params)


Got = tuple[list[object], FinishReason | None]


def drive(stage: ARStage, jobs: list[Job], dice: random.Random, *, aborts: bool = False) -> dict[str, Got]:
    """Requests come, are fed and leave at random; what those got that stayed."""
    waiting, fed, got = list(jobs), dict[str, int](), dict[str, list[object]]()
    ended: dict[str, Got] = {}
    for _ in range(5000):
        if waiting and dice.random() < 0.5:
            name, payload, params = waiting.pop(0)
            stage.submit(StageInput(RequestInfo(name, priority=dice.choice([0, 0, 1])), params, payload))
            got[name], fed[name] = [], 0 if payload.streaming else SIDES
        for name in got:
            if fed[name] < SIDES and dice.random() < 0.6:
                rows = side_rows(name)[fed[name] : fed[name] + 1]
                fed[name] += 1
                stage.feed(name, SideRows(rows, final=fed[name] == SIDES))
        for chunk in stage.step() if stage.has_work() else []:
            assert chunk.error is None
            if isinstance(chunk.payload, TokenChunk):
                got[chunk.request_id] += chunk.payload.frames or chunk.payload.token_ids
            if chunk.finish is not None:
                ended[chunk.request_id] = got.pop(chunk.request_id), chunk.finish
        if aborts and got and dice.random() < 0.03:
            left = dice.choice(list(got))
            stage.abort(left)
            del got[left]
        if not waiting and not got and not stage.has_work():
            break
    stage.check_integrity()
    assert stage.scheduler.pool.free_blocks == stage.scheduler.pool.num_blocks
    assert not stage.runner.keys()
    return ended


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("framed", [False, True], ids=["tokens", "frames"])
def test_whatever_else_runs_a_request_gets_its_own_answer(
    model: CausalLM,  # noqa: F811
    framed: bool,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dice = random.Random(seed)
    component: ARComponent = Framed(model) if framed else model
    jobs = [make_job(chr(97 + i), dice, streams=framed) for i in range(20)]
    plain = ARStage("thinker", component, ARBudget(kv_blocks=64, block_size=8, run_ahead=False, prefix_caching=False))
    expected = {name: got for job in jobs for name, got in drive(plain, [job], dice).items()}
    stage = captured_stage(component, dice, monkeypatch)
    got = drive(stage, jobs, dice, aborts=True)
    assert len(got) > len(jobs) / 2
    assert got == {name: expected[name] for name in got}
    assert stage.runner.prefill_graphs is not None
    assert stage.runner.prefill_graphs.replays > 0
