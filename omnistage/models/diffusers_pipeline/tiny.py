"""Random checkpoints of Stable Audio in diffusers' layout, for the family that runs pipelines whole.

`scale` 0 is a toy of half a million parameters, 1 has the shapes of Stable Audio Open 1.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._diffusers.tiny import TinyModel, TinyPart, TinyPipeline
from omnistage.models._tiny_common import Init, between

VARIANTS = ("stable_audio",)
_SECONDS = 512.0
"""Lengths that the projection is told lie between 0 and this."""


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    text, latents = parts.t5_width(scale), between(scale, (8, 64), 8)
    heads = between(scale, (4, 24), 4)
    transformer = parts.diffusers_model(
        "StableAudioDiTModel",
        sample_size=between(scale, (128, 1024), 8),
        in_channels=latents,
        out_channels=latents,
        num_layers=between(scale, (2, 24)),
        attention_head_dim=between(scale, (16, 64), 16),
        num_attention_heads=heads,
        num_key_value_attention_heads=heads // 2,
        cross_attention_dim=text,
        cross_attention_input_dim=text,
        global_states_input_dim=2 * text,
        time_proj_dim=between(scale, (32, 256), 32),
    )
    vae = parts.diffusers_model(
        "AutoencoderOobleck",
        encoder_hidden_size=between(scale, (8, 128), 8),
        decoder_channels=between(scale, (8, 128), 8),
        decoder_input_channels=latents,
        downsampling_ratios=[2, 4, 4, 8, 8] if scale else [2, 4, 8],
        channel_multiples=[1, 2, 4, 8, 16] if scale else [1, 2, 4],
        audio_channels=2,
        sampling_rate=44100 if scale else 8000,
    )
    projection = parts.diffusers_model(
        "StableAudioProjectionModel", text_encoder_dim=text, conditioning_dim=text, min_value=0.0, max_value=_SECONDS
    )
    # Published checkpoints have this solver's relative with noise, which needs the package torchsde.
    scheduler = diffusers().EDMDPMSolverMultistepScheduler(
        sigma_min=0.3, sigma_max=500.0, sigma_data=1.0, prediction_type="v_prediction"
    )
    return TinyPipeline(
        "StableAudioPipeline",
        {
            "text_encoder": TinyModel(parts.t5(scale), parts.t5_init),
            "transformer": TinyModel(transformer, parts.transformer_init),
            "vae": TinyModel(vae, vae_init),
            "projection_model": TinyModel(projection, parts.transformer_init),
        },
        {
            "scheduler": TinyPart("diffusers", "EDMDPMSolverMultistepScheduler", scheduler.save_pretrained),
            "tokenizer": parts.t5_tokenizer(),
        },
    )


write = parts.writer(checkpoint, VARIANTS)


def vae_init(name: str, shape: Sequence[int]) -> Init:
    """Convolutions whose weights are split into a direction and a length, and periodic activations."""
    if name.endswith(("alpha", "beta")):
        return Init(0.1)  # their logarithms
    if name.endswith("weight_g"):
        return Init(0.02, mean=0.5)
    return common.vector_init(name) if len(shape) == 1 else common.normal(shape)
