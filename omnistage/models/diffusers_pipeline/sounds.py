"""The sound in a pipeline's output: its samples, and their sample rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from omnistage.core.errors import StageError, UnsupportedModelError
from omnistage.core.types import AudioChunk
from omnistage.models.diffusers_pipeline.inspection import SOUND_FIELDS

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_PIPELINE_RATES = ("sample_rate", "audio_sample_rate")
_RATE_PARTS = ("vocoder", "vae", "audio_vae", "sound_tokenizer", "unet")
"""Parts that end in samples, in the order in which they are asked: behind a VAE of spectrograms comes a vocoder."""
_PART_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")
_MAX_CHANNELS = 2


def sample_rate_of(pipe: DiffusionPipeline) -> int:
    """Samples a second of what a pipeline generates."""
    for name in _PIPELINE_RATES:
        if isinstance(rate := getattr(pipe, name, None), int):
            return rate
    for part in _RATE_PARTS:
        config = getattr(getattr(pipe, part, None), "config", None)
        for name in _PART_RATES:
            if isinstance(rate := getattr(config, name, None), int):
                return rate
    raise UnsupportedModelError(
        f"{type(pipe).__name__} does not state the sample rate of its audio, so it is not served"
    )


def sound_of(output: object, sample_rate: int) -> AudioChunk | None:
    """The one sound in a pipeline's output; None where it has none."""
    for name in SOUND_FIELDS:
        values = getattr(output, name, None)
        if values is not None and len(values):
            return AudioChunk(_samples(values[0]), sample_rate)
    return None


def _samples(value: np.ndarray | torch.Tensor) -> np.ndarray:
    """`float32 [n]` or `[n, channels]` of `[n]` or `[channels, n]`."""
    if isinstance(value, torch.Tensor):
        value = value.float().cpu().numpy()
    samples = np.asarray(value, dtype=np.float32)
    if samples.ndim == 2 and len(samples) == 1:
        samples = samples[0]
    if samples.ndim == 1:
        return samples
    if samples.ndim != 2 or len(samples) > _MAX_CHANNELS:
        raise StageError(f"the pipeline returned samples of shape {samples.shape}, which are not a sound")
    return np.ascontiguousarray(samples.T)
