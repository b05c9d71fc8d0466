"""Our Stable Diffusion 3 against diffusers' three pipelines for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.loading import Parts
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments


class Reference(DiffusersReference):
    def __init__(self, folder: Path) -> None:
        absent = [name for name, entry in Parts(folder).index.items() if entry == [None, None]]  # T5, perhaps
        super().__init__(folder, "StableDiffusion3Pipeline", absent)
        self.from_picture = self.variant("StableDiffusion3Img2ImgPipeline")
        self.inpainting = self.variant("StableDiffusion3InpaintPipeline")

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        payload, pipe, images = case.payload, self.pipe, {}
        if payload.images:
            pipe, images["image"] = self.from_picture, Image.fromarray(payload.images[0])
        if payload.mask is not None:
            pipe, images["mask_image"] = self.inpainting, Image.fromarray(payload.mask)
        latents = pipe(payload.prompt, output_type="latent", **images, **call_arguments(pipe, case.params)).images
        # Decoded here, as two of the three do it: the inpainting pipeline leaves the VAE's shift out when it decodes,
        # having taken it off when it encoded.
        return DiffusionResult(latents[0], self.decode(latents))

    def kinds(self, seed: int) -> list[Kind]:
        side = self.pipe.default_sample_size * self.pipe.vae_scale_factor
        wide, tall = side + 32, max(side - 16, 32)
        square, oblong = {"width": side, "height": side}, {"width": wide, "height": tall}
        photo = picture(wide, tall, seed)
        mask = np.zeros(photo.shape[:2], np.uint8)
        mask[tall // 4 : tall // 2, wide // 4 :] = 255
        guided = {"guidance": 4.5, "negative_prompt": "people"}
        return [
            ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
            ("text, wide, negative", DiffusionInput("a quiet river"), {**oblong, "steps": 3, **guided}),
            ("image to image", DiffusionInput("the same at night", (photo,)), {**oblong, "steps": 5, "strength": 0.7}),
            (
                "inpainting",
                DiffusionInput("a bird", (photo,), mask),
                {**oblong, "steps": 4, "strength": 0.8, "guidance": 3.0},
            ),
            ("unguided", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0}),
        ]
