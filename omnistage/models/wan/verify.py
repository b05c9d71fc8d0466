"""Our Wan against diffusers' two pipelines for it."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers.base import latent_statistics
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, DiffusersReference, DiffusionResult, Kind, call_arguments
from omnistage.models.wan.components import picture_counts, takes_pictures


class Reference(DiffusersReference):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.from_picture = self.pipe
        if not isinstance(self.pipe, diffusers().WanImageToVideoPipeline):
            settings = {name: self.pipe.config[name] for name in ("boundary_ratio", "expand_timesteps")}
            self.from_picture = self.variant("WanImageToVideoPipeline", **settings)
        self.texts = diffusers().WanPipeline(self.pipe.tokenizer, self.pipe.text_encoder, self.pipe.vae, None)

    def generate(self, case: Case, output_type: str) -> Tensor:
        """What diffusers gives for a case: float frames `[n, h, w, 3]` ("np"), or latents ("latent")."""
        payload, params = case.payload, case.params
        length = params.max_sequence_length or 512
        if not payload.images:
            arguments = {**call_arguments(self.pipe, params), "max_sequence_length": length}
            return self.pipe(prompt=payload.prompt, output_type=output_type, **arguments).frames[0]  # type: ignore[no-any-return]
        # The pipeline for pictures reads no text where ftfy is not installed, so the other one does it.
        guided = (5.0 if params.guidance is None else params.guidance) > 1
        positive, negative = self.texts.encode_prompt(
            payload.prompt,
            params.negative_prompt,
            do_classifier_free_guidance=guided,
            max_sequence_length=length,
            device=torch.device("cpu"),
        )
        arguments = {**call_arguments(self.from_picture, params), "negative_prompt": None}
        arguments |= {"prompt_embeds": positive, "negative_prompt_embeds": negative, "output_type": output_type}
        pictures = [Image.fromarray(pixels) for pixels in payload.images]
        arguments |= dict(zip(("image", "last_image"), pictures, strict=False))
        return self.from_picture(**arguments).frames[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def __call__(self, case: Case) -> DiffusionResult:
        latents = self.generate(case, "latent")
        mean, std = latent_statistics(self.pipe.vae.config, latents[None])
        decoded = self.pipe.vae.decode(latents[None] / (1.0 / std) + mean, return_dict=False)[0]
        return DiffusionResult(latents, self.video(decoded))

    def kinds(self, seed: int) -> list[Kind]:
        """Every other one with as many pictures as the checkpoint takes at the most, the others with the fewest."""
        index = {**self.pipe.config, "_class_name": type(self.pipe).__name__}
        photos = picture(80, 60, seed), picture(64, 64, seed + 1)
        counts = picture_counts(self.pipe) if takes_pictures(index) else (0, 0)
        few, many = (photos[:count] for count in counts)
        square, wide, tall = ({"width": w, "height": h} for w, h in ((64, 64), (96, 64), (64, 96)))
        away = {"guidance": 3.5, "negative_prompt": "people"}
        kinds: list[Kind] = [
            ("guided", DiffusionInput("a red cat under a tree", few), {**square, "num_frames": 5, "steps": 4}),
            ("wide", DiffusionInput("a quiet river", many), {**wide, "num_frames": 9, "steps": 3, **away}),
            ("unguided", DiffusionInput("music", few), {**tall, "num_frames": 5, "steps": 5, "guidance": 1.0}),
            ("short", DiffusionInput("a bird", many), {**square, "num_frames": 1 if counts[1] < 2 else 5, "steps": 2}),
        ]
        return [(f"{name}, {len(payload.images)} pictures", payload, settings) for name, payload, settings in kinds]
