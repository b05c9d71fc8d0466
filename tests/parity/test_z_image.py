"""Z-Image: our encode, denoise and decode against diffusers' pipelines on one checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusionResult, drive, load_components, rows_of
from omnistage.models.z_image import verify

PROMPT = "The quick brown fox jumps over the lazy dog."
LONG = " ".join(["The river is quiet, and the children are playing under the old trees near the school."] * 3)
NEGATIVE = "strange numbers"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    folder: Path
    ours: tuple[Any, Any, Any]
    theirs: Callable[[Case], DiffusionResult]


@pytest.fixture(scope="module")
def checkpoint(checkpoint_of: Callable[..., Path]) -> Checkpoint:
    folder = checkpoint_of("z_image")
    return Checkpoint(folder, load_components(OmniRunner(folder)), verify.Reference(folder))


def _case(prompt: str = PROMPT, images: tuple[np.ndarray, ...] = (), **params: Any) -> Case:
    settings = {"width": 64, "height": 64, "steps": 3, "seed": 1, **params}
    return Case(str(params), DiffusionInput(prompt, images), DiffusionParams(**settings))


@pytest.mark.parametrize(
    "case",
    [
        _case(),
        _case(guidance=4.0, negative_prompt=NEGATIVE),
        _case(guidance=0.5, negative_prompt=" ", width=96, height=48, steps=2),
        _case(guidance=0.0, width=48, height=112, steps=8, seed=7),
        _case(guidance=0.0, steps=1),
        _case(LONG, guidance=3.0, negative_prompt=NEGATIVE, max_sequence_length=24),
        _case(LONG, guidance=3.0, width=16, height=16),
        _case("Zeichne {einen} Vogel.\n\n\u6c34", seed=2**40),
    ],
    ids=lambda case: case.name,
)
def test_drawn_from_text_as_diffusers_draws(checkpoint: Checkpoint, case: Case) -> None:
    assert all(row.ok for row in rows_of(case, drive(*checkpoint.ours, case), checkpoint.theirs(case)))


@pytest.mark.parametrize(
    "case",
    [
        _case(images=(picture(64, 64),), strength=0.6, negative_prompt=NEGATIVE, guidance=4.0),
        _case(images=(picture(70, 130),), strength=0.25, width=96, height=64, steps=5, guidance=0.0),
        _case(images=(picture(64, 64, 3),), strength=1.0, steps=2),
        _case(images=(picture(75, 60, 3),), width=None, height=None),
    ],
    ids=lambda case: case.name,
)
def test_drawn_from_a_picture_as_diffusers_draws(checkpoint: Checkpoint, case: Case) -> None:
    assert all(row.ok for row in rows_of(case, drive(*checkpoint.ours, case), checkpoint.theirs(case)))


def _lane(ours: tuple[Any, Any, Any], case: Case, steps: int) -> Any:
    """A lane that has taken so many steps."""
    encoder, denoiser, _ = ours
    encoded = encoder.encode(encoder.jobs(case.payload, case.params))
    condition = encoder.condition(case.payload, case.params, encoded)
    lane = denoiser.open(condition, case.params, torch.Generator().manual_seed(case.params.seed or 0))
    for _ in range(steps):
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    return lane


@torch.inference_mode()
def test_rows_of_a_mixed_batch_equal_each_alone(checkpoint: Checkpoint) -> None:
    """Of other texts, at other steps, wide and tall ones."""
    denoiser = checkpoint.ours[1]
    cases = [
        (_case(guidance=4.0, negative_prompt=NEGATIVE), 0),
        (_case(LONG, steps=5, seed=4, width=128, height=32), 3),
        (
            _case("A fox", guidance=0.0, images=(picture(64, 64),), strength=0.5, steps=6, seed=9, width=48, height=80),
            1,
        ),
    ]
    lanes = [_lane(checkpoint.ours, *case) for case in cases]
    rows = [row for lane in lanes for row in denoiser.rows(lane)]
    assert len(rows) == 5
    assert len({denoiser.group(row) for row in rows}) == 1
    for together, row in zip(denoiser.forward(rows), rows, strict=True):
        torch.testing.assert_close(together, denoiser.forward([row])[0], atol=2e-5, rtol=0)


@torch.inference_mode()
def test_pictures_of_other_lengths_wait_for_their_own_forward(checkpoint: Checkpoint) -> None:
    denoiser = checkpoint.ours[1]
    small, large = (_lane(checkpoint.ours, _case(width=w, height=128), 0) for w in (64, 128))
    assert denoiser.group(denoiser.rows(small)[0]) != denoiser.group(denoiser.rows(large)[0])


@torch.inference_mode()
def test_texts_encoded_together_equal_each_alone(checkpoint: Checkpoint) -> None:
    encoder = checkpoint.ours[0]
    jobs = [
        *encoder.jobs(DiffusionInput(PROMPT), DiffusionParams()),
        *encoder.jobs(DiffusionInput(LONG), DiffusionParams()),
    ]
    assert len(jobs) == 4
    for job, encoded in zip(jobs, encoder.encode(jobs), strict=True):
        torch.testing.assert_close(encoded["embeds"], encoder.encode([job])[0]["embeds"], atol=2e-5, rtol=0)


def test_everything_asked_for_changes_the_picture(checkpoint: Checkpoint) -> None:
    first = _case(guidance=4.0, negative_prompt=NEGATIVE)
    seen = [drive(*checkpoint.ours, first).pixels]
    for change in (
        {"seed": 2},
        {"guidance": 2.0},
        {"guidance": 0.0, "negative_prompt": None},
        {"negative_prompt": "water"},
        {"steps": 4},
    ):
        changed = dataclasses.replace(first, params=first.params.merged(DiffusionParams.parse(change)))
        seen.append(drive(*checkpoint.ours, changed).pixels)
    seen.append(drive(*checkpoint.ours, dataclasses.replace(first, payload=DiffusionInput("water"))).pixels)
    assert all(pixels.std() > 10 for pixels in seen)
    for number, pixels in enumerate(seen):
        assert all((pixels != other).any() for other in seen[:number])


@pytest.mark.parametrize(
    ("payload", "params", "param", "error"),
    [
        (DiffusionInput("a fox"), {"height": 72}, "height", InvalidRequestError),
        (DiffusionInput("a fox"), {"width": 8208}, "width", InvalidRequestError),
        (DiffusionInput("a fox", (np.zeros((8300, 16, 3), np.uint8),)), {}, "height", InvalidRequestError),
        (DiffusionInput("a fox", (picture(32, 32),) * 2), {}, "image", UnsupportedModalityError),
        (DiffusionInput("a fox"), {"strength": 0.5}, "strength", InvalidRequestError),
        (DiffusionInput("a fox"), {"max_sequence_length": 1505}, "max_sequence_length", InvalidRequestError),
    ],
)
def test_refused(
    checkpoint: Checkpoint, payload: DiffusionInput, params: dict[str, Any], param: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        checkpoint.ours[0].check(payload, DiffusionParams.parse(params))
    assert raised.value.param == param  # type: ignore[attr-defined]


def test_the_longest_text_fits_the_positions(checkpoint: Checkpoint) -> None:
    case = _case("fox " * 2000, max_sequence_length=1504, steps=1, guidance=0.0)
    assert drive(*checkpoint.ours, case).pixels.shape == (64, 64, 3)
