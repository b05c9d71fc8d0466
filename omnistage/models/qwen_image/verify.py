"""Our Qwen-Image against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from omnistage.core.types import DiffusionInput
from omnistage.models._diffusers import private_api
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import (
    Case,
    DiffusersReference,
    DiffusionResult,
    Kind,
    Recorder,
    call_arguments,
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

    def kinds(self, seed: int) -> list[Kind]:
        """Guided and unguided ones; a model that draws starts one of them from a picture."""
        square, away = {"width": 64, "height": 64, "steps": 2}, {"negative_prompt": "blurred, grey"}
        wide: dict[str, object] = {"width": 96, "height": 64, "steps": 3}
        tall: dict[str, object] = {"width": 64, "height": 128, "steps": 4}
        photos = tuple(picture(64, 64 + 32 * i, seed + i) for i in range(2))
        few, many = photos[:1], photos if "Plus" in type(self.pipe).__name__ else photos[:1]
        first = few
        if not self.edits:
            few = many = ()
            first, tall = (picture(90, 70, seed),), {**tall, "strength": 0.7}
        return [
            ("guided", DiffusionInput("a red cat under a tree", few), {**square, "guidance": 4.0, **away}),
            ("unguided", DiffusionInput("a quiet river", many), {**wide, "guidance": 1.0, **away}),
            ("picture", DiffusionInput("the same at night", first), {**tall, "guidance": 2.5, **away}),
            # None is set too: the default in pipeline.yaml is " ".
            ("no negative", DiffusionInput("a bird", many), {**square, "guidance": 4.0, "negative_prompt": None}),
        ]
