"""Which decode steps are captured, which of them a batch takes, and that none is captured once requests come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnistage.config.schema import ARBudget
from omnistage.engines.ar import graphs
from omnistage.engines.ar.graphs import DecodeGraphs, graph_shapes, smallest_fit

SIZES = ARBudget().graph_batch_sizes
BATCHES = [(count, longest) for count in (1, 2, 3, 8, 33, 64) for longest in (1, 1024, 1025, 4097, 20_000, 32_768)]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The shapes that are captured, in this order."""
    shapes: list[tuple[int, int]] = []

    def capture(runner: object, size: int, length: int, pool: object) -> object:
        shapes.append((size, length))
        return object()

    monkeypatch.setattr(graphs, "_Captured", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return shapes


def decode_graphs(max_length: int, sizes: tuple[int, ...] = SIZES) -> DecodeGraphs:
    runner: Any = SimpleNamespace()
    return DecodeGraphs(runner, sizes, max_length)


def test_every_batch_fits_into_a_step_that_every_start_captures() -> None:
    required, optional = graph_shapes(SIZES, 32_768)
    assert required[0] == (64, 32_768)
    for count, longest in BATCHES:
        assert smallest_fit(sorted(required), count, longest) is not None
    assert len(required) == len(SIZES) + 1
    assert len(optional) == 2 * len(SIZES) - 1
    assert not set(required) & set(optional)


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((1, 1), (1, 1024)),
        ((3, 1024), (4, 1024)),
        ((1, 1025), (1, 4096)),
        ((33, 4000), (64, 4096)),
        ((2, 4097), (2, 32_768)),
        ((64, 32_768), (64, 32_768)),
        ((65, 1), None),
        ((1, 32_769), None),
    ],
)
def test_a_batch_takes_the_smallest_step_that_holds_it(batch: tuple[int, int], shape: tuple[int, int] | None) -> None:
    required, optional = graph_shapes(SIZES, 32_768)
    assert smallest_fit(sorted(required + optional), *batch) == shape


@pytest.mark.parametrize(("max_length", "lengths"), [(512, [512]), (1024, [1024]), (3000, [1024, 3000])])
def test_a_stage_of_short_sequences_has_fewer_steps(max_length: int, lengths: list[int]) -> None:
    required, optional = graph_shapes([2, 8], max_length)
    assert sorted(required + optional) == [(size, length) for size in (2, 8) for length in lengths]


def test_all_steps_are_captured_at_the_start(captured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_OPTIONAL_SECONDS", 60.0)
    steps = decode_graphs(32_768)
    required, optional = graph_shapes(SIZES, 32_768)
    assert captured == required + optional
    assert steps.shapes == sorted(captured)


def test_without_time_a_long_sequence_runs_as_a_larger_batch(
    captured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_OPTIONAL_SECONDS", 0.0)
    steps = decode_graphs(32_768)
    assert captured == graph_shapes(SIZES, 32_768)[0]
    assert smallest_fit(steps.shapes, 1, 1024) == (1, 1024)
    assert smallest_fit(steps.shapes, 1, 1025) == (64, 32_768)


def test_a_full_device_ends_the_captures_that_are_not_required(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(runner: object, size: int, length: int, pool: object) -> object:
        if (size, length) == (4, 32_768):
            raise torch.OutOfMemoryError("out of memory")
        return object()

    monkeypatch.setattr(graphs, "_Captured", capture)
    monkeypatch.setattr(graphs, "_OPTIONAL_SECONDS", 60.0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps = decode_graphs(32_768)
    assert smallest_fit(steps.shapes, 2, 2000) == (2, 32_768)
    assert smallest_fit(steps.shapes, 4, 2000) == (64, 32_768)
    assert caplog.text.count("no CUDA graph for 4 sequences of up to 32768 tokens") == 1


def test_a_short_step_that_cannot_be_captured_fails_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(runner: object, size: int, length: int, pool: object) -> object:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(graphs, "_Captured", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with pytest.raises(torch.OutOfMemoryError):
        decode_graphs(512)
