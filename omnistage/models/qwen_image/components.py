"""Qwen-Image's three components, on diffusers' own pipelines and modules."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import pad

from omnistage.core.errors import InvalidRequestError, PromptTooLongError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.loading import Parts, load_encoder_pipeline

if TYPE_CHECKING:
    from diffusers.models.autoencoders.vae import AutoencoderKLOutput

_STEPS, _GUIDANCE = 50, 4.0
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>")
_MAX_RATIO = 200  # Qwen2.5-VL's image processor takes nothing beyond


class Encoder(DiffusersEncoder):
    """Qwen2.5-VL for the text; the VAE for a picture to start from."""

    max_images = 1
    max_text_tokens = 1024

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        for name, text in (("prompt", payload.prompt), ("negative_prompt", params.negative_prompt or "")):
            for token in _PLACEHOLDERS:
                if token in text:
                    raise InvalidRequestError(
                        f"{token} is a placeholder of pictures; leave it out of the text", param=name
                    )

    def guided(self, params: DiffusionParams) -> bool:
        return _guidance(params) > 1 and params.negative_prompt is not None

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, mask = self.encode_prompts(jobs)
        return _rows(embeds, mask)

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        return base.distribution(self.encoded_picture(payload.images[0], width, height)) if payload.images else {}

    def encoded_picture(self, image: np.ndarray, width: int, height: int) -> AutoencoderKLOutput:
        """What the VAE makes of a picture at this size: a video of one frame to it."""
        pixels = self.pipe.image_processor.preprocess(Image.fromarray(image), height=height, width=width)
        return self.pipe.vae.encode(pixels.unsqueeze(2).to(self.device, self.pipe.vae.dtype))


class EditEncoder(Encoder):
    """Qwen2.5-VL sees the picture with the instruction, and the denoiser sees its latents."""

    needs_image = True
    no_strength = "which edits a picture"
    picture_area = 1024 * 1024
    """Input pictures are brought to this many pixels, whatever the size of the result."""
    seen_area = picture_area
    """The number of pixels that the text encoder sees."""

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        for image in payload.images:
            for area in (self.picture_area, self.seen_area):
                low, high = sorted(_fit(image, area))
                if low == 0 or high > _MAX_RATIO * low:
                    raise InvalidRequestError(
                        f"{image.shape[1]}x{image.shape[0]} pixels are too elongated for this model; crop the picture",
                        param="image",
                    )

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        width, height = _fit(self.guiding(payload.images), self.picture_area)
        width, height = params.width or width, params.height or height
        return width // self.multiple * self.multiple, height // self.multiple * self.multiple

    def guiding(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """The picture whose shape the result has."""
        return images[0]

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        jobs = super().jobs(payload, params)
        # An instruction is never truncated, so a long one must be refused.
        limit = params.max_sequence_length or self.max_text_tokens
        for name, job in zip(("prompt", "negative_prompt"), jobs, strict=False):
            tokens = len(self.pipe.tokenizer(job.text)["input_ids"])
            if tokens > limit:
                raise PromptTooLongError(f"has {tokens} tokens, at most {limit} are taken; shorten it", param=name)
        return [EncodeJob(job.text, payload.images) for job in jobs]

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        texts, images = [job.text for job in jobs], [self.resize_input(job.images[0]) for job in jobs]
        return _rows(*self.pipe.encode_prompt(prompt=texts, image=images, device=self.device))

    def resize_input(self, image: np.ndarray) -> Image.Image:
        width, height = _fit(image, self.seen_area)
        resized: Image.Image = self.pipe.image_processor.resize(Image.fromarray(image), height, width)
        return resized

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        latents = []
        for image in payload.images:
            picture = self.encoded_picture(image, *_fit(image, self.picture_area)).latent_dist.mode()
            mean, std = base.latent_statistics(self.pipe.vae.config, picture)
            latents.append(((picture - mean) / std)[0])
        return {
            "image_latents": torch.cat([_pack(each) for each in latents]),
            "image_shapes": torch.tensor([[each.shape[-2] // 2, each.shape[-1] // 2] for each in latents]),
        }


class EditPlusEncoder(EditEncoder):
    """The same with several pictures, which the text encoder sees smaller."""

    max_images = 4
    seen_area = 384 * 384

    def guiding(self, images: Sequence[np.ndarray]) -> np.ndarray:
        return images[-1]

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        # The pipeline numbers the pictures of one text; it takes no second one with pictures of its own.
        encoded: list[Tensors] = []
        for job in jobs:
            images = [self.resize_input(image) for image in job.images]
            encoded += _rows(*self.pipe.encode_prompt(prompt=[job.text], image=images, device=self.device))
        return encoded


class Denoiser(DiffusersDenoiser):
    """The MMDiT. A lane's latents are packed: `[patches, 4 * channels]`."""

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (1024, self.pipe.transformer.config.joint_attention_dim)}

    def check(self, params: DiffusionParams) -> None:
        super().check(params)
        stock = self.pipe.scheduler
        unchanged = params.scheduler in (None, type(stock).__name__)
        if params.steps == 1 and unchanged and stock.config.get("shift_terminal"):
            # The schedule is stretched between its first step and its last: one alone becomes NaN.
            raise InvalidRequestError("this model's schedule has at least 2 steps; use 2 or more", param="steps")

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        rows, columns = self.grid(condition.width, condition.height)
        shift = base.calculate_shift(rows * columns, scheduler.config)
        timesteps = base.set_timesteps(
            scheduler, steps, self.device, sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift
        )
        shape = (1, 1, self.pipe.transformer.config.in_channels // 4, 2 * rows, 2 * columns)
        dtype = condition.positive["embeds"].dtype
        if "image_mean" in condition.shared:
            timesteps, latents, *_ = self.from_picture(condition, params, generator, scheduler, timesteps, steps)
        else:
            scheduler.set_begin_index(0)
            latents = base.noise(shape, generator, self.device, dtype)
        shapes = [(1, rows, columns)]
        context: dict[str, list[tuple[int, int, int]] | list[Tensor]] = {"shapes": shapes, "images": []}
        tokens = rows * columns
        if "image_latents" in condition.shared:
            images = condition.shared["image_latents"].to(self.device, dtype)
            shapes += [(1, *shape) for shape in condition.shared["image_shapes"].tolist()]
            context["images"] = [images]
            tokens += len(images)
        return Lane(_pack(latents[0]), scheduler, timesteps, condition, params, tokens, context=context)

    def scaled(self, latents: Tensor) -> Tensor:
        mean, std = base.latent_statistics(self.pipe.vae.config, latents)
        return ((latents - mean) * (1.0 / std)).transpose(1, 2)

    def group(self, row: Row) -> Hashable:
        """Positions in the pictures are shared by a forward; texts of any length are padded and masked."""
        return tuple(row.lane.context["shapes"])

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        latents = torch.stack([torch.cat([row.lane.latents, *row.lane.context["images"]]) for row in rows])
        texts = [row.tensors["embeds"] for row in rows]
        lengths = [len(text) for text in texts]
        longest = -(-max(lengths) // self.text_multiple) * self.text_multiple
        mask = None
        if set(lengths) != {longest}:
            places = torch.arange(longest, device=latents.device)
            mask = places[None] < torch.tensor(lengths, device=latents.device)[:, None]
        predicted = self.transformer(
            hidden_states=latents,
            timestep=torch.stack([row.timestep for row in rows]).to(latents.dtype) / 1000,
            encoder_hidden_states=torch.stack([pad(text, (0, 0, 0, longest - len(text))) for text in texts]),
            encoder_hidden_states_mask=mask,
            img_shapes=[row.lane.context["shapes"] for row in rows],
            return_dict=False,
        )[0]
        return [each[: len(row.lane.latents)] for each, row in zip(predicted, rows, strict=True)]

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        """Guidance turns each patch's prediction and leaves its length as the prompt alone would have it."""
        combined = negative + _guidance(lane.params) * (positive - negative)
        target, length = (each.norm(dim=-1, keepdim=True) for each in (positive, combined))
        rescaled: Tensor = combined * (target / length)
        return rescaled

    def result(self, lane: Lane) -> Tensor:
        """Unpacked, `[channels, 1, h, w]`: packed ones of different pictures can look alike."""
        _, rows, columns = lane.context["shapes"][0]
        cells = lane.latents.view(rows, columns, -1, 2, 2).permute(2, 0, 3, 1, 4)
        return cells.reshape(-1, 1, 2 * rows, 2 * columns)


class Decoder(VaeDecoder):
    def unscaled(self, latents: Tensor) -> Tensor:
        mean, std = base.latent_statistics(self.vae.config, latents)
        return latents / (1.0 / std) + mean

    def pixels(self, images: Tensor) -> list[np.ndarray]:
        return super().pixels(images[:, :, 0])


def load_encoder(context: LoadContext) -> Encoder:
    encoder, name = {
        "QwenImageEditPipeline": (EditEncoder, "QwenImageEditPipeline"),
        "QwenImageEditPlusPipeline": (EditPlusEncoder, "QwenImageEditPlusPipeline"),
    }.get(Parts(context.model.folder).pipeline_class, (Encoder, "QwenImageImg2ImgPipeline"))
    pipe = load_encoder_pipeline(context, name, ("text_encoder", "vae"), ("tokenizer", "processor"))
    pipe.text_encoder.lm_head = nn.Identity()  # only hidden states are asked for
    if encoder is Encoder:
        pipe.text_encoder.model.visual = None
    cell = pipe.vae_scale_factor
    return encoder(pipe, context.device, multiple=2 * cell, default_size=pipe.default_sample_size * cell)


def load_denoiser(context: LoadContext) -> Denoiser:
    denoiser = Denoiser.load(context, "QwenImagePipeline")
    if denoiser.pipe.transformer.config.guidance_embeds:
        # diffusers has the switch and no module behind it: its own pipeline cannot run such a checkpoint.
        folder = context.model.folder
        raise UnsupportedModelError(f"{folder} is guidance-distilled, which diffusers' transformer cannot run")
    return denoiser


def load_decoder(context: LoadContext) -> Decoder:
    return Decoder.load(context, "QwenImagePipeline")


def _guidance(params: DiffusionParams) -> float:
    """diffusers calls it true_cfg_scale; both names of ours mean it."""
    for value in (params.true_cfg, params.guidance):
        if value is not None:
            return value
    return _GUIDANCE


def _rows(embeds: Sequence[Tensor], mask: Sequence[Tensor] | None) -> list[Tensors]:
    """Each text without its padding."""
    return [{"embeds": each if mask is None else each[mask[i].bool()]} for i, each in enumerate(embeds)]


def _fit(image: np.ndarray, area: int) -> tuple[int, int]:
    """(width, height) of about this area in the picture's shape, as diffusers rounds them."""
    ratio = image.shape[1] / image.shape[0]
    width = math.sqrt(area * ratio)
    return round(width / 32) * 32, round(width / ratio / 32) * 32


def _pack(latents: Tensor) -> Tensor:
    """`[patches, 4 * channels]` of `[channels, 1, h, w]` or `[1, channels, h, w]`: each patch is 2x2 cells."""
    height, width = latents.shape[-2:]
    cells = latents.reshape(-1, height // 2, 2, width // 2, 2).permute(1, 3, 0, 2, 4)
    return cells.reshape((height // 2) * (width // 2), -1)
