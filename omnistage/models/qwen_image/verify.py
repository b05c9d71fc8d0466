"""Our Qwen-Image against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import (
    Case,
    DiffusersReference,
    DiffusionResult,
    Recorder,
    call_arguments,
    numbered_case,
    to_uint8,
)


class Reference(DiffusersReference):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.edits = "Edit" in type(self.pipe).__name__

    def __call__(self, case: Case) -> DiffusionResult:
        payload, params, recorder = case.payload, case.params, Recorder()
        pipe = self.pipe if self.edits or not payload.images else self.variant("QwenImageImg2ImgPipeline")
        # Both scales of a request mean this one; guidance_scale is for distilled checkpoints, which are refused.
        scale = {} if params.guidance is None else {"true_cfg_scale": params.guidance}
        arguments = {**scale, **call_arguments(pipe, params)}
        arguments.pop("guidance_scale", None)
        if payload.images:
            images = [Image.fromarray(image) for image in payload.images]
            arguments["image"] = images if len(images) > 1 else images[0]
        pixels = pipe(prompt=payload.prompt, callback_on_step_end=recorder, output_type="np", **arguments).images
        height, width = pixels.shape[1:3]
        factor = pipe.vae_scale_factor
        latents = private_api.qwen_image_unpack(recorder.latents, width=width, height=height, vae_scale_factor=factor)
        return DiffusionResult(latents[0], to_uint8(pixels[0]))

    def case(self, number: int, seed: int) -> Case:
        """Guided and unguided ones in turn; every third one of a model that draws starts from a picture."""
        width, height = ((64, 64), (96, 64), (64, 128))[number % 3]
        options: dict[str, object] = {"width": width, "height": height, "guidance": (4.0, 1.0, 2.5)[number % 3]}
        # Set even where it is None: the default in pipeline.yaml is " ".
        options["negative_prompt"] = "blurred, grey" if number % 4 != 3 else None
        images: list[np.ndarray] = []
        if self.edits:
            several = 1 + number % 2 if "Plus" in type(self.pipe).__name__ else 1
            images = [picture(64, 64 + 32 * i, seed + i) for i in range(several)]
        elif number % 3 == 2:
            images, options["strength"] = [picture(90, 70, seed)], 0.7
        return numbered_case(number, seed, images, **options)
