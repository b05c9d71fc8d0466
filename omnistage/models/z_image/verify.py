"""Our Z-Image components against diffusers' pipelines on the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, Drawn, compare


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Rows for each of `cases` pictures of various sizes, lengths and kinds."""
    check_cases(cases)
    return compare(runner, [case_of(number, seed) for number in range(cases)], reference(runner.folder), progress)


def case_of(number: int, seed: int) -> Case:
    """Guided and unguided ones in turn; every third one starts from a picture."""
    width, height = ((64, 64), (96, 64), (48, 80))[number % 3]
    params = DiffusionParams(
        width=width,
        height=height,
        steps=2 + number % 3,
        seed=seed + number,
        guidance=(5.0, 0.0, 2.5, 1.0)[number % 4],
        negative_prompt=(None, "blurred, grey")[number // 2 % 2],
    )
    images: tuple[np.ndarray, ...] = ()
    if number % 3 == 2:
        images, params = (picture(90, 70, seed),), params.merged(DiffusionParams(strength=0.7))
    kind = "a picture" if images else "text"
    payload = DiffusionInput(f"The quick brown fox number {number} in the garden.", images)
    return Case(f"{number}: {width}x{height} from {kind}", payload, params)


def reference(folder: Path) -> Callable[[Case], Drawn]:
    """What diffusers draws, in float32 on the CPU."""
    drawing = diffusers().DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    starting = diffusers().ZImageImg2ImgPipeline(**drawing.components)
    for pipe in (drawing, starting):
        pipe.set_progress_bar_config(disable=True)

    def draw(case: Case) -> Drawn:
        payload, params = case.payload, case.params
        pipe, more = drawing, _options(params)
        if payload.images:
            pipe, image = starting, _pil(payload.images[0])
            if params.width is not None and params.height is not None:
                # The pipeline takes a picture of another size for an error; ours brings it to the size asked for.
                image = pipe.image_processor.resize(image, params.height, params.width)
            more["image"] = image
            more |= {} if params.strength is None else {"strength": params.strength}
        kept: dict[str, Any] = {}

        def keep(_: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            kept.update(tensors)
            return tensors

        more |= {"generator": torch.Generator().manual_seed(params.seed or 0), "callback_on_step_end": keep}
        drawn = pipe(prompt=payload.prompt, output_type="np", **more).images
        return Drawn(kept["latents"][0], (drawn[0] * 255).round().astype(np.uint8))

    return draw


def _options(params: DiffusionParams) -> dict[str, Any]:
    given = {
        "width": params.width,
        "height": params.height,
        "num_inference_steps": params.steps,
        "guidance_scale": params.guidance,
        "negative_prompt": params.negative_prompt,
        "max_sequence_length": params.max_sequence_length,
    }
    return {name: value for name, value in given.items() if value is not None}


def _pil(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)
