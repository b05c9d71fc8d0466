"""What the thinkers and talkers of Qwen-Omni share on the autoregressive engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from omnistage.core.errors import InvalidRequestError
from omnistage.core.types import ARInput, MediaSpan, RequestInfo
from omnistage.models._qwen_omni.positions import vision_bytes, with_positions
from omnistage.models.decoder import DecoderComponent
from omnistage.models.loading import Checkpoint, end_token_ids
from omnistage.models.multimodal_lm.capture import DecoderCapture

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

VoiceT = TypeVar("VoiceT")
_EMBEDDINGS = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")


class OmniThinker(DecoderComponent):
    """The language model with its vision and audio towers.

    Media go through the model's own merge, as any multimodal LM's: an item's rows are what arrives at the decoder for
    its placeholders alone.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, *, emit_size: int) -> None:
        config = model.config.text_config
        super().__init__(model, model.get_decoder(), model.lm_head, config, position_dims=3, emit_size=emit_size)
        self.tokenizer = tokenizer
        self.eos_token_ids = end_token_ids(model.config, config, model.generation_config, tokenizer)
        self._capture = DecoderCapture(model, self.decoder)

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        del info
        return with_positions(self.model, payload, payload.token_ids)

    def media_bytes(self, tokens: int) -> int:
        return vision_bytes(self.model.config.vision_config, self.dtype, tokens)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        placeholder = getattr(self.model.config, f"{span.kind}_token_id")
        ids = torch.full((1, len(span.positions)), placeholder, device=self.device)
        inputs = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in span.inputs.items()
        }
        return self._capture.run({"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}).rows()


def embedding_rows(folder: Path, token_ids: Collection[int]) -> dict[int, torch.Tensor]:
    """Rows of the thinker's embedding by token, which leave a talker independent of the thinker's stage."""
    ids = sorted(set(token_ids))
    return dict(zip(ids, Checkpoint(folder).rows(_EMBEDDINGS, ids), strict=True))


def voice_of(voices: Mapping[str, VoiceT], name: str) -> VoiceT:
    """Raises `InvalidRequestError` for a voice that the checkpoint has not."""
    if name not in voices:
        raise InvalidRequestError(f"unknown voice {name!r}; known: {', '.join(voices)}", param="voice")
    return voices[name]
