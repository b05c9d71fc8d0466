"""CSM's language model on the autoregressive engine: text to frames of codes.

The backbone samples a frame's first code and the depth decoder the others; the sum of their embeddings is fed back. A
frame of end codes (its last code may differ) ends the answer. The engine ends answers by a token, so such a frame is
marked in one more column of its embedding, and after it the logits leave one id alone: that beyond the codebook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from omnistage.core.errors import CheckpointError
from omnistage.core.types import MediaSpan
from omnistage.engines.ar.attention import ATTENTION_NAME, PagedContext
from omnistage.engines.ar.component import ARComponent, ARSpec, Choose, ResidualCodes
from omnistage.engines.ar.cpu_kernels import apply_cpu_kernels
from omnistage.engines.ar.depth_decoder import DepthDecoder, predict_codes
from omnistage.models.loading import freeze, kv_shape, positive

if TYPE_CHECKING:
    from transformers import CsmForConditionalGeneration, MimiModel

_NEVER = -1e4
"""A logit that is never sampled, and finite in every dtype."""
_ENCODER_TENSORS = 4  # as wide as the samples are long, alive at once
_RESIDUAL_TOP_K = 50
"""As the model's authors sample."""


class Backbone(ARComponent):
    """CSM without its codec's decoder. `codec` encodes clips that a prompt holds; without it there are none."""

    def __init__(self, model: CsmForConditionalGeneration, codec: MimiModel | None = None) -> None:
        config = model.config
        layers, kv_heads, head_dim = kv_shape(config)
        self._width, self._codes = positive(config, "hidden_size"), positive(config, "vocab_size")
        self._books, self._end_code = positive(config, "num_codebooks"), end_code(config)
        text = positive(config, "text_vocab_size")
        if text <= self._codes:
            raise CheckpointError(f"config.json has {text} text tokens and {self._codes} codes; it must have more text")
        self.model, self._codec = freeze(model), codec
        self.decoder, self._depth = model.backbone_model, model.depth_decoder
        self._kernels: DepthDecoder | None = None
        self.device, self.dtype = model.device, model.dtype
        self.spec = ARSpec(
            num_layers=layers,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=self._codes + 1,
            embed_size=self._width + 1,
            max_length=positive(config, "max_position_embeddings"),
            residual=ResidualCodes(self._books - 1, self._codes, self._width + 1, top_k=_RESIDUAL_TOP_K),
            prompt_vocab_size=text,
        )
        self.eos_token_ids = (self._codes,)
        self._clip_end = positive(config, "audio_eos_token_id")
        with torch.inference_mode():  # what the token at the end of a clip stands for
            self._end_row = self._sum(torch.full((1, self._books), self._end_code, device=self.device))
        # Not by `use_paged_attention`: the depth decoder's settings are inside this config.
        self.decoder.set_attn_implementation({"": ATTENTION_NAME})  # type: ignore[operator]
        apply_cpu_kernels(self.decoder)

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        return (self.model,) if self._codec is None else (self.model, self._codec)

    def media_bytes(self, tokens: int) -> int:
        """Of the codec's widest layers, about: its encoder cannot run without data."""
        if self._codec is None:
            return 0
        config = self._codec.config
        samples: int = tokens * round(config.sampling_rate / config.frame_rate)
        return int(_ENCODER_TENSORS * samples * positive(config, "num_filters") * self._codec.dtype.itemsize)

    def embed(self, token_ids: Tensor) -> Tensor:
        rows = self.model.embed_text_tokens(token_ids)
        return functional.pad(torch.where((token_ids == self._clip_end)[:, None], self._end_row, rows), (0, 1))

    def embed_frames(self, frames: Tensor) -> Tensor:
        ended = (frames[:, :-1] == self._end_code).all(dim=1, keepdim=True)
        return torch.cat((self._sum(frames.clamp(max=self._codes - 1)), ended.to(self.dtype)), dim=1)

    def _sum(self, frames: Tensor) -> Tensor:
        """`[T, codebooks]` → `[T, width]`."""
        return self.decoder.embed_tokens(frames[None])[0]  # type: ignore[no-any-return,operator]

    def forward(self, embeds: Tensor, positions: Tensor, paged: PagedContext) -> Tensor:
        rows = embeds[None, :, : self._width]
        out = self.decoder(inputs_embeds=rows, position_ids=positions, use_cache=False, paged=paged)
        return torch.cat((out.last_hidden_state[0], embeds[:, self._width :]), dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden[:, : self._width])
        ended = hidden[:, self._width :] > 0
        return torch.cat((logits.masked_fill(ended, _NEVER), (~ended).to(logits.dtype) * _NEVER), dim=1)

    def use_kernels(self) -> None:
        self._kernels = DepthDecoder.of(self._depth.model, self._books)

    def predict(self, hidden: Tensor, token_ids: Tensor, choose: Choose) -> Tensor:
        depth, heads = self._depth.model, self._depth.codebooks_head.weight
        first = depth.embed_tokens(token_ids.clamp(max=self._codes - 1))
        if self._kernels is not None:
            project, offset = depth.inputs_embeds_projector, self._codes
            begin = project(hidden[:, : self._width]), project(first)

            def embed(index: int, code: Tensor) -> Tensor:
                return project(depth.embed_tokens(code + (index + 1) * offset))  # type: ignore[no-any-return]

            return predict_codes(self._kernels, begin, [head.T for head in heads], embed, choose)
        rows = torch.stack((hidden[:, : self._width], first), dim=1)
        cache, codes = _Cache(), list[Tensor]()
        # Ready-made masks: transformers would look at numbers on the device to leave one out.
        mask = torch.zeros(1, 1, 2, 2, dtype=self.dtype, device=self.device)
        mask[..., 0, 1] = float("-inf")
        for index in range(len(heads)):
            out = depth(inputs_embeds=rows, attention_mask=mask, past_key_values=cache, use_cache=True)
            codes.append(choose(out.last_hidden_state[:, -1] @ heads[index], index))
            rows = depth.embed_tokens(codes[-1] + (index + 1) * self._codes)[:, None]
            mask = mask.new_zeros(1, 1, 1, index + 3)
        return torch.stack(codes, dim=1)

    def encode(self, span: MediaSpan) -> Tensor:
        """A clip's frames, embedded as generated ones are."""
        if self._codec is None:
            return super().encode(span)
        samples = span.inputs["input_values"].to(self._codec.device, self._codec.dtype)
        codes = self._codec.encode(samples[None]).audio_codes[0].T  # [frames, codebooks]
        return functional.pad(self._sum(codes[:, : self._books]), (0, 1))


class _Cache:
    """Keys and values as `transformers` asks a cache for them. Its own makes tensors from numbers of the host."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._layers[layer_idx][0].shape[2] if self._layers else 0

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if layer_idx in self._layers:
            old = self._layers[layer_idx]
            keys, values = torch.cat((old[0], keys), dim=2), torch.cat((old[1], values), dim=2)
        self._layers[layer_idx] = keys, values
        return keys, values


def end_code(config: object) -> int:
    """The code of which a frame that ends an answer consists."""
    value = getattr(config, "codebook_eos_token_id", None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CheckpointError(f"config.json has codebook_eos_token_id={value!r}; it must be a code")
    return value
