"""FLUX.1 (dev, schnell, Kontext) on our components against diffusers' pipelines, and what we refuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import InvalidRequestError, LimitExceededError, OmniError, UnsupportedModelError
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, drive, load_components
from omnistage.models.flux import verify
from tests.diffusion_harness import Model, case, check_decoding, check_differ, check_groups

PHOTO, TALL_PHOTO = picture(96, 48, 3), picture(40, 90, 4)
SMALL = {"width": 64, "height": 64, "max_sequence_length": 24}
WIDE = {"width": 96, "height": 48, "max_sequence_length": 24}
TALL = {"width": 48, "height": 96, "max_sequence_length": 24}
AWAY = {"negative_prompt": "people and cars", "true_cfg": 3.0}


@pytest.fixture(scope="module")
def dev(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux", "dev"), verify.Reference)


@pytest.fixture(scope="module")
def schnell(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux", "schnell"), verify.Reference)


@pytest.fixture(scope="module")
def kontext(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux", "kontext"), verify.Reference)


@pytest.fixture(scope="module")
def fill(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux", "fill"), verify.Reference)


@pytest.fixture
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kontext scales every picture to a million pixels, which is a lot for a test; both sides read this list."""
    from diffusers.pipelines.flux import pipeline_flux_kontext

    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 64), (96, 56), (48, 96)])


TEXT = [
    case(**SMALL, steps=4),
    case(**SMALL, steps=1, guidance=1.0),
    case(**WIDE, steps=3, guidance=5.0, **AWAY),
    case(**TALL, steps=5, guidance=0.0, seed=2**40),
    case("a very long story about the robot in the garden " * 12, **SMALL, steps=2, negative_prompt="", true_cfg=1.5),
    case("Ein B\u00e4r, 7 V\u00f6gel \U0001f3b7", width=32, height=112, steps=2, max_sequence_length=512),
]
CHANGES = [
    case("at night", images=(PHOTO,), **WIDE, steps=5, strength=0.7),
    case("at night", images=(TALL_PHOTO,), **SMALL, steps=4),
    case("at night", images=(PHOTO,), **TALL, steps=3, strength=1.0, guidance=2.0),
    case("at night", images=(PHOTO,), **WIDE, steps=7, strength=0.05, **AWAY),
]


@pytest.mark.parametrize("asked", [*TEXT, *CHANGES])
def test_dev_as_diffusers_draws(asked: Case, dev: Model) -> None:
    dev.same(asked)


@pytest.mark.parametrize("asked", [TEXT[0], TEXT[2], CHANGES[0]])
def test_schnell_as_diffusers_draws(asked: Case, schnell: Model) -> None:
    schnell.same(asked)


@pytest.mark.usefixtures("small_references")
@pytest.mark.parametrize(
    "asked",
    [
        TEXT[2],
        case("make it night", images=(PHOTO,), **WIDE, steps=3),
        case("make it night", images=(TALL_PHOTO,), **WIDE, steps=2, guidance=2.0, **AWAY),
        case("make it night", images=(PHOTO,), **SMALL, steps=2),
    ],
)
def test_kontext_as_diffusers_draws(asked: Case, kontext: Model) -> None:
    kontext.same(asked)


MASK = np.zeros((48, 96), np.uint8)
MASK[12:30, 20:60] = 255
FILLS = [
    case("a bird", images=(PHOTO,), mask=MASK, **WIDE, steps=3),
    case("a bird", images=(PHOTO,), mask=MASK, **SMALL, steps=5, strength=0.6, guidance=10.0),
    case(images=(PHOTO,), mask=np.full((48, 96), 255, np.uint8), **WIDE, steps=2),
]


@pytest.mark.parametrize("asked", FILLS)
def test_fill_as_diffusers_draws(asked: Case, fill: Model) -> None:
    fill.same(asked)


def test_fill_steps_and_guidance_are_its_own(fill: Model) -> None:
    lane = fill.opened(case("a bird", images=(PHOTO,), mask=MASK, width=32, height=32))
    assert (lane.steps, float(lane.context["guidance"])) == (50, 30.0)


@torch.inference_mode()
def test_fills_do_not_mix(fill: Model) -> None:
    other = np.zeros((48, 96), np.uint8)
    other[:, :40] = 255
    lanes = [
        fill.opened(FILLS[0], 1),
        fill.opened(case("a hill", images=(picture(96, 48, 8),), mask=other, **WIDE, steps=6, strength=0.5, seed=9), 2),
        fill.opened(FILLS[1], 1),
    ]
    check_groups(fill.parts[1], lanes, [1, 2])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (case(), "image"),
        (case(images=(PHOTO,)), "mask"),
        (case(images=(PHOTO,), mask=MASK[:40]), "mask"),
        (case(images=(PHOTO,), mask=MASK, **AWAY), "negative_prompt"),
        (case(images=(PHOTO,), mask=MASK, true_cfg=2.0), "true_cfg"),
    ],
)
def test_what_fill_refuses(asked: Case, param: str, fill: Model) -> None:
    with pytest.raises(OmniError) as raised:
        fill.parts[0].check(asked.payload, asked.params)
    assert raised.value.param == param


def test_a_transformer_of_another_pipeline_is_refused(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoint_of("flux", "fill"), tmp_path / "copy")
    index = tmp_path / "copy" / "model_index.json"
    index.write_text(index.read_text().replace("FluxFillPipeline", "FluxPipeline"))
    with pytest.raises(UnsupportedModelError, match="384 channels"):
        load_components(OmniRunner(tmp_path / "copy"))


