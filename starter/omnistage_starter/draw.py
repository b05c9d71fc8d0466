"""The picture: FLUX.2's transformer, small and in pixel space, on the adapter that serves FLUX.2 itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pixel_shuffle

from omnistage.core.errors import CheckpointError, InvalidRequestError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Modality
from omnistage.engines.diffusion.component import Lane, LatentDecoder, Row
from omnistage.models._diffusers.loading import Parts, diffusers
from omnistage.models.flux2.components import Denoiser
from omnistage_starter.bridges import SIZE

PATCH = 6
"""Pixels: side of the square that one row of the transformer stands for."""
CHANNELS = 3 * PATCH * PATCH
LEAST_SIGMA = 0.05
"""Nearer to the end, the way there is computed as if there were this much noise, as in training."""
SHIPPED = Path(__file__).with_name("draw_weights")
"""The weights that come with the package."""
_UNUSED = {
    "negative_prompt": "nothing reads it here; say in the message what you do want, and leave it out",
    "strength": "this model draws from text alone; leave it out",
    "true_cfg": "this model has guidance only; set that instead",
    "max_sequence_length": "this model always reads the end of the last message; leave it out",
    "fps": "this model draws pictures, not videos; leave it out",
}


class Drawer(Denoiser):
    """Latents are the picture's own patches, so there is no VAE. What guides away is an empty message: zeros.

    The transformer predicts the clean patches behind the noise, which steps toward them are made of here.
    """

    def check(self, params: DiffusionParams) -> None:
        super().check(params)
        for name in ("width", "height"):
            asked = getattr(params, name)
            if asked not in (None, SIZE):
                raise InvalidRequestError(
                    f"this model draws {SIZE}x{SIZE} pixels, got a {name} of {asked}; ask for {SIZE}x{SIZE}, or leave "
                    "it out",
                    param=name,
                )
        for name, reason in _UNUSED.items():
            if getattr(params, name) is not None:
                raise InvalidRequestError(reason, param=name)
        if (params.num_frames or 1) > 1:
            raise InvalidRequestError("this model draws pictures, not videos; leave it out", param="num_frames")

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        return height // PATCH, width // PATCH

    def rows(self, lane: Lane) -> Sequence[Row]:
        both = super().rows(lane)
        # At 1 the empty message would count for nothing.
        return both[:1] if lane.params.guidance == 1 else both

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        seen = self.combine(lane, *predictions) if len(predictions) == 2 else predictions[0]
        super().advance(lane, [velocity(lane.latents, seen, lane.timesteps[lane.step] / 1000)])


def velocity(noisy: Tensor, clean: Tensor, sigma: Tensor) -> Tensor:
    """The flow from the clean patches to the noise; guided ones that left the range of colours are brought back."""
    return (noisy - clean.clamp(-1, 1)) / sigma.clamp(min=LEAST_SIGMA)


class Painter(LatentDecoder):
    """Patches to pixels: nothing is learnt here."""

    modality = Modality.IMAGE

    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        pictures = pixel_shuffle(torch.stack(list(latents)).float(), PATCH)
        scaled = (pictures * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return list((scaled * 255).round().astype(np.uint8))


class DrawParts(Parts):
    """A folder with a transformer and a scheduler, and no index: which classes they are is known here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = {
            "_class_name": "Flux2KleinPipeline",
            "is_distilled": False,
            "transformer": ["diffusers", "Flux2Transformer2DModel"],
            "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        }


def draw_folder(folder: Path) -> Path:
    """Where a starter's drawing weights are: in its own folder, or in the package."""
    own = folder / "draw"
    return own if own.is_dir() else SHIPPED


def load_draw(context: LoadContext) -> Drawer:
    folder = draw_folder(context.model.folder)
    parts = DrawParts(folder)
    diffusers().utils.logging.disable_progress_bar()  # the caller has one
    pipe = parts.pipeline(diffusers().Flux2KleinPipeline, ("transformer",), ("scheduler",), (), context)
    channels = pipe.transformer.config.in_channels
    if channels != CHANNELS:
        raise CheckpointError(
            f"the transformer in {folder} draws patches of {channels} numbers, not of {CHANNELS} ({PATCH}x{PATCH} "
            "pixels); it is another model's"
        )
    return Drawer(pipe, context.device, context.dtype)


def load_paint(context: LoadContext) -> Painter:
    del context
    return Painter()
