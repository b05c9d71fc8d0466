"""HunyuanVideo's three components, on diffusers' own pipeline and modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from omnistage.core.errors import UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder
from omnistage.models._diffusers.checks import check_frames, check_true_cfg
from omnistage.models._diffusers.loading import load_encoder_pipeline
from omnistage.models._diffusers.video import VideoDecoder

_STEPS, _GUIDANCE, _FRAMES = 50, 6.0, 129
_SIZE = (1280, 720)
_PLANNED_FRAMES = 9
_PIPELINE = "HunyuanVideoPipeline"


class Encoder(DiffusersEncoder):
    """A Llama, whose instruction is cut off again, and a CLIP."""

    text_tokens = 256

    def planned_size(self) -> tuple[int, int, int]:
        return *_SIZE, _FRAMES

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        check_true_cfg(params)
        check_frames(self.num_frames(params), self.pipe.vae_scale_factor_temporal)

    def guided(self, params: DiffusionParams) -> bool:
        return params.true_cfg is not None and params.true_cfg > 1 and params.negative_prompt is not None

    def num_frames(self, params: DiffusionParams) -> int:
        return params.num_frames or _FRAMES

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        return params.width or _SIZE[0], params.height or _SIZE[1]

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, pooled, mask = self.encode_prompts(jobs)
        return [{"embeds": embeds[i], "pooled": pooled[i], "mask": mask[i]} for i in range(len(jobs))]


class Denoiser(DiffusersDenoiser):
    """The transformer, which is told its guidance. A lane's latents are `[channels, frames, h, w]` in float32."""

    def planned_size(self) -> tuple[int, int, int]:
        # Compiled blocks take any length, and few frames are soon computed.
        return *_SIZE, _PLANNED_FRAMES

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        config = self.pipe.transformer.config
        return {"embeds": (256, config.text_embed_dim), "pooled": (config.pooled_projection_dim,), "mask": (256,)}

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        config, cell = self.pipe.transformer.config, self.pipe.vae_scale_factor_spatial
        frames = (num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1
        patches = (height // cell // config.patch_size) * (width // cell // config.patch_size)
        return int(frames // config.patch_size_t * patches)

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        timesteps = base.set_timesteps(scheduler, steps, self.device, sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        scheduler.set_begin_index(0)
        cell = self.pipe.vae_scale_factor_spatial
        frames = (condition.num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1
        shape = (self.pipe.transformer.config.in_channels, frames, condition.height // cell, condition.width // cell)
        latents = base.noise(shape, generator, self.device, torch.float32)
        guidance = (
            torch.tensor(base.default_to(params.guidance, _GUIDANCE), dtype=self.dtype, device=self.device) * 1000.0
        )
        tokens = self.tokens(condition.width, condition.height, condition.num_frames)
        return Lane(latents, scheduler, timesteps, condition, params, tokens, context={"guidance": guidance})

    def group(self, row: Row) -> Hashable:
        return tuple(row.lane.latents.shape), tuple(row.tensors["embeds"].shape)

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        return {
            "hidden_states": torch.stack([row.lane.latents for row in rows]).to(self.dtype),
            "timestep": torch.stack([row.timestep for row in rows]).float(),
            "encoder_hidden_states": torch.stack([row.tensors["embeds"] for row in rows]).to(self.dtype),
            "encoder_attention_mask": torch.stack([row.tensors["mask"] for row in rows]).to(self.dtype),
            "pooled_projections": torch.stack([row.tensors["pooled"] for row in rows]).to(self.dtype),
            "guidance": torch.stack([row.lane.context["guidance"] for row in rows]),
        }

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + base.default_to(lane.params.true_cfg, 1.0) * (positive - negative)


class Decoder(VideoDecoder):
    fps = 24.0

    def unscaled(self, latents: Tensor) -> Tensor:
        return latents.to(self.vae.dtype) / self.vae.config.scaling_factor  # type: ignore[no-any-return]


def load_encoder(context: LoadContext) -> Encoder:
    models, tokenizers = ("text_encoder", "text_encoder_2"), ("tokenizer", "tokenizer_2")
    pipe = load_encoder_pipeline(context, _PIPELINE, models, tokenizers, ("transformer", "vae"))
    cell = int(pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size)
    return Encoder(pipe, context.device, multiple=cell, default_size=_SIZE[1])


def load_denoiser(context: LoadContext) -> Denoiser:
    denoiser = Denoiser.load(context, _PIPELINE)
    kind = denoiser.pipe.transformer.config.image_condition_type
    if kind is not None:
        raise UnsupportedModelError(
            f"the transformer in {context.model.folder} is conditioned on images ({kind}), "
            "which its pipeline does not pass on; only text to video is served"
        )
    return denoiser


def load_decoder(context: LoadContext) -> Decoder:
    return Decoder.load(context, _PIPELINE, ())
