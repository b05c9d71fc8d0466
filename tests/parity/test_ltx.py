"""LTX-Video on our components against diffusers' pipelines for text and for a picture, and what we refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import OmniError, UnsupportedModelError
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, drive, load_components
from omnistage.models.ltx import verify
from tests.diffusion_harness import Model, case, check_differ, check_groups

PHOTO = picture(80, 60, 3)
SMALL = {"width": 64, "height": 64, "num_frames": 9, "max_sequence_length": 32}
WIDE = {"width": 96, "height": 64, "num_frames": 17, "max_sequence_length": 32}


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("ltx", "v0_9"), verify.Reference)


CASES = [
    case(**SMALL, steps=4),
    case(**WIDE, steps=3, guidance=4.5, negative_prompt="people"),
    case(**SMALL, steps=2, guidance=1.0, fps=12, seed=2**40),
    case("a very long story about the robot in the garden " * 12, width=32, height=96, num_frames=1, steps=2),
    case("it begins to rain", images=(PHOTO,), **SMALL, steps=3),
    case("it begins to rain", images=(PHOTO,), **WIDE, steps=2, guidance=1.0, fps=30),
]


@pytest.mark.parametrize("asked", CASES)
def test_as_diffusers_draws(asked: Case, model: Model) -> None:
    model.same(asked)


def test_a_vae_that_is_told_the_time_decodes_as_diffusers(checkpoint_of: Callable[..., Path]) -> None:
    Model(checkpoint_of("ltx", "v0_9_1"), verify.Reference).same(CASES[0])


def test_the_picture_is_the_first_frame_at_every_step(model: Model) -> None:
    start, later = (model.opened(CASES[4], steps) for steps in (0, 2))
    assert torch.equal(start.latents[:, :1], later.latents[:, :1])
    assert not torch.allclose(start.latents[:, 1:], later.latents[:, 1:], atol=0.1)


def test_defaults_are_those_of_diffusers(model: Model) -> None:
    encoder, denoiser, decoder = model.parts
    asked = case()
    assert encoder.planned_size() == (704, 512, 161)
    encoder.check(asked.payload, asked.params)
    lane = model.opened(case(width=32, height=32))
    assert (lane.steps, lane.condition.num_frames, lane.context["fps"], decoder.fps) == (50, 161, 25.0, 25.0)
    assert len(denoiser.rows(lane)) == 2


def test_every_parameter_counts(model: Model) -> None:
    others: dict[str, dict[str, Any]] = {
        "base": {},
        "prompt": {"prompt": "two blue dogs"},
        "seed": {"seed": 6},
        "guidance": {"guidance": 9.0},
        "negative": {"negative_prompt": "fog"},
        "steps": {"steps": 4},
        "fps": {"fps": 5},
        "picture": {"images": (PHOTO,)},
    }
    drawn = {name: drive(*model.parts, case(**{**SMALL, "steps": 3, **options})) for name, options in others.items()}
    assert drawn["base"].pixels.shape == (9, 64, 64, 3)
    check_differ(drawn, 0.2)


@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(model: Model) -> None:
    lanes = [
        model.opened(CASES[0], 2),
        model.opened(case("a boat", **SMALL, steps=3, guidance=1.0, seed=9), 1),
        model.opened(CASES[2], 1),  # at another frame rate
        model.opened(CASES[4], 1),
        model.opened(case("a hill", images=(picture(64, 64, 8),), **SMALL, steps=5, guidance=2.0), 2),
    ]
    check_groups(model.parts[1], lanes, [1, 3, 4])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (case(width=80, height=64), "width"),
        (case(width=64, height=48), "height"),
        (case(**{**SMALL, "num_frames": 8}), "num_frames"),
        (case(images=(PHOTO,), **{**SMALL, "num_frames": 1}), "num_frames"),
        (case(images=(PHOTO, PHOTO), **SMALL), "image"),
        (case(images=(PHOTO,), **SMALL, strength=0.5), "strength"),
        (case(images=(PHOTO,), mask=np.zeros((60, 80), np.uint8), **SMALL), "mask"),
        (case(**SMALL, guidance=1.0, negative_prompt="fog"), "negative_prompt"),
        (case(**SMALL, true_cfg=2.0), "true_cfg"),
    ],
)
def test_refusals_name_the_parameter(asked: Case, param: str, model: Model) -> None:
    with pytest.raises(OmniError) as raised:
        model.parts[0].check(asked.payload, asked.params)
    assert raised.value.param == param
    assert raised.value.status < 500


def test_transformers_with_larger_patches_are_refused(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.folder, tmp_path / "copy")
    path = tmp_path / "copy" / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "patch_size": 2}))
    with pytest.raises(UnsupportedModelError, match="patches of one"):
        load_components(OmniRunner(tmp_path / "copy"))
