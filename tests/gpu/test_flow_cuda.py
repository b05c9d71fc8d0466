"""Intervals of token2wav's solver as CUDA graphs against the same calls without, on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from omnistage.core.params import CodecParams, SpeechQuality
from omnistage.engines.codec.flow import SOLVERS
from omnistage.engines.codec.kernels import use_triton
from omnistage.engines.graphs import GraphCache
from omnistage.models.qwen2_5_omni.blocks import Solution
from omnistage.models.qwen2_5_omni.flow_solver import FlowSolver
from tests.dit_harness import LARGE, batch_of, build, distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DEVICE = torch.device("cuda")
Windows = Sequence[tuple[float, bool]]
SHAPES: dict[str, Windows] = {
    # codes of each window in blocks, and whether a block before it is kept
    "first window": [(3.0, False)],
    "later window": [(6.0, True)],
    "last, short": [(0.34, True)],
    "several": [(2.67, True), (3.0, False), (4.0, True), (3.0, True)],
    "many": [(10.0, i % 3 > 0) for i in range(16)],
}
STEPS = 4


@pytest.fixture(scope="module")
def flow() -> FlowSolver:
    return FlowSolver(build(LARGE, "cuda"), half=True, fused=use_triton("auto", DEVICE))


def solve(
    flow: FlowSolver,
    windows: Windows,
    graphs: GraphCache | None,
    *,
    quality: SpeechQuality = "full",
    scale: float = 0.5,
    half: bool = False,
    seed: int = 0,
) -> list[Solution]:
    """Of the same padded batch, with graphs or plainly."""
    counts = SOLVERS[quality].counts()
    kept = {kind: (STEPS - 1, count, 1 + (kind and scale > 0)) for kind, count in counts.items()}
    params = CodecParams(num_steps=STEPS, quality=quality, guidance_scale=scale)
    with torch.inference_mode():
        batch = batch_of(flow.networks[0], windows, kept, padded=True, seed=seed)
        return flow.solve(batch, params, half=half, graphs=graphs)


def tensors(solutions: Sequence[Solution]) -> list[Tensor]:
    found = []
    for solution in solutions:
        found += [solution.mel, *([] if solution.context is None else solution.context.values())]
    return found


@contextmanager
def other_work() -> Iterator[None]:
    """A thread that computes, allocates and frees on a stream of its own, as another stage does."""
    stop, failed = threading.Event(), []

    def work() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), torch.inference_mode():
                while not stop.is_set():
                    for size in (64, 512, 1024):
                        # While a thread captures, torch's own generator has no numbers for the others.
                        x = torch.ones(size, size, device=DEVICE)
                        (x @ x).sum()
                    stream.synchronize()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize("quality", ["full", "balanced", "fast"])
@pytest.mark.parametrize("scale", [0.5, 0.0], ids=["guided", "unguided"])
def test_captured_intervals_are_those_without(
    flow: FlowSolver, quality: SpeechQuality, scale: float, half: bool
) -> None:
    graphs = GraphCache(enabled=True)
    errors = {}
    for name, windows in SHAPES.items():
        for seed in range(2):  # captured, then replayed with other inputs
            found = solve(flow, windows, graphs, quality=quality, scale=scale, half=half, seed=seed)
            expected = solve(flow, windows, None, quality=quality, scale=scale, half=half, seed=seed)
            errors[name, seed] = distance(tensors(found), tensors(expected))
    print("", *(f"{case}: {error:.2g}" for case, error in errors.items()), sep="\n")
    assert max(errors.values()) < 1e-3
    assert graphs.replays == len(errors) * (STEPS - 1)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
def test_shapes_may_take_turns_while_another_stream_works(flow: FlowSolver, half: bool) -> None:
    """Graphs share their pool and their buffers; in any order none may see what is another's."""
    graphs, stream = GraphCache(enabled=True), torch.cuda.Stream()
    order = [*SHAPES, *reversed(SHAPES), *SHAPES]
    expected = {name: tensors(solve(flow, SHAPES[name], None, half=half)) for name in SHAPES}
    torch.cuda.synchronize()
    with other_work(), torch.cuda.stream(stream):
        for name in order:
            assert distance(tensors(solve(flow, SHAPES[name], graphs, half=half)), expected[name]) < 1e-3, name
    assert graphs.captures == len({solve_size(flow, windows) for windows in SHAPES.values()})


def solve_size(flow: FlowSolver, windows: Windows) -> object:
    return batch_of(flow.networks[0], windows, {True: (1, 1, 2)}, padded=True).size


def test_a_capture_that_fails_leaves_the_others_alone(flow: FlowSolver, caplog: pytest.LogCaptureFixture) -> None:
    graphs = GraphCache(enabled=True)
    windows = SHAPES["several"]
    expected = tensors(solve(flow, windows, None))
    assert distance(tensors(solve(flow, windows, graphs)), expected) < 1e-3

    def reads_back(x: Tensor) -> tuple[Tensor, ...]:
        return (x * float(x.sum()),)  # which no capture allows

    x = torch.ones(4, device=DEVICE)
    for _ in range(2):
        assert torch.equal(graphs("reads back", reads_back, x)[0], 4 * x)
    assert len(caplog.records) == 1
    # One that was captured before, and one that is captured now.
    assert distance(tensors(solve(flow, windows, graphs)), expected) < 1e-3
    before = graphs.captures
    later = SHAPES["later window"]
    assert distance(tensors(solve(flow, later, graphs)), tensors(solve(flow, later, None))) < 1e-3
    assert graphs.captures == before + 1
    torch.rand(4, device=DEVICE)  # torch's generator works as before
    # Memory that two streams have used comes back: no capture counts as under way.
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated()
    large = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
    large.record_stream(other)
    del large
    torch.cuda.synchronize()
    torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert torch.cuda.memory_allocated() - taken < 32 << 20


def test_smaller_graphs_use_the_memory_of_the_largest(flow: FlowSolver) -> None:
    graphs = GraphCache(enabled=True)
    solve(flow, SHAPES["many"], graphs)
    torch.cuda.synchronize()
    taken = torch.cuda.memory_allocated()
    for name in ("several", "later window", "first window"):
        solve(flow, SHAPES[name], graphs)
    torch.cuda.synchronize()
    assert graphs.captures == 4
    assert torch.cuda.memory_allocated() - taken < 4 << 20  # their constants
    graphs.clear()
