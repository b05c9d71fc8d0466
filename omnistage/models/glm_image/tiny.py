"""A random GLM-Image checkpoint in the layout of the published one, from a toy up to the true shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from omnistage.compat import prepare_torchvision
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers.loading import diffusers
from omnistage.models._tiny_common import Draw, between

_REAL_VOCAB, _REAL_CODES, _CONTROLS = 168064, 16384, 128
_FIRST_SPECIAL = 167841
# In the order of the real vocabulary, from `_FIRST_SPECIAL` on.
_SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
_IMAGE_START, _IMAGE_END = "<|dit_token_16384|>", "<|dit_token_16385|>"
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{- message.content -}}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '" + _IMAGE_START + "<|image|>" + _IMAGE_END + "' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{%- endfor -%}"
)
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]

Progress = Callable[[str, float], None]


def num_codes(scale: float) -> int:
    """Ids of picture tokens; the controls, then the text's ids lie above."""
    return between(scale, (256, _REAL_CODES), 128)


def vocab_size(scale: float) -> int:
    smallest = num_codes(0.0) + _CONTROLS + common.BASE_VOCAB + _REAL_VOCAB - _FIRST_SPECIAL
    return between(scale, (smallest, _REAL_VOCAB), 16)


def special_ids(scale: float) -> dict[str, int]:
    """Ids of special tokens: as far from the end of the vocabulary as in the real one."""
    first = _FIRST_SPECIAL - _REAL_VOCAB + vocab_size(scale)
    controls = {_IMAGE_START: num_codes(scale), _IMAGE_END: num_codes(scale) + 1}
    return controls | {token: first + offset for offset, token in enumerate(_SPECIAL_TOKENS)}


def prior_config(scale: float) -> Any:
    """The language model's configuration."""
    from transformers import GlmImageConfig

    ids, head_dim = special_ids(scale), between(scale, (32, 128), 32)
    heads = between(scale, (4, 32), 4)
    sixteenths = head_dim // 32  # half of the head turns: time, height and width share its pairs as 8 : 12 : 12
    text = {
        "vocab_size": vocab_size(scale),
        "vision_vocab_size": num_codes(scale) + _CONTROLS,
        "hidden_size": heads * head_dim,
        "intermediate_size": between(scale, (192, 13696), 32),
        "num_hidden_layers": between(scale, (3, 40)),
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids[_IMAGE_END],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2 * sixteenths, 3 * sixteenths, 3 * sixteenths],
        },
    }
    vision_heads = between(scale, (4, 16), 4)
    width = vision_heads * between(scale, (16, 96), 8)
    vision = {
        "depth": between(scale, (2, 40)),
        "hidden_size": width,
        "num_heads": vision_heads,
        "intermediate_size": between(scale, (96, 6144), 32),
        "image_size": between(scale, (256, 2048), 16),
        "patch_size": 16,
        "spatial_merge_size": 1,
    }
    codebook = {
        "num_embeddings": num_codes(scale),
        "embed_dim": between(scale, (32, 2048), 16),
        "latent_channels": width,
    }
    return GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config=codebook,
        image_token_id=ids["<|image|>"],
        image_start_token_id=ids[_IMAGE_START],
        image_end_token_id=ids[_IMAGE_END],
        architectures=["GlmImageForConditionalGeneration"],
        dtype="float32" if scale <= 0.5 else "bfloat16",
    )


def glyph_config(scale: float) -> Any:
    from transformers import T5Config

    return T5Config(
        vocab_size=384,
        d_model=between(scale, (48, 1472), 16),
        d_ff=between(scale, (96, 3584), 32),
        d_kv=between(scale, (16, 64), 16),
        num_layers=between(scale, (2, 12)),
        num_heads=between(scale, (3, 6)),
        feed_forward_proj="gated-gelu",
        architectures=["T5EncoderModel"],
    )


def transformer_config(scale: float) -> dict[str, object]:
    return {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": between(scale, (3, 30)),
        "attention_head_dim": between(scale, (16, 128), 8),
        "num_attention_heads": between(scale, (4, 32), 4),
        "text_embed_dim": between(scale, (48, 1472), 16),
        "time_embed_dim": between(scale, (32, 512), 32),
        "condition_dim": between(scale, (16, 256), 16),
        "prior_vq_quantizer_codebook_size": num_codes(scale),
    }


def vae_config(scale: float, seed: int) -> dict[str, object]:
    groups = 4 if scale < 0.5 else 32
    sizes = ((8, 128), (16, 512), (16, 1024), (16, 1024))
    channels = [between(scale, size, groups) for size in sizes]
    moments = common.draw("vae.moments", (2, 16), lambda *_: Draw(0.2), seed)
    return {
        "block_out_channels": channels,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 1 if scale < 0.5 else 3,
        "latent_channels": 16,
        "norm_num_groups": groups,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "mid_block_add_attention": False,
        "force_upcast": True,
        "scaling_factor": 1.0,
        "sample_size": 1024,
        "latents_mean": moments[0].tolist(),
        "latents_std": (moments[1].abs() + 1.0).tolist(),
    }


# ------------------------------------------------------------------------------------------------- weights


def _prior_rule(codes: int) -> common.Rule:
    def rule(name: str, shape: Sequence[int]) -> Draw:
        if name == "lm_head.weight":
            # A picture token is always the best one.
            return Draw(common.normal(shape, gain=4.0).std, keep_rows=((0, codes),))
        if name.endswith("position_embedding.weight"):
            return Draw(0.5)
        if name.endswith("quantize.embedding.weight"):
            return Draw(1.0)
        return common.decoder_draw(name, shape)

    return rule


