"""Stable Diffusion's three components, on diffusers' own pipelines and modules."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from omnistage.core.errors import InvalidRequestError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.loading import Parts, load_encoder_pipeline
from omnistage.models.stable_diffusion.checkpoints import Kind, vae_dtypes

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin

_TEXT_MODELS, _TOKENIZERS = ("text_encoder", "text_encoder_2"), ("tokenizer", "tokenizer_2")
_STEPS = 50
_UNSEEDED = ("DPMSolverSDEScheduler",)
"""Schedulers that sample noise from no generator of the request's."""


class Encoder(DiffusersEncoder):
    """One CLIP or two for the text; the VAE for pictures to start from and to paint into."""

    takes_mask = True
    text_tokens = 77

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, kind: Kind) -> None:
        side = pipe.unet.config.sample_size
        cell = pipe.vae_scale_factor
        super().__init__(
            pipe, device, multiple=cell, default_size=int(side if isinstance(side, int) else side[0]) * cell
        )
        self.kind = kind
        self.max_images = 2 if kind.changes else 1
        self.needs_image = kind.control or kind.inpainting
        self.takes_mask, self.takes_control = not kind.control, kind.control

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(
            part for part in super().modules if part not in (self.pipe.unet, self.pipe.components.get("controlnet"))
        )

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        kind, pictures = self.kind, len(payload.images)
        if kind.changes and pictures != 2:
            raise InvalidRequestError(
                "this model takes two images, the one to start from and the one that controls", param="image"
            )
        if kind.control and not kind.changes and params.strength is not None:
            raise InvalidRequestError(
                "not supported by this model, whose image only controls; omit it", param="strength"
            )
        if params.max_sequence_length is not None:
            raise InvalidRequestError(
                "not supported by this model, which always reads 77 tokens; omit it", param="max_sequence_length"
            )
        if kind.inpainting and payload.mask is None:
            raise InvalidRequestError("is missing; this model paints into a mask, so send one", param="mask")
        if payload.mask is not None and (not pictures or payload.mask.shape != payload.images[0].shape[:2]):
            raise InvalidRequestError("must come with an image of the same size", param="mask")
        if payload.mask is not None and self.pipe.vae.config.get("latents_mean") is not None:
            # diffusers' pipeline for it leaves them out, and what it draws does not fit the picture.
            raise InvalidRequestError("not supported by this model, whose VAE has statistics; omit it", param="mask")

    def guided(self, params: DiffusionParams) -> bool:
        # Every default is above 1, so which of them counts makes no difference here.
        return not self.kind.distilled and self.kind.guidance(params, painting=False) > 1

    def jobs(self, payload: DiffusionInput, params: DiffusionParams) -> Sequence[EncodeJob]:
        jobs = super().jobs(payload, params)
        zeros = self.kind.xl and params.negative_prompt is None and self.pipe.config.force_zeros_for_empty_prompt
        return jobs[:1] if zeros else jobs

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        texts = [job.text for job in jobs]
        encoded = self.pipe.encode_prompt(
            texts, device=self.device, num_images_per_prompt=1, do_classifier_free_guidance=False
        )
        if not self.kind.xl:
            return [{"embeds": each} for each in encoded[0]]
        return [{"embeds": embeds, "pooled": pooled} for embeds, pooled in zip(encoded[0], encoded[2], strict=True)]

    def condition(self, payload: DiffusionInput, params: DiffusionParams, encoded: Sequence[Tensors]) -> Condition:
        condition = super().condition(payload, params, encoded)
        if len(encoded) > 1 or not self.guided(params):
            return condition
        # SDXL guides away from zeros where a request names nothing to keep away from.
        zeros = {name: torch.zeros_like(tensor) for name, tensor in condition.positive.items()}
        return replace(condition, negative=zeros)

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        images, shared = list(payload.images), dict[str, Tensor]()
        if self.kind.control:
            control = self.pipe.control_image_processor.preprocess(
                Image.fromarray(images.pop()), height=height, width=width
            )
            shared["control"] = control[0].to(self.device)
        if not images:
            return shared
        pixels = self.pipe.image_processor.preprocess(Image.fromarray(images[0]), height=height, width=width)
        if payload.mask is None:
            return shared | self._encoded(pixels)
        mask = self.pipe.mask_processor.preprocess(Image.fromarray(payload.mask), height=height, width=width)
        if self.kind.inpainting:
            masked = self._encoded(pixels * (mask < 0.5))
            shared |= {"masked_mean": masked["image_mean"], "masked_std": masked["image_std"]}
        cell = self.pipe.vae_scale_factor
        mask = torch.nn.functional.interpolate(mask, size=(height // cell, width // cell))
        return shared | self._encoded(pixels) | {"mask": mask[0].to(self.device)}

    def _encoded(self, pixels: Tensor) -> dict[str, Tensor]:
        return base.distribution(self.pipe.vae.encode(pixels.to(self.device, self.pipe.vae.dtype)))


class Denoiser(DiffusersDenoiser):
    """The UNet, and a ControlNet where the checkpoint has one."""

    network = "unet"
    block_class = "BasicTransformerBlock"

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, dtype: torch.dtype, kind: Kind) -> None:
        super().__init__(pipe, device, dtype)
        self.kind = kind

    @property
    def transformers(self) -> tuple[nn.Module, ...]:
        return (self.pipe.unet, self.pipe.controlnet) if self.kind.control else (self.pipe.unet,)

    def planned_size(self) -> tuple[int, int, int]:
        side = self.pipe.unet.config.sample_size
        pixels = int(side if isinstance(side, int) else side[0]) * self.pipe.vae_scale_factor
        return pixels, pixels, 1

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        config = self.pipe.unet.config
        shapes = {"embeds": (77, int(config.cross_attention_dim))}
        if self.kind.xl:
            times = 6 * int(config.addition_time_embed_dim)
            return {**shapes, "pooled": (int(config.projection_class_embeddings_input_dim) - times,)}
        return shapes

    def planned_shared(self, width: int, height: int, num_frames: int) -> Tensors:
        cell = self.pipe.vae_scale_factor
        shared: dict[str, Tensor] = {}
        if self.kind.inpainting:
            latents = torch.zeros(
                int(self.pipe.vae.config.latent_channels), height // cell, width // cell, device=self.device
            )
            names = ("image_mean", "image_std", "masked_mean", "masked_std")
            shared = {**dict.fromkeys(names, latents), "mask": latents[:1]}
        if self.kind.control:
            shared["control"] = torch.zeros(3, height, width, device=self.device)
        return shared

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        return -(-width * height // 256)  # patches of 16 by 16 pixels, as in other families

    def check(self, params: DiffusionParams) -> None:
        super().check(params)
        name = params.scheduler
        if name in _UNSEEDED:
            raise InvalidRequestError(
                f"{name} samples its noise without the request's seed; use another", param="scheduler"
            )
        steps, scheduler = params.steps or _STEPS, self.scheduler(name)
        try:
            scheduler.set_timesteps(steps)
        except (ValueError, IndexError, ArithmeticError) as error:  # some want few, some at least a few
            reason = " ".join(str(error).split())[:200]
            raise InvalidRequestError(
                f"{type(scheduler).__name__} cannot take {steps} steps ({reason}); choose another number",
                param="steps",
            ) from error

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        # Some of these schedulers read their schedule, which is impossible where the memory plan asks.
        where = torch.device("cpu") if self.device.type == "meta" else self.device
        timesteps = base.set_timesteps(scheduler, steps, where).to(self.device)
        context: dict[str, Any] = {"generator": generator}
        if "image_mean" in condition.shared:
            timesteps, latents = self._from_picture(condition, params, generator, scheduler, timesteps, context)
        else:
            # The older pipelines leave it to the scheduler to find its first step, which waits for the device.
            if (self.kind.xl or self.device.type == "meta") and hasattr(scheduler, "set_begin_index"):
                scheduler.set_begin_index(0)
            cell = self.pipe.vae_scale_factor
            shape = (1, int(self.pipe.unet.config.in_channels), condition.height // cell, condition.width // cell)
            gaussian = base.noise(shape, generator, self.device, condition.positive["embeds"].dtype)
            latents = gaussian * scheduler.init_noise_sigma
        context |= self._network_inputs(condition, params, latents.dtype)
        tokens = self.tokens(condition.width, condition.height, 1)
        return Lane(latents[0], scheduler, timesteps, condition, params, tokens, context=context)

    def _network_inputs(self, condition: Condition, params: DiffusionParams, dtype: torch.dtype) -> dict[str, Any]:
        """What the networks read at every step beside latents, time and text."""
        guidance = self.kind.guidance(params, painting="mask" in condition.shared)
        inputs: dict[str, Any] = {"guidance": guidance}
        if self.kind.xl:
            size = (condition.height, condition.width)
            inputs["time_ids"] = torch.tensor([*size, 0, 0, *size], dtype=dtype, device=self.device)
        if self.kind.distilled:
            width = int(self.pipe.unet.config.time_cond_proj_dim)
            embedded = self.pipe.get_guidance_scale_embedding(torch.tensor([guidance - 1]), embedding_dim=width)
            inputs["timestep_cond"] = embedded[0].to(self.device, dtype)
        if self.kind.control:
            inputs["control"] = condition.shared["control"].to(self.device, dtype)
            scale = self.kind.control_scale(params)
            inputs["control_scale"] = torch.full((1, 1, 1), scale, dtype=dtype, device=self.device)
        return inputs

    def _from_picture(
        self,
        condition: Condition,
        params: DiffusionParams,
        generator: torch.Generator,
        scheduler: SchedulerMixin,
        timesteps: Tensor,
        context: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """The timesteps that are left, and `[1, ...]` latents. Noise is sampled in diffusers' order."""
        painting, dtype = "mask" in condition.shared, condition.positive["embeds"].dtype
        strength, steps = self.kind.strength(params, painting=painting), params.steps or _STEPS
        start = max(steps - min(int(steps * strength), steps), 0) * scheduler.order
        remaining = timesteps[start:]
        if not len(remaining):
            raise InvalidRequestError(
                f"{steps} steps at strength {strength:g} leave no step to run; raise one of them", param="strength"
            )
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(start)
        ignored = painting and strength == 1.0
        picture = None
        if not (self.kind.inpainting and ignored):
            picture = self.scaled(base.sample(condition, generator, self.device).to(dtype))
        shape = (1, *condition.shared["image_mean"].shape)
        gaussian = base.noise(shape, generator, self.device, dtype)
        if painting:
            context["mask"] = condition.shared["mask"].to(self.device, dtype)
            masked = self._masked(condition, generator).to(dtype)
            context |= (
                {"masked": self.scaled(masked)[0]} if self.kind.inpainting else {"picture": picture, "noise": gaussian}
            )
        if ignored or picture is None:
            return remaining, gaussian * scheduler.init_noise_sigma
        return remaining, scheduler.add_noise(picture, gaussian, remaining[:1])

    def _masked(self, condition: Condition, generator: torch.Generator) -> Tensor:
        """The masked picture's latents; plain UNets do not read them, but schedulers go on with the same generator."""
        shared = condition.shared
        if "masked_mean" not in shared:
            return base.sample(condition, generator, self.device)
        masked = {"image_mean": shared["masked_mean"], "image_std": shared["masked_std"]}
        return base.sample(replace(condition, shared=masked), generator, self.device)

    def scaled(self, latents: Tensor) -> Tensor:
        config = self.pipe.vae.config
        factor: float = config.scaling_factor
        if (statistics := _statistics(config, latents)) is None:
            return latents * factor
        mean, std = statistics
        scaled: Tensor = (latents - mean) * factor / std
        return scaled

    def group(self, row: Row) -> Hashable:
        # Pictures and masks are of the latents' size, so lanes with and without them share a forward.
        return tuple(row.lane.latents.shape), tuple(row.tensors["embeds"].shape)

    def stacked(self, rows: Sequence[Row]) -> Tensors:
        context = rows[0].lane.context
        inputs = {
            "sample": torch.stack([self._latents(row) for row in rows]),
            "timestep": torch.stack([row.timestep.float() for row in rows]),
            "encoder_hidden_states": torch.stack([row.tensors["embeds"] for row in rows]),
        }
        if self.kind.xl:
            inputs["text_embeds"] = torch.stack([row.tensors["pooled"] for row in rows])
        for name in ("time_ids", "timestep_cond", "control", "control_scale"):
            if name in context:
                inputs[name] = torch.stack([row.lane.context[name] for row in rows])
        return inputs

    def _latents(self, row: Row) -> Tensor:
        lane = row.lane
        latents: Tensor = lane.scheduler.scale_model_input(lane.latents, row.timestep)
        if not self.kind.inpainting:
            return latents
        return torch.cat([latents, lane.context["mask"], lane.context["masked"]])

    def predict(self, inputs: Tensors) -> Tensor:
        options: dict[str, Any] = {}
        if self.kind.xl:
            options["added_cond_kwargs"] = {name: inputs[name] for name in ("text_embeds", "time_ids")}
        model = {name: inputs[name] for name in ("sample", "timestep", "encoder_hidden_states")}
        if self.kind.control:
            down, mid = self.pipe.controlnet(
                **model,
                controlnet_cond=inputs["control"],
                conditioning_scale=inputs["control_scale"],
                return_dict=False,
                **options,
            )
            options |= {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        predicted: Tensor = self.pipe.unet(
            **model, timestep_cond=inputs.get("timestep_cond"), return_dict=False, **options
        )[0]
        return predicted

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        combined: Tensor = negative + lane.context["guidance"] * (positive - negative)
        return combined

    def step_options(self, lane: Lane) -> Mapping[str, Any]:
        return _with_generator(lane.scheduler, lane.context["generator"])

    def advance(self, lane: Lane, predictions: Sequence[Tensor]) -> None:
        super().advance(lane, predictions)
        if "picture" not in lane.context:
            return
        # What is not to be painted anew is the picture, as noisy as the next step expects it.
        picture, mask = lane.context["picture"], lane.context["mask"]
        if not lane.done:
            following = lane.timesteps[lane.step : lane.step + 1]
            picture = lane.scheduler.add_noise(picture, lane.context["noise"], following)
        lane.latents = ((1 - mask) * picture[0] + mask * lane.latents).to(lane.latents.dtype)


class Decoder(VaeDecoder):
    """The VAE's decoder, and the safety checker that a checkpoint comes with: what it finds is drawn black."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        checker = self.pipe.components.get("safety_checker")
        return (self.vae,) if checker is None else (self.vae, checker)

    def unscaled(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        factor: float = config.scaling_factor
        if (statistics := _statistics(config, latents)) is None:
            return latents / factor
        mean, std = statistics
        unscaled: Tensor = latents * std / factor + mean
        return unscaled

    def pixels(self, images: Tensor) -> list[np.ndarray]:
        pictures = super().pixels(images)
        if self.pipe.components.get("safety_checker") is None:
            return pictures
        _, flags = self.pipe.run_safety_checker(images, self.device, images.dtype)
        return [np.zeros_like(pixels) if unsafe else pixels for pixels, unsafe in zip(pictures, flags, strict=True)]


def _statistics(config: Any, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the channels, which the VAEs of some fine-tuned SDXLs have."""
    if config.get("latents_mean") is None or config.get("latents_std") is None:
        return None
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1).to(like) for values in (config.latents_mean, config.latents_std)
    )
    return mean, std


def _with_generator(scheduler: SchedulerMixin, generator: torch.Generator) -> dict[str, torch.Generator]:
    return {"generator": generator} if "generator" in inspect.signature(scheduler.step).parameters else {}


def load_encoder(context: LoadContext) -> Encoder:
    parts = Parts(context.model.folder)
    kind = Kind.of(parts)
    pipe = load_encoder_pipeline(
        context,
        kind.encoder_pipeline,
        (*_TEXT_MODELS, "vae"),
        _TOKENIZERS,
        ("unet",),
        dtypes=vae_dtypes(parts, context.dtype, encoding=True),
    )
    return Encoder(pipe, context.device, kind)


def load_denoiser(context: LoadContext) -> Denoiser:
    parts = Parts(context.model.folder)
    kind = Kind.of(parts)
    networks = ("unet", "controlnet") if kind.control else ("unet",)
    pipe = parts.pipeline(context, kind.pipeline, networks, ("scheduler",), ("vae",))
    if (name := type(pipe.scheduler).__name__) in _UNSEEDED:
        raise UnsupportedModelError(
            f"{parts.folder} has a {name}, which samples its noise without the request's seed; put another class into "
            "its scheduler's folder and index"
        )
    return Denoiser(pipe, context.device, context.dtype, kind)


def load_decoder(context: LoadContext) -> Decoder:
    parts = Parts(context.model.folder)
    kind = Kind.of(parts)
    dtypes = vae_dtypes(parts, context.dtype, encoding=False)
    if kind.xl:
        return Decoder.load(context, kind.pipeline, (), dtypes=dtypes)
    return Decoder.load(context, kind.pipeline, (), models=("vae", "safety_checker"), others=("feature_extractor",))
