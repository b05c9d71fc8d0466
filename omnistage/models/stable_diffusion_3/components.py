"""Stable Diffusion 3's three components, on diffusers' own pipeline and modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from PIL import Image
from torch import Tensor

from omnistage.core.errors import InvalidRequestError, SizeLimitError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.loading import load_encoder_pipeline

_TEXT_MODELS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
_STEPS, _GUIDANCE = 28, 7.0


class Encoder(DiffusersEncoder):
    """Two CLIPs and a T5 for the text; the VAE for a picture to start from, or to paint into."""

    max_images = 1
    takes_mask = True
    text_tokens, max_text_tokens = 256, 512
    default_guidance = _GUIDANCE

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        if payload.mask is not None and (not payload.images or payload.mask.shape != payload.images[0].shape[:2]):
            raise InvalidRequestError("must come with an image of the same size", param="mask")
        # Positions are learnt up to a size; a picture of any shape is cut out of their square.
        limit = self.pipe.transformer.config.pos_embed_max_size * self.multiple
        width, height = self.size(payload, params)
        for name, value in (("width", width), ("height", height)):
            if value > limit:
                message = f"must be at most {limit}, got {value}; choose a smaller size"
                raise SizeLimitError(message, side=name, nearest=limit)

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        options = {"prompt_2": None, "prompt_3": None, "do_classifier_free_guidance": False}
        embeds, _, pooled, _ = self.encode_prompts(jobs, **options)
        return [{"embeds": embeds[i], "pooled": pooled[i]} for i in range(len(jobs))]

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        shared = dict(super().shared(payload, params, width, height))
        if payload.mask is not None:
            mask = self.pipe.mask_processor.preprocess(Image.fromarray(payload.mask), height=height, width=width)
            cell = self.pipe.vae_scale_factor
            mask = torch.nn.functional.interpolate(mask, size=(height // cell, width // cell))
            shared["mask"] = mask[0].to(self.device, self.pipe.vae.dtype)
        return shared


class Denoiser(DiffusersDenoiser):
    """The MMDiT."""

    default_guidance = _GUIDANCE

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        config = self.pipe.transformer.config
        # CLIP's 77 tokens and T5's.
        return {"embeds": (77 + 256, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}

    def planned_size(self) -> tuple[int, int, int]:
        side = int(self.pipe.transformer.config.sample_size * self.pipe.vae_scale_factor)
        return side, side, 1

    @property
    def patch_size(self) -> int:
        return int(self.pipe.transformer.config.patch_size)

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        tokens = self.tokens(condition.width, condition.height, 1)
        if scheduler.config.get("use_dynamic_shifting"):
            mu = base.calculate_shift(tokens, scheduler.config, max_shift=1.16)
            timesteps = base.set_timesteps(scheduler, steps, self.device, mu=mu)
        else:
            timesteps = base.set_timesteps(scheduler, steps, self.device)
        context: dict[str, Tensor] = {}
        if "image_mean" in condition.shared:
            timesteps, latents, picture, gaussian = self.from_picture(
                condition, params, generator, scheduler, timesteps, steps
            )
            if "mask" in condition.shared:
                context = {"picture": picture, "noise": gaussian, "mask": condition.shared["mask"].to(self.device)}
        else:
            scheduler.set_begin_index(0)  # else its first step waits for the device to find the timestep's index
            cell = self.pipe.vae_scale_factor
            shape = (1, self.pipe.transformer.config.in_channels, condition.height // cell, condition.width // cell)
            latents = base.noise(shape, generator, self.device, condition.positive["embeds"].dtype)
        return Lane(latents[0], scheduler, timesteps, condition, params, tokens, context=dict(context))

    def group(self, row: Row) -> Hashable:
        # Input pictures are in the latents already, so lanes with one and without share a forward.
        return tuple(row.lane.latents.shape), tuple(row.tensors["embeds"].shape)

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        return {
            "hidden_states": torch.stack([row.lane.latents for row in rows]),
            "timestep": torch.stack([row.timestep for row in rows]),
            "encoder_hidden_states": torch.stack([row.tensors["embeds"] for row in rows]),
            "pooled_projections": torch.stack([row.tensors["pooled"] for row in rows]),
        }

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
    # Of the three pipelines this one has all the processors: for text, pictures and masks.
    pipe = load_encoder_pipeline(context, "StableDiffusion3InpaintPipeline", (*_TEXT_MODELS, "vae"), _TOKENIZERS)
    config = pipe.transformer.config
    cell = pipe.vae_scale_factor
    return Encoder(pipe, context.device, multiple=cell * config.patch_size, default_size=int(config.sample_size * cell))


def load_denoiser(context: LoadContext) -> Denoiser:
    denoiser = Denoiser.load(context, "StableDiffusion3Pipeline")
    channels = denoiser.pipe.transformer.config.in_channels
    latent_channels = denoiser.pipe.vae.config.latent_channels
    if channels != latent_channels:
        raise UnsupportedModelError(
            f"the transformer in {context.model.folder} takes {channels} channels and latents have {latent_channels}; "
            "transformers for inpainting alone are not served, plain ones paint into masks as well"
        )
    return denoiser


def load_decoder(context: LoadContext) -> VaeDecoder:
    return VaeDecoder.load(context, "StableDiffusion3Pipeline")
