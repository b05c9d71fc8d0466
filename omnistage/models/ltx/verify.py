"""Our LTX-Video against diffusers' two pipelines for it."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments


class Reference(DiffusersReference):
    text_tokens = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "LTXPipeline")
        self.from_picture = self.variant("LTXImageToVideoPipeline")

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        payload, params, pipe = case.payload, case.params, self.pipe
        more: dict[str, object] = {} if params.fps is None else {"frame_rate": params.fps}
        if payload.images:
            pipe, more["image"] = self.from_picture, Image.fromarray(payload.images[0])
        packed = pipe(prompt=payload.prompt, output_type="latent", **more, **call_arguments(pipe, params)).frames
        sides = (((params.num_frames or 161) - 1) // 8 + 1, (params.height or 512) // 32, (params.width or 704) // 32)
        latents = packed.transpose(1, 2).reshape(1, -1, *sides)
        vae = pipe.vae
        mean, std = (each.view(1, -1, 1, 1, 1) for each in (vae.latents_mean, vae.latents_std))
        timestep = torch.zeros(1) if vae.config.timestep_conditioning else None
        decoded = vae.decode(latents * std / vae.config.scaling_factor + mean, timestep, return_dict=False)[0]
        return DiffusionResult(latents[0], self.video(decoded))

    def kinds(self, seed: int) -> list[Kind]:
        square, wide = {"width": 64, "height": 64, "num_frames": 9}, {"width": 96, "height": 64, "num_frames": 17}
        photo = picture(80, 60, seed)
        away = {"guidance": 4.5, "negative_prompt": "people"}
        return [
            ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
            ("picture", DiffusionInput("a quiet river", (photo,)), {**wide, "steps": 3, **away}),
            ("unguided, slower", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0, "fps": 12}),
            ("one frame", DiffusionInput("a bird"), {**square, "steps": 2, "num_frames": 1}),
        ]
