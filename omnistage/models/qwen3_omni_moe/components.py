"""Thinker and talker of Qwen3-Omni on the autoregressive engine, around `transformers`' own modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from omnistage.core.errors import CheckpointError, InvalidRequestError
from omnistage.core.types import ARInput, MediaSpan, Modality, RequestInfo
from omnistage.engines.ar.attention import PagedContext
from omnistage.engines.ar.component import Choose, ResidualCodes
from omnistage.engines.ar.depth_decoder import DepthDecoder, PlainDecoder, predict_codes
from omnistage.engines.streams import upload
from omnistage.models._qwen_omni.components import OmniThinker, voice_of
from omnistage.models._qwen_omni.positions import with_positions
from omnistage.models.decoder import DecoderComponent

if TYPE_CHECKING:
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeTalkerForConditionalGeneration,
        Qwen3OmniMoeThinkerForConditionalGeneration,
    )

_DEFAULT_VOICE = "Ethan"
_HEADER = 3
"""Rows of `<|im_start|>assistant\\n`, before the reply's own."""
_PIECE_WINDOWS = 8
"""Of the audio encoder's windows, 8 s each, that are encoded at once."""
# The reference has them in its code.
_RESIDUAL_TOP_K, _RESIDUAL_TOP_P, _RESIDUAL_TEMPERATURE = 50, 0.8, 1.0


