"""Our Z-Image against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from omnistage.core.types import DiffusionInput
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
        self.from_picture = self.variant("ZImageImg2ImgPipeline")

    def __call__(self, case: Case) -> DiffusionResult:
        payload, params, recorder, images = case.payload, case.params, Recorder(), {}
        pipe = self.from_picture if payload.images else self.pipe
        if payload.images:
            image = Image.fromarray(payload.images[0])
            if params.width is not None and params.height is not None:
                # The pipeline refuses a picture of another size; ours resizes it.
                image = pipe.image_processor.resize(image, params.height, params.width)
            images["image"] = image
        arguments = {**images, **call_arguments(pipe, params)}
        pixels = pipe(prompt=payload.prompt, callback_on_step_end=recorder, output_type="np", **arguments).images
        return DiffusionResult(recorder.latents[0], to_uint8(pixels[0]))

    def kinds(self, seed: int) -> list[Kind]:
        square, away = {"width": 64, "height": 64, "steps": 2}, {"negative_prompt": "blurred, grey"}
        wide, tall = {"width": 96, "height": 64, "steps": 3}, {"width": 48, "height": 80, "steps": 4}
        photo = picture(90, 70, seed)
        return [
            ("guided", DiffusionInput("a quick brown fox in the garden"), {**square, "guidance": 5.0}),
            ("unguided", DiffusionInput("a quiet river"), {**wide, "guidance": 0.0}),
            ("picture", DiffusionInput("at night", (photo,)), {**tall, "guidance": 2.5, "strength": 0.7, **away}),
            ("guidance 1, negative", DiffusionInput("music"), {**square, "guidance": 1.0, **away}),
        ]