def _glyph_draw(name: str, shape: Sequence[int]) -> Draw:
    if name == "shared.weight" or len(shape) == 1:
        return Draw(0.1 if len(shape) == 1 else 1.0, mean=1.0 if len(shape) == 1 else 0.0)
    # T5 does not scale its scores.
    return common.normal(shape, gain=0.5 if name.endswith((".q.weight", ".k.weight")) else 1.0)


def _picture_draw(name: str, shape: Sequence[int]) -> Draw:
    """Weights of the transformer and the VAE: pictures that differ by prompt and place, within range."""
    if len(shape) == 1:
        return Draw(0.1, mean=1.0) if name.endswith("weight") else Draw(0.05)
    if name.endswith("prior_token_embedding.weight"):
        return Draw(1.0)
    if name == "decoder.conv_out.weight":
        return common.normal(shape, gain=0.5)
    return common.normal(shape)


# ------------------------------------------------------------------------------------------------- writing


def write(folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    prepare_torchvision()
    from transformers import GlmImageForConditionalGeneration, T5EncoderModel

    common.check_scale(scale)
    common.new_folder(folder)
    package, report = diffusers(), progress or (lambda _what, _done: None)
    dtype = torch.float32 if scale <= 0.5 else torch.bfloat16
    prior = prior_config(scale)
    report("vision_language_encoder", 0.0)
    _write_language_model(
        folder / "vision_language_encoder",
        GlmImageForConditionalGeneration,
        prior,
        _prior_rule(num_codes(scale)),
        dtype,
        seed,
    )
    common.write_json(
        folder / "vision_language_encoder" / "generation_config.json",
        {
            "do_sample": True,
            "temperature": 0.9,
            "top_p": 0.75,
            "top_k": prior.text_config.vision_vocab_size,
            "eos_token_id": prior.text_config.eos_token_id,
            "pad_token_id": prior.text_config.pad_token_id,
        },
    )
    report("text_encoder", 0.5)
    _write_language_model(folder / "text_encoder", T5EncoderModel, glyph_config(scale), _glyph_draw, dtype, seed)
    report("transformer", 0.6)
    transformer = package.GlmImageTransformer2DModel
    _write_picture_model(folder / "transformer", transformer, transformer_config(scale), dtype, seed)
    report("vae", 0.9)
    _write_picture_model(folder / "vae", package.AutoencoderKL, vae_config(scale, seed), dtype, seed)
    _write_processors(folder, scale)
    package.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, base_image_seq_len=256, time_shift_type="linear"
    ).save_pretrained(folder / "scheduler")
    _write_index(folder, package.__version__)  # last: a folder without it is no checkpoint
    report("written", 1.0)


def _write_language_model(
    folder: Path, cls: Any, config: Any, rule: common.Rule, dtype: torch.dtype, seed: int
) -> None:
    folder.mkdir()
    with torch.device("meta"):
        tensors: Mapping[str, torch.Tensor] = cls(config).state_dict()
    tied = "encoder.embed_tokens.weight"
    stored = {name: tensor for name, tensor in tensors.items() if name != tied}
    common.write_weights(folder, stored, rule, lambda _name: dtype, seed)
    config.save_pretrained(folder)


def _write_picture_model(folder: Path, cls: Any, config: Mapping[str, object], dtype: torch.dtype, seed: int) -> None:
    with torch.device("meta"):
        model = cls.from_config(dict(config))
    model.save_config(folder)
    tensors = {
        name: common.draw(name, tensor.shape, _picture_draw, seed).to(dtype)
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, str(folder / "diffusion_pytorch_model.safetensors"), metadata={"format": "pt"})


def _write_processors(folder: Path, scale: float) -> None:
    from transformers import ByT5Tokenizer, GlmImageImageProcessor, GlmImageProcessor, PreTrainedTokenizerFast

    ids = special_ids(scale)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(scale, ids),
        bos_token=_IMAGE_START,
        eos_token=_IMAGE_END,
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )
    images = GlmImageImageProcessor(
        # A small model must not need minutes for an edit.
        min_pixels=512**2 if scale == 1.0 else 64**2,
        max_pixels=2048**2,
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        image_mean=_CLIP_MEAN,
        image_std=_CLIP_STD,
    )
    GlmImageProcessor(images, tokenizer, chat_template=_CHAT_TEMPLATE).save_pretrained(folder / "processor")
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder / "tokenizer")


def _tokenizer(scale: float, special: Mapping[str, int]) -> Any:
    """Byte-level BPE whose text ids lie above those of the picture tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab, merges = common.base_vocabulary()
    first = num_codes(scale) + _CONTROLS
    pictures = {f"<|picture_{index}|>": index for index in range(first) if index not in special.values()}
    words = {token: first + index for token, index in vocab.items()}
    tokenizer = Tokenizer(BPE(vocab={**pictures, **words, **special}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _write_index(folder: Path, version: str) -> None:
    parts = {
        "processor": "GlmImageProcessor",
        "text_encoder": "T5EncoderModel",
        "tokenizer": "ByT5Tokenizer",
        "vision_language_encoder": "GlmImageForConditionalGeneration",
    }
    index: dict[str, object] = {"_class_name": "GlmImagePipeline", "_diffusers_version": version}
    index |= {name: ["transformers", cls] for name, cls in parts.items()}
    index |= {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "GlmImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    common.write_json(folder / "model_index.json", index)
