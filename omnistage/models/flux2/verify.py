"""Our FLUX.2 against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments
from omnistage.models.flux2.components import statistics


class Reference(DiffusersReference):
    text_tokens = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.dev = type(self.pipe).__name__ == "Flux2Pipeline"

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        pipe, payload, params = self.pipe, case.payload, case.params
        arguments = call_arguments(pipe, params)
        if payload.images:
            arguments["image"] = [Image.fromarray(pixels) for pixels in payload.images]
        if params.negative_prompt is not None:
            length = params.max_sequence_length or 512
            negative, _ = pipe.encode_prompt(params.negative_prompt, max_sequence_length=length)
            arguments["negative_prompt_embeds"] = negative
        latents = pipe(prompt=payload.prompt, output_type="latent", **arguments).images
        mean, std = statistics(pipe.vae)
        if self.dev:  # which gives what its transformer has, packed
            first = payload.images[0] if payload.images else None
            high = (params.height or (first.shape[0] if first is not None else 1024)) // 16
            unpacked = latents[0].T.reshape(1, -1, high, latents.shape[1] // high)
            latents = private_api.flux2_unpatchify(unpacked * std + mean)
        else:  # which gives what the VAE takes
            unpacked = (private_api.flux2_patchify(latents) - mean) / std
        decoded = pipe.vae.decode(latents, return_dict=False)[0]
        return DiffusionResult(unpacked[0], self.picture(decoded))

    def kinds(self, seed: int) -> list[Kind]:
        square, oblong = {"width": 64, "height": 64}, {"width": 96, "height": 48}
        photos = picture(104, 64, seed), picture(64, 88, seed + 1)
        away = {} if self.pipe.config.get("is_distilled", True) else {"negative_prompt": "people", "guidance": 3.0}
        return [
            ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
            ("text, wide", DiffusionInput("a quiet river"), {**oblong, "steps": 3, **away}),
            ("picture", DiffusionInput("the same at night", photos[:1]), {"steps": 2}),
            ("two pictures", DiffusionInput("the first in the style of the second", photos), {**square, "steps": 2}),
            ("unguided", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0}),
        ]