class Thinker(OmniThinker):
    """Emits a token's embedding for the talker, and for media the hidden state out of layer `accept_layer`; None: there
    is no talker. Pictures also feed the first layers, with features of several levels of the tower."""

    def __init__(
        self,
        model: Qwen3OmniMoeThinkerForConditionalGeneration,
        accept_layer: int | None = None,
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        size = int(model.config.text_config.hidden_size)
        super().__init__(model, tokenizer, emit_size=0 if accept_layer is None else size)
        levels = len(model.config.vision_config.deepstack_visual_indexes)
        self.spec = replace(self.spec, fractional_positions=True, deep_size=levels * size)
        self._tapped: torch.Tensor | None = None
        self._accepted: torch.Tensor | None = None
        if accept_layer is not None and 0 < accept_layer < self.spec.num_layers:
            model.get_decoder().layers[accept_layer - 1].register_forward_hook(self._tap)

    def _tap(self, _layer: object, _args: object, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        self._tapped = output if isinstance(output, torch.Tensor) else output[0]

    def media_bytes(self, tokens: int) -> int:
        audio = self.model.config.audio_config
        # A chunk of twice `n_window` frames makes 13 rows.
        frames = min(tokens * int(audio.n_window) // 6, (_PIECE_WINDOWS + 1) * int(audio.n_window_infer))
        # The first convolution halves both sides of the spectrogram; its activation is a copy.
        channels, bins = int(audio.downsample_hidden_size), int(audio.num_mel_bins) // 2
        convolved = frames // 2 * bins * channels * 2 * self.dtype.itemsize
        return max(super().media_bytes(tokens), convolved)

    def forward_media(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        paged: PagedContext,
        places: torch.Tensor,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        hidden = super().forward_media(embeds, positions, paged, places, rows)
        self._accepted = hidden if self._tapped is None else self._tapped[0]
        return hidden

    def emit(self, embeds: torch.Tensor, hidden: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        del hidden
        accepted, self._accepted = self._accepted, None
        return embeds if accepted is None else torch.where(media, accepted, embeds)

    def encode(self, span: MediaSpan) -> torch.Tensor:
        if span.kind is not Modality.AUDIO:
            return super().encode(span)
        return self._encode_audio(len(span.positions), **{n: value.to(self.device) for n, value in span.inputs.items()})

    def _encode_audio(
        self,
        rows: int,
        input_features: torch.Tensor,
        feature_attention_mask: torch.Tensor,
        padded_frames: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if padded_frames is not None:  # as beside a clip of that length
            more = int(padded_frames) - input_features.shape[-1]
            input_features = torch.nn.functional.pad(input_features, (0, more)).repeat(2, 1, 1)
            mask = torch.nn.functional.pad(feature_attention_mask, (0, more))
            feature_attention_mask = torch.cat((mask, torch.ones_like(mask)))
        # Nothing reaches from one window into another: a long clip is encoded in pieces, in the memory of one.
        config, frames = self.model.config.audio_config, input_features.shape[-1]
        piece, chunk = _PIECE_WINDOWS * int(config.n_window_infer), 2 * int(config.n_window)
        cuts = [0, *(cut for cut in range(piece, frames, piece) if frames - cut >= chunk), frames]
        encoded = [
            self.model.get_audio_features(
                input_features=input_features[..., first:last].to(self.dtype),
                feature_attention_mask=feature_attention_mask[..., first:last],
                return_dict=True,
            ).last_hidden_state
            for first, last in pairwise(cuts)
        ]
        return torch.cat(encoded)[:rows]


class Talker(DecoderComponent):
    """The codec language model with its code predictor. Each of its frames needs a row of the thinker's reply.

    `text_rows` are rows of the *thinker's* embedding by token id: the beginning, the end and the padding of a reply.
    Holding them here leaves the talker independent of the thinker's stage.
    """

    def __init__(
        self,
        model: Qwen3OmniMoeTalkerForConditionalGeneration,
        whole: Qwen3OmniMoeConfig,
        voices: Mapping[str, int],
        text_rows: Mapping[int, torch.Tensor],
    ) -> None:
        config, text, predictor = model.config, model.config.text_config, model.config.code_predictor_config
        kinds = sorted(set(predictor.layer_types))
        if kinds != ["full_attention"]:
            raise CheckpointError(f"code_predictor_config has layers of {', '.join(kinds)}; all must be full_attention")
        super().__init__(model, model.model, model.codec_head, text, position_dims=3, side_input=True)
        residual = ResidualCodes(
            count=int(config.num_code_groups) - 1,
            vocab_size=int(predictor.vocab_size),
            hidden_size=int(text.hidden_size),
            top_k=_RESIDUAL_TOP_K,
            top_p=_RESIDUAL_TOP_P,
            temperature=_RESIDUAL_TEMPERATURE,
        )
        self.spec = replace(
            self.spec, fractional_positions=True, side_size=int(config.thinker_hidden_size), residual=residual
        )
        self._whole = whole
        self._voices = voices
        self._depth: DepthDecoder | None = None
        self._rows = {token: row.to(self.device, self.dtype) for token, row in text_rows.items()}
        self.eos_token_ids = (config.codec_eos_token_id,)
        # What is neither a code nor an end cannot be spoken.
        self.suppress_token_ids = tuple(
            i for i in range(int(whole.code2wav_config.codebook_size), text.vocab_size) if i not in self.eos_token_ids
        )

    # --------------------------------------------------------------------------------------------- prompts

    def prepare(self, info: RequestInfo, payload: ARInput) -> ARInput:
        """Thinker rows of the prompt and of the first reply token → what users said, then the reply's beginning."""
        if payload.embeds is None:
            raise InvalidRequestError("the talker's prompt is made of the thinker's rows")
        speaker, whole = self._speaker(info), self._whole
        ids = np.array(payload.token_ids)
        starts = np.flatnonzero(ids[:-2] == whole.im_start_token_id)
        begin = starts[ids[starts + 1] == whole.assistant_token_id][-1:]
        if not len(begin) or len(ids) - begin[0] <= _HEADER:
            raise InvalidRequestError("speech needs a chat whose last message is the assistant's; use chat()")
        roles = np.where(ids == whole.im_start_token_id, np.arange(len(ids)), -1)
        roles = ids[np.minimum(np.maximum.accumulate(roles), len(ids) - 2) + 1]
        roles[: starts[0]] = -1
        user_places = np.flatnonzero((roles == whole.user_token_id) & (np.arange(len(ids)) < begin[0]))
        thinker = whole.thinker_config
        placeholders = (thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id)
        media = np.isin(ids, placeholders)
        with torch.inference_mode():
            rows = payload.embeds.to(self.device, self.dtype)
            where = upload(user_places, self.device)
            user = torch.where(
                upload(media[user_places], self.device)[:, None],
                self.model.hidden_projection(rows[where]),
                self.model.text_projection(rows[where]),
            )
            reply = rows[int(begin[0]) :]
            embeds = torch.cat((user, self._opening(reply, speaker)))
            later = reply[_HEADER + 1 :].clone()
            if payload.side_rows is not None:
                later = torch.cat((later, payload.side_rows.to(self.device, self.dtype)))
        text_ids = (*ids[user_places].tolist(), *(whole.tts_pad_token_id,) * (len(embeds) - len(user_places)))
        # A picture outside of what users said has no row here, and the rule would take its size for another's.
        prepared = payload
        if media.sum() == media[user_places].sum():
            # The reference leaves use_audio_in_video out, for the talker.
            prepared = with_positions(self.model, payload, text_ids, use_audio_in_video=False)
        token_ids = (self.model.config.codec_pad_id,) * len(text_ids)
        return replace(prepared, token_ids=token_ids, embeds=embeds, side_rows=later)

    def _opening(self, reply: torch.Tensor, speaker: int) -> torch.Tensor:
        """The rows before the first frame: the header, the voice, and the first token of the reply."""
        config = self.model.config
        codes = [config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id, speaker]
        codes += [config.codec_pad_id, config.codec_bos_id]
        text = self.model.text_projection(reply[: _HEADER + 1])
        bos, _, pad = self._text_rows
        text = torch.cat((text[:_HEADER], pad[None].expand(4, -1), bos[None], text[_HEADER:]))
        text[_HEADER:] += self.embed(upload(np.array(codes), self.device))
        return text

    @cached_property
    def _text_rows(self) -> torch.Tensor:
        """Beginning, end and padding of a reply, as the talker's rows."""
        whole = self._whole
        ids = (whole.tts_bos_token_id, whole.tts_eos_token_id, whole.tts_pad_token_id)
        rows: torch.Tensor = self.model.text_projection(torch.stack([self._rows[token] for token in ids]))
        return rows

    def _speaker(self, info: RequestInfo) -> int:
        first = _DEFAULT_VOICE if _DEFAULT_VOICE in self._voices else next(iter(self._voices))
        return voice_of(self._voices, info.voice or first)

    # ---------------------------------------------------------------------------------------------- frames

    @property
    def decoders(self) -> tuple[nn.Module, ...]:
        return (self.decoder,) if self._depth is not None else (self.decoder, self.model.code_predictor.model)

    def use_kernels(self) -> None:
        self._depth = DepthDecoder.of(self.model.code_predictor.model, int(self.model.config.num_code_groups))

    def add_side(self, embeds: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return embeds + self.model.text_projection(rows)  # type: ignore[no-any-return]

    def final_side_rows(self) -> torch.Tensor:
        return torch.stack((self._rows[self._whole.tts_eos_token_id], self._rows[self._whole.tts_pad_token_id]))

    def predict(self, hidden: torch.Tensor, token_ids: torch.Tensor, choose: Choose) -> torch.Tensor:
        predictor = self.model.code_predictor
        tables, first = predictor.get_input_embeddings(), (hidden, self.embed(token_ids))
        heads = [head.weight for head in predictor.lm_head]
        decoder = PlainDecoder(predictor.model) if self._depth is None else self._depth
        return predict_codes(decoder, first, heads, lambda index, code: tables[index](code), choose)

    def embed_frames(self, frames: torch.Tensor) -> torch.Tensor:
        tables = self.model.code_predictor.get_input_embeddings()
        rows = [self.embed(frames[:, 0]), *(table(frames[:, i + 1]) for i, table in enumerate(tables))]
        return torch.stack(rows, dim=1).sum(1)
