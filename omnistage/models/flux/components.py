"""FLUX.1's three components, on diffusers' own pipelines and modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.core.errors import InvalidRequestError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base, private_api
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.checks import check_true_cfg
from omnistage.models._diffusers.loading import Parts, load_encoder_pipeline

_TEXT_MODELS = ("text_encoder", "text_encoder_2")
_TOKENIZERS = ("tokenizer", "tokenizer_2")
_STEPS, _SCHNELL_STEPS = 28, 4
_GUIDANCE, _IMAGE_GUIDANCE = 3.5, 7.0
_SCHNELL_TEXT_TOKENS = 256
_KONTEXT, _FILL = "FluxKontextPipeline", "FluxFillPipeline"


class Encoder(DiffusersEncoder):
    """A CLIP and a T5 for the text; the VAE for a picture to start from."""

    max_images = 1
    max_text_tokens = 512

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        check_true_cfg(params)

    def guided(self, params: DiffusionParams) -> bool:
        return params.true_cfg is not None and params.true_cfg > 1 and params.negative_prompt is not None

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        if not self.pipe.transformer.config.guidance_embeds and params.max_sequence_length is None:  # schnell
            params = params.merged(DiffusionParams(max_sequence_length=_SCHNELL_TEXT_TOKENS))
        return super().jobs(payload, params)

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, pooled, _ = self.encode_prompts(jobs)
        return [{"embeds": embeds[i], "pooled": pooled[i]} for i in range(len(jobs))]


class KontextEncoder(Encoder):
    """Kontext looks at the picture beside its own latents, and starts from noise alone."""

    no_strength = "which edits a picture as the prompt says"

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        if payload.images and params.width is None and params.height is None:
            return self._preferred(payload.images[0])
        return super().size(payload, params)

    def _preferred(self, pixels: np.ndarray) -> tuple[int, int]:
        """(width, height) among the sizes that Kontext has seen that has the picture's shape most nearly."""
        ratio = pixels.shape[1] / pixels.shape[0]
        _, width, height = min((abs(ratio - w / h), w, h) for w, h in private_api.kontext_resolutions())
        return width // self.multiple * self.multiple, height // self.multiple * self.multiple

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        if not payload.images:
            return {}
        pipe, (width, height) = self.pipe, self._preferred(payload.images[0])
        resized = pipe.image_processor.resize(Image.fromarray(payload.images[0]), height, width)
        scaled = pipe.image_processor.preprocess(resized, height, width).to(self.device, pipe.vae.dtype)
        config = pipe.vae.config
        latents = (pipe.vae.encode(scaled).latent_dist.mode() - config.shift_factor) * config.scaling_factor
        high, wide = latents.shape[-2:]
        ids = private_api.flux_position_ids(high // 2, wide // 2, self.device, latents.dtype)
        ids[..., 0] = 1
        return {"reference": private_api.flux_pack(latents)[0], "reference_ids": ids}


class FillEncoder(Encoder):
    """Fill looks at the picture without what the mask covers, and at the mask itself."""

    needs_image = True
    takes_mask = True

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        if params.negative_prompt is not None:
            raise InvalidRequestError("not supported by this model; omit it", param="negative_prompt")
        super().check(payload, params)
        if payload.mask is None or payload.mask.shape != payload.images[0].shape[:2]:
            raise InvalidRequestError(
                "must come with the image, in its size: white is filled; make it all white to draw a new picture",
                param="mask",
            )

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        pipe, mask = self.pipe, Image.fromarray(payload.mask) if payload.mask is not None else None
        pixels = pipe.image_processor.preprocess(Image.fromarray(payload.images[0]), height=height, width=width)
        covered = pipe.mask_processor.preprocess(mask, height=height, width=width)
        uncovered = base.distribution(pipe.vae.encode((pixels * (1 - covered)).to(self.device, pipe.vae.dtype)))
        # A cell of latents has the mask's pixels as channels.
        cells = torch.nn.functional.pixel_unshuffle(covered, pipe.vae_scale_factor)
        shared = base.distribution(pipe.vae.encode(pixels.to(self.device, pipe.vae.dtype)))
        shared |= {f"kept_{name}": tensor for name, tensor in uncovered.items()}
        return {**shared, "mask": private_api.flux_pack(cells)[0].to(self.device, pipe.vae.dtype)}


class Denoiser(DiffusersDenoiser):
    """FLUX's transformer. Latents are packed: a row of channels for each patch of 2 by 2."""

    default_steps, guidance, image_guidance = _STEPS, _GUIDANCE, _IMAGE_GUIDANCE

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        config = self.pipe.transformer.config
        return {"embeds": (512, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        schnell = not self.pipe.transformer.config.guidance_embeds
        steps = params.steps or (_SCHNELL_STEPS if schnell else self.default_steps)
        scheduler = self.scheduler(params.scheduler)
        tokens = self.tokens(condition.width, condition.height, 1)
        sigmas = None if scheduler.config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
        mu = base.calculate_shift(tokens, scheduler.config)
        timesteps = base.set_timesteps(scheduler, steps, self.device, sigmas=sigmas, mu=mu)
        high, wide = self.grid(condition.width, condition.height)
        shape = (1, self.pipe.transformer.config.in_channels // 4, high * 2, wide * 2)
        dtype = condition.positive["embeds"].dtype
        if "image_mean" in condition.shared:
            timesteps, latents, *_ = self.from_picture(condition, params, generator, scheduler, timesteps, steps)
        else:
            latents = base.noise(shape, generator, self.device, dtype)
            scheduler.set_begin_index(0)
        packed = private_api.flux_pack(latents)[0]
        context = self._positions(condition, high, wide, dtype)
        tokens = len(context["ids"])
        guidance = self._guidance(condition, params)
        return Lane(packed, scheduler, timesteps, condition, params, tokens, context={**context, "guidance": guidance})

    def _positions(
        self, condition: Condition, high: int, wide: int, dtype: torch.dtype
    ) -> dict[str, Tensor | tuple[int, ...]]:
        """Position ids of a lane's patches, and the grids that they stand for: equal grids have equal ids."""
        ids = private_api.flux_position_ids(high, wide, self.device, dtype)
        if "reference" not in condition.shared:
            return {"ids": ids, "grids": (high, wide)}
        reference_ids = condition.shared["reference_ids"]
        return {
            "reference": condition.shared["reference"].to(self.device, dtype),
            "ids": torch.cat([ids, reference_ids.to(self.device, dtype)]),
            "grids": (high, wide, *(int(last) for last in reference_ids[-1].tolist())),
        }

    def _guidance(self, condition: Condition, params: DiffusionParams) -> Tensor | None:
        """The input of a guidance-distilled transformer; None for one that takes none."""
        if not self.pipe.transformer.config.guidance_embeds:
            return None
        default = self.image_guidance if "image_mean" in condition.shared else self.guidance
        return torch.tensor(base.default_to(params.guidance, default), dtype=torch.float32, device=self.device)

    def group(self, row: Row) -> Hashable:
        # The transformer takes one set of positions for all rows, so a 64x32 picture cannot go with a 32x64 one.
        return row.lane.context["grids"], tuple(row.tensors["embeds"].shape)

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        first = rows[0].lane
        latents = base.with_references(rows)
        embeds = torch.stack([row.tensors["embeds"] for row in rows])
        inputs = {
            "hidden_states": latents,
            "timestep": torch.stack([row.timestep for row in rows]).to(latents.dtype) / 1000,
            "pooled_projections": torch.stack([row.tensors["pooled"] for row in rows]),
            "encoder_hidden_states": embeds,
            "txt_ids": torch.zeros(embeds.shape[1], 3, device=self.device, dtype=embeds.dtype),
            "img_ids": first.context["ids"],
        }
        if first.context["guidance"] is not None:
            inputs["guidance"] = torch.stack([row.lane.context["guidance"] for row in rows])
        return inputs

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        return negative + base.default_to(lane.params.true_cfg, 1.0) * (positive - negative)

    def result(self, lane: Lane) -> Tensor:
        # Unpacked, for packed ones do not tell a wide picture from a tall one.
        size = {"width": lane.condition.width, "height": lane.condition.height}
        return private_api.flux_unpack(lane.latents[None], **size, vae_scale_factor=self.pipe.vae_scale_factor)[0]


class FillDenoiser(Denoiser):
    """Fill's transformer, which takes the kept picture and the mask as further channels."""

    default_steps, image_guidance, default_strength = 50, 30.0, 1.0

    def planned_shared(self, width: int, height: int, num_frames: int) -> Tensors:
        high, wide = self.grid(width, height)
        channels = int(self.pipe.vae.config.latent_channels)
        latents = torch.zeros(channels, high * 2, wide * 2, dtype=self.dtype, device=self.device)
        mask = torch.zeros(high * wide, 4 * self.pipe.vae_scale_factor**2, dtype=self.dtype, device=self.device)
        names = ("image_mean", "image_std", "kept_image_mean", "kept_image_std")
        return {**dict.fromkeys(names, latents), "mask": mask}

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        lane = super().open(condition, params, generator)
        shared = {name: condition.shared[f"kept_{name}"] for name in ("image_mean", "image_std")}
        uncovered = self.scaled(base.sample(replace(condition, shared=shared), generator, self.device))
        parts = private_api.flux_pack(uncovered)[0], condition.shared["mask"].to(self.device)
        lane.context["kept"] = torch.cat([part.to(lane.latents.dtype) for part in parts], dim=1)
        return lane

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        inputs = dict(super().stacked(rows))
        uncovered = torch.stack([row.lane.context["kept"] for row in rows])
        inputs["hidden_states"] = torch.cat([inputs["hidden_states"], uncovered], dim=2)
        return inputs


def load_encoder(context: LoadContext) -> Encoder:
    encoder, name = {_KONTEXT: (KontextEncoder, _KONTEXT), _FILL: (FillEncoder, _FILL)}.get(
        Parts(context.model.folder).pipeline_class, (Encoder, "FluxImg2ImgPipeline")
    )
    pipe = load_encoder_pipeline(context, name, (*_TEXT_MODELS, "vae"), _TOKENIZERS)
    cell = pipe.vae_scale_factor
    return encoder(pipe, context.device, multiple=cell * 2, default_size=pipe.default_sample_size * cell)


def load_denoiser(context: LoadContext) -> Denoiser:
    fill = Parts(context.model.folder).pipeline_class == _FILL
    denoiser = (FillDenoiser if fill else Denoiser).load(context, "FluxPipeline")
    latents, cell = int(denoiser.pipe.vae.config.latent_channels), int(denoiser.pipe.vae_scale_factor)
    channels, expected = denoiser.pipe.transformer.config.in_channels, 4 * latents
    if fill:
        expected += 4 * latents + 4 * cell**2
    if channels != expected:
        raise UnsupportedModelError(
            f"the transformer in {context.model.folder} takes {channels} channels, and its pipeline gives it "
            f"{expected}; it was made for another pipeline"
        )
    return denoiser


def load_decoder(context: LoadContext) -> VaeDecoder:
    return VaeDecoder.load(context, "FluxPipeline", ())
