"""Steps with prompts in captured forwards: which one takes a step, and what it is filled with. Capturing: tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.engines.ar import prefill_graphs
from omnistage.engines.ar.attention import BatchLayout, StageError, make_backend
from omnistage.engines.ar.attention.triton_backend import TritonBackend
from omnistage.engines.ar.prefill_graphs import PrefillGraphs, PromptStep

CPU = torch.device("cpu")


def layout(*sequences: tuple[int, int]) -> BatchLayout:
    """Of queries and lengths; sequence i has blocks 10 i, 10 i + 1, ..."""
    queries, lengths = np.array(sequences, dtype=np.int32).T
    tables = [np.arange(10 * i, 10 * i + -(-length // 16), dtype=np.int32) for i, (_, length) in enumerate(sequences)]
    return BatchLayout(queries, lengths, [], tables)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PrefillGraphs:
    def captured(_runner: Any, tokens: int, max_length: int, pool: Any) -> Any:
        if tokens == 99:
            raise RuntimeError("out of memory")
        return SimpleNamespace(run=lambda *_: tokens)

    monkeypatch.setattr(prefill_graphs, "_Captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return PrefillGraphs(object(), (16, 64), max_length=1000)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequences", "tokens"),
    [
        ([(5, 5)], 16),
        ([(16, 40)], 16),
        ([(16, 40), (1, 3)], 64),
        ([(64, 1000)], 64),
        ([(64, 1001)], None),
        ([(64, 64), (1, 9)], None),
        ([(1, 9)] * 64, 64),
    ],
)
def test_the_smallest_forward_that_fits_takes_a_step(
    graphs: PrefillGraphs, sequences: list[tuple[int, int]], tokens: int | None
) -> None:
    rows = torch.zeros(sum(queries for queries, _ in sequences), 4)
    assert graphs.run(PromptStep(rows, rows, rows, None, layout(*sequences))) == tokens


def test_too_many_sequences_run_without(graphs: PrefillGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_graphs, "MAX_SEQUENCES", 2)
    rows = torch.zeros(3, 4)
    assert graphs.run(PromptStep(rows, rows, rows, None, layout((1, 1), (1, 1), (1, 1)))) is None


def test_a_forward_that_cannot_be_captured_is_done_without(
    graphs: PrefillGraphs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    few = PrefillGraphs(object(), (99, 64), max_length=1000)  # type: ignore[arg-type]
    assert few.run(PromptStep(torch.zeros(3, 4), torch.zeros(3), torch.zeros(3), None, layout((3, 3)))) is None
    assert "no CUDA graphs for steps with prompts" in caplog.text


def test_a_plan_holds_the_step_and_sequences_without_queries() -> None:
    graph_plan = TritonBackend().prefill_graph_plan(32, 4, 100, 16, CPU)
    plan = graph_plan.plan
    assert (plan.max_query_len, plan.max_seq_len) == (32, 112)
    for sequences in ([(9, 9), (1, 40), (5, 21)], [(2, 100)]):  # the second leaves nothing of the first
        step = layout(*sequences)
        graph_plan.fill_layout(step)
        expected, count = TritonBackend().plan(step, CPU), len(sequences)
        total = int(step.query_lengths.sum())
        assert torch.equal(plan.query_start_loc[: count + 1], expected.query_start_loc)
        assert plan.query_start_loc[count + 1 :].tolist() == [total] * (4 - count)
        assert plan.seq_lens.tolist() == [*step.sequence_lengths, *[0] * (4 - count)]
        assert torch.equal(plan.block_tables[:count, : expected.block_tables.shape[1]], expected.block_tables)
        assert not plan.block_tables[:count, expected.block_tables.shape[1] :].any()
        assert not plan.block_tables[count:].any()


def test_a_backend_without_graphs_says_so() -> None:
    with pytest.raises(StageError, match="cuda_graphs: false"):
        make_backend("sdpa", CPU).prefill_graph_plan(16, 4, 100, 16, CPU)