def test_defaults_are_those_of_diffusers(dev: Model) -> None:
    dev.same(case(width=32, height=32))
    dev.same(case(images=(PHOTO,), width=32, height=32, max_sequence_length=24))


def test_schnell_takes_few_steps_and_a_shorter_text(schnell: Model) -> None:
    with torch.inference_mode():
        lane = schnell.opened(case(width=32, height=32))
    assert lane.steps == 4
    assert len(lane.condition.positive["embeds"]) == 256


def test_every_parameter_counts(dev: Model) -> None:
    others = {
        "base": case(**SMALL, steps=3),
        "prompt": case("two blue dogs", **SMALL, steps=3),
        "seed": case(**SMALL, steps=3, seed=6),
        "guidance": case(**SMALL, steps=3, guidance=20.0),
        "true guidance": case(**SMALL, steps=3, **AWAY),
        "negative": case(**SMALL, steps=3, true_cfg=3.0, negative_prompt="fog"),
        "steps": case(**SMALL, steps=4),
        "picture": case(images=(PHOTO,), **SMALL, steps=3),
        "strength": case(images=(PHOTO,), **SMALL, steps=3, strength=0.3),
    }
    drawn = {name: drive(*dev.parts, asked) for name, asked in others.items()}
    check_differ(drawn, 1)


# ----------------------------------------------------------------------------------------------- batching


@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(dev: Model) -> None:
    lanes = [
        dev.opened(case(**WIDE, steps=6, **AWAY), 2),
        dev.opened(case("a boat", **WIDE, steps=3, guidance=9.0, seed=9), 1),
        dev.opened(CHANGES[0], 1),
        dev.opened(case("a wall", **TALL, steps=4, seed=3), 1),  # as many patches, but elsewhere
    ]
    assert lanes[0].latents.shape == lanes[3].latents.shape
    check_groups(dev.parts[1], lanes, [1, 4])


@pytest.mark.usefixtures("small_references")
@torch.inference_mode()
def test_references_do_not_mix(kontext: Model) -> None:
    lanes = [
        kontext.opened(case(images=(PHOTO,), **WIDE, steps=3, **AWAY), 1),
        kontext.opened(case("a hill", images=(picture(96, 50, 8),), **WIDE, steps=2)),
        kontext.opened(case(images=(TALL_PHOTO,), **WIDE, steps=3)),
        kontext.opened(case(**WIDE, steps=3)),
    ]
    assert lanes[0].tokens == 18 + 18
    check_groups(kontext.parts[1], lanes, [1, 1, 3])


@torch.inference_mode()
def test_texts_encoded_together_are_those_encoded_alone(dev: Model) -> None:
    encoder = dev.parts[0]
    jobs = [job for asked in TEXT[:3] for job in encoder.jobs(asked.payload, asked.params)]
    assert len(jobs) == 4
    for job, together in zip(jobs, encoder.encode(jobs), strict=True):
        (alone,) = encoder.encode([job])
        assert all(float((together[name] - alone[name]).abs().max()) < 2e-5 for name in alone)


def test_pictures_decoded_together_are_those_decoded_alone(dev: Model) -> None:
    check_decoding(dev.parts[2], 16, 6, 10)


# ----------------------------------------------------------------------------------------------- checkpoints


def test_stages_hold_only_their_weights(dev: Model) -> None:
    encoder, denoiser, decoder = (part.pipe for part in dev.parts)  # type: ignore[attr-defined]
    assert not list(encoder.vae.decoder.parameters())
    assert not list(decoder.vae.encoder.parameters())
    assert encoder.transformer.proj_out.weight.is_meta
    assert denoiser.vae.decoder.conv_in.weight.is_meta
    assert denoiser.text_encoder is None
    assert decoder.text_encoder_2 is None


# ----------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        (case(width=65, height=64), InvalidRequestError, "width"),
        (case(width=64, height=72), InvalidRequestError, "height"),
        (case(max_sequence_length=513), LimitExceededError, "max_sequence_length"),
        (case(images=(PHOTO, PHOTO)), InvalidRequestError, "image"),
        (case(images=(PHOTO,), mask=PHOTO[..., 0]), InvalidRequestError, "mask"),
        (case(strength=0.5), InvalidRequestError, "strength"),
        (case(negative_prompt="fog"), InvalidRequestError, "negative_prompt"),
        (case(negative_prompt="fog", true_cfg=1.0), InvalidRequestError, "negative_prompt"),
        (case(true_cfg=2.0), InvalidRequestError, "true_cfg"),
    ],
)
def test_refusals_name_the_parameter(asked: Case, error: type[OmniError], param: str, dev: Model) -> None:
    with pytest.raises(error) as raised:
        dev.parts[0].check(asked.payload, asked.params)
    assert raised.value.param == param


def test_kontext_takes_no_strength(kontext: Model) -> None:
    asked = case(images=(PHOTO,), strength=0.5)
    with pytest.raises(InvalidRequestError, match="omit it"):
        kontext.parts[0].check(asked.payload, asked.params)


def test_an_input_picture_gives_the_size(dev: Model, kontext: Model) -> None:
    asked = case(images=(picture(100, 50),), steps=2, max_sequence_length=24)
    assert drive(*dev.parts, asked).pixels.shape == (48, 96, 3)
    # Kontext has seen certain sizes only, and this is the one that is nearest to two by one.
    size = kontext.parts[0].size(asked.payload, asked.params)  # type: ignore[attr-defined]
    assert size == (1456, 720)
