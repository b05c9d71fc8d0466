"""GLM-Image's glyph encoder, diffusion transformer and VAE, on diffusers' own pipeline and modules."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.compat import prepare_torchvision
from omnistage.core.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from omnistage.core.family import LoadContext
from omnistage.core.params import DiffusionParams
from omnistage.core.types import Condition, DiffusionInput
from omnistage.engines.diffusion.component import EncodeJob, Lane, Row, Tensors
from omnistage.models._diffusers import base, private_api
from omnistage.models._diffusers.base import DiffusersDenoiser, DiffusersEncoder, VaeDecoder
from omnistage.models._diffusers.loading import load_encoder_pipeline
from omnistage.models.glm_image.layout import CELL, DEFAULT_SIZE, MAX_IMAGES, check_params, upsampled

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, GlmImageTransformer2DModel
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

_STEPS, _GUIDANCE = 50, 1.5
_NO_TOKENS, _NO_GRIDS = torch.empty(0, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64)


class Encoder(DiffusersEncoder):
    """A byte-level T5 for the words that are to stand in the picture; the VAE for pictures to look at.

    What is drawn comes as tokens of the language model; `grid` in the payload's context says how they lie.
    """

    max_images = MAX_IMAGES
    text_tokens = 2048
    default_guidance = _GUIDANCE

    def check(self, payload: DiffusionInput, params: DiffusionParams) -> None:
        check_params(params, num_images=len(payload.images), masked=payload.mask is not None)
        grid = payload.context.get("grid")
        if grid is None or len(payload.tokens) != int(grid.prod()):
            expected = "a grid of" if grid is None else str(int(grid.prod()))
            raise InvalidRequestError(
                f"this model needs {expected} picture tokens, got {len(payload.tokens)}; "
                "let its prior stage generate all of them",
                param="prompt",
            )
        sources = payload.context.get("source_grids", _NO_GRIDS)
        source_tokens = payload.context.get("source_tokens", _NO_TOKENS)
        if len(sources) != len(payload.images) or len(source_tokens) != int(sources.prod(-1).sum()):
            raise InvalidRequestError("each input picture needs its tokens from the prior stage", param="image")
        codes = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        tokens = torch.cat((torch.tensor(payload.tokens), source_tokens.cpu()))
        if int(tokens.min()) < 0 or int(tokens.max()) >= codes:
            raise InvalidRequestError(f"picture tokens must be in [0, {codes})", param="prompt")

    def size(self, payload: DiffusionInput, params: DiffusionParams) -> tuple[int, int]:
        rows, columns = payload.context["grid"].tolist()  # settled when the tokens were asked for
        return columns * CELL, rows * CELL

    def encode(self, jobs: Sequence[EncodeJob]) -> list[Tensors]:
        # One by one: the pipeline pads shorter ones with zeros, which the transformer would look at.
        return [{"embeds": self._embeds(job)} for job in jobs]

    def _embeds(self, job: EncodeJob) -> Tensor:
        embeds, _ = self.pipe.encode_prompt(
            job.text,
            do_classifier_free_guidance=False,
            device=self.device,
            dtype=self.pipe.text_encoder.dtype,
            max_sequence_length=job.options[0],
        )
        return embeds[0]  # type: ignore[no-any-return]

    def shared(self, payload: DiffusionInput, params: DiffusionParams, width: int, height: int) -> Tensors:
        tokens = torch.tensor(payload.tokens, device=self.device)
        return {"prior": upsampled(tokens, (height // CELL, width // CELL)), **self._sources(payload)}

    def _sources(self, payload: DiffusionInput) -> dict[str, Tensor]:
        """Latents and tokens of the input pictures, as `source_latents_i` and `source_tokens_i`."""
        if not payload.images:
            return {}
        sources: dict[str, Tensor] = {}
        grids = [(int(rows), int(columns)) for rows, columns in payload.context["source_grids"].tolist()]
        tokens = payload.context["source_tokens"].to(self.device)
        split = torch.split(tokens, [rows * columns for rows, columns in grids])
        for number, (image, grid, codes) in enumerate(zip(payload.images, grids, split, strict=True)):
            rows, columns = grid
            if image.shape[:2] != (rows * CELL, columns * CELL):
                raise InvalidRequestError(
                    f"picture {number + 1} has {image.shape[1]}x{image.shape[0]} pixels and tokens for "
                    f"{columns * CELL}x{rows * CELL}",
                    param="image",
                )
            picture, (height, width) = Image.fromarray(image), image.shape[:2]
            pixels = self.pipe.image_processor.preprocess(picture, height=height, width=width)
            latents = self.pipe.vae.encode(pixels.to(self.device, self.pipe.vae.dtype)).latent_dist.mode()
            mean, std = base.latent_statistics(self.pipe.vae.config, latents)
            sources[f"source_latents_{number}"] = ((latents - mean) / std)[0]
            sources[f"source_tokens_{number}"] = upsampled(codes, grid)
        return sources


class Denoiser(DiffusersDenoiser):
    """The single-stream transformer. It reads input pictures through keys and values that it computes once."""

    transformer: GlmImageTransformer2DModel
    default_guidance = _GUIDANCE

    def text_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"embeds": (2048, self.transformer.config.text_embed_dim)}

    def planned_shared(self, width: int, height: int, num_frames: int) -> Tensors:
        tokens = torch.zeros(height // CELL, width // CELL, dtype=torch.int64, device=self.device)
        return {"prior": upsampled(tokens.flatten(), (height // CELL, width // CELL))}

    @property
    def patch_size(self) -> int:
        return int(self.pipe.transformer.config.patch_size)

    def open(self, condition: Condition, params: DiffusionParams, generator: torch.Generator) -> Lane:
        steps, scheduler = params.steps or _STEPS, self.scheduler(params.scheduler)
        cell, config = self.pipe.vae_scale_factor, scheduler.config
        shape = (1, self.transformer.config.in_channels, condition.height // cell, condition.width // cell)
        latents = base.noise(shape, generator, self.device, condition.positive["embeds"].dtype)[0]
        tokens = self.tokens(condition.width, condition.height, 1)
        times = np.linspace(config.num_train_timesteps, 1.0, steps + 1)[:-1].astype(np.int64).astype(np.float32)
        base_tokens = config.get("base_image_seq_len", 256)
        mu = (tokens / base_tokens) ** 0.5 * config.get("max_shift", 0.75) + config.get("base_shift", 0.25)
        timesteps = base.set_timesteps(
            scheduler, steps, self.device, sigmas=times / config.num_train_timesteps, timesteps=times, mu=mu
        )
        # diffusers steps in float32 whatever the transformer's dtype.
        lane = Lane(latents.float(), scheduler, timesteps, condition, params, tokens)
        if "source_latents_0" in condition.shared:
            lane.context["sources"] = self._read_sources(condition)
        return lane

    def _read_sources(self, condition: Condition) -> GlmImageKVCache:
        """Keys and values of all layers over the input pictures, as clean pictures at time 0."""
        cache = private_api.glm_cache(self.transformer.config.num_layers, "write")
        number = 0
        while (latents := condition.shared.get(f"source_latents_{number}")) is not None:
            tokens = condition.shared[f"source_tokens_{number}"][None].to(self.device)
            cell = self.pipe.vae_scale_factor
            size = [side * cell for side in latents.shape[-2:]]
            self.transformer(
                hidden_states=latents[None].to(self.device, self.transformer.dtype),
                encoder_hidden_states=condition.positive["embeds"][None, :0].to(self.device),
                prior_token_id=tokens,
                prior_token_drop=torch.zeros_like(tokens, dtype=torch.bool),
                timestep=torch.zeros(1, device=self.device),
                target_size=torch.tensor([size], device=self.device),
                crop_coords=torch.zeros(1, 2, device=self.device),
                kv_caches=cache,
            )
            number += 1
        return cache

    def group(self, row: Row) -> Hashable:
        # Only the prompt's rows read the input pictures. The transformer's mask is not one that hides padding, so
        # texts of different lengths do not mix.
        return super().group(row), row.branch == "positive" and "sources" in row.lane.context

    def forward(self, rows: Sequence[Row]) -> list[Tensor]:
        dtype = self.transformer.dtype
        prior = torch.stack([row.lane.condition.shared["prior"] for row in rows])
        dropped = torch.tensor([row.branch == "negative" for row in rows], device=prior.device)
        embeds = torch.stack([row.tensors["embeds"] for row in rows])
        size = [[row.lane.condition.height, row.lane.condition.width] for row in rows]
        predicted = self.transformer(
            hidden_states=torch.stack([row.lane.latents for row in rows]).to(dtype),
            encoder_hidden_states=embeds,
            prior_token_id=prior,
            prior_token_drop=dropped[:, None].expand_as(prior),
            timestep=torch.stack([row.timestep for row in rows]) - 1,
            target_size=torch.tensor(size, dtype=embeds.dtype, device=self.device),
            crop_coords=torch.zeros(len(rows), 2, dtype=embeds.dtype, device=self.device),
            return_dict=False,
            kv_caches=self._sources_of(rows),
        )[0]
        return list(predicted.float())

    def _sources_of(self, rows: Sequence[Row]) -> GlmImageKVCache | None:
        """One cache with a sample for each row, or None where the rows look at no picture."""
        if rows[0].branch == "negative" or "sources" not in rows[0].lane.context:
            return None
        joined = private_api.glm_cache(self.transformer.config.num_layers, "read")
        for layer, cache in enumerate(joined.caches):
            caches = [row.lane.context["sources"][layer] for row in rows]
            cache.k_caches = [sample.k_caches[0] for sample in caches]
            cache.v_caches = [sample.v_caches[0] for sample in caches]
        return joined


class Decoder(VaeDecoder):
    def unscaled(self, latents: Tensor) -> Tensor:
        mean, std = base.latent_statistics(self.vae.config, latents)
        return latents * std + mean


def load_encoder(context: LoadContext) -> Encoder:
    prepare_torchvision(required=False)
    pipe = load_encoder_pipeline(context, "GlmImagePipeline", ("text_encoder", "vae"), ("tokenizer",))
    _check_pipeline(pipe, context)
    return Encoder(pipe, context.device, multiple=CELL, default_size=DEFAULT_SIZE)


def load_denoiser(context: LoadContext) -> Denoiser:
    prepare_torchvision(required=False)
    denoiser = Denoiser.load(context, "GlmImagePipeline")
    _check_pipeline(denoiser.pipe, context)
    return denoiser


def load_decoder(context: LoadContext) -> Decoder:
    prepare_torchvision(required=False)
    decoder = Decoder.load(context, "GlmImagePipeline")
    _check_pipeline(decoder.pipe, context)
    return decoder


def _check_pipeline(pipe: DiffusionPipeline, context: LoadContext) -> None:
    folder = context.model.folder
    if pipe.vae_scale_factor * pipe.transformer.config.patch_size * 2 != CELL:
        raise UnsupportedModelError(f"a picture token of {folder} is not {CELL} pixels wide; only those are served")
    config = pipe.vae.config
    for moment in (config.latents_mean, config.latents_std):
        if not isinstance(moment, list | tuple) or len(moment) != config.latent_channels:
            raise CheckpointError(f"the VAE's config in {folder} has no latents_mean and latents_std for its channels")
