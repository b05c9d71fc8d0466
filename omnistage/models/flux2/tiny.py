"""A random FLUX.2 klein checkpoint in diffusers' layout: the distilled one or its base.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of FLUX.2 klein 4B.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.core.verification import Progress
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

VARIANTS = ("base", "distilled")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def text_encoder(scale: float) -> Qwen3ForCausalLM:
    """A Qwen3, on no device. The pipeline reads the hidden states of its layers 9, 18 and 27 at every size."""
    heads = between(scale, (2, 32), 2)
    config = transformers.Qwen3Config(
        vocab_size=between(scale, (1024, 151936), 64),
        hidden_size=between(scale, (32, 2560), 32),
        intermediate_size=between(scale, (64, 9728), 32),
        num_hidden_layers=between(scale, (28, 36)),
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=between(scale, (16, 128), 16),
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=_special_ids()["<|im_end|>"],
        pad_token_id=_special_ids()["<|endoftext|>"],
    )
    return parts.on_meta(lambda: transformers.Qwen3ForCausalLM(config))


def transformer(scale: float, *, text: int) -> nn.Module:
    """FLUX.2's transformer at `scale`, on no device."""
    head = between(scale, (32, 128), 32)
    return parts.diffusers_model(
        "Flux2Transformer2DModel",
        patch_size=1,
        in_channels=128,
        num_layers=between(scale, (2, 5)),
        num_single_layers=between(scale, (2, 20)),
        attention_head_dim=head,
        num_attention_heads=between(scale, (2, 24)),
        joint_attention_dim=text * 3,
        guidance_embeds=False,
        axes_dims_rope=(head // 4,) * 4,
    )


def autoencoder(scale: float) -> nn.Module:
    """The 32-channel VAE, eight pixels a latent at every scale, on no device."""
    narrow, wide = between(scale, (16, 128), 32 if scale else 16), between(scale, (32, 512), 32)
    return parts.diffusers_model(
        "AutoencoderKLFlux2",
        block_out_channels=(narrow, min(2 * narrow, wide), wide, wide),
        layers_per_block=2 if scale else 1,
        norm_num_groups=32 if scale else 8,
        latent_channels=32,
    )


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None, variant: str = "distilled"
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    common.start(folder, scale, variant, VARIANTS)
    language = text_encoder(scale)
    flux = transformer(scale, text=language.config.hidden_size)
    parts.write_checkpoint(
        folder,
        "Flux2KleinPipeline",
        {
            "text_encoder": TinyModel(language, common.decoder_init),
            "transformer": TinyModel(flux, transformer_init),
            "vae": TinyModel(autoencoder(scale), _vae_init, fixed={"bn.num_batches_tracked": torch.tensor(1)}),
        },
        {
            "scheduler": parts.flow_scheduler(shift=3.0, use_dynamic_shifting=True),
            "tokenizer": parts.qwen_tokenizer(
                _special_ids(), "Qwen2TokenizerFast", qwen=False, chat_template=parts.QWEN3_CHAT
            ),
        },
        seed=seed,
        scale=scale,
        progress=progress,
        is_distilled=variant == "distilled",
    )


def transformer_init(name: str, shape: Sequence[int]) -> Init:
    """Attention is the prompt's only way in, and most of its tokens are the template's: it must pick and weigh them."""
    if "norm_q" in name or "norm_k" in name or "norm_added" in name:
        return Init(0.1, mean=2.0)
    init = parts.transformer_init(name, shape)
    return Init(init.std * 3, init.mean) if ".attn.to_out" in name else init


def _vae_init(name: str, shape: Sequence[int]) -> Init:
    return Init(0.1, mean=1.0) if name.endswith("running_var") else parts.vae_init(name, shape)


def _special_ids() -> dict[str, int]:
    return {token: common.BASE_VOCAB + offset for offset, token in enumerate(SPECIAL_TOKENS)}
