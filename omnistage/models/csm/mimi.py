"""Mimi's decoder as a streaming codec component, on transformers' own modules: 80 ms of sound a frame."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from omnistage.core.errors import CheckpointError
from omnistage.engines.codec.causal import CausalDecoder
from omnistage.engines.codec.causal_layers import (
    Contexts,
    StreamedTransformer,
    streamed_convolutions,
    wrapped_convolutions,
)
from omnistage.engines.codec.component import CodecLayout
from omnistage.engines.shared_copy import shared_copy
from omnistage.models.loading import kv_shape, positive

if TYPE_CHECKING:
    from transformers import MimiModel

_ENCODING = ("encoder", "encoder_transformer", "downsample")
"""Parts of the model that decoding has no use for; some versions of transformers have all of them in the first."""


class Mimi(CausalDecoder):
    """Mimi behind the codec engine. The given model's modules stay as they are; their tensors are shared.

    `voices` are those of the model that gives the codes, which this stage has no use for and must not refuse.
    """

    def __init__(
        self,
        model: MimiModel,
        device: torch.device | str | None = None,
        *,
        num_codebooks: int | None = None,
        voices: tuple[str, ...] = (),
        cuda_graphs: bool = True,
        target: torch.device | None = None,
    ) -> None:
        at = torch.device(device) if device is not None else model.device
        model.to(at).eval()
        config, contexts = model.config, Contexts()
        if not config.use_causal_conv or config.trim_right_ratio != 1.0 or config.pad_mode != "constant":
            raise CheckpointError(
                "codec_config is not of a causal codec; use_causal_conv must be true, trim_right_ratio 1 and pad_mode "
                "constant"
            )
        decoding = [m for name, m in model.named_modules() if name.split(".")[0] not in ("", "quantizer", *_ENCODING)]
        convolutions = [conv for _, conv in wrapped_convolutions(decoding)]
        samples = math.prod(conv.stride[0] for conv in convolutions if isinstance(conv, nn.ConvTranspose1d))
        frame_tokens = round(config.encodec_frame_rate / config.frame_rate)
        codebooks = positive(config, "num_quantizers") if num_codebooks is None else num_codebooks
        layout = CodecLayout(
            block_codes=1,
            codebook_size=positive(config, "codebook_size"),
            num_codebooks=codebooks,
            max_codes=positive(config, "max_position_embeddings") // frame_tokens,
            code_seconds=samples / config.sampling_rate,
            mixed_windows=True,
        )
        (transformer,) = (m for m in decoding if type(m).__name__ == "MimiTransformerModel")
        swaps = streamed_convolutions(decoding, contexts, waits=False)
        swaps[transformer] = StreamedTransformer(
            transformer, positive(config, "sliding_window"), kv_shape(config), contexts, frame_tokens=frame_tokens
        )
        swaps[model.quantizer] = _Codebooks(model.quantizer, codebooks)
        swaps.update({module: nn.Identity() for name, module in model.named_children() if name in _ENCODING})
        super().__init__(
            _Decoder(shared_copy(model, swaps)),
            contexts,
            layout,
            positive(config, "sampling_rate"),
            frame_samples=samples,
            device=at,
            voices=voices,
            cuda_graphs=cuda_graphs,
            target=target,
        )


class _Decoder(nn.Module):
    """Codes `[B, codebooks, frames]` to samples `[B, 1, n]`."""

    def __init__(self, model: MimiModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, codes: Tensor) -> Tensor:
        return self.model.decode(codes).audio_values.clamp(-1.0, 1.0)  # type: ignore[no-any-return]


class _Codebooks(nn.Module):
    """Stands in for Mimi's quantizer: all codebooks are one table, read and summed up at once."""

    table: Tensor
    starts: Tensor

    def __init__(self, quantizer: Any, count: int) -> None:
        super().__init__()
        halves = quantizer.semantic_residual_vector_quantizer, quantizer.acoustic_residual_vector_quantizer
        self._semantic = len(halves[0].layers)
        self.projections = nn.ModuleList(half.output_proj or nn.Identity() for half in halves)
        books = [layer.codebook for half in halves for layer in half.layers][:count]
        with torch.no_grad():
            rows = [book.embed_sum / book.cluster_usage.clamp(min=book.epsilon)[:, None] for book in books]
            self.register_buffer("table", torch.cat(rows), persistent=False)
            starts = torch.arange(count, device=self.table.device) * len(rows[0])
            self.register_buffer("starts", starts[:, None], persistent=False)

    def decode(self, codes: Tensor) -> Tensor:
        """`[B, codebooks, frames]` → `[B, hidden, frames]`."""
        rows = functional.embedding(codes + self.starts, self.table)  # [B, codebooks, frames, dim]
        halves = rows[:, : self._semantic], rows[:, self._semantic :]
        sums = [half.sum(dim=1).transpose(1, 2) for half in halves]
        return self.projections[0](sums[0]) + self.projections[1](sums[1])  # type: ignore[no-any-return]
