"""Our Qwen-Image components against diffusers' pipelines on the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.core.params import DiffusionParams
from omnistage.core.types import DiffusionInput
from omnistage.core.verification import ModelRunner, Progress, VerifyRow, check_cases
from omnistage.models._diffusers.loading import Parts, diffusers
from omnistage.models._diffusers.tiny import picture
from omnistage.models._diffusers.verify import Case, Drawn, compare

_NEGATIVE = "blurred, grey"


def run(runner: ModelRunner, *, cases: int = 4, seed: int = 0, progress: Progress | None = None) -> list[VerifyRow]:
    """Rows for each of `cases` pictures of various sizes, lengths and kinds."""
    check_cases(cases)
    chosen = [case_of(Parts(runner.folder).pipeline_class, number, seed) for number in range(cases)]
    return compare(runner, chosen, reference(runner.folder), progress)


def case_of(pipeline: str, number: int, seed: int) -> Case:
    """Guided and unguided ones in turn; every third one of a model that draws starts from a picture."""
    width, height = ((64, 64), (96, 64), (64, 128))[number % 3]
    params = DiffusionParams(
        width=width,
        height=height,
        steps=2 + number % 3,
        seed=seed + number,
        guidance=(4.0, 1.0, 2.5)[number % 3],
        negative_prompt=_NEGATIVE if number % 4 != 3 else None,
    )
    images: tuple[np.ndarray, ...] = ()
    if "Edit" in pipeline:
        several = 1 + number % 2 if "Plus" in pipeline else 1
        images = tuple(picture(64, 64 + 32 * i, seed + i) for i in range(several))
    elif number % 3 == 2:
        images, params = (picture(90, 70, seed),), params.merged(DiffusionParams(strength=0.7))
    kind = f"{len(images)} pictures" if images else "text"
    payload = DiffusionInput(f"The quick brown fox number {number} in the garden.", images)
    return Case(f"{number}: {width}x{height} from {kind}", payload, params)


def reference(folder: Path) -> Callable[[Case], Drawn]:
    """What diffusers draws, in float32 on the CPU."""
    drawing = diffusers().DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    drawing.set_progress_bar_config(disable=True)
    editing = "Edit" in type(drawing).__name__

    def draw(case: Case) -> Drawn:
        payload, params = case.payload, case.params
        pipe, more = drawing, _options(params)
        if payload.images:
            images = [_pil(image) for image in payload.images]
            more["image"] = images if len(images) > 1 else images[0]
            if not editing:
                pipe = diffusers().QwenImageImg2ImgPipeline(**drawing.components)
                pipe.set_progress_bar_config(disable=True)
                more |= {} if params.strength is None else {"strength": params.strength}
        seeded = torch.Generator().manual_seed(params.seed or 0)
        kept: dict[str, Any] = {}

        def keep(_: Any, step: int, time: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            kept.update(tensors)
            return tensors

        more |= {"generator": seeded, "callback_on_step_end": keep, "output_type": "np"}
        drawn = pipe(prompt=payload.prompt, **more).images
        height, width = drawn.shape[1:3]
        latents = pipe._unpack_latents(kept["latents"], height, width, pipe.vae_scale_factor)[0]
        return Drawn(latents, (drawn[0] * 255).round().astype(np.uint8))

    return draw


def _options(params: DiffusionParams) -> dict[str, Any]:
    given = {
        "width": params.width,
        "height": params.height,
        "num_inference_steps": params.steps,
        "true_cfg_scale": params.true_cfg if params.true_cfg is not None else params.guidance,
        "negative_prompt": params.negative_prompt,
        "max_sequence_length": params.max_sequence_length,
    }
    return {name: value for name, value in given.items() if value is not None}


def _pil(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)
