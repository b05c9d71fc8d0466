"""Our components against the diffusers pipeline on the same checkpoint, noise and prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder
from omnistage.types import DiffusionInput, DiffusionParams
from omnistage.verify import VerifyRow

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
    pixels = float(np.abs(ours.pixels.astype(np.int16) - reference.pixels.astype(np.int16)).max()) / 255
    return [
        VerifyRow.judge(case.name, "latents", latents, LATENT_TOLERANCE),
        VerifyRow.judge(case.name, "pixels", pixels, PIXEL_TOLERANCE),
    ]


def compare(
    folder: Path, cases: Sequence[Case], reference: Callable[[Case], Drawn], progress: Report | None = None
) -> list[VerifyRow]:
    """All cases through a loaded pipeline of ours, several at once, and through diffusers one by one."""
    from omnistage.models._diffusers.offline import load_components

    parts = load_components(folder)
    rows: list[VerifyRow] = []
    for done, case in enumerate(cases):
        if progress is not None:
            progress(case.name, done / len(cases))
        rows += rows_of(case, drive(*parts, case), reference(case))
    return rows
