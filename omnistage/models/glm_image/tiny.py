"""A random GLM-Image checkpoint in the layout of the published one, from a toy up to the true shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from omnistage.compat import prepare_torchvision
from omnistage.core.verification import Progress
from omnistage.hf import transformers
from omnistage.models import _tiny_common as common
from omnistage.models._diffusers import tiny as parts
from omnistage.models._diffusers.tiny import TinyModel, TinyPart, TinyPipeline
from omnistage.models._tiny_common import Init, between

if TYPE_CHECKING:
    from transformers import GlmImageConfig, GlmImageProcessor, T5Config
    from transformers.models.glm_image import GlmImageTextConfig

_REAL_VOCAB, _REAL_CODES, _CONTROLS = 168064, 16384, 128
_FIRST_SPECIAL = 167841
# In the order of the real vocabulary, from `_FIRST_SPECIAL` on.
_SPECIAL_TOKENS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>"),
    *("<|end_of_video|>", "<|image|>", "<|video|>"),
)
_ORDER = ("processor", "text_encoder", "tokenizer", "vision_language_encoder", "scheduler", "transformer", "vae")
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


def num_codes(scale: float) -> int:
    """Ids of picture tokens; the controls, then the text's ids lie above."""
    return between(scale, (256, _REAL_CODES), 128)


def vocab_size(scale: float) -> int:
    smallest = num_codes(0.0) + _CONTROLS + common.BASE_VOCAB + _REAL_VOCAB - _FIRST_SPECIAL
    return between(scale, (smallest, _REAL_VOCAB), 16)


def special_ids(scale: float) -> dict[str, int]:
    """Ids of special tokens: as far from the end of the vocabulary as in the real one."""
    controls = {_IMAGE_START: num_codes(scale), _IMAGE_END: num_codes(scale) + 1}
    return controls | common.special_ids(_SPECIAL_TOKENS, vocab_size(scale), _REAL_VOCAB, _FIRST_SPECIAL)


def prior_config(scale: float) -> GlmImageConfig:
    """The language model's configuration."""
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
    return transformers.GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config=codebook,
        image_token_id=ids["<|image|>"],
        image_start_token_id=ids[_IMAGE_START],
        image_end_token_id=ids[_IMAGE_END],
    )


def glyph_config(scale: float) -> T5Config:
    return transformers.T5Config(
        vocab_size=384,
        d_model=between(scale, (48, 1472), 16),
        d_ff=between(scale, (96, 3584), 32),
        d_kv=between(scale, (16, 64), 16),
        num_layers=between(scale, (2, 12)),
        num_heads=between(scale, (3, 6)),
        feed_forward_proj="gated-gelu",
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
    moments = common.initial("vae.moments", (2, 16), lambda *_: Init(0.2), seed)
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
    def rule(name: str, shape: Sequence[int]) -> Init:
        if name.endswith("lm_head.weight"):
            return common.head_init(shape, (0, codes))  # a picture token is always the best one
        if name.endswith("position_embedding.weight"):
            return Init(0.5)
        if name.endswith("quantize.embedding.weight"):
            return Init(1.0)
        return common.decoder_init(name, shape)

    return rule


def _transformer_init(name: str, shape: Sequence[int]) -> Init:
    if name.endswith("prior_token_embedding.weight"):
        return Init(1.0)
    return common.vector_init(name) if len(shape) == 1 else common.normal(shape)


# ------------------------------------------------------------------------------------------------- writing


def write(folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None) -> None:
    """Write the checkpoint into `folder`, which must be new or empty."""
    prepare_torchvision()
    common.start(folder, scale)
    prior, glyphs = prior_config(scale), glyph_config(scale)
    language = parts.on_meta(lambda: transformers.GlmImageForConditionalGeneration(prior))
    transformer = parts.diffusers_model("GlmImageTransformer2DModel", **transformer_config(scale))
    _write_generation_config(folder / "vision_language_encoder", prior.text_config)
    pipeline = TinyPipeline(
        "GlmImagePipeline",
        {
            "vision_language_encoder": TinyModel(language, _prior_rule(num_codes(scale))),
            "text_encoder": TinyModel(parts.on_meta(lambda: transformers.T5EncoderModel(glyphs)), parts.t5_init),
            "transformer": TinyModel(transformer, _transformer_init),
            "vae": TinyModel(parts.diffusers_model("AutoencoderKL", **vae_config(scale, seed)), parts.vae_init),
        },
        {
            "scheduler": parts.flow_scheduler(
                use_dynamic_shifting=True,
                base_shift=0.25,
                max_shift=0.75,
                base_image_seq_len=256,
                time_shift_type="linear",
            ),
            "processor": TinyPart("transformers", "GlmImageProcessor", _processor(scale).save_pretrained),
            "tokenizer": TinyPart(
                "transformers", "ByT5Tokenizer", transformers.ByT5Tokenizer(extra_ids=0).save_pretrained
            ),
        },
        order=_ORDER,
    )
    parts.write_checkpoint(folder, pipeline, seed, scale, progress)


def _write_generation_config(folder: Path, text: GlmImageTextConfig) -> None:
    folder.mkdir()
    sampling = {"do_sample": True, "temperature": 0.9, "top_p": 0.75, "top_k": text.vision_vocab_size}
    ends = {"eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id}
    common.write_json(folder / "generation_config.json", {**sampling, **ends})


def _processor(scale: float) -> GlmImageProcessor:
    ids = special_ids(scale)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(scale, ids),
        bos_token=_IMAGE_START,
        eos_token=_IMAGE_END,
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
    )
    images = transformers.GlmImageImageProcessor(
        # A small model must not need minutes for an edit.
        min_pixels=512**2 if scale == 1.0 else 64**2,
        max_pixels=2048**2,
        patch_size=16,
        temporal_patch_size=1,
        merge_size=1,
        image_mean=common.CLIP_MEAN,
        image_std=common.CLIP_STD,
    )
    return transformers.GlmImageProcessor(images, tokenizer, chat_template=_CHAT_TEMPLATE)


def _tokenizer(scale: float, special: Mapping[str, int]) -> Tokenizer:
    """Byte-level BPE whose text ids lie above those of the picture tokens."""
    vocab, merges = common.base_vocabulary()
    first = num_codes(scale) + _CONTROLS
    pictures = {f"<|picture_{index}|>": index for index in range(first) if index not in special.values()}
    words = {token: first + index for token, index in vocab.items()}
    tokenizer = Tokenizer(BPE(vocab={**pictures, **words, **special}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
