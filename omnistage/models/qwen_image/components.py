"""Qwen-Image's three components, on diffusers' own pipelines and modules."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from omnistage.core.errors import InvalidRequestError, PromptTooLongError, UnsupportedModelError
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

_STEPS, _GUIDANCE, _STRENGTH, _TEXT = 50, 4.0, 0.6, 512
_LONGEST_TEXT = 1024
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>")
_MOST_ELONGATED = 200  # Qwen2.5-VL's image processor takes nothing beyond


class Encoder(DiffusersEncoder):
    """Qwen2.5-VL for the text; the VAE for a picture to start from."""

    max_images = 1

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        if params.max_sequence_length is not None and params.max_sequence_length > _LONGEST_TEXT:
            raise InvalidRequestError(
                f"must be at most {_LONGEST_TEXT}, got {params.max_sequence_length}", param="max_sequence_length"
            )
        for name, text in (("prompt", payload.prompt), ("negative_prompt", params.negative_prompt or "")):
            for token in _PLACEHOLDERS:
                if token in text:
                    raise InvalidRequestError(f"{token} stands for a picture; leave it out of the text", param=name)

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        texts = [payload.prompt]
        if _guidance(params) > 1 and params.negative_prompt is not None:
            texts.append(params.negative_prompt)
        return [self.job(text, payload, params) for text in texts]

    def job(self, text: str, payload: DiffusionInput, params: DiffusionParams) -> EncodeJob:
        """What one text is encoded from."""
        return EncodeJob(text, options=(params.max_sequence_length or _TEXT,))

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        texts = [job.text for job in jobs]
        return _rows(*self.pipe.encode_prompt(prompt=texts, device=self.device, max_sequence_length=jobs[0].options[0]))

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        width, height = self.size(payload, params)
        shared: Tensors = {}
        if payload.images:
            shared = distribution(self.encoded_picture(payload.images[0], width, height))
        return Condition(encoded[0], encoded[1] if len(encoded) > 1 else None, shared, width, height)

    def encoded_picture(self, image: np.ndarray, width: int, height: int) -> Any:
        """What the VAE makes of a picture at this size: a video of one frame to it."""
        pixels = self.pipe.image_processor.preprocess(_pil(image), height=height, width=width)
        return self.pipe.vae.encode(pixels.unsqueeze(2).to(self.device, self.pipe.vae.dtype))


class EditEncoder(Encoder):
    """Qwen2.5-VL sees the picture with the instruction, and the denoiser sees its latents."""

    needs_image = True
    picture_area = 1024 * 1024
    """Input pictures are brought to this many pixels, whatever the size of the result."""
    seen_area = picture_area
    """As many has what the text encoder sees."""

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        if params.strength is not None:
            raise InvalidRequestError(
                "this model edits a picture rather than starting from it; leave it out", param="strength"
            )
        for image in payload.images:
            for area in (self.picture_area, self.seen_area):
                low, high = sorted(_fit(image, area))
                if low == 0 or high > _MOST_ELONGATED * low:
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

    def job(self, text: str, payload: DiffusionInput, params: DiffusionParams) -> EncodeJob:
        # An instruction is never cut, so one without end must be refused.
        most = params.max_sequence_length or _LONGEST_TEXT
        tokens = len(self.pipe.tokenizer(text)["input_ids"])
        if tokens > most:
            name = "prompt" if text == payload.prompt else "negative_prompt"
            raise PromptTooLongError(f"has {tokens} tokens, at most {most} are taken; shorten it", param=name)
        return EncodeJob(text, payload.images)

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        texts, images = [job.text for job in jobs], [self.seen(job.images[0]) for job in jobs]
        return _rows(*self.pipe.encode_prompt(prompt=texts, image=images, device=self.device))

    def seen(self, image: np.ndarray) -> Any:
        width, height = _fit(image, self.seen_area)
        return self.pipe.image_processor.resize(_pil(image), height, width)

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        width, height = self.size(payload, params)
        latents = []
        mean, std = _statistics(self.pipe.vae.config, self.device, self.pipe.vae.dtype)
        for image in payload.images:
            picture = self.encoded_picture(image, *_fit(image, self.picture_area)).latent_dist.mode()
            latents.append(((picture - mean) / std)[0])
        shared = {
            "image_latents": torch.cat([_pack(each) for each in latents]),
            "image_shapes": torch.tensor([[each.shape[-2] // 2, each.shape[-1] // 2] for each in latents]),
        }
        return Condition(encoded[0], encoded[1] if len(encoded) > 1 else None, shared, width, height)


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
            images = [self.seen(image) for image in job.images]
            encoded += _rows(*self.pipe.encode_prompt(prompt=[job.text], image=images, device=self.device))
        return encoded


class Denoiser(DiffusersDenoiser):
    """The MMDiT. A lane's latents are packed: `[patches, 4 * channels]`."""

    def check(self, params: DiffusionParams) -> None:
        super().check(params)
        own = self.pipe.scheduler
        if params.steps == 1 and params.scheduler in (None, type(own).__name__) and own.config.get("shift_terminal"):
            # The schedule is stretched between its first step and its last: one alone becomes NaN.
            raise InvalidRequestError("this model's schedule has at least 2 steps; use 2 or more", param="steps")

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        rows, columns = self._patches(width, height)
        return rows * columns

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        rows, columns = self._patches(condition.width, condition.height)
        shift = calculate_shift(rows * columns, scheduler.config)
        timesteps = set_timesteps(scheduler, steps, self.device, sigmas=np.linspace(1.0, 1 / steps, steps), mu=shift)
        shape = (1, 1, self.pipe.transformer.config.in_channels // 4, 2 * rows, 2 * columns)
        dtype = condition.positive["embeds"].dtype
        if "image_mean" in condition.shared:
            strength = _STRENGTH if params.strength is None else params.strength
            timesteps = skip_to_strength(scheduler, timesteps, steps, strength)
            mean, std = _statistics(self.pipe.vae.config, self.device, dtype)
            start = (sample(condition, generator, self.device) - mean) * (1.0 / std)
            drawn = noise(shape, generator, self.device, dtype)
            latents = scheduler.scale_noise(start.transpose(1, 2), timesteps[:1], drawn)
        else:
            scheduler.set_begin_index(0)
            latents = noise(shape, generator, self.device, dtype)
        shapes = [(1, rows, columns)]
        context: dict[str, Any] = {"shapes": shapes, "images": []}
        tokens = rows * columns
        if "image_latents" in condition.shared:
            images = condition.shared["image_latents"].to(self.device, dtype)
            shapes += [(1, *shape) for shape in condition.shared["image_shapes"].tolist()]
            context["images"] = [images]
            tokens += len(images)
        return Lane(_pack(latents[0]), scheduler, timesteps, condition, params, tokens, context=context)

    def group(self, row: Row) -> Hashable:
        """Positions in the pictures are shared by a forward; texts of any length are padded and masked."""
        return tuple(row.lane.context["shapes"])

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        latents = torch.stack([torch.cat([row.lane.latents, *row.lane.context["images"]]) for row in rows])
        texts = [row.tensors["embeds"] for row in rows]
        lengths = [len(text) for text in texts]
        mask = None
        if len(set(lengths)) > 1:
            places = torch.arange(max(lengths), device=latents.device)
            mask = places[None] < torch.tensor(lengths, device=latents.device)[:, None]
        predicted = self.transformer(
            hidden_states=latents,
            timestep=torch.stack([row.timestep for row in rows]).to(latents.dtype) / 1000,
            encoder_hidden_states=pad_sequence(texts, batch_first=True),
            encoder_hidden_states_mask=mask,
            img_shapes=[row.lane.context["shapes"] for row in rows],
            return_dict=False,
        )[0]
        return [each[: len(row.lane.latents)] for each, row in zip(predicted, rows, strict=True)]

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        """Guidance turns each patch's prediction and leaves its length as the prompt alone would have it."""
        combined = negative + _guidance(lane.params) * (positive - negative)
        wanted, length = (each.norm(dim=-1, keepdim=True) for each in (positive, combined))
        rescaled: Tensor = combined * (wanted / length)
        return rescaled

    def result(self, lane: Lane) -> Tensor:
        """Unpacked, `[channels, 1, h, w]`: packed ones of different pictures can look alike."""
        _, rows, columns = lane.context["shapes"][0]
        cells = lane.latents.view(rows, columns, -1, 2, 2).permute(2, 0, 3, 1, 4)
        return cells.reshape(-1, 1, 2 * rows, 2 * columns)

    def _patches(self, width: int, height: int) -> tuple[int, int]:
        cell = 2 * self.pipe.vae_scale_factor
        return height // cell, width // cell


class Decoder(VaeDecoder):
    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        self.tile(width, height)
        mean, std = _statistics(self.vae.config, self.device, self.vae.dtype)
        scaled = torch.stack(list(latents)).to(self.device, self.vae.dtype) / (1.0 / std) + mean
        return self.pixels(self.vae.decode(scaled, return_dict=False)[0][:, :, 0])


def load_encoder(context: LoadContext) -> Encoder:
    parts = Parts(context.model.folder)
    encoder, pipeline = {
        "QwenImageEditPipeline": (EditEncoder, "QwenImageEditPipeline"),
        "QwenImageEditPlusPipeline": (EditPlusEncoder, "QwenImageEditPlusPipeline"),
    }.get(parts.pipeline_class, (Encoder, "QwenImageImg2ImgPipeline"))
    cls = getattr(diffusers(), pipeline)
    pipe = parts.pipeline(cls, ("text_encoder", "vae"), ("tokenizer", "processor"), ("transformer",), context)
    pipe.text_encoder.lm_head = nn.Identity()  # only hidden states are asked for
    if encoder is Encoder:
        pipe.text_encoder.model.visual = None
    pipe.vae.decoder = nn.Identity()  # the decoding stage's; None would not do, the VAE counts its convolutions
    multiple = 2 * pipe.vae_scale_factor
    return encoder(
        pipe, context.device, multiple=multiple, default_size=pipe.default_sample_size * pipe.vae_scale_factor
    )


def load_denoiser(context: LoadContext) -> Denoiser:
    parts = Parts(context.model.folder)
    cls = diffusers().QwenImagePipeline
    pipe = parts.pipeline(cls, ("transformer",), ("scheduler",), ("vae",), context)
    if pipe.transformer.config.guidance_embeds:
        # diffusers has the switch and no module behind it: its own pipeline cannot run such a checkpoint.
        raise UnsupportedModelError(f"{parts.folder} is guidance-distilled, which diffusers' transformer cannot run")
    return Denoiser(pipe, context.device, context.dtype)


def load_decoder(context: LoadContext) -> Decoder:
    parts = Parts(context.model.folder)
    pipe = parts.pipeline(diffusers().QwenImagePipeline, ("vae",), (), ("transformer",), context)
    pipe.vae.encoder = nn.Identity()
    return Decoder.load(context, pipe)


def _guidance(params: DiffusionParams) -> float:
    """diffusers calls it true_cfg_scale; both names of ours mean it."""
    for value in (params.true_cfg, params.guidance):
        if value is not None:
            return value
    return _GUIDANCE


def _rows(embeds: Tensor, mask: Tensor | None) -> list[Tensors]:
    """Each text without its padding."""
    return [{"embeds": each if mask is None else each[mask[i].bool()]} for i, each in enumerate(embeds)]


def _fit(image: np.ndarray, area: int) -> tuple[int, int]:
    """(width, height) of about this area in the picture's shape, as diffusers rounds them."""
    ratio = image.shape[1] / image.shape[0]
    width = math.sqrt(area * ratio)
    return round(width / 32) * 32, round(width / ratio / 32) * 32


def _statistics(config: Any, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The latents' mean and deviation by channel, for `[1, channels, 1, h, w]`."""
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(device, dtype)
        for values in (config.latents_mean, config.latents_std)
    )
    return mean, std


def _pack(latents: Tensor) -> Tensor:
    """`[patches, 4 * channels]` of `[channels, 1, h, w]` or `[1, channels, h, w]`: each patch is 2x2 cells."""
    height, width = latents.shape[-2:]
    cells = latents.reshape(-1, height // 2, 2, width // 2, 2).permute(1, 3, 0, 2, 4)
    return cells.reshape((height // 2) * (width // 2), -1)


def _pil(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)
