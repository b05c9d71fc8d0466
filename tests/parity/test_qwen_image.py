"""Qwen-Image: our encode, denoise and decode against diffusers' pipelines on one checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")

from omnistage.cli.model_runner import OmniRunner
from omnistage.core.errors import (
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModalityError,
    UnsupportedModelError,
)
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusionResult, drive, load_components, rows_of
from omnistage.models._tiny_common import write_json
from omnistage.models.qwen_image import FAMILY, verify

PROMPT = "The quick brown fox jumps over the lazy dog."
LONG = " ".join(["The river is quiet, and the children are playing under the old trees near the school."] * 3)
NEGATIVE = "strange numbers"
SMALL = 16
"""Most cases edit pictures of this fraction of a million pixels, on both sides."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    folder: Path
    ours: tuple[Any, Any, Any]
    theirs: Callable[[Case], DiffusionResult]

    def apart(self, case: Case) -> list[Any]:
        return rows_of(case, drive(*self.ours, case), self.theirs(case))


def _checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, load_components(OmniRunner(folder)), verify.Reference(folder))


@pytest.fixture(scope="module")
def drawing(checkpoint_of: Callable[..., Path]) -> Checkpoint:
    return _checkpoint(checkpoint_of("qwen_image", "image"))


@pytest.fixture(scope="module")
def editing(checkpoint_of: Callable[..., Path]) -> Checkpoint:
    return _checkpoint(checkpoint_of("qwen_image", "edit"))


@pytest.fixture(scope="module")
def editing_several(checkpoint_of: Callable[..., Path]) -> Checkpoint:
    return _checkpoint(checkpoint_of("qwen_image", "edit_plus"))


