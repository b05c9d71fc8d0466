"""VAEs of videos: decoded one by one, as a video alone fills the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from omnistage.core.types import Modality
from omnistage.engines.peak_memory import META, peak_bytes
from omnistage.models._diffusers.base import VaeDecoder, latent_channels


class VideoDecoder(VaeDecoder):
    """A VAE's decoder of videos over a diffusers pipeline; families say how latents are scaled."""

    modality = Modality.VIDEO
    ratios: ClassVar[tuple[str, str]] = ("vae_scale_factor_spatial", "vae_scale_factor_temporal")
    """The pipeline's attributes: pixels and frames for each cell of latents."""

    @abstractmethod
    def unscaled(self, latents: Tensor) -> Tensor:
        """`[1, ...]` on the device, in the denoiser's dtype, as the VAE decodes them in its own."""

    def conditions(self, latents: Tensor) -> tuple[Tensor, ...]:
        """What else the VAE's decoder takes."""
        return ()

    def latent_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        cell, frames = (int(getattr(self.pipe, ratio)) for ratio in self.ratios)
        return latent_channels(self.vae), (num_frames - 1) // frames + 1, height // cell, width // cell

    def decode_bytes(self, rows: int, width: int, height: int, num_frames: int) -> int:
        return super().decode_bytes(1, width, height, num_frames)

    def _decode_peak(self, rows: int, width: int, height: int, num_frames: int) -> int:
        shape = self.latent_shape(width, height, num_frames)
        latents = torch.empty(rows, *shape, dtype=self.vae.dtype, device=META)
        return peak_bytes(lambda: self.vae.decode(latents, *self.conditions(latents)))

    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        self.tile(width, height)
        return [self._decode(each[None].to(self.device)) for each in latents]

    def _decode(self, latents: Tensor) -> np.ndarray:
        scaled = self.unscaled(latents)
        frames = self.vae.decode(scaled, *self.conditions(scaled), return_dict=False)[0][0]
        return np.stack(self.pixels(frames.permute(1, 0, 2, 3)))
