"""GLM-Image's language model on the autoregressive engine: it writes a picture's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from omnistage.compat import prepare_torchvision
from omnistage.core.errors import CheckpointError, InvalidRequestError
from omnistage.core.family import LoadContext
from omnistage.core.types import ARInput, RequestInfo
from omnistage.hf import transformers
from omnistage.models._diffusers.loading import Parts
from omnistage.models.decoder import DecoderComponent
from omnistage.models.glm_image.layout import generated_positions
from omnistage.models.loading import load_model, positive, read_weights

if TYPE_CHECKING:
    from transformers import GlmImageForConditionalGeneration

PART = "vision_language_encoder"


class Prior(DecoderComponent):
    """The decoder with its vision tower and codebook, which turn input pictures into tokens of the prompt.

    Its head gives picture tokens and a few controls, not text. A picture has as many tokens as its grid, so no control
    is ever sampled: where diffusers' pipeline samples one, it fails.
    """

    def __init__(self, model: GlmImageForConditionalGeneration) -> None:
        config, text = model.config, model.config.text_config
        super().__init__(
            model,
            model.model.language_model,
            model.lm_head,
            text,
            vocab_size=positive(text, "vision_vocab_size"),
            prompt_vocab_size=positive(text, "vocab_size"),
            position_dims=3,
        )
        codes = positive(config.vq_config, "num_embeddings")
        self.suppress_token_ids = tuple(range(codes, self.spec.vocab_size))
        self._image_token = int(config.image_token_id)

    def check(self, info: RequestInfo, payload: ARInput) -> None:
        del info
        if payload.num_tokens is None or payload.drawing is None:
            raise InvalidRequestError("this model draws pictures; send a text prompt or a chat", param="prompt")

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        """Input pictures become tokens in the prompt; positions of the prompt and of all tokens to come."""
        self.check(info, payload)
        grids: Tensor = payload.context["image_grid_thw"]
        pixels = payload.context.get("pixel_values")
        ids = torch.tensor(payload.token_ids)
        context: dict[str, Tensor] = {}
        targets = grids
        if pixels is not None:
            sources, targets = grids[:-1], grids[-1:]
            codes = self._codes(pixels, sources)
            ids[ids == self._image_token] = codes
            context = {"source_tokens": codes, "source_grids": sources[:, 1:]}
        context["grid"] = targets[0, 1:]
        prompt, _ = self.model.model.get_rope_index(ids[None], image_grid_thw=grids)
        first = int(prompt[:, 0, -1].max()) + 1
        order = [(rows, columns) for _, rows, columns in reversed(targets.tolist())]
        positions = torch.cat((prompt[:, 0], generated_positions(first, order)), dim=1)
        return replace(payload, token_ids=tuple(ids.tolist()), positions=positions, context=context)

    def _codes(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """The codebook's indices of input pictures, one picture's behind the other's, on the host."""
        features = self.model.get_image_features(
            pixels.to(self.device), grids.to(self.device), return_dict=True
        ).pooler_output
        codes: Tensor = self.model.get_image_tokens(features)
        return codes.reshape(-1).cpu()


def load_prior(context: LoadContext) -> Prior:
    prepare_torchvision()
    folder = Parts(context.model.folder).folder_of(PART)
    try:
        config = transformers.GlmImageConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"config.json in {folder} is not GLM-Image's: {error}") from error
    tensors = read_weights(context, part=PART)
    model = load_model(transformers.GlmImageForConditionalGeneration, config, tensors, context.device, context.dtype)
    return Prior(model)
