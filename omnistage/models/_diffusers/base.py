"""Pieces that most families' components are made of."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from omnistage.config.schema import DiffusionStageConfig
from omnistage.core.errors import (
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    UnsupportedModalityError,
)
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput, Modality
from omnistage.engines.diffusion.component import Denoiser, EncodeJob, LatentDecoder, PromptEncoder, Row, Tensors
from omnistage.engines.diffusion.convergence import check_early_stop
from omnistage.engines.peak_memory import META, peak_bytes
from omnistage.models._diffusers.checks import check_sides
from omnistage.models._diffusers.loading import Parts
from omnistage.models._diffusers.schedules import other_scheduler

if TYPE_CHECKING:
    from diffusers import ConfigMixin, DiffusionPipeline, SchedulerMixin
    from diffusers.models.autoencoders.vae import AutoencoderKLOutput

_STRENGTH = 0.6
"""How far an input picture is left where a request does not say: the default of diffusers' pipelines."""


class DiffusersEncoder(PromptEncoder):
    """An encoder over a diffusers pipeline that holds the text encoders (and the VAE's encoder)."""

    max_images: int = 0
    needs_image: bool = False
    takes_mask: bool = False
    takes_control: bool = False
    """It has a ControlNet."""
    text_tokens: ClassVar[int] = 512
    """`max_sequence_length` where a request does not say."""
    max_text_tokens: ClassVar[int | None] = None
    """The largest `max_sequence_length`; None: any."""
    default_guidance: ClassVar[float] = 0.0
    """Where a request does not say; at most 1 is none."""
    no_strength: ClassVar[str | None] = None
    """Why a request may set no `strength`; None: it may."""

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, *, multiple: int, default_size: int) -> None:
        self.pipe = pipe
        self.device = device
        self.multiple = multiple
        self.default_size = default_size

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        parts = self.pipe.components.items()
        return tuple(part for name, part in parts if isinstance(part, nn.Module) and not name.startswith("transformer"))

    def planned_size(self) -> tuple[int, int, int]:
        return self.default_size, self.default_size, 1

    def encode_bytes(self, rows: int) -> int:
        parts = self.pipe.components.items()
        texts = [part for name, part in parts if name.startswith("text_encoder") and part is not None]
        peaks = [text_bytes(part, rows, self.text_tokens) for part in texts]
        return max([*peaks, self._picture_bytes() if self.max_images else 0])

    def _picture_bytes(self) -> int:
        """Peak of the VAE's encoder over an input picture."""
        width, height, _ = self.planned_size()
        vae = self.pipe.vae
        shape = (1, 3, 1, height, width) if takes_frames(vae) else (1, 3, height, width)
        pixels = torch.empty(shape, dtype=vae.dtype, device=META)
        return peak_bytes(lambda: vae.encode(pixels))

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        check_sides(params, self.multiple)
        if len(payload.images) > self.max_images:
            raise UnsupportedModalityError(
                f"this model takes {self.max_images or 'no'} images, got {len(payload.images)}", param="image"
            )
        if self.needs_image and not payload.images:
            raise InvalidRequestError("is missing; this model edits an image, so send one", param="image")
        if payload.mask is not None and not self.takes_mask:
            raise InvalidRequestError("not supported by this model; omit it", param="mask")
        if params.strength is not None and not payload.images:
            raise InvalidRequestError("applies to an input image only; send one, or omit it", param="strength")
        length, limit = params.max_sequence_length, self.max_text_tokens
        if length is not None and limit is not None and length > limit:
            raise LimitExceededError(f"must be at most {limit}, got {length}", param="max_sequence_length")
        self._refuse_unused(payload, params)
        if params.strength is not None and self.no_strength is not None:
            raise InvalidRequestError(f"not supported by this model, {self.no_strength}; omit it", param="strength")

    def _refuse_unused(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        """Refuse parameters that would have no effect."""
        true_cfg, video = self._takes("true_cfg_scale"), self._takes("num_frames")
        if params.control_scale is not None and not self.takes_control:
            raise InvalidRequestError(
                "not supported by this model, which has no ControlNet; omit it", param="control_scale"
            )
        if params.true_cfg is not None and not true_cfg:
            raise InvalidRequestError("not supported by this model; use guidance instead", param="true_cfg")
        if not video and (params.num_frames or 1) > 1:
            raise InvalidRequestError(
                "this model draws pictures, not videos; omit it, or set n for several", param="num_frames"
            )
        if not video and params.fps is not None:
            raise InvalidRequestError("this model draws pictures, not videos; omit it", param="fps")
        if params.seconds is not None:
            raise InvalidRequestError("this model generates no sound; omit it", param="seconds")
        # Families with both scales check themselves which of them the negative prompt needs.
        off = params.guidance is not None and not true_cfg and len(self.jobs(payload, params)) < 2
        if params.negative_prompt and off:
            raise InvalidRequestError(
                f"has no effect at guidance {params.guidance:g}; raise guidance, or omit it",
                param="negative_prompt",
            )

    def _takes(self, argument: str) -> bool:
        """Whether diffusers' own pipeline has this argument."""
        return argument in inspect.signature(type(self.pipe).__call__).parameters

    def guided(self, params: DiffusionParams) -> bool:
        """Whether a second text guides away from what is drawn."""
        return default_to(params.guidance, self.default_guidance) > 1

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        texts = [payload.prompt, params.negative_prompt or ""][: 2 if self.guided(params) else 1]
        return [EncodeJob(text, options=(params.max_sequence_length or self.text_tokens,)) for text in texts]

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        return [{"embeds": row} for row in self.encode_prompts(jobs)[0]]

    def encode_prompts(self, jobs: Sequence[EncodeJob], **options: object) -> tuple[Sequence[Tensor], ...]:
        """What the pipeline's `encode_prompt` gives for all jobs at once."""
        texts, length = [job.text for job in jobs], jobs[0].options[0]
        encoded: tuple[Sequence[Tensor], ...] = self.pipe.encode_prompt(
            prompt=texts, device=self.device, max_sequence_length=length, **options
        )
        return encoded

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        width, height = self.size(payload, params)
        shared = self.shared(payload, params, width, height)
        negative = encoded[1] if len(encoded) > 1 else None
        return Condition(encoded[0], negative, shared, width, height, self.num_frames(params))

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        """What the denoiser needs of the input pictures: here the VAE's posterior over the one to start from."""
        if not payload.images:
            return {}
        pixels = self.pipe.image_processor.preprocess(Image.fromarray(payload.images[0]), height=height, width=width)
        return distribution(self.pipe.vae.encode(pixels.to(self.device, self.pipe.vae.dtype)))

    def num_frames(self, params: DiffusionParams) -> int:
        return 1

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        """(width, height): as asked, else as the input picture's, else the model's default."""
        if payload.images and params.width is None and params.height is None:
            height, width = payload.images[0].shape[:2]
            return (max(n // self.multiple, 1) * self.multiple for n in (width, height))  # type: ignore[return-value]
        return params.width or self.default_size, params.height or self.default_size


class DiffusersDenoiser(Denoiser):
    """A denoiser over a diffusers pipeline that holds the transformer, the scheduler and a stand-in of the VAE."""

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}
    """Of parts that have another than the stage's."""
    network: ClassVar[str] = "transformer"
    """What the pipeline calls it."""
    default_strength: ClassVar[float] = _STRENGTH

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, dtype: torch.dtype) -> None:
        self.pipe = pipe
        self.transformer = pipe.components[self.network]
        self.device = device
        self.dtype = dtype

    @classmethod
    def load(cls, context: LoadContext, pipeline: str, models: Collection[str] = ("transformer",)) -> Self:
        """The denoiser of a checkpoint; `pipeline` is a class of diffusers, `models` its transformers."""
        parts = Parts(context.model.folder)
        pipe = parts.pipeline(context, pipeline, models, ("scheduler",), ("vae",), dtypes=cls.dtypes)
        return cls(pipe, context.device, context.dtype)

    @property
    def adapter_pipeline(self) -> Any:
        return type(self.pipe)

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of a prompt's tensors, as the encoder gives them at its usual length; none: unknown."""
        return {}

    def planned_condition(self, width: int, height: int, num_frames: int) -> Condition | None:
        tensors = {n: torch.zeros(s, dtype=self.dtype, device=self.device) for n, s in self.text_shapes().items()}
        if not tensors:
            return None
        return Condition(tensors, None, self.planned_shared(width, height, num_frames), width, height, num_frames)

    def planned_shared(self, width: int, height: int, num_frames: int) -> Tensors:
        """What else the condition must hold."""
        return {}

    def scheduler(self, name: str | None) -> SchedulerMixin:
        """A scheduler for one lane: the checkpoint's, or another class that can take its place."""
        return other_scheduler(self.pipe.scheduler, name) or copy.deepcopy(self.pipe.scheduler)

    def check(self, params: DiffusionParams) -> None:
        scheduler = self.scheduler(params.scheduler)
        if params.early_stop is not None:
            check_early_stop(scheduler)

    @property
    def patch_size(self) -> int:
        """Latents of a patch's side."""
        return 2

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of a picture's patches."""
        cell = self.pipe.vae_scale_factor * self.patch_size
        return height // cell, width // cell

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        rows, columns = self.grid(width, height)
        return rows * columns

    def from_picture(
        self,
        condition: Condition,
        params: DiffusionParams,
        generator: torch.Generator,
        scheduler: SchedulerMixin,
        timesteps: Tensor,
        steps: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A lane's start from an input picture, whose `distribution` the condition holds.

        Gives the timesteps that are left, and `[1, ...]` each: latents, the scaled picture, its noise.
        """
        strength = default_to(params.strength, self.default_strength)
        remaining = skip_to_strength(scheduler, timesteps, steps, strength)
        picture = self.scaled(sample(condition, generator, self.device))
        gaussian = noise(picture.shape, generator, self.device, picture.dtype)
        return remaining, scheduler.scale_noise(picture, remaining[:1], gaussian), picture, gaussian

    def scaled(self, latents: Tensor) -> Tensor:
        """Latents of the VAE as the transformer takes them."""
        config = self.pipe.vae.config
        scaled: Tensor = (latents - config.shift_factor) * config.scaling_factor
        return scaled


def latent_statistics(config: ConfigMixin, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of a VAE's latents by channel, for a batch of latents like these."""
    shape = (1, -1, *(1 for _ in like.shape[2:]))
    mean, std = (torch.tensor(values).view(shape).to(like) for values in (config.latents_mean, config.latents_std))
    return mean, std


def takes_frames(vae: nn.Module) -> bool:
    """Whether a VAE's tensors have a dimension of time."""
    return any(isinstance(module, nn.Conv3d) for module in vae.modules())


def tile_side(vae: Any) -> int:
    """Pixels of a tile's side, which VAEs name differently."""
    return int(vae.tile_sample_min_size if hasattr(vae, "tile_sample_min_size") else vae.tile_sample_min_height)


def latent_channels(vae: Any) -> int:
    """Channels of a VAE's latents; those of videos call it `z_dim`."""
    config = vae.config
    return int(config.z_dim if "z_dim" in config else config.latent_channels)


def text_bytes(encoder: Any, rows: int, tokens: int) -> int:
    """Peak memory of a text encoder that gives all of its hidden states."""
    config = encoder.config.get_text_config()
    length = min(tokens, getattr(config, "max_position_embeddings", tokens))
    ids = torch.empty(rows, length, dtype=torch.int64, device=META)
    return peak_bytes(lambda: encoder(input_ids=ids, output_hidden_states=True))


def with_references(rows: Sequence[Row]) -> Tensor:
    """Packed latents `[B, patches, channels]`, with those of the input pictures, where there are any, behind them."""
    latents = torch.stack([row.lane.latents for row in rows])
    if "reference" not in rows[0].lane.context:
        return latents
    return torch.cat([latents, torch.stack([row.lane.context["reference"] for row in rows])], dim=1)


def default_to(value: float | None, default: float) -> float:
    return default if value is None else value


def set_timesteps(
    scheduler: SchedulerMixin,
    steps: int,
    device: torch.device,
    *,
    sigmas: Sequence[float] | np.ndarray | None = None,
    **more: float | np.ndarray,
) -> Tensor:
    """Set a lane's schedule as diffusers' pipelines do; sigmas and `more` only where the scheduler takes them."""
    parameters = inspect.signature(scheduler.set_timesteps).parameters
    options = {name: value for name, value in more.items() if name in parameters}
    if sigmas is not None and "sigmas" in parameters:
        scheduler.set_timesteps(sigmas=sigmas, device=device, **options)
    else:
        scheduler.set_timesteps(steps, device=device, **options)
    timesteps: Tensor = scheduler.timesteps
    return timesteps


def skip_to_strength(scheduler: SchedulerMixin, timesteps: Tensor, steps: int, strength: float) -> Tensor:
    """The timesteps that are left for an input picture of this strength, as diffusers' `get_timesteps` gives them."""
    start = int(max(steps - min(steps * strength, steps), 0))
    remaining = timesteps[start * scheduler.order :]
    if not len(remaining):
        raise InvalidRequestError(
            f"{steps} steps at strength {strength:g} leave no step to run; raise one of them", param="strength"
        )
    scheduler.set_begin_index(start * scheduler.order)
    return remaining


def distribution(encoded: AutoencoderKLOutput) -> dict[str, Tensor]:
    """A VAE's posterior over one picture, for `Condition.shared`; the denoiser samples from it."""
    posterior = encoded.latent_dist
    return {"image_mean": posterior.mean[0], "image_std": posterior.std[0]}


def sample(condition: Condition, generator: torch.Generator, device: torch.device) -> Tensor:
    """A sample of `distribution`, `[1, ...]`, as diffusers' `latent_dist.sample(generator)` does."""
    mean, std = condition.shared["image_mean"].to(device), condition.shared["image_std"].to(device)
    return mean[None] + std[None] * noise(mean[None].shape, generator, device, mean.dtype)


def noise(shape: Sequence[int], generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Gaussian noise from a CPU generator, sampled in the dtype as diffusers' `randn_tensor` does."""
    return torch.randn(tuple(shape), generator=generator, dtype=dtype).to(device)


class VaeDecoder(LatentDecoder):
    """A VAE's decoder over a diffusers pipeline that holds it; families say how latents are scaled."""

    modality = Modality.IMAGE
    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, *, tiling_pixels: int) -> None:
        self.pipe = pipe
        self.vae = pipe.vae
        self.device = device
        self._tiling_pixels = tiling_pixels

    @classmethod
    def load(
        cls,
        context: LoadContext,
        pipeline: str,
        stand_ins: Collection[str] = ("transformer",),
        *,
        models: Collection[str] = ("vae",),
        others: Collection[str] = (),
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> Self:
        """The decoder of a checkpoint, with the tiling that the budget asks for; parts as in `Parts.pipeline`."""
        if not isinstance(context.stage, DiffusionStageConfig):
            raise InternalError(f"a decoder was put on the {context.stage.engine} engine")
        parts = Parts(context.model.folder)
        pipe = parts.pipeline(context, pipeline, models, others, stand_ins, dtypes=dtypes or cls.dtypes)
        pipe.vae.encoder = nn.Identity()  # the encoding stage's
        return cls(pipe, context.device, tiling_pixels=context.stage.budget.tiling_pixels)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.vae,)

    def decode_bytes(self, rows: int, width: int, height: int, num_frames: int) -> int:
        pixels = rows * num_frames * width * height * 3
        if self._is_tiled(width, height):  # a tile at a time; all of them are kept until they are joined
            side = tile_side(self.vae)
            tile = self._decode_peak(1, min(width, side), min(height, side), num_frames)
            return tile + 2 * pixels * int(self.vae.dtype.itemsize)
        # After it, the pixels in float32, twice.
        return max(self._decode_peak(rows, width, height, num_frames), 2 * pixels * torch.float32.itemsize)

    def _decode_peak(self, rows: int, width: int, height: int, num_frames: int) -> int:
        shape = self.latent_shape(width, height, num_frames)
        latents = torch.empty(rows, *shape, dtype=self.vae.dtype, device=META)
        return peak_bytes(lambda: self.vae.decode(latents))

    def latent_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        """What the VAE decodes, without a batch dimension."""
        cell = self.pipe.vae_scale_factor
        frames = (num_frames,) if takes_frames(self.vae) else ()
        return latent_channels(self.vae), *frames, height // cell, width // cell

    def decode(self, latents: Sequence[Tensor], *, width: int, height: int, num_frames: int) -> list[np.ndarray]:
        self.tile(width, height)
        scaled = self.unscaled(torch.stack(list(latents)).to(self.device, self.vae.dtype))
        return self.pixels(self.vae.decode(scaled, return_dict=False)[0])

    def unscaled(self, latents: Tensor) -> Tensor:
        """A batch of latents as the VAE made them, before they were scaled for the transformer."""
        scale: float = self.vae.config.scaling_factor
        shift: float = self.vae.config.shift_factor
        return latents / scale + shift

    def tile(self, width: int, height: int) -> None:
        """Decode large pictures in tiles and one by one: together they would need more memory than all before."""
        large = self._is_tiled(width, height)
        for kind in ("tiling", "slicing"):
            switch = getattr(self.vae, f"{'enable' if large else 'disable'}_{kind}", None)
            if switch is not None:
                switch()

    def _is_tiled(self, width: int, height: int) -> bool:
        return bool(self._tiling_pixels) and width * height > self._tiling_pixels

    def pixels(self, images: Tensor) -> list[np.ndarray]:
        """`uint8 [h, w, 3]` of decoded `[B, 3, h, w]` in -1..1, rounded as diffusers does."""
        scaled = (images.float() * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu().numpy()
        return list((scaled * 255).round().astype(np.uint8))


def calculate_shift(tokens: int, config: ConfigMixin, *, max_shift: float = 1.15) -> float:
    """The resolution-dependent shift (`mu`) of flow-matching schedules, from a scheduler's config."""
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base, highest = config.get("base_shift", 0.5), config.get("max_shift", max_shift)
    slope = (highest - base) / (max_tokens - base_tokens)
    return float(tokens * slope + base - slope * base_tokens)
