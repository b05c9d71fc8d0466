"""HunyuanVideo on our components against diffusers' pipeline, and what we refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import OmniError, UnsupportedModelError
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, drive, load_components
from omnistage.models.hunyuan_video import verify
from tests.diffusion_harness import Model, case, check_differ, check_groups

SMALL = {"width": 64, "height": 64, "num_frames": 5}
WIDE = {"width": 96, "height": 64, "num_frames": 9}
AWAY = {"negative_prompt": "people and cars", "true_cfg": 3.0}


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("hunyuan_video"), verify.Reference)


@pytest.mark.parametrize(
    "asked",
    [
        case(**SMALL, steps=4),
        case(**WIDE, steps=3, guidance=2.0, **AWAY),
        case(**SMALL, steps=2, guidance=0.0, max_sequence_length=200, seed=2**40),
        case("a very long story about the robot in the garden " * 30, width=32, height=96, num_frames=1, steps=1),
    ],
)
def test_as_diffusers_draws(asked: Case, model: Model) -> None:
    model.same(asked)


def test_defaults_are_those_of_diffusers(model: Model) -> None:
    assert model.parts[0].planned_size() == (1280, 720, 129)
    lane = model.opened(case(width=32, height=32))
    assert (lane.steps, lane.condition.num_frames, float(lane.context["guidance"])) == (50, 129, 6000.0)
    assert len(model.parts[1].rows(lane)) == 1


def test_every_parameter_counts(model: Model) -> None:
    others: dict[str, dict[str, Any]] = {
        "base": {},
        "prompt": {"prompt": "two blue dogs"},
        "seed": {"seed": 6},
        "guidance": {"guidance": 30.0},
        "negative": AWAY,
        "steps": {"steps": 4},
    }
    drawn = {name: drive(*model.parts, case(**{**SMALL, "steps": 3, **options})) for name, options in others.items()}
    assert drawn["base"].pixels.shape == (5, 64, 64, 3)
    check_differ(drawn, 0.2)


@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(model: Model) -> None:
    """Texts of different lengths among them, which are masked."""
    lanes = [
        model.opened(case(**SMALL, steps=4, **AWAY), 2),
        model.opened(case("a boat " * 20, **SMALL, steps=3, guidance=1.0, seed=9), 1),
        model.opened(case(**WIDE, steps=3), 1),
    ]
    check_groups(model.parts[1], lanes, [1, 3])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (case(width=72, height=64), "width"),
        (case(width=64, height=40), "height"),
        (case(**{**SMALL, "num_frames": 6}), "num_frames"),
        (case(images=(picture(64, 64),), **SMALL), "image"),
        (case(**SMALL, negative_prompt="fog"), "negative_prompt"),
        (case(**SMALL, true_cfg=2.0), "true_cfg"),
        (case(**SMALL, strength=0.5), "strength"),
    ],
)
def test_refusals_name_the_parameter(asked: Case, param: str, model: Model) -> None:
    with pytest.raises(OmniError) as raised:
        model.parts[0].check(asked.payload, asked.params)
    assert raised.value.param == param
    assert raised.value.status < 500


def test_transformers_that_go_on_from_pictures_are_refused(model: Model, tmp_path: Path) -> None:
    shutil.copytree(model.folder, tmp_path / "copy")
    path = tmp_path / "copy" / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_condition_type": "token_replace"}))
    with pytest.raises(UnsupportedModelError, match="token_replace"):
        load_components(OmniRunner(tmp_path / "copy"))
