"""Our FLUX.2 klein against diffusers' pipeline for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, Drawn, compare
from omnistage.models.flux2.components import statistics


class Reference:
    """diffusers' pipeline in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        cls = diffusers().Flux2KleinPipeline
        self.pipe = cls.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.pipe.set_progress_bar_config(disable=True)

    @torch.inference_mode()
    def __call__(self, case: Case) -> Drawn:
        pipe, payload, params = self.pipe, case.payload, case.params
        given = {
            "width": params.width,
            "height": params.height,
            "num_inference_steps": params.steps,
            "guidance_scale": params.guidance,
            "max_sequence_length": params.max_sequence_length,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if payload.images:
            options["image"] = [Image.fromarray(pixels) for pixels in payload.images]
        if params.negative_prompt is not None:
            length = params.max_sequence_length or 512
            negative, _ = pipe.encode_prompt(params.negative_prompt, max_sequence_length=length)
            options["negative_prompt_embeds"] = negative
        generator = torch.Generator().manual_seed(params.seed or 0)
        latents = pipe(prompt=payload.prompt, generator=generator, output_type="latent", **options).images
        decoded = pipe.vae.decode(latents, return_dict=False)[0]
        pixels = pipe.image_processor.postprocess(decoded, output_type="np")[0]
        # The pipeline gives latents as the VAE takes them, the denoiser as the transformer does.
        mean, std = statistics(pipe.vae)
        return Drawn(((pipe._patchify_latents(latents) - mean) / std)[0], (pixels * 255).round().astype(np.uint8))


def cases_for(count: int, seed: int, *, distilled: bool, size: int = 64) -> list[Case]:
    """Requests of every kind around a size (a multiple of 16)."""
    square, oblong = {"width": size, "height": size}, {"width": size + 32, "height": size - 16}
    photos = picture(size + 40, size, seed), picture(size, size + 24, seed + 1)
    away: dict[str, object] = {} if distilled else {"negative_prompt": "people", "guidance": 3.0}
    kinds: list[tuple[str, DiffusionInput, dict[str, object]]] = [
        ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
        ("text, wide", DiffusionInput("a quiet river"), {**oblong, "steps": 3, **away}),
        ("picture", DiffusionInput("the same at night", photos[:1]), {"steps": 2}),
        ("two pictures", DiffusionInput("the first in the style of the second", photos), {**square, "steps": 2}),
        ("unguided", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0}),
    ]
    made = []
    for number in range(count):
        name, payload, options = kinds[number % len(kinds)]
        options = {**options, "max_sequence_length": 64, "seed": seed + number}
        made.append(Case(f"{name} {number + 1}", payload, DiffusionParams.parse(options)))
    return made


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Latents and pixels of each case, compared."""
    check_cases(cases)
    reference = Reference(runner.folder)
    distilled = bool(reference.pipe.config.is_distilled)
    return compare(runner, cases_for(cases, seed, distilled=distilled), reference, progress)
