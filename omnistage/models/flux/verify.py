"""Our FLUX.1 against diffusers' pipelines for it."""

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
        self.kontext = Parts(folder).pipeline_class == "FluxKontextPipeline"
        cls = package.FluxKontextPipeline if self.kontext else package.FluxPipeline
        self.drawing = cls.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        parts = self.drawing.components
        if not self.kontext:
            parts = {name: part for name, part in parts.items() if name not in ("image_encoder", "feature_extractor")}
        self.changing = self.drawing if self.kontext else package.FluxImg2ImgPipeline(**parts)
        for pipe in (self.drawing, self.changing):
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
            "true_cfg_scale": params.true_cfg,
            "max_sequence_length": params.max_sequence_length,
            "strength": params.strength,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        pipe = self.drawing
        if payload.images:
            pipe = self.changing
            options["image"] = Image.fromarray(payload.images[0])
        if self.kontext:  # which otherwise scales every size to a million pixels
            options["max_area"] = (params.width or 1024) * (params.height or 1024)
        generator = torch.Generator().manual_seed(params.seed or 0)
        packed = pipe(prompt=payload.prompt, generator=generator, output_type="latent", **options).images
        size = params.height or 1024, params.width or 1024
        latents = pipe._unpack_latents(packed, *size, pipe.vae_scale_factor)
        config = pipe.vae.config
        decoded = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
        pixels = pipe.image_processor.postprocess(decoded, output_type="np")[0]
        return Drawn(latents[0], (pixels * 255).round().astype(np.uint8))


def cases_for(count: int, seed: int, *, kontext: bool, size: int = 64) -> list[Case]:
    """Requests of every kind around a size (a multiple of 16)."""
    wide, tall = size + 32, size - 16
    photo = picture(wide, tall, seed)
    change: dict[str, object] = {"steps": 2} if kontext else {"steps": 5, "strength": 0.7}
    square, oblong = {"width": size, "height": size}, {"width": wide, "height": tall}
    guided = {"negative_prompt": "people", "true_cfg": 3.0, "guidance": 2.0}
    kinds: list[tuple[str, DiffusionInput, dict[str, object]]] = [
        ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
        ("text, wide, negative", DiffusionInput("a quiet river"), {**oblong, "steps": 3, **guided}),
        ("picture", DiffusionInput("the same at night", (photo,)), {**oblong, **change}),
        ("guidance 1", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0, "max_sequence_length": 40}),
    ]
    made = []
    for number in range(count):
        name, payload, options = kinds[number % len(kinds)]
        # The text's default length differs from diffusers' for schnell.
        options = {"max_sequence_length": 128, **options, "seed": seed + number}
        made.append(Case(f"{name} {number + 1}", payload, DiffusionParams.parse(options)))
    return made


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Latents and pixels of each case, compared."""
    check_cases(cases)
    reference = Reference(runner.folder)
    return compare(runner, cases_for(cases, seed, kontext=reference.kontext), reference, progress)
