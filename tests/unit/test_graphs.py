"""The cache of captured calls, with captures that need no CUDA."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from omnistage.engines.graphs import GraphCache
from tests.graph_harness import FakeCapture


def double(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x + y, 2 * x


def cache(capacity: int = 96, failures: int = 0) -> GraphCache:
    return GraphCache(enabled=True, capacity=capacity, capture=FakeCapture(failures))


def inputs(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, size, generator=torch.Generator().manual_seed(seed))
    return x, y


def check(graphs: GraphCache, size: int, seed: int = 0) -> None:
    given = inputs(size, seed)
    for result, expected in zip(graphs(size, double, *given), double(*given), strict=True):
        assert torch.equal(result, expected)


def test_calls_of_several_shapes_may_take_turns() -> None:
    """Whatever is captured later, and however large: buffers that grow leave those of earlier graphs alone."""
    graphs = cache()
    for seed, size in enumerate((3, 100, 3, 1000, 100, 3, 1000)):
        check(graphs, size, seed)
    assert graphs.captures == 3
    assert graphs.replays == 7


def test_graphs_share_the_memory_of_their_inputs_and_results() -> None:
    graphs = cache()
    large = graphs(100, double, *inputs(100))
    small = graphs(3, double, *inputs(3))
    assert {tensor.untyped_storage().data_ptr() for tensor in (*large, *small)} == {
        large[0].untyped_storage().data_ptr()
    }


@pytest.mark.parametrize("keys", ["aaaa", "abab"])
def test_results_may_be_the_inputs_of_the_next_call(keys: str) -> None:
    """Also of one that is captured: that it is run for this must not overwrite them."""
    graphs = cache()
    x, y = inputs(5)
    expected = x
    for key in keys:
        x, _ = graphs(key, double, x, y)
        expected = expected + y
    assert torch.equal(x, expected)


def test_inputs_keep_their_strides_and_dtypes() -> None:
    """Kernels may be others for other strides."""
    seen: list[tuple[tuple[int, ...], torch.dtype]] = []

    def note(*tensors: Tensor) -> tuple[Tensor, ...]:
        seen.extend((tensor.stride(), tensor.dtype) for tensor in tensors)
        return tuple(tensor.clone() for tensor in tensors)

    given = (
        torch.randn(3, 4).t(),
        torch.tensor([True, False, True]),
        torch.tensor(2.5),
        torch.empty(0, 7),
        torch.arange(5),
        torch.randn(6).half(),
    )
    results = cache()("key", note, *given)
    assert seen[: len(given)] == [(tensor.stride(), tensor.dtype) for tensor in given]
    for tensor, result in zip(given, results, strict=True):
        assert torch.equal(tensor, result)
    expanded = torch.ones(1).expand(4)
    assert torch.equal(cache()("key", note, expanded)[0], expanded)


def test_a_constant_is_read_again_only_when_it_is_another_tensor() -> None:
    graphs = cache()
    x, y = inputs(4)
    other = y + 1
    for constant in (y, y, other, y):
        result, _ = graphs("key", double, x, constants=(constant,))
        assert torch.equal(result, x + constant)
    expected = x + y
    y += 1  # which is not allowed, and shows that it is not copied
    assert torch.equal(graphs("key", double, x, constants=(y,))[0], expected)


def test_the_least_recently_used_graph_goes_first() -> None:
    graphs = cache(capacity=2)
    for size in (1, 2, 1, 3):
        check(graphs, size)
    assert list(graphs._graphs) == [1, 3]
    assert graphs.captures == 3


def test_a_key_that_cannot_be_captured_is_called_plainly_and_others_are_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    graphs = cache(failures=1)
    for _ in range(3):
        check(graphs, 1)
        check(graphs, 2)
    assert (graphs.captures, graphs.replays) == (1, 3)
    assert graphs.enabled
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_keys_that_cannot_be_captured_are_bounded() -> None:
    graphs = cache(capacity=4, failures=100)
    for size in range(1, 20):
        check(graphs, size)
    assert len(graphs._plain) == 4
    assert not graphs._graphs


def test_a_lost_device_is_not_taken_for_a_failed_capture() -> None:
    def lose(x: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        cache()("key", lose, torch.ones(1))


def test_a_cache_that_is_turned_off_calls_plainly() -> None:
    graphs = cache()
    check(graphs, 2)
    graphs.enabled = False
    check(graphs, 2)
    check(graphs, 3)
    assert (graphs.captures, graphs.replays) == (1, 1)
    graphs.clear()
    assert not graphs._graphs
