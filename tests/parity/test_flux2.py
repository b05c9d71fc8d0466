"""FLUX.2 klein (base and distilled) and dev on our components against diffusers' pipelines, and what we refuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import InvalidRequestError, OmniError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.engines.diffusion.component import Denoiser, Lane, LatentDecoder, PromptEncoder, Row
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusionResult, drive, load_components, rows_of
from omnistage.models.flux2 import verify

Components = tuple[PromptEncoder, Denoiser, LatentDecoder]

PHOTO, TALL_PHOTO = picture(100, 64, 3), picture(64, 110, 4)
SMALL = {"width": 64, "height": 64, "max_sequence_length": 32}
WIDE = {"width": 96, "height": 48, "max_sequence_length": 32}
TALL = {"width": 48, "height": 96, "max_sequence_length": 32}


class Model:
    """A checkpoint, ours and theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: Components = load_components(OmniRunner(folder))
        self.reference = verify.Reference(folder)

    def same(self, asked: Case) -> None:
        rows = rows_of(asked, drive(*self.parts, asked), self.reference(asked))
        assert all(row.ok for row in rows), rows


@pytest.fixture(scope="module")
def base(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux2", "base"))


@pytest.fixture(scope="module")
def distilled(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux2", "distilled"))


@pytest.fixture(scope="module")
def dev(checkpoint_of: Callable[..., Path]) -> Model:
    return Model(checkpoint_of("flux2", "dev"))


def case(prompt: str = "a red cat", *, images: tuple[np.ndarray, ...] = (), mask: Any = None, **options: Any) -> Case:
    return Case("case", DiffusionInput(prompt, images, mask), DiffusionParams.parse({"seed": 5, **options}))


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
        lane = _opened(dev, case(width=32, height=32))
        assert (lane.steps, float(lane.context["guidance"])) == (50, 4.0)
        lanes = [lane, _opened(dev, case("a boat", width=32, height=32, steps=3, guidance=0.0), 1)]
        rows = [row for each in lanes for row in dev.parts[1].rows(each)]
        assert len(rows) == len({dev.parts[1].group(row) for row in rows}) + 1 == 2
        for row, together in zip(rows, dev.parts[1].forward(rows), strict=True):
            assert float((together - dev.parts[1].forward([row])[0]).abs().max()) < 2e-5
    drawn = [drive(*dev.parts, case(**SMALL, steps=3, guidance=guidance)) for guidance in (1.0, 20.0)]
    assert _far(*drawn) > 0.5
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
        slow, quick = _opened(base, asked), _opened(distilled, asked)
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
    assert drawn["base"].pixels.std() > 10
    for name, one in drawn.items():
        for other, two in drawn.items():
            assert name == other or _far(one, two) > 1, (name, other, _far(one, two))


def _far(one: DiffusionResult, two: DiffusionResult) -> float:
    return float(np.abs(one.pixels.astype(int) - two.pixels.astype(int)).mean())


# ----------------------------------------------------------------------------------------------- batching


def _opened(model: Model, asked: Case, steps: int = 0) -> Lane:
    """A lane some steps on its way."""
    encoder, denoiser, _ = model.parts
    encoded = [encoder.encode([job])[0] for job in encoder.jobs(asked.payload, asked.params)]
    condition = encoder.condition(asked.payload, asked.params, encoded)
    lane = denoiser.open(condition, asked.params, torch.Generator().manual_seed(asked.params.seed or 0))
    for _ in range(steps):
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    return lane


@torch.inference_mode()
def test_rows_do_not_feel_their_neighbours(base: Model) -> None:
    denoiser = base.parts[1]
    lanes = [
        _opened(base, case(**WIDE, steps=6), 2),
        _opened(base, case("a boat", **WIDE, steps=3, guidance=1.0, seed=9), 1),
        _opened(base, case("a wall", **TALL, steps=4, seed=3, guidance=1.0), 1),  # as many patches, but elsewhere
        _opened(base, case("a hill", images=(PHOTO,), **WIDE, steps=3), 1),
        _opened(base, case("a hill", images=(picture(98, 66, 7),), **WIDE, steps=2, guidance=1.0)),
        _opened(base, case("a hill", images=(TALL_PHOTO,), **WIDE, steps=2, guidance=1.0)),
    ]
    assert lanes[0].latents.shape == lanes[2].latents.shape
    assert lanes[3].tokens == 18 + 24
    groups: dict[Hashable, list[Row]] = {}
    for row in (row for lane in lanes for row in denoiser.rows(lane)):
        groups.setdefault(denoiser.group(row), []).append(row)
    assert sorted(len(group) for group in groups.values()) == [1, 1, 3, 3]
    for group in groups.values():
        for row, together in zip(group, denoiser.forward(group), strict=True):
            assert float((together - denoiser.forward([row])[0]).abs().max()) < 2e-5


@torch.inference_mode()
def test_texts_encoded_together_are_those_encoded_alone(base: Model) -> None:
    encoder = base.parts[0]
    jobs = [job for asked in TEXT[:3] for job in encoder.jobs(asked.payload, asked.params)]
    assert len(jobs) == 5
    for job, together in zip(jobs, encoder.encode(jobs), strict=True):
        (alone,) = encoder.encode([job])
        # Hidden states of 27 layers without a norm are large numbers.
        assert torch.allclose(together["embeds"], alone["embeds"], rtol=2e-5, atol=2e-4)


@torch.inference_mode()
def test_pictures_decoded_together_are_those_decoded_alone(base: Model) -> None:
    decoder = base.parts[2]
    latents = [torch.randn(128, 3, 5, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    size = {"width": 80, "height": 48, "num_frames": 1}
    for one, together in zip(latents, decoder.decode(latents, **size), strict=True):
        alone = decoder.decode([one], **size)[0]
        assert together.shape == (48, 80, 3)
        assert np.abs(together.astype(int) - alone.astype(int)).max() <= 1


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
