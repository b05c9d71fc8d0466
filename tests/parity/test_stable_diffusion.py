"""Stable Diffusion 1.x, 2.x and XL on our components against diffusers' pipelines, and what we refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import CheckpointError, InvalidRequestError, OmniError, UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import (
    Case,
    drive,
    load_components,
    pixel_difference,
    to_uint8,
)
from omnistage.models.stable_diffusion import verify
from tests.diffusion_harness import Model, case, check_differ, check_groups

PHOTO, EDGES = picture(96, 48, 3), picture(64, 64, 8)
MASK = np.zeros((48, 96), np.uint8)
MASK[10:30, 20:80] = 255
SMALL, WIDE = {"width": 64, "height": 64}, {"width": 96, "height": 48}
AWAY = {"guidance": 4.5, "negative_prompt": "people and cars"}
STOCHASTIC = "EulerAncestralDiscreteScheduler"


@pytest.fixture(scope="module")
def model_of(checkpoint_of: Callable[..., Path]) -> Callable[[str], Model]:
    loaded: dict[str, Model] = {}

    def get(variant: str) -> Model:
        if variant not in loaded:
            loaded[variant] = Model(checkpoint_of("stable_diffusion", variant), verify.Reference)
        return loaded[variant]

    return get


TEXT = case(**WIDE, steps=3, **AWAY)
CHANGE = case("at night", images=(PHOTO,), **WIDE, steps=5, strength=0.7)
PAINTING = case("a bird", images=(PHOTO,), mask=MASK, **WIDE, steps=4, strength=0.8, **AWAY)


@pytest.mark.parametrize("asked", [TEXT, CHANGE, PAINTING])
@pytest.mark.parametrize("variant", ["v1", "v2", "xl"])
def test_as_diffusers_draws(variant: str, asked: Case, model_of: Callable[[str], Model]) -> None:
    model_of(variant).same(asked)


@pytest.mark.parametrize(
    ("variant", "asked"),
    [
        ("v1", case("a very long story about the robot in the garden " * 12, **SMALL, steps=2, guidance=2.0)),
        ("v1", case(width=40, height=72, steps=1, guidance=1.0)),  # sizes that halve to odd numbers
        ("v1", case(images=(PHOTO,), mask=MASK, **SMALL, steps=3, guidance=0.0)),  # at full strength
        ("v1", case(images=(PHOTO,), **SMALL, steps=20, strength=0.05)),
        ("xl", case("Ein Bär, 7 Vögel \U0001f3b7", **SMALL, steps=2, guidance=3.0, negative_prompt="", seed=2**40)),
        ("xl", case(images=(picture(100, 50),), steps=4)),  # the picture's own size
        ("xl", case(images=(PHOTO,), mask=MASK, **WIDE, steps=3)),
        ("xl", case(**SMALL, steps=2, guidance=0.0)),
        ("inpaint", PAINTING),
        ("inpaint", case(images=(PHOTO,), mask=MASK, **SMALL, steps=3, scheduler=STOCHASTIC)),
        ("lcm", case(**SMALL, steps=4, guidance=8.5)),
        ("lcm", case(images=(PHOTO,), **SMALL, steps=4)),
        ("controlnet", case(images=(EDGES,), **WIDE, steps=3, **AWAY)),
        ("controlnet", case(images=(EDGES,), steps=3, control_scale=0.3)),
        ("xl_controlnet", case(images=(EDGES,), **WIDE, steps=3, control_scale=1.5)),
    ],
)
def test_kinds_of_requests_as_diffusers_draws(variant: str, asked: Case, model_of: Callable[[str], Model]) -> None:
    model_of(variant).same(asked)


@pytest.mark.parametrize(
    "name",
    [
        "DDIMScheduler",
        "DDPMScheduler",
        "DPMSolverMultistepScheduler",
        "EulerDiscreteScheduler",
        STOCHASTIC,
        "HeunDiscreteScheduler",
        "KDPM2AncestralDiscreteScheduler",
        "UniPCMultistepScheduler",
    ],
)
def test_schedulers_keep_their_state_and_their_noise(name: str, model_of: Callable[[str], Model]) -> None:
    options = {"width": 32, "height": 32, "steps": 6, "scheduler": name, "guidance": 1.0}
    model_of("v1").same(case(**options))
    model_of("v1").same(case(images=(PHOTO,), mask=MASK, **options, strength=0.7))


@pytest.mark.parametrize("variant", ["controlnet", "xl_controlnet"])
def test_a_controlnet_may_start_from_a_picture(
    variant: str, checkpoint_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = _copy(checkpoint_of("stable_diffusion", variant), tmp_path)
    _index(folder, lambda index: {**index, "_class_name": index["_class_name"].replace("Pipeline", "Img2ImgPipeline")})
    model = Model(folder, verify.Reference)
    model.same(case(images=(PHOTO, EDGES), **SMALL, steps=4, strength=0.6, control_scale=0.5))
    with pytest.raises(InvalidRequestError, match="two images"):
        model.parts[0].check(DiffusionInput("a cat", (PHOTO,)), DiffusionParams())


# ----------------------------------------------------------------------------------------------- batching


@pytest.mark.parametrize("variant", ["v1", "xl", "controlnet"])
@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(variant: str, model_of: Callable[[str], Model]) -> None:
    model = model_of(variant)
    control = variant == "controlnet"
    images, photos = ((EDGES,), (picture(64, 64, 9),)) if control else ((), (PHOTO,))
    lanes = [
        model.opened(case(images=images, **WIDE, steps=6), 2),
        model.opened(case("a boat", images=images, **WIDE, steps=3, seed=9, scheduler=STOCHASTIC, **AWAY), 1),
        model.opened(case("a hill", images=photos, **WIDE, steps=4, guidance=1.0)),
        model.opened(case("a wall", images=images, **SMALL, steps=4, seed=3, scheduler="DDIMScheduler"), 1),
    ]
    check_groups(model.parts[1], lanes, [2, 5], 5e-5)


def test_requests_at_once_are_drawn_as_alone(model_of: Callable[[str], Model]) -> None:
    """Noise that a scheduler adds step by step is the request's own, whoever shares its forwards."""
    model = model_of("v1")
    asked = [
        case(**SMALL, steps=5, guidance=2.0, scheduler=STOCHASTIC),
        case(**SMALL, steps=5, guidance=2.0, scheduler=STOCHASTIC, seed=6),
        case(**SMALL, steps=3, guidance=3.0, negative_prompt="fog"),
        PAINTING,
    ]
    together = OmniRunner(model.folder).draw([(each.payload, each.params) for each in asked])
    for each, pixels in zip(asked, together, strict=True):
        assert pixel_difference(pixels, model.reference(each).pixels) <= 1.01 / 255
    assert pixel_difference(together[0], together[1]) > 0.1


