"""Z-Image's three components, on diffusers' own pipelines and modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from omnistage.core.errors import InvalidRequestError, SizeError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.loading import load_encoder_pipeline

_STEPS, _GUIDANCE, _SIZE = 50, 5.0, 1024
_CHUNK = 32
"""The transformer fills up texts and pictures to a multiple of this many tokens."""


class Encoder(DiffusersEncoder):
    """A Qwen3 for the text; the VAE for a picture to start from."""

    max_images = 1

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        super().check(payload, params)
        # Positions are looked up in tables of fixed sizes, and the picture stands one place behind the text.
        texts, rows, columns = self.pipe.transformer.config.axes_lens
        width, height = self.size(payload, params)
        for name, value, limit in (
            ("width", width, columns * self.multiple),
            ("height", height, rows * self.multiple),
            ("max_sequence_length", params.max_sequence_length or 0, (texts - 2) // _CHUNK * _CHUNK),
        ):
            if value > limit and name in ("width", "height"):
                raise SizeError(f"must be at most {limit}, got {value}", side=name, nearest=limit)
            if value > limit:
                raise InvalidRequestError(f"must be at most {limit}, got {value}", param=name)

    def guided(self, params: DiffusionParams) -> bool:
        return base.default_to(params.guidance, _GUIDANCE) > 0

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        embeds, _ = self.encode_prompts(jobs, do_classifier_free_guidance=False)
        return [{"embeds": row} for row in embeds]


class Denoiser(DiffusersDenoiser):
    """The single-stream transformer. A lane's latents are `[channels, h, w]` in float32, whatever the weights are."""

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (512, self.pipe.transformer.config.cap_feat_dim)}

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        tokens = self.tokens(condition.width, condition.height, 1)
        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()
        shift = base.calculate_shift(tokens, scheduler.config)
        timesteps = base.set_timesteps(scheduler, steps, self.device, sigmas=sigmas, mu=shift)
        if "image_mean" in condition.shared:
            timesteps, latents, *_ = self.from_picture(condition, params, generator, scheduler, timesteps, steps)
        else:
            scheduler.set_begin_index(0)
            rows, columns = self.grid(condition.width, condition.height)
            shape = (1, self.pipe.transformer.config.in_channels, 2 * rows, 2 * columns)
            latents = base.noise(shape, generator, self.device, torch.float32)
        return Lane(latents[0].float(), scheduler, timesteps, condition, params, tokens)

    def group(self, row: Row) -> Hashable:
        """Texts and pictures go in as lists, of any lengths and shapes; only pictures of one length waste nothing."""
        return -(-row.lane.tokens // _CHUNK)

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        predicted = self.transformer(
            [row.lane.latents.to(self.dtype).unsqueeze(1) for row in rows],
            (1000 - torch.stack([row.timestep for row in rows])) / 1000,
            [row.tensors["embeds"] for row in rows],
            return_dict=False,
        )[0]
        # The transformer predicts from noise to the picture, the scheduler expects the reverse.
        return [-each.float().squeeze(1) for each in predicted]

    def combine(self, lane: Lane, positive: Tensor, negative: Tensor) -> Tensor:
        """Guidance counts from the prompt, so that 0 is none."""
        return positive + base.default_to(lane.params.guidance, _GUIDANCE) * (positive - negative)


def load_encoder(context: LoadContext) -> Encoder:
    pipe = load_encoder_pipeline(context, "ZImageImg2ImgPipeline", ("text_encoder", "vae"), ("tokenizer",))
    if hasattr(pipe.text_encoder, "lm_head"):
        pipe.text_encoder.lm_head = nn.Identity()  # only hidden states are asked for
    return Encoder(pipe, context.device, multiple=2 * pipe.vae_scale_factor, default_size=_SIZE)


def load_denoiser(context: LoadContext) -> Denoiser:
    return Denoiser.load(context, "ZImagePipeline")


def load_decoder(context: LoadContext) -> VaeDecoder:
    return VaeDecoder.load(context, "ZImagePipeline")
