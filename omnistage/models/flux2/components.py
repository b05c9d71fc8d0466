"""FLUX.2's three components, on diffusers' own pipeline and modules."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.core.errors import InvalidRequestError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import Lane, Row, Tensors
from omnistage.models._diffusers import base, private_api
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.loading import Parts, load_encoder_pipeline

if TYPE_CHECKING:
    from diffusers import AutoencoderKLFlux2

_DEV = "Flux2Pipeline"
_STEPS, _DISTILLED_STEPS = 50, 4
_GUIDANCE = 4.0
_MIN_SIDE, _MAX_RATIO, _MAX_AREA = 64, 8, 1024 * 1024


class Encoder(DiffusersEncoder):
    """A language model's hidden states for the text; the VAE for pictures to refer to."""

    max_images = 10
    default_guidance = _GUIDANCE
    no_strength = "which always starts from noise"

    @property
    def unguided_row(self) -> bool:
        """Whether guidance takes a second row: klein's base is the only one that is not distilled in some way."""
        return not self.pipe.config.get("is_distilled", True)

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        if params.negative_prompt is not None and not self.unguided_row:
            raise InvalidRequestError(
                "not supported by this model, which is distilled; omit it", param="negative_prompt"
            )
        for pixels in payload.images:
            height, width = pixels.shape[:2]
            if min(width, height) < _MIN_SIDE:
                raise InvalidRequestError(
                    f"has {width}x{height} pixels; both sides must have at least {_MIN_SIDE}", param="image"
                )
            if max(width, height) > _MAX_RATIO * min(width, height):
                raise InvalidRequestError(
                    f"has {width}x{height} pixels; one side may be at most {_MAX_RATIO} times the other",
                    param="image",
                )

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        width = height = self.default_size
        if payload.images:
            width, height = self._scaled(payload.images[0])[1]
        return params.width or width, params.height or height

    def _scaled(self, pixels: np.ndarray) -> tuple[Image.Image, tuple[int, int]]:
        """A picture of at most a million pixels, and the size that it is cut to."""
        picture = Image.fromarray(pixels)
        if picture.width * picture.height > _MAX_AREA:
            picture = private_api.flux2_resize(picture, _MAX_AREA)
        return picture, (
            picture.width // self.multiple * self.multiple,
            picture.height // self.multiple * self.multiple,
        )

    def guided(self, params: DiffusionParams) -> bool:
        return super().guided(params) and self.unguided_row

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        if not payload.images:
            return {}
        pictures = []
        for pixels in payload.images:
            picture, (wide, high) = self._scaled(pixels)
            pictures.append(self.pipe.image_processor.preprocess(picture, height=high, width=wide, resize_mode="crop"))
        latents, ids = self.pipe.prepare_image_latents(
            images=pictures, batch_size=1, generator=None, device=self.device, dtype=self.pipe.vae.dtype
        )
        return {"reference": latents[0], "reference_ids": ids[0]}


class Denoiser(DiffusersDenoiser):
    """FLUX.2's transformer. Latents are packed: a row of channels for each patch of 2 by 2."""

    default_guidance = _GUIDANCE

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (512, self.pipe.transformer.config.joint_attention_dim)}

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps = params.steps or (_DISTILLED_STEPS if self.pipe.config.get("is_distilled") else _STEPS)
        scheduler = self.scheduler(params.scheduler)
        high, wide = self.grid(condition.width, condition.height)
        dtype = condition.positive["embeds"].dtype
        channels = self.pipe.transformer.config.in_channels
        latents = base.noise((1, channels, high, wide), generator, self.device, dtype)
        sigmas = None if scheduler.config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
        mu = private_api.flux2_shift(high * wide, steps)
        timesteps = base.set_timesteps(scheduler, steps, self.device, sigmas=sigmas, mu=mu)
        scheduler.set_begin_index(0)
        ids = private_api.flux2_position_ids(latents)
        # Texts are padded to one length, so both branches have the same positions.
        text = private_api.flux2_text_ids(condition.positive["embeds"])
        context: dict[str, Tensor | bytes] = {"text_ids": text.to(self.device)}
        if self.pipe.transformer.config.guidance_embeds:  # dev is told it
            guidance = base.default_to(params.guidance, _GUIDANCE)
            context["guidance"] = torch.tensor(guidance, dtype=torch.float32, device=self.device)
        if "reference" in condition.shared:
            ids = torch.cat([ids, condition.shared["reference_ids"].cpu()])
            context["reference"] = condition.shared["reference"].to(self.device, dtype)
        # One digest stands for the sizes of the picture and of all references, which rows of a forward must share.
        context["places"] = hashlib.blake2b(ids.numpy().tobytes(), digest_size=16).digest()
        context["ids"] = ids.to(self.device)
        packed = private_api.flux2_pack(latents)[0]
        return Lane(packed, scheduler, timesteps, condition, params, len(ids), context=context)

    def group(self, row: Row) -> Hashable:
        # The transformer takes one set of positions for all rows, so a 64x32 picture cannot go with a 32x64 one.
        return row.lane.context["places"], tuple(row.tensors["embeds"].shape)

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        first = rows[0].lane
        latents = base.with_references(rows)
        guidance = {}
        if "guidance" in first.context:
            guidance["guidance"] = torch.stack([row.lane.context["guidance"] for row in rows])
        return {
            **guidance,
            "hidden_states": latents.to(self.dtype),
            "timestep": torch.stack([row.timestep for row in rows]).to(latents.dtype) / 1000,
            "encoder_hidden_states": torch.stack([row.tensors["embeds"] for row in rows]),
            "txt_ids": first.context["text_ids"][None],
            "img_ids": first.context["ids"][None],
        }

    def result(self, lane: Lane) -> Tensor:
        # `[channels, high, wide]`, for packed ones do not tell a wide picture from a tall one.
        high, wide = self.grid(lane.condition.width, lane.condition.height)
        return lane.latents.T.reshape(-1, high, wide)


class Decoder(VaeDecoder):
    def unscaled(self, latents: Tensor) -> Tensor:
        mean, std = statistics(self.vae)
        return private_api.flux2_unpatchify(latents * std + mean)


def statistics(vae: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the channels, by which the transformer's latents are normalised."""
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    return mean.to(vae.dtype), std.to(vae.dtype)


def load_encoder(context: LoadContext) -> Encoder:
    name = Parts(context.model.folder).pipeline_class
    pipe = load_encoder_pipeline(context, name, ("text_encoder", "vae"), ("tokenizer",), ())
    # Hidden states are all that is read: the language model's head would only fill memory with logits.
    pipe.text_encoder = pipe.text_encoder.model
    if name == _DEV:  # its Mistral could see, for rewriting prompts
        pipe.text_encoder.vision_tower = pipe.text_encoder.multi_modal_projector = None
    cell = pipe.vae_scale_factor
    return Encoder(pipe, context.device, multiple=cell * 2, default_size=pipe.default_sample_size * cell)


def load_denoiser(context: LoadContext) -> Denoiser:
    return Denoiser.load(context, Parts(context.model.folder).pipeline_class)


def load_decoder(context: LoadContext) -> Decoder:
    return Decoder.load(context, "Flux2KleinPipeline", ())