def test_every_parameter_counts(model_of: Callable[[str], Model]) -> None:
    base = {**SMALL, "steps": 3, "guidance": 4.0}
    parts = model_of("xl").parts
    drawn = {
        name: drive(*parts, case(**{**base, **options}))
        for name, options in {
            "base": {},
            "prompt": {"prompt": "two blue dogs"},
            "seed": {"seed": 6},
            "guidance": {"guidance": 8.0},
            "no guidance": {"guidance": 1.0},
            "negative": {"negative_prompt": "fog"},
            "empty negative": {"negative_prompt": ""},
            "steps": {"steps": 4},
            "scheduler": {"scheduler": "DDIMScheduler"},
            "picture": {"images": (PHOTO,), "strength": 0.8},
        }.items()
    }
    control = model_of("xl_controlnet").parts
    drawn |= {
        f"control {scale}": drive(*control, case(images=(EDGES,), **base, control_scale=scale)) for scale in (0.5, 1.0)
    }
    check_differ(drawn, 1)


# ----------------------------------------------------------------------------------------------- checkpoints


def _copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to / "copy")
    return to / "copy"


def _index(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def _settings(folder: Path, **settings: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def test_the_safety_checker_of_a_checkpoint_runs(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    """Once with thresholds that no picture reaches, once with ones that every picture does."""
    from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

    folder = _copy(checkpoint_of("stable_diffusion", "v1"), tmp_path)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        vision_config={**small, "image_size": 32, "patch_size": 16}, text_config=small, projection_dim=8
    )
    checker = StableDiffusionSafetyChecker(config)
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(
        folder / "feature_extractor"
    )
    names = {
        "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
        "feature_extractor": ["transformers", "CLIPImageProcessor"],
    }
    _index(folder, lambda index: {**index, **names, "requires_safety_checker": True})
    asked = case(**SMALL, steps=1)
    for threshold in (2.0, -2.0):
        checker.concept_embeds_weights.data.fill_(threshold)
        checker.save_pretrained(folder / "safety_checker")
        pipe = diffusers().StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
        theirs = pipe(
            "a red cat", **SMALL, num_inference_steps=1, output_type="np", generator=torch.Generator().manual_seed(5)
        )
        ours = drive(*load_components(OmniRunner(folder)), asked).pixels
        assert theirs.nsfw_content_detected == [threshold < 0]
        assert bool((ours == 0).all()) == (threshold < 0)
        assert pixel_difference(ours, to_uint8(theirs.images[0])) <= 1.01 / 255


@pytest.mark.parametrize(
    ("variant", "part", "settings", "reason"),
    [
        ("v1", "unet", {"in_channels": 8}, "8 channels"),
        ("v1", "unet", {"class_embed_type": "timestep"}, "class_embed_type='timestep'"),
        ("xl", "unet", {"addition_embed_type": None}, "addition_embed_type=None"),
        ("controlnet", "controlnet", {"global_pool_conditions": True}, "pools its conditions"),
        ("controlnet", "unet", {"in_channels": 9}, "not served together"),
    ],
)
def test_checkpoints_that_cannot_be_served_are_refused_with_the_reason(
    variant: str,
    part: str,
    settings: dict[str, object],
    reason: str,
    checkpoint_of: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = _copy(checkpoint_of("stable_diffusion", variant), tmp_path)
    _settings(folder / part, **settings)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_components(OmniRunner(folder))


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({"requires_aesthetics_score": True}, UnsupportedModelError, "refiner"),
        ({"text_encoder": [None, None]}, UnsupportedModelError, "refiner"),
        ({"unet": [None, None]}, CheckpointError, "names no unet"),
        ({"text_encoder_2": ["diffusers", "DDPMPipeline"]}, CheckpointError, "whole pipeline"),
    ],
)
def test_indexes_that_name_something_else_are_refused(
    change: dict[str, object],
    error: type[OmniError],
    reason: str,
    checkpoint_of: Callable[..., Path],
    tmp_path: Path,
) -> None:
    folder = _copy(checkpoint_of("stable_diffusion", "xl"), tmp_path)
    _index(folder, lambda index: {**index, **change})
    with pytest.raises(error, match=reason):
        load_components(OmniRunner(folder))


def test_a_missing_part_is_named(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = _copy(checkpoint_of("stable_diffusion", "v1"), tmp_path)
    shutil.rmtree(folder / "unet")
    with pytest.raises(CheckpointError, match="no folder unet"):
        load_components(OmniRunner(folder))


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("variant", "asked", "param"),
    [
        ("v1", case(width=65, height=64), "width"),
        ("v1", case(width=64, height=68), "height"),
        ("v1", case(images=(PHOTO, PHOTO)), "image"),
        ("v1", case(strength=0.5), "strength"),
        ("v1", case(mask=MASK), "mask"),
        ("v1", case(images=(PHOTO,), mask=MASK[:40]), "mask"),
        ("v1", case(control_scale=0.5), "control_scale"),
        ("v1", case(max_sequence_length=64), "max_sequence_length"),
        ("v1", case(true_cfg=2.0), "true_cfg"),
        ("v1", case(num_frames=5), "num_frames"),
        ("v1", case(guidance=1.0, negative_prompt="fog"), "negative_prompt"),
        ("lcm", case(guidance=8.0, negative_prompt="fog"), "negative_prompt"),
        ("inpaint", case(), "image"),
        ("inpaint", case(images=(PHOTO,)), "mask"),
        ("controlnet", case(), "image"),
        ("controlnet", case(images=(EDGES,), strength=0.5), "strength"),
        ("controlnet", case(images=(PHOTO,), mask=MASK), "mask"),
        ("lcm", case(steps=60), "steps"),
        ("v2", case(steps=2, scheduler="PNDMScheduler"), "steps"),
        ("v1", case(scheduler="DPMSolverSDEScheduler"), "scheduler"),
        ("v1", case(scheduler="FlowMatchEulerDiscreteScheduler"), "scheduler"),
        ("xl", case(scheduler="EDMEulerScheduler"), "scheduler"),
        ("v1", case(early_stop=0.1), "early_stop"),
    ],
)
def test_refusals_name_the_parameter(variant: str, asked: Case, param: str, model_of: Callable[[str], Model]) -> None:
    with pytest.raises(OmniError) as raised:
        model_of(variant).check(asked)
    assert raised.value.param == param
    assert raised.value.status < 500


def test_a_strength_that_leaves_no_step_is_refused(model_of: Callable[[str], Model]) -> None:
    with pytest.raises(InvalidRequestError, match="leave no step"):
        model_of("v2").opened(case(images=(PHOTO,), **SMALL, steps=2, strength=0.3))
