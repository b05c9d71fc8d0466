"""LTX-Video's three components, on diffusers' own pipelines and modules.

The same weights make a video from a prompt or go on from a picture, whose latents are then the first frame: it is never
noisy, so its patches have a timestep of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.core.errors import InvalidRequestError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder
from omnistage.models._diffusers.checks import check_frames
from omnistage.models._diffusers.loading import load_encoder_pipeline
from omnistage.models._diffusers.video import VideoDecoder

_STEPS, _GUIDANCE, _FRAMES, _FPS = 50, 3.0, 161, 25.0
_SIZE = (704, 512)
_PLANNED_FRAMES = 9


class Encoder(DiffusersEncoder):
    """A T5 for the text; the VAE for a picture to start from."""

    max_images = 1
    text_tokens = 128
    default_guidance = _GUIDANCE
    no_strength = "whose first frame is the picture"

    def planned_size(self) -> tuple[int, int, int]:
        return *_SIZE, _FRAMES

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        frames, factor = self.num_frames(params), self.pipe.vae_temporal_compression_ratio
        check_frames(frames, factor)
        if payload.images and frames == 1:
            raise InvalidRequestError(f"must be at least {factor + 1} after a picture", param="num_frames")

    def num_frames(self, params: DiffusionParams) -> int:
        return params.num_frames or _FRAMES

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        if payload.images:
            return super().size(payload, params)
        return params.width or _SIZE[0], params.height or _SIZE[1]

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, mask, *_ = self.encode_prompts(jobs, do_classifier_free_guidance=False)
        return [{"embeds": embeds[i], "mask": mask[i]} for i in range(len(jobs))]

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        if not payload.images:
            return {}
        pipe = self.pipe
        pixels = pipe.video_processor.preprocess(Image.fromarray(payload.images[0]), height=height, width=width)
        posterior = pipe.vae.encode(pixels.unsqueeze(2).to(self.device, pipe.vae.dtype)).latent_dist
        # Normalised here, for the statistics are among the VAE's weights, which the denoiser does not have.
        mean, std = (each.view(-1, 1, 1, 1).float() for each in (pipe.vae.latents_mean, pipe.vae.latents_std))
        return {"image_mean": (posterior.mean[0].float() - mean) / std, "image_std": posterior.std[0].float() / std}


class Denoiser(DiffusersDenoiser):
    """LTX's transformer. A lane's latents are `[channels, frames, h, w]` in float32."""

    default_guidance = _GUIDANCE

    def planned_size(self) -> tuple[int, int, int]:
        # Compiled blocks take any length, and few frames are soon computed.
        return *_SIZE, _PLANNED_FRAMES

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (128, int(self.pipe.transformer.config.caption_channels)), "mask": (128,)}

    def _sides(self, width: int, height: int, num_frames: int) -> tuple[int, int, int]:
        pipe = self.pipe
        cell = pipe.vae_spatial_compression_ratio
        return (num_frames - 1) // pipe.vae_temporal_compression_ratio + 1, height // cell, width // cell

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        frames, high, wide = self._sides(width, height, num_frames)
        return frames * high * wide

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        sides = self._sides(condition.width, condition.height, condition.num_frames)
        tokens = self.tokens(condition.width, condition.height, condition.num_frames)
        mu = base.calculate_shift(tokens, scheduler.config)
        timesteps = base.set_timesteps(scheduler, steps, self.device, sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        scheduler.set_begin_index(0)
        starts = "image_mean" in condition.shared
        picture = base.sample(condition, generator, self.device)[0] if starts else None
        shape = (int(self.pipe.transformer.config.in_channels), *sides)
        latents = base.noise(shape, generator, self.device, torch.float32)
        if picture is not None:
            latents[:, :1] = picture
        context = {"starts": starts, "fps": base.default_to(params.fps, _FPS)}
        return Lane(latents, scheduler, timesteps, condition, params, tokens, context=context)

    def group(self, row: Row) -> Hashable:
        # Positions, which follow the frame rate, are shared by a forward; so is the kind of timestep.
        context = row.lane.context
        return tuple(row.lane.latents.shape), context["fps"], context["starts"], tuple(row.tensors["embeds"].shape)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        first = rows[0].lane
        frames, high, wide = first.latents.shape[1:]
        embeds = torch.stack([row.tensors["embeds"] for row in rows])
        timestep = torch.stack([row.timestep for row in rows])
        if first.context["starts"]:
            noisy = torch.ones(frames * high * wide, device=timestep.device, dtype=timestep.dtype)
            noisy[: high * wide] = 0
            timestep = timestep[:, None] * noisy
        cell = float(self.pipe.vae_spatial_compression_ratio)
        predicted = self.transformer(
            hidden_states=torch.stack([row.lane.latents.flatten(1).T for row in rows]).to(embeds.dtype),
            encoder_hidden_states=embeds,
            timestep=timestep,
            encoder_attention_mask=torch.stack([row.tensors["mask"] for row in rows]),
            num_frames=frames,
            height=high,
            width=wide,
            rope_interpolation_scale=(self.pipe.vae_temporal_compression_ratio / first.context["fps"], cell, cell),
            return_dict=False,
        )[0]
        return [each.float().T.reshape(first.latents.shape) for each in predicted]

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        if not lane.context["starts"]:
            return super().advance(lane, predictions)
        picture, lane.latents = lane.latents[:, :1], lane.latents[:, 1:]
        super().advance(lane, [each[:, 1:] for each in predictions])
        lane.latents = torch.cat([picture, lane.latents], dim=1)
        return None


class Decoder(VideoDecoder):
    fps = _FPS
    ratios = ("vae_spatial_compression_ratio", "vae_temporal_compression_ratio")

    def unscaled(self, latents: Tensor) -> Tensor:
        mean, std = (each.view(1, -1, 1, 1, 1).to(latents) for each in (self.vae.latents_mean, self.vae.latents_std))
        scaled: Tensor = latents * std / self.vae.config.scaling_factor + mean
        return scaled.to(self.vae.dtype)

    def conditions(self, latents: Tensor) -> tuple[Tensor, ...]:
        """The VAEs of later versions denoise a last time; how noisy their input is, they are told: not at all."""
        return (latents.new_zeros(1),) if self.vae.config.timestep_conditioning else ()


def load_encoder(context: LoadContext) -> Encoder:
    pipe = load_encoder_pipeline(context, "LTXPipeline", ("text_encoder", "vae"), ("tokenizer",))
    return Encoder(pipe, context.device, multiple=int(pipe.vae_spatial_compression_ratio), default_size=_SIZE[1])


def load_denoiser(context: LoadContext) -> Denoiser:
    denoiser = Denoiser.load(context, "LTXPipeline")
    config = denoiser.pipe.transformer.config
    if (config.patch_size, config.patch_size_t) != (1, 1):
        raise UnsupportedModelError(
            f"the transformer in {context.model.folder} has patches of several latents; "
            "only those with patches of one are served"
        )
    return denoiser


def load_decoder(context: LoadContext) -> Decoder:
    return Decoder.load(context, "LTXPipeline", ())
