"""Our HunyuanVideo against diffusers' pipeline for it."""

from __future__ import annotations

from pathlib import Path

import torch

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments


class Reference(DiffusersReference):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "HunyuanVideoPipeline")

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        pipe = self.pipe
        latents = pipe(prompt=case.payload.prompt, output_type="latent", **call_arguments(pipe, case.params)).frames
        decoded = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
        return DiffusionResult(latents[0], self.video(decoded))

    def kinds(self, seed: int) -> list[Kind]:
        square, wide = {"width": 64, "height": 64, "num_frames": 5}, {"width": 96, "height": 64, "num_frames": 9}
        away = {"true_cfg": 3.0, "negative_prompt": "people"}
        return [
            ("text", DiffusionInput("a red cat under an old tree"), {**square, "steps": 4}),
            ("negative", DiffusionInput("a quiet river"), {**wide, "steps": 3, **away}),
            ("little guidance", DiffusionInput("music"), {**square, "steps": 2, "guidance": 1.0}),
            ("one frame", DiffusionInput("a bird"), {**square, "steps": 2, "num_frames": 1}),
        ]
