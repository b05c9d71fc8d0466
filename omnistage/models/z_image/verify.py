"""Our Z-Image against diffusers' pipelines for it."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

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

    def case(self, number: int, seed: int) -> Case:
        """Guided and unguided ones in turn; every third one starts from a picture."""
        width, height = ((64, 64), (96, 64), (48, 80))[number % 3]
        guidance, negative = (5.0, 0.0, 2.5, 1.0)[number % 4], (None, "blurred, grey")[number // 2 % 2]
        options = {"width": width, "height": height, "guidance": guidance, "negative_prompt": negative}
        if number % 3 == 2:
            return numbered_case(number, seed, [picture(90, 70, seed)], **options, strength=0.7)
        return numbered_case(number, seed, [], **options)
