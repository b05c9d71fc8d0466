"""Our Stable Diffusion 3 against diffusers' three pipelines for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases
from omnistage.models._diffusers.loading import Parts, diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, Drawn, compare


class Reference:
    """diffusers' pipelines over one set of weights, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        package = diffusers()
        # Checkpoints may come without T5; diffusers wants to be told.
        absent = {name: None for name, entry in Parts(folder).index.items() if entry == [None, None]}
        self.drawing = package.StableDiffusion3Pipeline.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, **absent
        )
        self.changing = package.StableDiffusion3Img2ImgPipeline(**self.drawing.components)
        self.painting = package.StableDiffusion3InpaintPipeline(**self.drawing.components)
        for pipe in (self.drawing, self.changing, self.painting):
            pipe.set_progress_bar_config(disable=True)

    @torch.inference_mode()
    def __call__(self, case: Case) -> Drawn:
        payload, params = case.payload, case.params
        given = {
            "width": params.width,
            "height": params.height,
            "num_inference_steps": params.steps,
            "guidance_scale": params.guidance,
            "negative_prompt": params.negative_prompt,
            "max_sequence_length": params.max_sequence_length,
            "strength": params.strength,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        pipe = self.drawing
        if payload.images:
            pipe = self.changing
            options["image"] = Image.fromarray(payload.images[0])
        if payload.mask is not None:
            pipe = self.painting
            options["mask_image"] = Image.fromarray(payload.mask)
        generator = torch.Generator().manual_seed(params.seed or 0)
        latents = pipe(payload.prompt, generator=generator, output_type="latent", **options).images
        # Decoded here, as two of the three do it: the inpainting pipeline leaves the VAE's shift out when it decodes,
        # having taken it off when it encoded.
        config = self.drawing.vae.config
        decoded = self.drawing.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        pixels = self.drawing.image_processor.postprocess(decoded, output_type="np")[0]
        return Drawn(latents[0], (pixels * 255).round().astype(np.uint8))


def cases_for(count: int, seed: int, size: int) -> list[Case]:
    """Requests of every kind around a model's size (a multiple of 16)."""
    wide, tall = size + 32, max(size - 16, 32)
    photo = picture(wide, tall, seed)
    mask = np.zeros(photo.shape[:2], np.uint8)
    mask[tall // 4 : tall // 2, wide // 4 :] = 255
    kinds: list[tuple[str, DiffusionInput, dict[str, object]]] = [
        ("text", DiffusionInput("a red cat under an old tree"), {"width": size, "height": size, "steps": 4}),
        (
            "text, wide, negative",
            DiffusionInput("a quiet river"),
            {"width": wide, "height": tall, "steps": 3, "guidance": 4.5, "negative_prompt": "people"},
        ),
        (
            "image to image",
            DiffusionInput("the same at night", (photo,)),
            {"width": wide, "height": tall, "steps": 5, "strength": 0.7},
        ),
        (
            "inpainting",
            DiffusionInput("a bird", (photo,), mask),
            {"width": wide, "height": tall, "steps": 4, "strength": 0.8, "guidance": 3.0},
        ),
        ("unguided", DiffusionInput("music"), {"width": size, "height": size, "steps": 2, "guidance": 1.0}),
    ]
    made = []
    for number in range(count):
        name, payload, options = kinds[number % len(kinds)]
        made.append(Case(f"{name} {number + 1}", payload, DiffusionParams.parse({**options, "seed": seed + number})))
    return made


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Latents and pixels of each case, compared."""
    check_cases(cases)
    reference = Reference(runner.folder)
    size = reference.drawing.default_sample_size * reference.drawing.vae_scale_factor
    return compare(runner, cases_for(cases, seed, size), reference, progress)
