"""Thinker and talker of Qwen2.5-Omni on the autoregressive engine, around `transformers`' own modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from omnistage.core.errors import InvalidRequestError
from omnistage.core.types import ARInput, RequestInfo
from omnistage.engines.ar.attention import PagedContext
from omnistage.models._qwen_omni.components import OmniThinker, voice_of
from omnistage.models._qwen_omni.positions import with_positions
from omnistage.models.decoder import DecoderComponent
from omnistage.models.qwen2_5_omni.voices import Speakers, first_voice

if TYPE_CHECKING:
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5OmniTalkerForConditionalGeneration,
        Qwen2_5OmniThinkerForConditionalGeneration,
    )


class Thinker(OmniThinker):
    """Emits embedding plus final hidden state, for the talker."""

    def __init__(
        self,
        model: Qwen2_5OmniThinkerForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        super().__init__(model, tokenizer, emit_size=int(model.config.text_config.hidden_size))

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        # Media reach the talker through the hidden state only: their embeddings count as zero.
        return embeds.masked_fill(media, 0.0) + hidden


class Talker(DecoderComponent):
    """The codec language model. Each of its tokens needs a row of the thinker's reply: it runs as the reply grows.

    `text_rows` are rows of the *thinker's* embedding: the end and the padding of the reply, and each speaker's own
    beginning. Holding them here leaves the talker independent of the thinker's stage.
    """

    def __init__(
        self,
        model: Qwen2_5OmniTalkerForConditionalGeneration,
        speakers: Speakers,
        text_rows: Mapping[int, torch.Tensor],
        num_codes: int,
    ) -> None:
        size = int(model.config.embedding_size)
        super().__init__(
            model, model.model, model.codec_head, model.config, embed_size=size, position_dims=3, side_input=True
        )
        self._speakers = speakers
        self._rows = {token: row.to(self.device, self.dtype) for token, row in text_rows.items()}
        self.eos_token_ids = (model.codec_pad_token, model.codec_eos_token)
        # What is neither a code nor an end cannot be spoken.
        self.suppress_token_ids = (
            model.codec_bos_token,
            *(i for i in range(num_codes, self.spec.vocab_size) if i not in self.eos_token_ids),
        )

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        """Thinker rows `[p + 1]` → prompt rows `[p + 2]`: prompt, the speaker's beginning, first reply token."""
        if payload.embeds is None or len(payload.token_ids) < 2:
            raise InvalidRequestError("the talker's prompt is made of the thinker's rows")
        begin, model = int(self._speaker(info)["bos_token"]), self.model
        with torch.inference_mode():
            pad, bos = self._first_codes
            rows = payload.embeds.to(self.device, self.dtype)
            embeds = torch.cat((rows[:-1], (self._rows[begin] + pad)[None], (rows[-1] + bos)[None]))
        text_ids = (*payload.token_ids[:-1], begin, payload.token_ids[-1])
        ids = (model.codec_mask_token,) * (len(text_ids) - 2) + (model.codec_pad_token, model.codec_bos_token)
        prepared = with_positions(model, payload, text_ids, after_largest=True)
        return replace(prepared, token_ids=ids, embeds=embeds)

    @cached_property
    def _first_codes(self) -> torch.Tensor:
        # Once: ids that are copied to a GPU wait there for the talker's steps.
        ids = (self.model.codec_pad_token, self.model.codec_bos_token)
        codes: torch.Tensor = self.model.get_input_embeddings()(torch.tensor(ids, device=self.device))
        return codes

    def _speaker(self, info: RequestInfo) -> Mapping[str, torch.Tensor | int]:
        return voice_of(self._speakers, info.voice or first_voice(self._speakers))

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, paged: PagedContext) -> torch.Tensor:
        return super().forward(self.model.thinker_to_talker_proj(embeds), positions, paged)

    def final_side_rows(self) -> torch.Tensor:
        return torch.stack((self._rows[self.model.text_eos_token], self._rows[self.model.text_pad_token]))
