"""What the thinkers share: media by the model's own merge, up to its decoder, as any multimodal LM's."""

from __future__ import annotations

from typing import Any

import torch

from omnistage.core.types import ARInput, MediaSpan, RequestInfo
from omnistage.models._qwen_omni.positions import with_positions
from omnistage.models.decoder import DecoderComponent
from omnistage.models.multimodal_lm.capture import DecoderCapture


class MediaThinker(DecoderComponent):
    """A thinker whose media items are what arrives at its decoder for their placeholders alone."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(
            model, model.get_decoder(), model.lm_head, model.config.text_config, position_dims=3, **options
        )
        self._capture = DecoderCapture(model, self.decoder)

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        del info
        return with_positions(self.model, payload, payload.token_ids)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        placeholder = getattr(self.model.config, f"{span.kind}_token_id")
        ids = torch.full((1, len(span.positions)), placeholder, device=self.device)
        inputs = {
            name: value.to(self.device, self.dtype if value.is_floating_point() else None)
            for name, value in span.inputs.items()
        }
        return self._capture.run({"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}).rows()
