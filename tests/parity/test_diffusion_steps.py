"""Steps made faster from outside: compiled blocks and captured forwards give the same predictions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from omnistage.cli.model_runner import OmniRunner
from omnistage.config import DiffusionBudget, OmniEngineArgs
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.engines.compiling import compile_layers
from omnistage.engines.diffusion import graphs, stage
from omnistage.engines.diffusion.component import Denoiser, Row
from omnistage.engines.diffusion.graphs import StepGraphs, captured_rows, graph_bytes, warm_sizes
from omnistage.engines.diffusion.stage import DenoiseStage
from omnistage.engines.graphs import GraphCache
from omnistage.engines.peak_memory import META
from omnistage.models._diffusers.base import DiffusersDenoiser
from omnistage.models._diffusers.verify import load_components
from omnistage.models.registry import REGISTRY
from omnistage.pipeline.build import load_component, resolve
from tests.graph_harness import FakeCapture, HostTensors

CAPTURABLE = ("stable_diffusion", "stable_diffusion_3", "flux", "flux2", "hunyuan_video")
PROMPTS = ("a cat", "a red house on a hill by the sea", "snow", "a boat")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def rows_of(folder: Path, width: int = 64, height: int = 64) -> tuple[Denoiser, list[Row]]:
    """A denoiser, and the rows of four pictures."""
    encoder, denoiser, _ = load_components(OmniRunner(folder))
    params = DiffusionParams(width=width, height=height, steps=3, guidance=4.0)
    rows: list[Row] = []
    for seed, prompt in enumerate(PROMPTS):
        payload = DiffusionInput(prompt)
        encoded = [encoder.encode([job])[0] for job in encoder.jobs(payload, params)]
        condition = encoder.condition(payload, params, encoded)
        rows += denoiser.rows(denoiser.open(condition, params, torch.Generator().manual_seed(seed)))
    return denoiser, rows


@pytest.mark.parametrize("family", CAPTURABLE)
def test_captured_forwards_predict_what_plain_ones_do(
    family: str, checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "GraphCache", partial(GraphCache, capture=FakeCapture()))
    denoiser, rows = rows_of(checkpoint_of(family))
    steps = StepGraphs(denoiser, enabled=True)
    steps.capture([rows[0]] * 2)
    cache = steps._graphs
    assert cache.replays == 1
    # Two replays before either's predictions are read, as in a step whose rows are too many for one forward.
    first, second = steps.forward(rows[:2]), steps.forward(rows[2:4])
    assert cache.replays == 3
    for found, batch in ((first, rows[:2]), (second, rows[2:4])):
        assert all(torch.equal(a, b) for a, b in zip(found, denoiser.forward(batch), strict=True))
    others = steps.forward(rows[:3])
    assert cache.replays == 3  # no other number of rows is captured
    assert all(torch.equal(a, b) for a, b in zip(others, denoiser.forward(rows[:3]), strict=True))


def test_a_family_whose_forward_reads_more_than_tensors_is_not_captured(checkpoint_of: Callable[..., Path]) -> None:
    denoiser, rows = rows_of(checkpoint_of("qwen_image"))
    steps = StepGraphs(denoiser, enabled=True)
    steps.capture(rows[:1])
    assert not steps._planned
    assert len(steps.forward(rows[:2])) == 2


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 4), (256, 16), (4096, 0), (36, 16)])
def test_few_patches_are_captured(tokens: int, rows: int) -> None:
    assert captured_rows(tokens, 16) == rows


def on_meta(folder: Path) -> Denoiser:
    resolved = resolve(OmniEngineArgs(model=str(folder), device="cpu"), registry=REGISTRY)
    settings = resolved.config.pipeline.stages["denoise"]
    denoiser = load_component(LoadContext(resolved.model, "denoise", settings, META, torch.float32))
    assert isinstance(denoiser, Denoiser)
    return denoiser


@pytest.mark.parametrize("family", CAPTURABLE)
def test_nothing_of_the_host_is_read_in_a_captured_forward(family: str, checkpoint_of: Callable[..., Path]) -> None:
    denoiser = on_meta(checkpoint_of(family))
    condition = denoiser.planned_condition(64, 64, 1)
    assert condition is not None
    row = Row(denoiser.open(condition, DiffusionParams(), torch.Generator()), "positive")
    inputs = denoiser.stacked([row, row])
    with HostTensors() as host:
        denoiser.predict(inputs)
    assert host.found == []


def test_the_memory_plan_counts_graphs_where_they_are_captured(checkpoint_of: Callable[..., Path]) -> None:
    params, small = DiffusionParams(), DiffusionBudget(warm_sizes=("256x256", "128x128"))
    flux, qwen = on_meta(checkpoint_of("flux")), on_meta(checkpoint_of("qwen_image"))
    assert graph_bytes(flux, small, params) > flux.step_bytes(16, 256, 256, 1)
    assert graph_bytes(flux, small.model_copy(update={"cuda_graphs": False}), params) == 0
    assert graph_bytes(flux, small.model_copy(update={"cache": "first_block"}), params) == 0
    assert graph_bytes(flux, DiffusionBudget(), params) == 0  # 1024 by 1024 pixels are not few patches
    assert graph_bytes(qwen, small, params) == 0


def test_a_start_prepares_for_the_sizes_that_are_configured_or_for_the_default(
    checkpoint_of: Callable[..., Path],
) -> None:
    flux = on_meta(checkpoint_of("flux"))
    assert warm_sizes(flux, DiffusionBudget(), DiffusionParams()) == [(1024, 1024, 1)]
    assert warm_sizes(flux, DiffusionBudget(), DiffusionParams(width=512, height=256)) == [(512, 256, 1)]
    configured = DiffusionBudget(warm_sizes=("256x256", "512x512", "4096x4096"), max_batch_tokens=2000)
    assert warm_sizes(flux, configured, DiffusionParams(width=64)) == [(512, 512, 1), (256, 256, 1)]


def test_a_family_that_names_no_shapes_starts_unprepared(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    denoiser, rows = rows_of(checkpoint_of("stable_diffusion_3"))
    monkeypatch.setattr(type(denoiser), "text_shapes", DiffusersDenoiser.text_shapes)
    started = DenoiseStage("denoise", denoiser, DiffusionBudget(warm_sizes=("64x64",)))
    started.warm_up()
    assert len(started._runner._forward(rows[:2])) == 2


@pytest.mark.parametrize("family", ["stable_diffusion", "stable_diffusion_3", "z_image"])
def test_nothing_is_compiled_after_the_warm_up(
    family: str, checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of rows, the size and the texts' lengths; predictions are those of plain blocks."""
    monkeypatch.setattr(stage, "compile_layers", partial(compile_layers, backend="eager"))
    folder = checkpoint_of(family)
    torch._dynamo.reset()
    compiled = load_components(OmniRunner(folder))[1]
    DenoiseStage("denoise", compiled, DiffusionBudget(compile=True, warm_sizes=("64x64",))).warm_up()
    graphs_before = counters["stats"]["unique_graphs"]
    assert graphs_before
    for size in ((64, 64), (96, 64)):
        denoiser, rows = rows_of(folder, *size)
        by_group: dict[Hashable, list[Row]] = {}
        for row in rows:
            by_group.setdefault(denoiser.group(row), []).append(row)
        for group in by_group.values():
            for batch in (group[:1], group[:2], group):
                for found, expected in zip(compiled.forward(batch), denoiser.forward(batch), strict=True):
                    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == graphs_before
    torch._dynamo.reset()


def test_nothing_is_compiled_on_the_cpu_unless_asked_for(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(stage, "compile_layers", lambda layers: compiled.extend(layers))
    denoiser = load_components(OmniRunner(checkpoint_of("flux")))[1]
    DenoiseStage("denoise", denoiser, DiffusionBudget())
    assert compiled == []
    DenoiseStage("denoise", denoiser, DiffusionBudget(compile=True))
    assert len(compiled) == 4  # two blocks of each kind
