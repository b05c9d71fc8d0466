"""Qwen3-Omni's code2wav as a streaming codec component, on transformers' own modules.

Several codes a frame become an embedding, a transformer with sliding-window attention mixes frames, and convolutions
raise 12.5 frames a second to 24,000 samples. It is causal, except that some transposed convolutions wait for one more
column of their input: samples are 555 behind the frames, and `forward` never gives those at an utterance's end. What is
streamed here equals `forward` over the whole utterance. transformers' `chunked_decode`, which `generate` uses, does not
from 300 frames on: each of its chunks lacks its last 555 samples, and sees 25 frames of the past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.core.errors import CheckpointError
from omnistage.engines.codec.causal import CausalDecoder
from omnistage.engines.codec.causal_layers import (
    Contexts,
    StreamedTransformer,
    streamed_convolutions,
    upsampling,
)
from omnistage.engines.codec.component import CodecLayout
from omnistage.engines.codec.kernels import Kernels, use_triton
from omnistage.engines.codec.snake import fused_snakes
from omnistage.engines.shared_copy import shared_copy
from omnistage.models.loading import kv_shape, positive

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

SAMPLE_RATE = 24_000  # not in the checkpoint's config


class Code2Wav(CausalDecoder):
    """Code2wav behind the codec engine. The given model's modules stay as they are; their tensors are shared.

    It computes in the model's dtype, its convolutions as torch's setting for cuDNN says. `kernels` of its activations:
    `auto` is `triton` on CUDA, `torch` elsewhere. `voices` are the talker's, which this stage has no use for and must
    not refuse. `target` is where a model on the meta device will run, for `memory`.
    """

    def __init__(
        self,
        model: Qwen3OmniMoeCode2Wav,
        device: torch.device | str | None = None,
        *,
        voices: tuple[str, ...] = (),
        cuda_graphs: bool = True,
        kernels: Kernels = "auto",
        target: torch.device | None = None,
    ) -> None:
        at = torch.device(device) if device is not None else model.device
        planned = at.type == "meta"
        fused = use_triton(kernels, target if planned and target is not None else at, planned=planned)
        model.to(at).eval()
        config, contexts = model.config, Contexts()
        scale, delay = upsampling(model.modules())
        layout = CodecLayout(
            block_codes=1,
            codebook_size=positive(config, "codebook_size"),
            num_codebooks=positive(config, "num_quantizers"),
            max_codes=positive(config, "max_position_embeddings"),
            code_seconds=scale / SAMPLE_RATE,
            first_blocks=delay // scale + 1,
            mixed_windows=True,
        )
        super().__init__(
            streamed_copy(model, contexts, fused=fused),
            contexts,
            layout,
            SAMPLE_RATE,
            frame_samples=scale,
            delay=delay,
            device=at,
            voices=voices,
            cuda_graphs=cuda_graphs,
            target=target,
        )


def streamed_copy(model: Qwen3OmniMoeCode2Wav, contexts: Contexts, *, fused: bool) -> Qwen3OmniMoeCode2Wav:
    """A copy whose convolutions and transformer go on from `contexts`; all else is transformers' own."""
    config, transformer = model.config, model.pre_transformer
    kinds = sorted(set(config.layer_types))
    if kinds != ["sliding_attention"]:
        raise CheckpointError(f"code2wav_config has layers of {', '.join(kinds)}; all must be sliding_attention")
    swaps: dict[nn.Module, nn.Module] = fused_snakes(model.modules()) if fused else {}
    window = positive(config, "sliding_window")
    swaps[transformer] = StreamedTransformer(transformer, window, kv_shape(config), contexts, kinds=kinds)
    swaps.update(streamed_convolutions(model.modules(), contexts, waits=True))
    return shared_copy(model, swaps)