@pytest.fixture
def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input pictures with a sixteenth of the pixels, in diffusers and here."""
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as edit
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as edit_plus

    from omnistage.models.qwen_image import components

    for module in (edit, edit_plus):
        whole = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, whole=whole: whole(area // SMALL, ratio)
        )
    fit = components._fit
    monkeypatch.setattr(components, "_fit", lambda image, area: fit(image, area // SMALL))


def _case(prompt: str = PROMPT, images: tuple[np.ndarray, ...] = (), **params: Any) -> Case:
    settings = {"width": 64, "height": 64, "steps": 3, "seed": 1, **params}
    return Case(str(params), DiffusionInput(prompt, images), DiffusionParams(**settings))


DRAWN = [
    _case(guidance=4.0, negative_prompt=NEGATIVE),
    _case(guidance=2.0, negative_prompt=" ", width=96, height=48, steps=2),
    _case(true_cfg=6.0, guidance=1.0, negative_prompt="", width=48, height=112, steps=4, seed=7),
    _case(guidance=1.0, negative_prompt=NEGATIVE, steps=2),
    _case(guidance=4.0, steps=5, seed=2),
    _case(LONG, guidance=3.0, negative_prompt=NEGATIVE, max_sequence_length=24),
    _case("Zeichne {einen} Vogel.\n\n\u6c34", negative_prompt=NEGATIVE, seed=2**40),
]


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: case.name)
def test_drawn_from_text_as_diffusers_draws(drawing: Checkpoint, case: Case) -> None:
    assert all(row.ok for row in drawing.apart(case))


@pytest.mark.parametrize(
    "case",
    [
        _case(images=(picture(64, 64),), strength=0.6, negative_prompt=NEGATIVE, guidance=4.0),
        _case(images=(picture(70, 130),), strength=0.25, width=96, height=64, steps=5),
        _case(images=(picture(64, 64, 3),), strength=1.0, steps=2),
        _case(images=(picture(50, 60, 3),), width=48, height=48),
    ],
    ids=lambda case: case.name,
)
def test_drawn_from_a_picture_as_diffusers_draws(drawing: Checkpoint, case: Case) -> None:
    assert all(row.ok for row in drawing.apart(case))


def test_a_picture_gives_its_size(drawing: Checkpoint) -> None:
    case = _case(images=(picture(70, 50),), width=None, height=None, steps=2)
    assert drive(*drawing.ours, case).pixels.shape == (48, 64, 3)
    assert drawing.ours[0].size(DiffusionInput("a fox"), DiffusionParams()) == (1024, 1024)


@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize(
    "case",
    [
        _case(images=(picture(64, 64),), guidance=4.0, negative_prompt=NEGATIVE, steps=2),
        _case(images=(picture(100, 40),), width=96, height=64, guidance=1.0, steps=3),
        _case(images=(picture(40, 64),), width=None, height=None, negative_prompt=" ", steps=2),
    ],
    ids=lambda case: case.name,
)
def test_edited_as_diffusers_edits(editing: Checkpoint, case: Case) -> None:
    assert all(row.ok for row in editing.apart(case))


def test_edited_at_full_size_as_diffusers_edits(editing: Checkpoint) -> None:
    assert all(row.ok for row in editing.apart(_case(images=(picture(64, 48),), steps=2)))


@pytest.mark.usefixtures("smaller")
@pytest.mark.parametrize(
    "case",
    [
        _case(images=(picture(64, 64),), guidance=4.0, negative_prompt=NEGATIVE, steps=2),
        _case(images=(picture(64, 48), picture(40, 64, 1)), guidance=3.0, negative_prompt=" ", width=96),
        _case(images=(picture(64, 64), picture(64, 64, 1), picture(90, 30, 2)), width=None, height=None, steps=2),
    ],
    ids=lambda case: case.name,
)
def test_edited_from_several_as_diffusers_edits(editing_several: Checkpoint, case: Case) -> None:
    assert all(row.ok for row in editing_several.apart(case))


def _lane(ours: tuple[Any, Any, Any], case: Case, steps: int) -> Any:
    """A lane that has taken so many steps."""
    encoder, denoiser, _ = ours
    encoded = encoder.encode(encoder.jobs(case.payload, case.params))
    condition = encoder.condition(case.payload, case.params, encoded)
    lane = denoiser.open(condition, case.params, torch.Generator().manual_seed(case.params.seed or 0))
    for _ in range(steps):
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in denoiser.rows(lane)])
    return lane


def _apart_in_a_batch(ours: tuple[Any, Any, Any], lanes: list[Any]) -> float:
    denoiser = ours[1]
    rows = [row for lane in lanes for row in denoiser.rows(lane)]
    assert len({denoiser.group(row) for row in rows}) == 1
    together = denoiser.forward(rows)
    return max(float((a - denoiser.forward([row])[0]).abs().max()) for a, row in zip(together, rows, strict=True))


@torch.inference_mode()
def test_rows_of_a_mixed_batch_equal_each_alone(drawing: Checkpoint) -> None:
    cases = [
        (_case(guidance=4.0, negative_prompt=NEGATIVE), 0),
        (_case(LONG, guidance=2.0, negative_prompt=" ", steps=5, seed=4), 3),
        (_case("A fox", images=(picture(64, 64),), strength=0.5, steps=6, seed=9), 1),
    ]
    assert _apart_in_a_batch(drawing.ours, [_lane(drawing.ours, *case) for case in cases]) < 2e-5


@torch.inference_mode()
@pytest.mark.usefixtures("smaller")
def test_edited_rows_of_a_mixed_batch_equal_each_alone(editing_several: Checkpoint) -> None:
    images = (picture(64, 64), picture(64, 48, 1))
    cases = [
        (_case(images=images, guidance=4.0, negative_prompt=NEGATIVE), 0),
        (_case(LONG, images=images, steps=4, seed=4), 2),
    ]
    assert _apart_in_a_batch(editing_several.ours, [_lane(editing_several.ours, *case) for case in cases]) < 2e-5


@torch.inference_mode()
def test_pictures_of_as_many_patches_but_another_shape_never_share_a_forward(drawing: Checkpoint) -> None:
    denoiser = drawing.ours[1]
    wide, square = (_lane(drawing.ours, _case(width=w, height=h), 0) for w, h in ((128, 32), (64, 64)))
    assert wide.latents.shape == square.latents.shape
    assert denoiser.group(denoiser.rows(wide)[0]) != denoiser.group(denoiser.rows(square)[0])
    assert denoiser.result(wide).shape != denoiser.result(square).shape


@torch.inference_mode()
@pytest.mark.usefixtures("smaller")
def test_texts_encoded_together_equal_each_alone(drawing: Checkpoint, editing: Checkpoint) -> None:
    for checkpoint, images in ((drawing, ((), ())), (editing, ((picture(64, 64),), (picture(50, 80),)))):
        encoder = checkpoint.ours[0]
        pairs = zip((PROMPT, LONG), images, strict=True)
        jobs = [encoder.jobs(DiffusionInput(text, own), DiffusionParams())[0] for text, own in pairs]
        for job, encoded in zip(jobs, encoder.encode(jobs), strict=True):
            torch.testing.assert_close(encoded["embeds"], encoder.encode([job])[0]["embeds"], atol=2e-5, rtol=0)


def test_everything_asked_for_changes_the_picture(drawing: Checkpoint) -> None:
    first = _case(guidance=4.0, negative_prompt=NEGATIVE)
    seen = [drive(*drawing.ours, first).pixels]
    for change in ({"seed": 2}, {"guidance": 2.0}, {"negative_prompt": "water"}, {"steps": 4}):
        changed = dataclasses.replace(first, params=first.params.merged(DiffusionParams.parse(change)))
        seen.append(drive(*drawing.ours, changed).pixels)
    seen.append(drive(*drawing.ours, dataclasses.replace(first, payload=DiffusionInput("water"))).pixels)
    assert all(pixels.std() > 10 for pixels in seen)
    for number, pixels in enumerate(seen):
        assert all((pixels != other).any() for other in seen[:number])


@pytest.mark.parametrize(
    ("payload", "params", "param", "error"),
    [
        (DiffusionInput("a fox"), {"width": 72}, "width", InvalidRequestError),
        (DiffusionInput("a fox", (picture(32, 32),) * 2), {}, "image", UnsupportedModalityError),
        (DiffusionInput("a fox"), {"strength": 0.5}, "strength", InvalidRequestError),
        (DiffusionInput("a fox"), {"max_sequence_length": 1025}, "max_sequence_length", InvalidRequestError),
        (DiffusionInput("a <|image_pad|>"), {}, "prompt", InvalidRequestError),
        (DiffusionInput("a fox"), {"negative_prompt": "<|video_pad|>"}, "negative_prompt", InvalidRequestError),
    ],
)
def test_refused(
    drawing: Checkpoint, payload: DiffusionInput, params: dict[str, Any], param: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as raised:
        drawing.ours[0].check(payload, DiffusionParams.parse(params))
    assert raised.value.param == param  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("payload", "params", "param"),
    [
        (DiffusionInput("a fox"), {}, "image"),
        (DiffusionInput("a fox", (picture(32, 32),) * 2), {}, "image"),
        (DiffusionInput("a fox", (picture(32, 32),)), {"strength": 0.5}, "strength"),
        (DiffusionInput("a fox", (picture(3000, 4),)), {}, "image"),
        (DiffusionInput("a fox", (picture(2, 3000),)), {}, "image"),
    ],
)
def test_refused_to_edit(editing: Checkpoint, payload: DiffusionInput, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        editing.ours[0].check(payload, DiffusionParams.parse(params))
    assert raised.value.param == param


def test_a_single_step_is_refused_for_diffusers_makes_nan_of_it(drawing: Checkpoint) -> None:
    denoiser = drawing.ours[1]
    with pytest.raises(InvalidRequestError, match="steps"):
        denoiser.check(DiffusionParams(steps=1))
    denoiser.check(DiffusionParams(steps=2))
    with pytest.raises(InvalidRequestError, match="scheduler"):
        denoiser.check(DiffusionParams(scheduler="NoScheduler"))
    assert drawing.theirs(_case(steps=1)).latents.isnan().any()


def test_an_instruction_without_end_is_refused(editing: Checkpoint) -> None:
    payload = DiffusionInput("a fox", (picture(32, 32),))
    with pytest.raises(PromptTooLongError, match="negative_prompt"):
        editing.ours[0].jobs(payload, DiffusionParams(negative_prompt="fox " * 2000))
    with pytest.raises(PromptTooLongError, match="at most 4"):
        editing.ours[0].jobs(DiffusionInput(LONG, payload.images), DiffusionParams(max_sequence_length=4))


def test_guidance_distilled_checkpoints_are_refused_as_diffusers_cannot_run_them(tmp_path: Path) -> None:
    assert FAMILY.tiny is not None
    FAMILY.tiny(tmp_path / "model", seed=3)
    path = tmp_path / "model" / "transformer" / "config.json"
    write_json(path, {**json.loads(path.read_text()), "guidance_embeds": True})
    with pytest.raises(UnsupportedModelError, match="guidance-distilled"):
        load_components(OmniRunner(tmp_path / "model"))
    pipe = diffusers().DiffusionPipeline.from_pretrained(tmp_path / "model")
    with pytest.raises(TypeError):
        pipe("a fox", width=32, height=32, num_inference_steps=2, guidance_scale=2.0)
