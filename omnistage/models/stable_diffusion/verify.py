"""Our Stable Diffusion against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.loading import Parts
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments
from omnistage.models.stable_diffusion.checkpoints import Kind as CheckpointKind


class Reference(DiffusersReference):
    def __init__(self, folder: Path) -> None:
        parts = Parts(folder)
        self.kind = CheckpointKind.of(parts)
        absent = [name for name, entry in parts.index.items() if entry == [None, None]]
        super().__init__(folder, parts.pipeline_class, absent)
        self.stock = self.pipe.scheduler

    def pipeline_for(self, payload: DiffusionInput) -> str:
        """diffusers' class for what goes in."""
        family = f"StableDiffusion{'XL' if self.kind.xl else ''}"
        if self.kind.control:
            return f"{family}ControlNet{'Img2Img' if self.kind.changes else ''}Pipeline"
        task = "Inpaint" if payload.mask is not None else "Img2Img" if payload.images else ""
        return f"{family}{task}Pipeline"

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        payload, params = case.payload, case.params
        names = ("force_zeros_for_empty_prompt",) if self.kind.xl else ("requires_safety_checker",)
        settings = {name: self.pipe.config[name] for name in names}
        pipe = self.variant(self.pipeline_for(payload), **settings)
        if params.scheduler is not None:
            schedulers = {each.__name__: each for each in (type(self.stock), *self.stock.compatibles)}
            pipe.scheduler = schedulers[params.scheduler].from_config(self.stock.config)
        arguments = call_arguments(pipe, params)
        images = [Image.fromarray(pixels) for pixels in payload.images]
        if self.kind.control:
            control = images.pop()
            arguments["control_image" if self.kind.changes else "image"] = control
            width, height = control.size
            arguments |= {"width": params.width or width // 8 * 8, "height": params.height or height // 8 * 8}
        if images and payload.mask is None and not self.kind.changes:
            # These pipelines draw in the picture's size.
            size = (params.height or images[0].height, params.width or images[0].width)
            images[0] = pipe.image_processor.resize(images[0], *(n // 8 * 8 for n in size))
        if images:
            arguments["image"] = images[0]
        if payload.mask is not None:
            arguments["mask_image"] = Image.fromarray(payload.mask)
        latents = pipe(payload.prompt, output_type="latent", **arguments).images
        return DiffusionResult(latents[0], self.decode(latents))

    def decode(self, latents: Tensor) -> np.ndarray:
        vae = self.pipe.vae
        decoded = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return self.picture(decoded)

    def kinds(self, seed: int) -> list[Kind]:
        square, oblong = {"width": 64, "height": 64}, {"width": 96, "height": 48}
        photo, drawing = picture(96, 48, seed), picture(96, 48, seed + 1)
        mask = np.zeros(photo.shape[:2], np.uint8)
        mask[12:24, 24:] = 255
        away: dict[str, object] = {"guidance": 4.5}
        if not self.kind.distilled:
            away["negative_prompt"] = "people"
        if self.kind.inpainting:
            kinds: list[Kind] = [
                ("inpainting", DiffusionInput("a bird", (photo,), mask), {**oblong, "steps": 4, **away}),
                (
                    "inpainting, in part",
                    DiffusionInput("a boat", (photo,), mask),
                    {**square, "steps": 5, "strength": 0.6},
                ),
            ]
        elif self.kind.control:
            images = (photo, drawing) if self.kind.changes else (drawing,)
            kinds = [
                ("control", DiffusionInput("a red cat", images), {**oblong, "steps": 4, **away}),
                ("weak control", DiffusionInput("a tree", images), {**square, "steps": 3, "control_scale": 0.4}),
            ]
        else:
            kinds = [
                ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
                ("text, wide, negative", DiffusionInput("a quiet river"), {**oblong, "steps": 5, **away}),
                ("image to image", DiffusionInput("at night", (photo,)), {**oblong, "steps": 6, "strength": 0.7}),
                ("inpainting", DiffusionInput("a bird", (photo,), mask), {**oblong, "steps": 5, "strength": 0.8}),
                ("unguided", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0}),
            ]
        return kinds
