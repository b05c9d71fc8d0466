"""Our components against the diffusers pipeline on the same checkpoint, noise and prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import VerifyRow
from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder

LATENT_TOLERANCE = 1e-4
PIXEL_TOLERANCE = 1 / 255

Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Case:
    """A request to draw one picture or video. `params.seed` must be set, `n` must be 1."""

    name: str
    payload: DiffusionInput
    params: DiffusionParams


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Final latents as the family's denoiser gives them, without batch dimension, and `uint8` pixels."""

    latents: torch.Tensor
    pixels: np.ndarray


@torch.inference_mode()
def drive(encoder: PromptEncoder, denoiser: Denoiser, decoder: LatentDecoder, case: Case) -> Drawn:
    """Draw with the components alone, no engine: one request, one step after the other."""
    payload, params = case.payload, case.params
    encoder.check(payload, params)
    encoded = [encoder.encode([job])[0] for job in encoder.jobs(payload, params)]
    condition = encoder.condition(payload, params, encoded)
    lane = denoiser.open(condition, params, torch.Generator().manual_seed(params.seed or 0))
    while not lane.done:
        rows = denoiser.rows(lane)
        denoiser.advance(lane, [denoiser.forward([row])[0] for row in rows])
    latents = denoiser.result(lane)
    size = {"width": condition.width, "height": condition.height, "num_frames": condition.num_frames}
    return Drawn(latents, decoder.decode([latents], **size)[0])


def rows_of(case: Case, ours: Drawn, reference: Drawn) -> list[VerifyRow]:
    """How far the two are apart."""
    if ours.latents.shape != reference.latents.shape or ours.pixels.shape != reference.pixels.shape:
        return [VerifyRow.judge(case.name, "shape", float("inf"), 0.0)]
    latents = float((ours.latents.float() - reference.latents.float()).abs().max())
    pixels = _pixels_apart(ours.pixels, reference.pixels)
    return [
        VerifyRow.judge(case.name, "latents", latents, LATENT_TOLERANCE),
        VerifyRow.judge(case.name, "pixels", pixels, PIXEL_TOLERANCE),
    ]


def compare(
    folder: Path, cases: Sequence[Case], reference: Callable[[Case], Drawn], progress: Report | None = None
) -> list[VerifyRow]:
    """All cases through our components and through diffusers one by one, then all at once through the engine.

    The engine's pictures are judged by their pixels: latents stay inside it.
    """
    from omnistage.models._diffusers.offline import load_components

    parts = load_components(folder)
    rows: list[VerifyRow] = []
    expected: list[Drawn] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(case.name, done / (len(cases) + 1))
        expected.append(reference(case))
        rows += rows_of(case, drive(*parts, case), expected[-1])
    if progress is not None:
        progress("all at once", len(cases) / (len(cases) + 1))
    del parts
    for case, drawn, wanted in zip(cases, draw_together(folder, cases), expected, strict=True):
        apart = _pixels_apart(drawn, wanted.pixels)
        rows.append(VerifyRow.judge(case.name, "pixels, all at once", apart, PIXEL_TOLERANCE))
    return rows


def draw_together(folder: Path, cases: Sequence[Case]) -> list[np.ndarray]:
    """`uint8` pixels of every case, drawn by one pipeline that is given all of them at once."""
    from omnistage.omni import Omni

    prompts: list[Any] = []
    for case in cases:
        given = {"images": list(case.payload.images)} if case.payload.images else {}
        masked = {"mask": case.payload.mask} if case.payload.mask is not None else {}
        prompts.append({"prompt": case.payload.prompt, **given, **masked})
    with Omni(str(folder), device="cpu", dtype="float32") as omni:
        outputs = omni.generate(prompts, [case.params for case in cases], progress=False)
    drawn = []
    for output in outputs:
        if output.error is not None:
            raise output.error
        drawn.append(output.video.frames if output.video is not None else output.images[0].pixels)
    return drawn


def _pixels_apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max()) / 255
