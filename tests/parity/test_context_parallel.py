"""Pictures and videos that two ranks compute together, each in its process, equal those of one, to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.config import OmniEngineArgs, resolve
from omnistage.core.errors import CapacityError, ConfigError, OmniError
from omnistage.core.params import DiffusionParams
from omnistage.core.stage import Stage
from omnistage.core.types import Condition, DiffusionInput, Latents, Modality, RequestInfo, StageInput
from omnistage.engines.diffusion.context_parallel import ParallelDenoiseStage
from omnistage.models._diffusers.tiny import picture
from omnistage.models.flux import tiny as flux
from omnistage.models.flux2 import tiny as flux2
from omnistage.models.qwen_image import tiny as qwen_image
from omnistage.models.registry import REGISTRY
from omnistage.models.stable_diffusion_3 import tiny as stable_diffusion_3
from omnistage.models.wan import tiny as wan
from omnistage.pipeline.build import build_stage

pytestmark = pytest.mark.timeout(300)
WITHIN = 2e-5
SMALL = {"width": 64, "height": 64, "steps": 2, "seed": 3, "n": 2}
IMAGE = picture(64, 64, seed=5)
PROMPTS = ("a cat", "two lighthouses at dusk, far away")


@contextmanager
def built(folder: Path, name: str, *settings: str) -> Iterator[Stage]:
    args = OmniEngineArgs(model=str(folder), device="cpu", dtype="float32", overrides=settings)
    resolved = resolve(args, registry=REGISTRY)
    config = resolved.config
    stage = build_stage(resolved.model, name, config.pipeline.stages[name], config.deployment)
    try:
        yield stage
    finally:
        stage.close()


def run(stage: Stage, inputs: list[StageInput]) -> list[object]:
    """What a stage gives for requests that run together, in the order of their ids and pictures."""
    for stage_input in inputs:
        stage.submit(stage_input)
    found = []
    while stage.has_work():
        for chunk in stage.step():
            assert chunk.error is None, chunk.error
            if isinstance(chunk.payload, Condition | Latents):
                found.append((chunk.request_id, getattr(chunk.payload, "index", 0), chunk.payload))
    return [payload for *_, payload in sorted(found, key=lambda each: each[:2])]


def requests(params: DiffusionParams, payloads: list[object]) -> list[StageInput]:
    return [
        StageInput(RequestInfo(str(number), frozenset({Modality.IMAGE})), params, payload)  # type: ignore[arg-type]
        for number, payload in enumerate(payloads)
    ]


@pytest.mark.parametrize(
    ("write", "variant", "settings", "images"),
    [
        (flux.write, "dev", {}, ()),
        (flux2.write, "base", {"guidance": 3.0}, (IMAGE,)),
        (qwen_image.write, "edit_plus", {"true_cfg": 2.0, "negative_prompt": "x"}, (IMAGE,)),
        (wan.write, "ti2v", {"num_frames": 5, "guidance": 3.0}, (IMAGE,)),
        (wan.write, "t2v_experts", {"num_frames": 5, "steps": 3}, ()),
    ],
)
def test_two_ranks_give_the_latents_of_one(
    tmp_path: Path,
    write: Callable[..., None],
    variant: str,
    settings: dict[str, object],
    images: tuple[np.ndarray, ...],
) -> None:
    folder = tmp_path / "model"
    write(folder, seed=3, variant=variant)
    params = DiffusionParams.parse({**SMALL, **settings})
    with built(folder, "encode") as encode:
        conditions = run(encode, requests(params, [DiffusionInput(text, images) for text in PROMPTS]))
    with built(folder, "denoise") as denoise:
        expected = run(denoise, requests(params, conditions))
    with built(folder, "denoise", "denoise.context_parallel=2") as denoise:
        assert isinstance(denoise, ParallelDenoiseStage)
        latents = run(denoise, requests(params, conditions))
    assert len(latents) == len(expected) == 2 * len(PROMPTS)
    for ours, theirs in zip(latents, expected, strict=True):
        assert isinstance(ours, Latents)
        assert isinstance(theirs, Latents)
        torch.testing.assert_close(
            ours.picture, theirs.picture, rtol=0, atol=WITHIN * float(theirs.picture.abs().max())
        )


def test_what_cannot_be_divided_is_refused_by_name_and_the_ranks_go_on(tmp_path: Path) -> None:
    flux.write(tmp_path / "flux", seed=3)
    params = DiffusionParams.parse({**SMALL, "n": 1})
    odd_text = params.model_copy(update={"max_sequence_length": 15})
    with built(tmp_path / "flux", "encode") as encode:
        (good,) = run(encode, requests(params, [DiffusionInput("a cat")]))
        (odd,) = run(encode, requests(odd_text, [DiffusionInput("a cat")]))
    with built(tmp_path / "flux", "denoise", "denoise.context_parallel=2") as denoise:
        with pytest.raises(CapacityError, match="9 latent patches cannot be divided evenly by 2 ranks"):
            denoise.check_params(DiffusionParams(width=48, height=48))
        (refused,) = requests(odd_text, [odd])
        denoise.submit(refused)
        errors = [chunk.error for chunk in denoise.step() if chunk.error is not None]
        assert [str(error).partition(" cannot")[0] for error in errors] == ["15 tokens of text"]
        assert len(run(denoise, requests(params, [good]))) == 1
        with (
            pytest.raises(ConfigError, match=r"has a process group of torch already, .* process of its own"),
            built(tmp_path / "flux", "denoise", "denoise.context_parallel=2"),
        ):
            pass


@pytest.mark.parametrize(
    ("write", "stage", "settings", "problem"),
    [
        (stable_diffusion_3.write, "denoise", ("denoise.context_parallel=2",), r"SD3Transformer2DModel has no plan"),
        (flux.write, "encode", ("encode.context_parallel=2",), r"does not denoise step by step.*context_parallel: 1"),
        (flux.write, "denoise", ("denoise.context_parallel=3",), r"2 attention heads, .*context_parallel: 1 or 2"),
        (flux.write, "denoise", ("denoise.context_parallel=2", "denoise.cache=first_block:0.1"), "remove cache"),
    ],
)
def test_models_that_ranks_cannot_divide_are_refused_by_name(
    tmp_path: Path, write: Callable[..., None], stage: str, settings: tuple[str, ...], problem: str
) -> None:
    write(tmp_path / "model", seed=3)
    with (
        pytest.raises(OmniError, match=problem),
        built(tmp_path / "model", stage, *settings),
    ):
        pass
