"""FLUX.2 klein (base and distilled) and dev on our components against diffusers' pipelines, and what we refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, drive
from omnistage.models.flux2 import verify
from tests.diffusion_harness import Model, case, check_decoding, check_differ, check_groups, distance

PHOTO, TALL_PHOTO = picture(100, 64, 3), picture(64, 110, 4)
SMALL = {"width": 64, "height": 64, "max_sequence_length": 32}
WIDE = {"width": 96, "height": 48, "max_sequence_length": 32}
TALL = {"width": 48, "height": 96, "max_sequence_length": 32}


@pytest.fixture(scope="module")
def base(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux2", "base"), verify.Reference)


@pytest.fixture(scope="module")
def distilled(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux2", "distilled"), verify.Reference)


@pytest.fixture(scope="module")
def dev(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux2", "dev"), verify.Reference)


TEXT = [
    case(**SMALL, steps=4),
    case(**WIDE, steps=3, guidance=2.5),
    case(**TALL, steps=2, guidance=1.0, seed=2**40),
    case("a very long story about the robot in the garden " * 12, **SMALL, steps=2, guidance=0.0),
    case("Ein B\u00e4r, 7 V\u00f6gel \U0001f3b7", width=32, height=112, steps=1),
]
REFERENCES = [
    case("the same at night", images=(PHOTO,), steps=2, max_sequence_length=32),
    case("the same at night", images=(TALL_PHOTO,), **WIDE, steps=2),
    case("the first as the second", images=(PHOTO, TALL_PHOTO), **SMALL, steps=2, guidance=1.0),
    case("only the width", images=(TALL_PHOTO,), width=96, steps=1, max_sequence_length=32),
]


@pytest.mark.parametrize("asked", [*TEXT, *REFERENCES, case(**SMALL, steps=3, negative_prompt="people", guidance=3.0)])
def test_base_as_diffusers_draws(asked: Case, base: Model) -> None:
    base.same(asked)


@pytest.mark.parametrize("asked", [TEXT[0], TEXT[1], REFERENCES[0]])
def test_distilled_as_diffusers_draws(asked: Case, distilled: Model) -> None:
    distilled.same(asked)


@pytest.mark.parametrize("asked", [*TEXT[:4], *REFERENCES[:3]])
def test_dev_as_diffusers_draws(asked: Case, dev: Model) -> None:
    dev.same(asked)


def test_dev_is_told_its_guidance(dev: Model) -> None:
    with torch.inference_mode():
        lane = dev.opened(case(width=32, height=32))
        assert (lane.steps, float(lane.context["guidance"])) == (50, 4.0)
        lanes = [lane, dev.opened(case("a boat", width=32, height=32, steps=3, guidance=0.0), 1)]
        rows = [row for each in lanes for row in dev.parts[1].rows(each)]
        assert len(rows) == len({dev.parts[1].group(row) for row in rows}) + 1 == 2
        for row, together in zip(rows, dev.parts[1].forward(rows), strict=True):
            assert float((together - dev.parts[1].forward([row])[0]).abs().max()) < 2e-5
    drawn = [drive(*dev.parts, case(**SMALL, steps=3, guidance=guidance)) for guidance in (1.0, 20.0)]
    assert distance(*drawn) > 0.5
    assert dev.parts[0].pipe.text_encoder.vision_tower is None  # type: ignore[attr-defined]  # it sees no pictures here
    with pytest.raises(InvalidRequestError) as raised:
        dev.parts[0].check(DiffusionInput("a cat"), DiffusionParams(negative_prompt="fog"))
    assert raised.value.param == "negative_prompt"


def test_large_references_are_scaled_down(base: Model) -> None:
    encoder: Any = base.parts[0]
    payload = DiffusionInput("at night", (picture(1500, 1000),))
    assert encoder.size(payload, DiffusionParams()) == (1248, 832)
    assert encoder.size(payload, DiffusionParams(height=64)) == (1248, 64)


def test_defaults_depend_on_the_checkpoint(base: Model, distilled: Model) -> None:
    asked = case(width=32, height=32)
    with torch.inference_mode():
        slow, quick = base.opened(asked), distilled.opened(asked)
    assert (slow.steps, quick.steps) == (50, 4)
    assert slow.condition.negative is not None
    assert quick.condition.negative is None
    assert len(quick.condition.positive["embeds"]) == 512


def test_every_parameter_counts(base: Model) -> None:
    others = {
        "base": case(**SMALL, steps=3),
        "prompt": case("two blue dogs", **SMALL, steps=3),
        "seed": case(**SMALL, steps=3, seed=6),
        "guidance": case(**SMALL, steps=3, guidance=8.0),
        "no guidance": case(**SMALL, steps=3, guidance=1.0),
        "negative": case(**SMALL, steps=3, negative_prompt="fog over the river"),
        "steps": case(**SMALL, steps=4),
        "picture": case(images=(PHOTO,), **SMALL, steps=3),
        "pictures": case(images=(PHOTO, TALL_PHOTO), **SMALL, steps=3),
    }
    drawn = {name: drive(*base.parts, asked) for name, asked in others.items()}
    check_differ(drawn, 1)


# ----------------------------------------------------------------------------------------------- batching


@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(base: Model) -> None:
    lanes = [
        base.opened(case(**WIDE, steps=6), 2),
        base.opened(case("a boat", **WIDE, steps=3, guidance=1.0, seed=9), 1),
        base.opened(case("a wall", **TALL, steps=4, seed=3, guidance=1.0), 1),  # as many patches, but elsewhere
        base.opened(case("a hill", images=(PHOTO,), **WIDE, steps=3), 1),
        base.opened(case("a hill", images=(picture(98, 66, 7),), **WIDE, steps=2, guidance=1.0)),
        base.opened(case("a hill", images=(TALL_PHOTO,), **WIDE, steps=2, guidance=1.0)),
    ]
    assert lanes[0].latents.shape == lanes[2].latents.shape
    assert lanes[3].tokens == 18 + 24
    check_groups(base.parts[1], lanes, [1, 1, 3, 3])


@torch.inference_mode()
def test_texts_encoded_together_are_those_encoded_alone(base: Model) -> None:
    encoder = base.parts[0]
    jobs = [job for asked in TEXT[:3] for job in encoder.jobs(asked.payload, asked.params)]
    assert len(jobs) == 5
    for job, together in zip(jobs, encoder.encode(jobs), strict=True):
        (alone,) = encoder.encode([job])
        # Hidden states of 27 layers without a norm are large numbers.
        assert torch.allclose(together["embeds"], alone["embeds"], rtol=2e-5, atol=2e-4)


def test_pictures_decoded_together_are_those_decoded_alone(base: Model) -> None:
    check_decoding(base.parts[2], 128, 3, 5)


# ----------------------------------------------------------------------------------------------- checkpoints


def test_stages_hold_only_their_weights(base: Model) -> None:
    encoder, denoiser, decoder = (part.pipe for part in base.parts)  # type: ignore[attr-defined]
    assert not list(encoder.vae.decoder.parameters())
    assert not list(decoder.vae.encoder.parameters())
    assert encoder.transformer is None
    assert denoiser.vae.decoder.conv_in.weight.is_meta
    assert denoiser.text_encoder is None
    assert not hasattr(encoder.text_encoder, "lm_head")


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        (case(width=65, height=64), InvalidRequestError, "width"),
        (case(width=64, height=72), InvalidRequestError, "height"),
        (case(images=(PHOTO,) * 11), InvalidRequestError, "image"),
        (case(images=(PHOTO, picture(63, 100))), InvalidRequestError, "image"),
        (case(images=(picture(64, 640),)), InvalidRequestError, "image"),
        (case(images=(PHOTO,), mask=PHOTO[..., 0]), InvalidRequestError, "mask"),
        (case(images=(PHOTO,), strength=0.5), InvalidRequestError, "strength"),
        (case(negative_prompt="fog"), InvalidRequestError, "negative_prompt"),
    ],
)
def test_refusals_name_the_parameter(asked: Case, error: type[OmniError], param: str, distilled: Model) -> None:
    with pytest.raises(error) as raised:
        distilled.parts[0].check(asked.payload, asked.params)
    assert raised.value.param == param
