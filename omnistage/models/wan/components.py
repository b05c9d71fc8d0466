"""Wan's three components, on diffusers' own pipelines and modules.

Four layouts of checkpoint are served. Text to video; image to video, where the picture's latents are further channels
of the transformer's input (Wan 2.1 also gives it CLIP's view of the picture); both with one transformer or with two
experts, one for the noisy steps and one for the rest; and Wan 2.2's small model, which takes a prompt with or without
a picture and a timestep for every patch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor, nn

from omnistage.core.errors import CheckpointError, InvalidRequestError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder
from omnistage.models._diffusers.checks import check_frames
from omnistage.models._diffusers.loading import Parts, diffusers, load_encoder_pipeline
from omnistage.models._diffusers.video import VideoDecoder

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, SchedulerMixin

_STEPS, _GUIDANCE, _FRAMES = 50, 5.0, 81
_SIZE, _EXPANDED_SIZE = (832, 480), (1280, 704)
_CLIP_TOKENS = 257
_PLANNED_FRAMES = 9, 17
_FPS, _EXPANDED_FPS = 16.0, 24.0
# As published: everything that turns pixels into numbers or back runs in full precision.
_PRECISE = {"vae": torch.float32, "image_encoder": torch.float32}

# Solvers that support flow matching and sample no noise.
_FLOW_EULER = "FlowMatchEulerDiscreteScheduler"
_SOLVERS = (_FLOW_EULER, "UniPCMultistepScheduler", "DPMSolverMultistepScheduler", "DEISMultistepScheduler")


class Encoder(DiffusersEncoder):
    """UMT5 for the text; the VAE, and CLIP in Wan 2.1, for pictures that a video starts from or ends with."""

    no_strength = "whose videos always start from noise"
    default_guidance = _GUIDANCE

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, *, pictures: tuple[int, int]) -> None:
        self.default = _EXPANDED_SIZE if pipe.config.expand_timesteps else _SIZE
        # diffusers asks for multiples of 16 first and then cuts down to whole patches.
        cell = math.lcm(16, pipe.vae_scale_factor_spatial * pipe.transformer.config.patch_size[1])
        super().__init__(pipe, device, multiple=cell, default_size=self.default[1])
        self.min_images, self.max_images = pictures
        self.takes_clip = pipe.transformer.config.image_dim is not None
        # Texts are encoded by the other pipeline, equally: the one for pictures fails where ftfy is not installed.
        self.texts = diffusers().WanPipeline(pipe.tokenizer, pipe.text_encoder, pipe.vae, None)

    def planned_size(self) -> tuple[int, int, int]:
        return *self.default, _FRAMES

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        if len(payload.images) < self.min_images:
            requirement = (
                "a picture to start from" if self.min_images == 1 else "two pictures, to start from and to end with"
            )
            raise InvalidRequestError(f"this model needs {requirement}, got {len(payload.images)}", param="image")
        super().check(payload, params)
        frames, factor = self.num_frames(params), self.pipe.vae_scale_factor_temporal
        check_frames(frames, factor)
        if len(payload.images) > 1 and frames == 1:
            raise InvalidRequestError(
                f"two pictures need at least {factor + 1} frames between them", param="num_frames"
            )
        if self.takes_clip and params.max_sequence_length not in (None, self.text_tokens):
            raise InvalidRequestError(
                f"this model reads exactly {self.text_tokens} prompt tokens; leave it out", param="max_sequence_length"
            )

    def num_frames(self, params: DiffusionParams) -> int:
        return params.num_frames or _FRAMES

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, _ = self.texts.encode_prompt(
            prompt=[job.text for job in jobs],
            do_classifier_free_guidance=False,
            max_sequence_length=jobs[0].options[0],
            device=self.device,
        )
        return [{"embeds": row} for row in embeds]

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        """As asked; a side that is left out follows the picture's shape, at the model's usual number of pixels."""
        width, height = params.width, params.height
        if not payload.images:
            return width or self.default[0], height or self.default[1]
        aspect = payload.images[0].shape[1] / payload.images[0].shape[0]
        if width is None:
            width = self._whole(math.sqrt(math.prod(self.default) * aspect) if height is None else height * aspect)
            height = height or self._whole(math.sqrt(math.prod(self.default) / aspect))
        return width, height or self._whole(width / aspect)

    def _whole(self, side: float) -> int:
        return max(int(side) // self.multiple, 1) * self.multiple

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        """`picture`: its latents as the transformer's input has them; `clip`: CLIP's view of each, where it is used."""
        if not payload.images:
            return {}
        pictures = [Image.fromarray(pixels) for pixels in payload.images]
        prepared = [
            self.pipe.video_processor.preprocess(each, height=height, width=width).to(self.device, torch.float32)
            for each in pictures
        ]
        _, latents, *_ = self.pipe.prepare_latents(
            prepared[0],
            batch_size=1,
            num_channels_latents=self.pipe.vae.config.z_dim,
            height=height,
            width=width,
            num_frames=self.num_frames(params),
            dtype=torch.float32,
            device=self.device,
            latents=torch.empty(0),  # the noise is the denoiser's
            last_image=prepared[1] if len(prepared) > 1 else None,
        )
        shared = {"picture": latents[0]}
        if self.takes_clip:
            shared["clip"] = self.pipe.encode_image(pictures, self.device)
        return shared


class Denoiser(DiffusersDenoiser):
    """One transformer, or two experts that share the steps between them."""

    default_guidance, dtypes = _GUIDANCE, _PRECISE

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (512, self.pipe.transformer.config.text_dim)}

    def planned_shared(self, width: int, height: int, num_frames: int) -> Tensors:
        config, shared = self.pipe.transformer.config, {}
        further = config.in_channels - self.pipe.vae.config.z_dim
        if further:
            sides = self._latent_shape(width, height, num_frames)
            shared["picture"] = torch.zeros(further, *sides, device=self.device)
        if config.image_dim is not None:
            both = config.pos_embed_seq_len  # of two pictures, where there are two
            shape = (1, _CLIP_TOKENS) if both is None else (2, both // 2)
            shared["clip"] = torch.zeros(*shape, config.image_dim, dtype=self.dtype, device=self.device)
        return shared

    def __init__(self, pipe: DiffusionPipeline, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(pipe, device, dtype)
        self.expanded = bool(pipe.config.expand_timesteps)
        boundary = pipe.config.boundary_ratio
        self.boundary = None if boundary is None else boundary * pipe.scheduler.config.num_train_timesteps

    def planned_size(self) -> tuple[int, int, int]:
        # Compiled blocks take any length, and few frames are soon computed.
        return *(_EXPANDED_SIZE if self.expanded else _SIZE), _PLANNED_FRAMES[0]

    @property
    def transformers(self) -> tuple[nn.Module, ...]:
        return (self.transformer,) if self.boundary is None else (self.transformer, self.pipe.transformer_2)

    def scheduler(self, name: str | None) -> SchedulerMixin:
        stock = self.pipe.scheduler
        if name is None or name == type(stock).__name__:
            return super().scheduler(None)
        if name not in _SOLVERS:
            raise InvalidRequestError(
                f"there is no scheduler {name!r} for this model; known: {', '.join(_SOLVERS)}", param="scheduler"
            )
        cls = getattr(diffusers(), name)
        shift = stock.config.get("flow_shift", stock.config.get("shift", 1.0))
        if name == _FLOW_EULER:
            return cls(num_train_timesteps=stock.config.num_train_timesteps, shift=shift)
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
        return cls.from_config(stock.config, **flow)

    def tokens(self, width: int, height: int, num_frames: int) -> int:
        sides = zip(self._latent_shape(width, height, num_frames), self.pipe.transformer.config.patch_size, strict=True)
        return math.prod(side // patch for side, patch in sides)

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        scheduler = self.scheduler(params.scheduler)
        timesteps = base.set_timesteps(scheduler, params.steps or _STEPS, self.device)
        if not condition.shared:
            scheduler.set_begin_index(0)  # diffusers does so for videos from text only
        sides = self._latent_shape(condition.width, condition.height, condition.num_frames)
        latents = base.noise((1, self.pipe.vae.config.z_dim, *sides), generator, self.device, torch.float32)[0]
        tokens = self.tokens(condition.width, condition.height, condition.num_frames)
        lane = Lane(latents, scheduler, timesteps, condition, params, tokens)
        # Known in advance, so that no step has to wait for the device to compare a timestep.
        lane.context["experts"] = (
            [0] * lane.steps
            if self.boundary is None or self.device.type == "meta"
            else (timesteps < self.boundary).int().tolist()
        )
        if self.expanded:
            mask = torch.ones((1, *sides), dtype=torch.float32, device=self.device)
            if "picture" in condition.shared:
                mask[:, 0] = 0  # the first frame is the picture and has no noise
            lane.context["mask"] = mask
        return lane

    def group(self, row: Row) -> Hashable:
        return super().group(row), _expert(row.lane)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        model = self.transformers[_expert(rows[0].lane)]
        dtype = self.pipe.transformer.dtype
        views = [row.lane.condition.shared["clip"] for row in rows if "clip" in row.lane.condition.shared]
        return list(
            model(
                hidden_states=torch.stack([self._input(row.lane) for row in rows]).to(dtype),
                timestep=torch.stack([self._timestep(row) for row in rows]),
                encoder_hidden_states=torch.stack([row.tensors["embeds"] for row in rows]).to(dtype),
                encoder_hidden_states_image=torch.cat(views).to(self.device, dtype) if views else None,
                return_dict=False,
            )[0]
        )

    def result(self, lane: Lane) -> Tensor:
        return self._input(lane) if self.expanded else lane.latents

    def _input(self, lane: Lane) -> Tensor:
        """Latents as the transformer takes them: the picture laid over its frame, or as further channels."""
        picture = lane.condition.shared.get("picture")
        if picture is None:
            return lane.latents
        picture = picture.to(self.device)
        if not self.expanded:
            return torch.cat([lane.latents, picture])
        mask: Tensor = lane.context["mask"]
        return (1 - mask) * picture + mask * lane.latents

    def _timestep(self, row: Row) -> Tensor:
        """Of the row, or of each of its patches."""
        if not self.expanded:
            return row.timestep
        mask: Tensor = row.lane.context["mask"]
        return (mask[0, :, ::2, ::2] * row.timestep).flatten()

    def _latent_shape(self, width: int, height: int, num_frames: int) -> tuple[int, int, int]:
        cell = self.pipe.vae_scale_factor_spatial
        return (num_frames - 1) // self.pipe.vae_scale_factor_temporal + 1, height // cell, width // cell


class Decoder(VideoDecoder):
    dtypes = _PRECISE

    def decode_bytes(self, rows: int, width: int, height: int, num_frames: int) -> int:
        # Frames are decoded after one another: beyond some they only pile up.
        few, more = _PLANNED_FRAMES
        if num_frames <= more:
            return super().decode_bytes(rows, width, height, num_frames)
        sizes = [super(Decoder, self).decode_bytes(rows, width, height, frames) for frames in (few, more)]
        return sizes[1] + (sizes[1] - sizes[0]) * (num_frames - more) // (more - few)

    def unscaled(self, latents: Tensor) -> Tensor:
        scaled = latents.to(self.vae.dtype)
        mean, std = base.latent_statistics(self.vae.config, scaled)
        return scaled / (1.0 / std) + mean  # divided by the inverse, as diffusers does, for the same rounding


def load_encoder(context: LoadContext) -> Encoder:
    pictures = takes_pictures(Parts(context.model.folder).index)
    pipe = load_encoder_pipeline(
        context,
        "WanImageToVideoPipeline",
        ("text_encoder", "image_encoder", "vae") if pictures else ("text_encoder",),
        ("tokenizer", "image_processor"),
        ("transformer",) if pictures else ("transformer", "vae"),
        dtypes=_PRECISE,
    )
    _check_transformer(pipe, context)
    return Encoder(pipe, context.device, pictures=picture_counts(pipe) if pictures else (0, 0))


def load_denoiser(context: LoadContext) -> Denoiser:
    denoiser = Denoiser.load(context, "WanPipeline", ("transformer", "transformer_2"))
    pipe = denoiser.pipe
    _check_transformer(pipe, context)
    if pipe.config.boundary_ratio is not None and pipe.transformer_2 is None:
        raise CheckpointError(f"{context.model.folder} shares its steps between two experts but has no transformer_2")
    return denoiser


def load_decoder(context: LoadContext) -> Decoder:
    decoder = Decoder.load(context, "WanPipeline", ())
    decoder.fps = _EXPANDED_FPS if decoder.pipe.config.expand_timesteps else _FPS
    return decoder


def takes_pictures(index: Mapping[str, object]) -> bool:
    """Whether a checkpoint with this model_index.json makes videos from pictures."""
    return index.get("_class_name") == "WanImageToVideoPipeline" or bool(index.get("expand_timesteps"))


def picture_counts(pipe: DiffusionPipeline) -> tuple[int, int]:
    """Fewest and most pictures of a request to a checkpoint that takes any."""
    config = pipe.transformer.config
    if pipe.config.expand_timesteps:
        return 0, 1
    if config.image_dim is None:
        return 1, 2
    return (1, 1) if config.pos_embed_seq_len is None else (2, 2)


def _check_transformer(pipe: DiffusionPipeline, context: LoadContext) -> None:
    if pipe.transformer is None:
        folder = context.model.folder
        raise CheckpointError(f"{folder} has no transformer; the checkpoint is incomplete, fetch it again")


def _expert(lane: Lane) -> int:
    """Which transformer takes the lane's current step."""
    return int(lane.context["experts"][lane.step])
