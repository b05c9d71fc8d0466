"""Our Wan against diffusers' two pipelines for it."""

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
from omnistage.models.wan.components import picture_counts, takes_pictures


class Reference:
    """diffusers' pipelines over one set of weights, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        package = diffusers()
        self.pipe = package.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self.from_picture = self.pipe
        if not isinstance(self.pipe, package.WanImageToVideoPipeline):
            settings = {name: self.pipe.config[name] for name in ("boundary_ratio", "expand_timesteps")}
            self.from_picture = package.WanImageToVideoPipeline(**self.pipe.components, **settings)
        self.texts = package.WanPipeline(self.pipe.tokenizer, self.pipe.text_encoder, self.pipe.vae, None)
        for pipe in (self.pipe, self.from_picture):
            pipe.set_progress_bar_config(disable=True)

    def generate(self, case: Case, output_type: str) -> Any:
        """What diffusers gives for a case: float frames `[n, h, w, 3]` ("np"), or latents ("latent")."""
        payload, params = case.payload, case.params
        given = {
            "width": params.width,
            "height": params.height,
            "num_frames": params.num_frames,
            "num_inference_steps": params.steps,
            "guidance_scale": params.guidance,
        }
        options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        texts = {"prompt": payload.prompt, "negative_prompt": params.negative_prompt}
        length = params.max_sequence_length or 512
        generator = torch.Generator().manual_seed(params.seed or 0)
        if not payload.images:
            options |= {**texts, "max_sequence_length": length, "output_type": output_type}
            return self.pipe(generator=generator, **options).frames[0]
        # The pipeline for pictures reads no text where ftfy is not installed, so the other one does it.
        guided = (5.0 if params.guidance is None else params.guidance) > 1
        positive, negative = self.texts.encode_prompt(
            **texts, do_classifier_free_guidance=guided, max_sequence_length=length, device=torch.device("cpu")
        )
        options |= {"prompt_embeds": positive, "negative_prompt_embeds": negative, "output_type": output_type}
        pictures = [Image.fromarray(pixels) for pixels in payload.images]
        options |= dict(zip(("image", "last_image"), pictures, strict=False))
        return self.from_picture(generator=generator, **options).frames[0]

    @torch.inference_mode()
    def __call__(self, case: Case) -> Drawn:
        latents = self.generate(case, "latent")
        config = self.pipe.vae.config
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        decoded = self.pipe.vae.decode(latents[None] / (1.0 / std) + mean, return_dict=False)[0]
        frames = self.pipe.video_processor.postprocess_video(decoded, output_type="np")[0]
        return Drawn(latents, (frames * 255).round().astype(np.uint8))


def cases_for(count: int, seed: int, reference: Reference) -> list[Case]:
    """Small videos of every kind that the checkpoint makes."""
    index = {**reference.pipe.config, "_class_name": type(reference.pipe).__name__}
    photos = picture(80, 60, seed), picture(64, 64, seed + 1)
    least, most = picture_counts(reference.pipe) if takes_pictures(index) else (0, 0)
    kinds: list[tuple[str, str, dict[str, object]]] = [
        ("guided", "a red cat under an old tree", {"width": 64, "height": 64, "num_frames": 5, "steps": 4}),
        (
            "wide, negative",
            "a quiet river",
            {"width": 96, "height": 64, "num_frames": 9, "steps": 3, "guidance": 3.5, "negative_prompt": "people"},
        ),
        ("unguided", "music", {"width": 64, "height": 96, "num_frames": 5, "steps": 5, "guidance": 1.0}),
        ("one frame", "a bird", {"width": 64, "height": 64, "num_frames": 1 if most < 2 else 5, "steps": 2}),
    ]
    made = []
    for number in range(count):
        name, prompt, options = kinds[number % len(kinds)]
        taken = photos[: (least, most)[number % 2]]
        payload = DiffusionInput(prompt, taken)
        params = DiffusionParams.parse({**options, "seed": seed + number})
        made.append(Case(f"{name}, {len(taken)} pictures {number + 1}", payload, params))
    return made


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Latents and pixels of each case, compared."""
    check_cases(cases)
    reference = Reference(runner.folder)
    return compare(runner, cases_for(cases, seed, reference), reference, progress)
