"""Our components against the diffusers pipeline on the same checkpoint, noise and prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ModelRunner, Progress, VerifyRow
from omnistage.engines.diffusion.component import Denoiser, LatentDecoder, PromptEncoder

LATENT_TOLERANCE = 1e-4
PIXEL_TOLERANCE = 1 / 255


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


def load_components(runner: ModelRunner) -> tuple[PromptEncoder, Denoiser, LatentDecoder]:
    """The three networks of a drawing pipeline, on no engine."""
    loaded = [runner.load_component(name) for name in runner.stage_names]
    encoder = next((part for part in loaded if isinstance(part, PromptEncoder)), None)
    denoiser = next((part for part in loaded if isinstance(part, Denoiser)), None)
    decoder = next((part for part in loaded if isinstance(part, LatentDecoder)), None)
    if encoder is None or denoiser is None or decoder is None:
        raise UnsupportedModelError(f"{runner.folder} is not a pipeline that encodes, denoises and decodes")
    return encoder, denoiser, decoder


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
    runner: ModelRunner,
    cases: Sequence[Case],
    reference: Callable[[Case], Drawn],
    progress: Progress | None = None,
) -> list[VerifyRow]:
    """All cases through our components and through diffusers one by one, then all at once through the engine.

    The engine's pictures are judged by their pixels: latents stay inside it.
    """
    report = progress or (lambda _what, _done: None)
    parts = load_components(runner)
    rows: list[VerifyRow] = []
    expected: list[Drawn] = []
    for done, case in enumerate(cases):
        report(case.name, done / (len(cases) + 1))
        expected.append(reference(case))
        rows += rows_of(case, drive(*parts, case), expected[-1])
    report("all at once", len(cases) / (len(cases) + 1))
    del parts
    together = runner.draw([(case.payload, case.params) for case in cases])
    for case, pixels, wanted in zip(cases, together, expected, strict=True):
        difference = _pixels_apart(pixels, wanted.pixels)
        rows.append(VerifyRow.judge(case.name, "pixels, all at once", difference, PIXEL_TOLERANCE))
    return rows


def _pixels_apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours.astype(np.int16) - theirs.astype(np.int16)).max()) / 255
