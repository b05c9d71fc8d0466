"""A random FLUX.2 klein checkpoint in diffusers' layout: the distilled one or its base.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of FLUX.2 klein 4B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from omnistage.core.errors import ConfigError
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import Draw, between

VARIANTS = ("base", "distilled")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
    "{%- endif -%}"
)

_INDEX = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen3ForCausalLM"),
    "tokenizer": ("transformers", "Qwen2TokenizerFast"),
    "transformer": ("diffusers", "Flux2Transformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLFlux2"),
}


def text_encoder(scale: float) -> Any:
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


def transformer(scale: float, *, text: int) -> Any:
    """FLUX.2's transformer at `scale`, on no device."""
    head = between(scale, (32, 128), 32)
    return parts.on_meta(
        lambda: diffusers().Flux2Transformer2DModel(
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
    )


def autoencoder(scale: float) -> Any:
    """The 32-channel VAE, eight pixels a latent at every scale, on no device."""
    narrow, wide = between(scale, (16, 128), 32 if scale else 16), between(scale, (32, 512), 32)
    return parts.on_meta(
        lambda: diffusers().AutoencoderKLFlux2(
            block_out_channels=(narrow, min(2 * narrow, wide), wide, wide),
            layers_per_block=2 if scale else 1,
            norm_num_groups=32 if scale else 8,
            latent_channels=32,
        )
    )


def write(
    folder: Path,
    *,
    seed: int = 0,
    scale: float = 0.0,
    progress: Callable[[str, float], None] | None = None,
    variant: str = "distilled",
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    common.check_scale(scale)
    if variant not in VARIANTS:
        raise ConfigError(f"there is no {variant!r}; known: {', '.join(VARIANTS)}", param="variant")
    common.new_folder(folder)
    language = text_encoder(scale)
    models = {
        "text_encoder": (language, common.decoder_draw),
        "transformer": (transformer(scale, text=language.config.hidden_size), _transformer_draw),
        "vae": (autoencoder(scale), _vae_draw),
    }
    fixed = {"bn.num_batches_tracked": torch.tensor(1)}
    for done, (name, (model, rule)) in enumerate(models.items()):
        if progress is not None:
            progress(f"writing {name}", done / len(models))
        parts.write_model(folder / name, model, rule, seed=seed, dtype=parts.stored_dtype(scale), fixed=fixed)
    _write_tokenizer(folder / "tokenizer")
    parts.write_flow_scheduler(folder / "scheduler", shift=3.0, use_dynamic_shifting=True)
    parts.write_index(folder, "Flux2KleinPipeline", _INDEX, is_distilled=variant == "distilled")
    if progress is not None:
        progress("checkpoint written", 1.0)


def _transformer_draw(name: str, shape: Sequence[int]) -> Draw:
    """Attention is the prompt's only way in, and most of its tokens are the template's: it must pick and weigh them."""
    if "norm_q" in name or "norm_k" in name or "norm_added" in name:
        return Draw(0.1, mean=2.0)
    drawn = parts.transformer_draw(name, shape)
    return Draw(drawn.std * 3, drawn.mean) if ".attn.to_out" in name else drawn


def _vae_draw(name: str, shape: Sequence[int]) -> Draw:
    return Draw(0.1, mean=1.0) if name.endswith("running_var") else parts.vae_draw(name, shape)


def _special_ids() -> dict[str, int]:
    return {token: common.BASE_VOCAB + offset for offset, token in enumerate(SPECIAL_TOKENS)}


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }
    common.write_tokenizer(folder, _special_ids(), settings)
