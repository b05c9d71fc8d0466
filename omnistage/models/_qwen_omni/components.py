"""What the thinkers and talkers of Qwen-Omni share on the autoregressive engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from omnistage.core.errors import InvalidRequestError, StageError
from omnistage.core.types import ARInput, MediaSpan, Modality, RequestInfo
from omnistage.models._qwen_omni.positions import vision_bytes, with_positions
from omnistage.models.decoder import DecoderComponent
from omnistage.models.loading import Checkpoint, end_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
    from transformers.modeling_outputs import ModelOutput

VoiceT = TypeVar("VoiceT")
_EMBEDDINGS = ("thinker.model.embed_tokens.weight", "thinker.model.language_model.embed_tokens.weight")


class OmniThinker(DecoderComponent):
    """The language model with its vision and audio towers."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None, *, emit_size: int) -> None:
        config = model.config.text_config
        super().__init__(model, model.get_decoder(), model.lm_head, config, position_dims=3, emit_size=emit_size)
        self.tokenizer = tokenizer
        self.eos_token_ids = end_token_ids(model.config, config, model.generation_config, tokenizer)

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        del info
        return with_positions(self.model, payload, payload.token_ids)

    def media_bytes(self, tokens: int) -> int:
        return vision_bytes(self.model.config.vision_config, self.dtype, tokens)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        inputs = {name: value.to(self.device) for name, value in span.inputs.items()}
        if span.kind in (Modality.IMAGE, Modality.VIDEO):
            visual = self.model.get_image_features if span.kind is Modality.IMAGE else self.model.get_video_features
            return self.visual_rows(visual(**inputs, return_dict=True))
        if span.kind is Modality.AUDIO:
            return self.audio_rows(len(span.positions), **inputs)
        raise StageError(f"{type(self.model).__name__} has no encoder for {span.kind}")

    def visual_rows(self, features: ModelOutput) -> torch.Tensor:
        """Rows of one picture or video, of what its tower gave."""
        return torch.cat(tuple(features.pooler_output))

    @abstractmethod
    def audio_rows(self, rows: int, input_features: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """So many rows of one clip."""


def embedding_rows(folder: Path, token_ids: Collection[int]) -> dict[int, torch.Tensor]:
    """Rows of the thinker's embedding by token, which leave a talker independent of the thinker's stage."""
    ids = sorted(set(token_ids))
    return dict(zip(ids, Checkpoint(folder).rows(_EMBEDDINGS, ids), strict=True))


def voice_of(voices: Mapping[str, VoiceT], name: str) -> VoiceT:
    """Raises `InvalidRequestError` for a voice that the checkpoint has not."""
    if name not in voices:
        raise InvalidRequestError(f"unknown voice {name!r}; known: {', '.join(voices)}", param="voice")
    return voices[name]
