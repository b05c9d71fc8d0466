"""Small random checkpoints of three kinds: pictures and videos with m-RoPE, pictures alone, sounds alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnistage.compat import prepare_torchvision
from omnistage.core.verification import Progress
from omnistage.models import _tiny_common as common
from omnistage.models._tiny_common import Init

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, ProcessorMixin

VARIANTS = ("qwen2_5_vl", "llava", "qwen2_audio")
_MAX_LENGTH = 2048
_BASE = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOKENS = {
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "llava": ("<image>",),
    "qwen2_audio": ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
}
_MARKS = {
    "image": {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "llava": "<image>\\n"},
    "video": {"qwen2_5_vl": "<|vision_start|><|video_pad|><|vision_end|>"},
    "audio": {"qwen2_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"},
}


def chat_template(marks: dict[str, str]) -> str:
    """A ChatML template that writes `marks` for media, by their kind."""
    media = "".join(
        f"{{%- {'elif' if number else 'if'} part.type == '{kind}' -%}}{{{{- '{mark}' -}}}}"
        for number, (kind, mark) in enumerate(marks.items())
    )
    return (
        "{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\\n' -}}"
        "{%- if message.content is string -%}{{- message.content -}}{%- else -%}{%- for part in message.content -%}"
        + media
        + "{%- else -%}{{- part.text -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def special_ids(variant: str) -> dict[str, int]:
    return common.following_ids((*_BASE, *_TOKENS[variant]))


def write(
    folder: Path, *, seed: int = 0, scale: float = 0.0, progress: Progress | None = None, variant: str = VARIANTS[0]
) -> None:
    """Write the checkpoint into `folder`, which must be new or empty. It has one size, whatever the scale."""
    prepare_torchvision()
    from transformers import AutoModelForMultimodalLM, PreTrainedTokenizerFast

    common.start(folder, scale, variant, VARIANTS)
    ids = special_ids(variant)
    marks = {kind: by_variant[variant] for kind, by_variant in _MARKS.items() if variant in by_variant}
    template = {"chat_template": chat_template(marks)}
    settings = common.tokenizer_settings("PreTrainedTokenizerFast", _MAX_LENGTH, qwen=False)
    common.write_tokenizer(folder, ids, settings)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config, processor = _PARTS[variant](ids, tokenizer, template)
    processor.save_pretrained(folder)
    with torch.device("meta"):
        tensors = AutoModelForMultimodalLM.from_config(config).state_dict()
    dtype = common.stored_dtype(0.0)
    common.write_weights(folder, tensors, _weight_rule(ids), lambda _: dtype, seed, progress)
    common.write_generation_config(folder, ids)
    config.save_pretrained(folder)  # last: a folder without it is no checkpoint


def _weight_rule(ids: dict[str, int]) -> common.Rule:
    """Weights for greedy answers that are varied and keep to tokens that exist."""
    eos = ids["<|im_end|>"]

    def rule(name: str, shape: Sequence[int]) -> Init:
        if name == "lm_head.weight":
            return common.head_init(shape, (0, common.BASE_VOCAB), (eos, eos + 1))
        if "layers" not in name and len(shape) > 1 and "embed_tokens" not in name:
            return common.normal(shape)
        return common.decoder_init(name, shape)

    return rule


def _text(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": _MAX_LENGTH,
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }


def _qwen2_5_vl(
    ids: dict[str, int], tokenizer: Any, template: dict[str, str]
) -> tuple[PreTrainedConfig, ProcessorMixin]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    vision = common.qwen_vision_config(0.0, 64, heads=2, width=32)
    config = Qwen2_5_VLConfig(
        text_config={**_text(ids), "rope_parameters": common.mrope(16)},
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), **template
    )
    return config, processor


def _llava(ids: dict[str, int], tokenizer: Any, template: dict[str, str]) -> tuple[PreTrainedConfig, ProcessorMixin]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaImageProcessor, LlavaProcessor

    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=LlamaConfig(**_text(ids)).to_dict(),
        image_token_index=ids["<image>"],
        image_seq_length=16,
        architectures=["LlavaForConditionalGeneration"],
        tie_word_embeddings=False,
    )
    images = LlavaImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        **template,
    )
    return config, processor


def _qwen2_audio(
    ids: dict[str, int], tokenizer: Any, template: dict[str, str]
) -> tuple[PreTrainedConfig, ProcessorMixin]:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioProcessor,
        Qwen2Config,
        WhisperFeatureExtractor,
    )

    audio = Qwen2AudioEncoderConfig(
        num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=32
    )
    config = Qwen2AudioConfig(
        audio_config=audio.to_dict(),
        text_config=Qwen2Config(**_text(ids)).to_dict(),
        audio_token_index=ids["<|AUDIO|>"],
        architectures=["Qwen2AudioForConditionalGeneration"],
        tie_word_embeddings=False,
    )
    return config, Qwen2AudioProcessor(WhisperFeatureExtractor(feature_size=16), tokenizer, **template)


_PARTS: dict[str, Callable[[dict[str, int], Any, dict[str, str]], tuple[PreTrainedConfig, ProcessorMixin]]] = {
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
    "qwen2_audio": _qwen2_audio,
}
