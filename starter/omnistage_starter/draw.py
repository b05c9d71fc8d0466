"""Image generation: a small FLUX.2 transformer in pixel space, on the adapter that serves FLUX.2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle

from omnistage.core.errors import CheckpointError, InvalidRequestError, SizeError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Modality
from omnistage.engines.diffusion.component import Lane, LatentDecoder, Row
from omnistage.models._diffusers.loading import Parts, diffusers
from omnistage.models.flux2.components import Denoiser
from omnistage_starter.bridges import SIZE, TEXT_ROWS

PATCH = 6
"""Pixels: side of the square that one token of the transformer stands for."""
CHANNELS = 3 * PATCH * PATCH
MIN_SIGMA = 0.05
"""Lower noise levels are computed with this one, as in training."""
PACKAGED_WEIGHTS = Path(__file__).with_name("draw_weights")
_UNUSED = {
    "negative_prompt": "not supported by this model; describe the image in the message instead, and leave it out",
    "strength": "not supported by this model, which takes no input image; leave it out",
    "control_scale": "not supported by this model, which has no ControlNet; leave it out",
    "true_cfg": "not supported by this model; set guidance instead",
    "max_sequence_length": "not supported by this model, which always reads the end of the last message; leave it out",
    "fps": "not supported by this model, which gives images, not videos; leave it out",
}


class PixelDenoiser(Denoiser):
    """Latents are the image's own patches, so there is no VAE. The unconditional input is all zeros.

    The transformer predicts the clean patches; `velocity` turns them into the flow that the scheduler takes.
    """

    def check(self, params: DiffusionParams) -> None:
        super().check(params)
        for name in ("width", "height"):
            value = getattr(params, name)
            if value not in (None, SIZE):
                raise SizeError(
                    f"this model generates {SIZE}x{SIZE} images, got a {name} of {value}; ask for {SIZE}x{SIZE}, or "
                    "leave it out",
                    side=name,
                    nearest=SIZE,
                )
        for name, reason in _UNUSED.items():
            if getattr(params, name) is not None:
                raise InvalidRequestError(reason, param=name)
        if (params.num_frames or 1) > 1:
            raise InvalidRequestError(
                "must be 1: this model gives images, not videos; leave it out", param="num_frames"
            )

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (TEXT_ROWS, self.pipe.transformer.config.joint_attention_dim)}

    def planned_size(self) -> tuple[int, int, int]:
        return SIZE, SIZE, 1

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // PATCH, width // PATCH

    def rows(self, lane: Lane) -> Sequence[Row]:
        rows = super().rows(lane)
        # At guidance 1 the unconditional row has no weight.
        return rows[:1] if lane.params.guidance == 1 else rows

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        clean = self.combine(lane, *predictions) if len(predictions) == 2 else predictions[0]
        super().advance(lane, [velocity(lane.latents, clean, lane.timesteps[lane.step] / 1000)])


def velocity(noisy: Tensor, clean: Tensor, sigma: Tensor) -> Tensor:
    """The flow from the clean patches to the noise; guided patches are clamped to the range of colours."""
    return (noisy - clean.clamp(-1, 1)) / sigma.clamp(min=MIN_SIGMA)


class PatchDecoder(LatentDecoder):
    """Patches to pixels, without weights."""

    modality = Modality.IMAGE

    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        images = pixel_shuffle(torch.stack(list(latents)).float(), PATCH)
        scaled = (images * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return list((scaled * 255).round().astype(np.uint8))


class DrawParts(Parts):
    """A folder with a transformer and a scheduler but no model_index.json; their classes are fixed here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = {
            "_class_name": "Flux2KleinPipeline",
            "is_distilled": False,
            "transformer": ["diffusers", "Flux2Transformer2DModel"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        }


def draw_folder(folder: Path) -> Path:
    """The weights of the draw stage: those in the model's folder, else the packaged ones."""
    weights = folder / "draw"
    return weights if weights.is_dir() else PACKAGED_WEIGHTS


def load_draw(context: LoadContext) -> PixelDenoiser:
    folder = draw_folder(context.model.folder)
    parts = DrawParts(folder)
    diffusers().utils.logging.disable_progress_bar()  # the caller shows progress
    pipe = parts.pipeline(context, "Flux2KleinPipeline", ("transformer",), ("scheduler",))
    channels = pipe.transformer.config.in_channels
    if channels != CHANNELS:
        raise CheckpointError(
            f"the transformer in {folder} has {channels} input channels, expected {CHANNELS} (patches of "
            f"{PATCH}x{PATCH} pixels); use the starter's weights"
        )
    return PixelDenoiser(pipe, context.device, context.dtype)


def load_paint(context: LoadContext) -> PatchDecoder:
    del context
    return PatchDecoder()
