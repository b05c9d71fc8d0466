"""Stable Diffusion 3's three components, on diffusers' own pipeline and modules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from omnistage.core.errors import InvalidRequestError, LimitExceededError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers.base import (
    DiffusersDenoiser,
    DiffusersEncoder,
    VaeDecoder,
    calculate_shift,
    distribution,
    noise,
    sample,
    set_timesteps,
    skip_to_strength,
)
from omnistage.models._diffusers.loading import Parts, diffusers

_TEXT_MODELS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
_STEPS, _GUIDANCE, _STRENGTH = 28, 7.0, 0.6
_TEXT_TOKENS, _MAX_TEXT_TOKENS = 256, 512


class Encoder(DiffusersEncoder):
    """Two CLIPs and a T5 for the text; the VAE for a picture to start from, or to paint into."""

    max_images = 1
    takes_mask = True

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        if params.max_sequence_length is not None and params.max_sequence_length > _MAX_TEXT_TOKENS:
            raise LimitExceededError(
                f"must be at most {_MAX_TEXT_TOKENS}, got {params.max_sequence_length}", param="max_sequence_length"
            )
        if payload.mask is not None and (not payload.images or payload.mask.shape != payload.images[0].shape[:2]):
            raise InvalidRequestError("must come with an image of the same size", param="mask")
        # Positions are learnt up to a size; a picture of any shape is cut out of their square.
        most = self.pipe.transformer.config.pos_embed_max_size * self.multiple
        width, height = self.size(payload, params)
        for name, value in (("width", width), ("height", height)):
            if value > most:
                raise LimitExceededError(f"must be at most {most}, got {value}; ask for a smaller size", param=name)

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        options = (params.max_sequence_length or _TEXT_TOKENS,)
        jobs = [EncodeJob(payload.prompt, options=options)]
        if _guidance(params) > 1:
            jobs.append(EncodeJob(params.negative_prompt or "", options=options))
        return jobs

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, _, pooled, _ = self.pipe.encode_prompt(
            prompt=[job.text for job in jobs],
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=jobs[0].options[0],
        )
        return [{"embeds": embeds[i], "pooled": pooled[i]} for i in range(len(jobs))]

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        width, height = self.size(payload, params)
        shared: dict[str, Tensor] = {}
        if payload.images:
            picture = Image.fromarray(payload.images[0])
            pixels = self.pipe.image_processor.preprocess(picture, height=height, width=width)
            shared |= distribution(self.pipe.vae.encode(pixels.to(self.device, self.pipe.vae.dtype)))
        if payload.mask is not None:
            mask = self.pipe.mask_processor.preprocess(Image.fromarray(payload.mask), height=height, width=width)
            cell = self.pipe.vae_scale_factor
            mask = torch.nn.functional.interpolate(mask, size=(height // cell, width // cell))
            shared["mask"] = mask[0].to(self.device, encoded[0]["embeds"].dtype)
        return Condition(encoded[0], encoded[1] if len(encoded) > 1 else None, shared, width, height)


class Denoiser(DiffusersDenoiser):
    """The MMDiT."""

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        cell = self.pipe.vae_scale_factor * self.pipe.transformer.config.patch_size
        return int((height // cell) * (width // cell))

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        tokens = self.tokens(condition.width, condition.height, 1)
        more: dict[str, Any] = {}
        if scheduler.config.get("use_dynamic_shifting"):
            more["mu"] = calculate_shift(tokens, scheduler.config, max_shift=1.16)
        timesteps = set_timesteps(scheduler, steps, self.device, **more)
        context: dict[str, Tensor] = {}
        if "image_mean" in condition.shared:
            strength = _STRENGTH if params.strength is None else params.strength
            timesteps = skip_to_strength(scheduler, timesteps, steps, strength)
            config = self.pipe.vae.config
            picture = (sample(condition, generator, self.device) - config.shift_factor) * config.scaling_factor
            drawn = noise(picture.shape, generator, self.device, picture.dtype)
            latents = scheduler.scale_noise(picture, timesteps[:1], drawn)[0]
            if "mask" in condition.shared:
                context = {"picture": picture, "noise": drawn, "mask": condition.shared["mask"].to(self.device)}
        else:
            cell = self.pipe.vae_scale_factor
            shape = (1, self.pipe.transformer.config.in_channels, condition.height // cell, condition.width // cell)
            latents = noise(shape, generator, self.device, condition.positive["embeds"].dtype)[0]
        return Lane(latents, scheduler, timesteps, condition, params, tokens, context=dict(context))

    def group(self, row: Row) -> Hashable:
        # Input pictures are in the latents already, so lanes with one and without share a forward.
        return tuple(row.lane.latents.shape), tuple(row.tensors["embeds"].shape)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        return list(
            self.transformer(
                hidden_states=torch.stack([row.lane.latents for row in rows]),
                timestep=torch.stack([row.timestep for row in rows]),
                encoder_hidden_states=torch.stack([row.tensors["embeds"] for row in rows]),
                pooled_projections=torch.stack([row.tensors["pooled"] for row in rows]),
                return_dict=False,
            )[0]
        )

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + _guidance(lane.params) * (positive - negative)

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        super().advance(lane, predictions)
        if "mask" not in lane.context:
            return
        # What is not to be painted anew is the picture, as noisy as the next step expects it.
        picture, mask = lane.context["picture"], lane.context["mask"]
        if not lane.done:
            following = lane.timesteps[lane.step : lane.step + 1]
            picture = lane.scheduler.scale_noise(picture, following, lane.context["noise"])
        lane.latents = ((1 - mask) * picture[0] + mask * lane.latents).to(lane.latents.dtype)


def load_encoder(context: LoadContext) -> Encoder:
    parts = Parts(context.model.folder)
    # Of the three pipelines this one has all the processors: for text, pictures and masks.
    cls = diffusers().StableDiffusion3InpaintPipeline
    pipe = parts.pipeline(cls, (*_TEXT_MODELS, "vae"), _TOKENIZERS, ("transformer",), context)
    pipe.vae.decoder = None  # the decoding stage's
    config = pipe.transformer.config
    cell = pipe.vae_scale_factor
    return Encoder(pipe, context.device, multiple=cell * config.patch_size, default_size=int(config.sample_size * cell))


def load_denoiser(context: LoadContext) -> Denoiser:
    parts = Parts(context.model.folder)
    cls = diffusers().StableDiffusion3Pipeline
    pipe = parts.pipeline(cls, ("transformer",), ("scheduler",), ("vae",), context)
    taken, given = pipe.transformer.config.in_channels, pipe.vae.config.latent_channels
    if taken != given:
        raise UnsupportedModelError(
            f"the transformer in {context.model.folder} takes {taken} channels and latents have {given}; transformers "
            "made for inpainting alone are not served, plain ones paint into masks as well"
        )
    return Denoiser(pipe, context.device, context.dtype)


def load_decoder(context: LoadContext) -> VaeDecoder:
    parts = Parts(context.model.folder)
    pipe = parts.pipeline(diffusers().StableDiffusion3Pipeline, ("vae",), (), ("transformer",), context)
    pipe.vae.encoder = None
    return VaeDecoder.load(context, pipe)


def _guidance(params: DiffusionParams) -> float:
    return _GUIDANCE if params.guidance is None else params.guidance
