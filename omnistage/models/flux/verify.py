"""Our FLUX.1 against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.loading import Parts
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments


class Reference(DiffusersReference):
    text_tokens = 128  # the usual length differs from diffusers' for schnell

    def __init__(self, folder: Path) -> None:
        name = Parts(folder).pipeline_class
        self.kontext, self.fill = name == "FluxKontextPipeline", name == "FluxFillPipeline"
        super().__init__(folder, name if self.kontext or self.fill else "FluxPipeline")
        self.from_picture = self.pipe
        if not self.kontext and not self.fill:
            self.from_picture = self.variant("FluxImg2ImgPipeline", ("image_encoder", "feature_extractor"))

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        payload, pipe = case.payload, self.pipe
        more: dict[str, object] = {}
        width, height = case.params.width or 1024, case.params.height or 1024
        if payload.images:
            pipe, more["image"] = self.from_picture, Image.fromarray(payload.images[0])
        if self.kontext:  # which otherwise scales every size to a million pixels
            more["max_area"] = width * height
        if payload.mask is not None:
            more |= {"mask_image": Image.fromarray(payload.mask), "width": width, "height": height}
        arguments = {**call_arguments(pipe, case.params), **more}
        packed = pipe(prompt=payload.prompt, output_type="latent", **arguments).images
        factor = pipe.vae_scale_factor
        latents = private_api.flux_unpack(packed, width=width, height=height, vae_scale_factor=factor)
        return DiffusionResult(latents[0], self.decode(latents))

    def kinds(self, seed: int) -> list[Kind]:
        square, oblong = {"width": 64, "height": 64}, {"width": 96, "height": 48}
        photo = picture(96, 48, seed)
        change = {"steps": 2} if self.kontext else {"steps": 5, "strength": 0.7}
        guided = {"negative_prompt": "people", "true_cfg": 3.0, "guidance": 2.0}
        kinds: list[Kind] = [
            ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
            ("text, wide, negative", DiffusionInput("a quiet river"), {**oblong, "steps": 3, **guided}),
            ("picture", DiffusionInput("the same at night", (photo,)), {**oblong, **change}),
            ("guidance 1", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0, "max_sequence_length": 40}),
        ]
        if self.fill:
            mask = np.zeros(photo.shape[:2], np.uint8)
            mask[12:30, 20:60] = 255
            kinds = [
                ("fill", DiffusionInput("a red cat", (photo,), mask), {**oblong, "steps": 4}),
                ("fill in part", DiffusionInput("a boat", (photo,), mask), {**square, "steps": 5, "strength": 0.7}),
            ]
        return kinds
