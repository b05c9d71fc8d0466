"""Random FLUX.2 checkpoints in diffusers' layout: klein, distilled or its base, and dev.

`scale` 0 is a toy of about a million parameters, 1 has the shapes of FLUX.2 klein 4B or of FLUX.2 dev.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPart, TinyPipeline
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import Mistral3ForConditionalGeneration, Qwen3ForCausalLM

VARIANTS = ("distilled", "base", "dev")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
_DEV_TOKENS = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
_IDS = common.following_ids(SPECIAL_TOKENS)
_DEV_IDS = common.following_ids((*SPECIAL_TOKENS[:3], *_DEV_TOKENS))
_DEV_CHAT = (
    "{%- for message in messages -%}"
    "{%- set name = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' -%}"
    "{{- '[' + name + ']' -}}"
    "{%- for part in message.content -%}{{- part.text if part.type == 'text' else '[IMG]' -}}{%- endfor -%}"
    "{{- '[/' + name + ']' -}}"
    "{%- endfor -%}"
)


def mistral(scale: float) -> Mistral3ForConditionalGeneration:
    """A Mistral that sees, on no device. The pipeline reads the hidden states of its layers 10, 20 and 30."""
    sizes = parts.decoder_sizes(scale, _IDS, vocab=131072, hidden=5120, feed_forward=32768, layers=(31, 40))
    head_dim, vision_scale = between(scale, (16, 128), 16), between(scale, (1, 16))
    text = transformers.MistralConfig(head_dim=head_dim, max_position_embeddings=131072, sliding_window=None, **sizes)
    vision = transformers.PixtralVisionConfig(
        hidden_size=vision_scale * 64,
        intermediate_size=vision_scale * 256,
        num_hidden_layers=between(scale, (1, 24)),
        num_attention_heads=vision_scale,
        image_size=1540,
        patch_size=14,
    )
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=_DEV_IDS["[IMG]"], tie_word_embeddings=False
    )
    return parts.on_meta(lambda: transformers.Mistral3ForConditionalGeneration(config))


def _write_processor(folder: Path) -> None:
    settings = common.tokenizer_settings("Qwen2Tokenizer", 131072, {"chat_template": _DEV_CHAT}, qwen=False)
    common.write_tokenizer(folder, _DEV_IDS, {**settings, "processor_class": "PixtralProcessor"})
    common.write_json(folder / "processor_config.json", {"processor_class": "PixtralProcessor", "patch_size": 14})
    (folder / "chat_template.jinja").write_text(_DEV_CHAT, encoding="utf-8")
    image = {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14}}
    common.write_json(folder / "preprocessor_config.json", {**image, "size": {"longest_edge": 1540}, "do_resize": True})


def text_encoder(scale: float) -> Qwen3ForCausalLM:
    """A Qwen3, on no device. The pipeline reads the hidden states of its layers 9, 18 and 27 at every size."""
    sizes = parts.decoder_sizes(scale, _IDS, vocab=151936, hidden=2560, feed_forward=9728, layers=(28, 36))
    head_dim = between(scale, (16, 128), 16)
    config = transformers.Qwen3Config(
        head_dim=head_dim, max_position_embeddings=40960, tie_word_embeddings=True, **sizes
    )
    return parts.on_meta(lambda: transformers.Qwen3ForCausalLM(config))


def transformer(scale: float, *, text: int, dev: bool = False) -> nn.Module:
    """FLUX.2's transformer at `scale`, on no device."""
    head = between(scale, (32, 128), 32)
    return parts.diffusers_model(
        "Flux2Transformer2DModel",
        patch_size=1,
        in_channels=128,
        num_layers=between(scale, (2, 8 if dev else 5)),
        num_single_layers=between(scale, (2, 48 if dev else 20)),
        attention_head_dim=head,
        num_attention_heads=between(scale, (2, 48 if dev else 24)),
        joint_attention_dim=text * 3,
        guidance_embeds=dev,
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


def checkpoint(scale: float, variant: str) -> TinyPipeline:
    dev = variant == "dev"
    language = mistral(scale) if dev else text_encoder(scale)
    flux = transformer(scale, text=language.config.get_text_config().hidden_size, dev=dev)
    klein_tokenizer = parts.qwen_tokenizer(_IDS, "Qwen2TokenizerFast", qwen=False, chat_template=parts.QWEN3_CHAT)
    return TinyPipeline(
        "Flux2Pipeline" if dev else "Flux2KleinPipeline",
        {
            "text_encoder": TinyModel(language, common.decoder_init),
            "transformer": TinyModel(flux, transformer_init),
            "vae": TinyModel(autoencoder(scale), _vae_init, fixed={"bn.num_batches_tracked": torch.tensor(1)}),
        },
        {
            "scheduler": parts.flow_scheduler(shift=3.0, use_dynamic_shifting=True),
            "tokenizer": TinyPart("transformers", "PixtralProcessor", _write_processor) if dev else klein_tokenizer,
        },
        settings={} if dev else {"is_distilled": variant == "distilled"},
    )


write = parts.writer(checkpoint, VARIANTS)


def transformer_init(name: str, shape: Sequence[int]) -> Init:
    """Attention is the prompt's only way in, and most of its tokens are the template's: it must pick and weigh them."""
    if "norm_q" in name or "norm_k" in name or "norm_added" in name:
        return Init(0.1, mean=2.0)
    init = parts.transformer_init(name, shape)
    return Init(init.std * 3, init.mean) if ".attn.to_out" in name else init


def _vae_init(name: str, shape: Sequence[int]) -> Init:
    return Init(0.1, mean=1.0) if name.endswith("running_var") else parts.vae_init(name, shape)
