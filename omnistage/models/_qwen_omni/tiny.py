"""What the random checkpoints of the Qwen-Omni families share: the chat template, the files, the audio tower."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from omnistage.models import _tiny_common as common
from omnistage.models._tiny_common import between

_THINK = (
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- else -%}{{- '<think>\\n' -}}{%- endif -%}"
)


def token_attributes(image: str, audio: str, video: str, *spans: str) -> dict[str, str]:
    """Tokens by the names that processors have for them; `spans` begin and end images and videos, then audio."""
    names = ("vision_bos_token", "vision_eos_token", "audio_bos_token", "audio_eos_token")
    return {"image_token": image, "audio_token": audio, "video_token": video, **dict(zip(names, spans, strict=True))}


def audio_config(scale: float, output_dim: int, **sizes: int) -> dict[str, object]:
    heads = between(scale, (4, 20), 4)
    return {
        "num_mel_bins": 128,
        "encoder_layers": between(scale, (2, 32)),
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": between(scale, (128, 5120), 32),
        "d_model": heads * between(scale, (16, 64), 8),
        "max_source_positions": 1500,
        "output_dim": output_dim,
        **sizes,
    }


def hub_name(name: str) -> str:
    """A tensor's name in the published checkpoint, from its name in transformers (which has moved some of them)."""
    inside = name.removeprefix("thinker.model.")
    for new, old in (("language_model.", "model."), ("visual.", "visual."), ("audio_tower.", "audio_tower.")):
        if inside is not name and inside.startswith(new):
            return f"thinker.{old}{inside.removeprefix(new)}"
    return name


def stored_dtype(codec: str, scale: float, name: str) -> torch.dtype:
    """Of a tensor; those of the vocoder, which begin with `codec`, are stored in float32."""
    return torch.float32 if name.startswith(codec) else common.stored_dtype(scale)


def chat_template(tokens: Mapping[str, str], system: str | None = None, *, thinks: bool = False) -> str:
    """ChatML with media by the token names of a processor; `system` is said where a chat begins without one.

    `thinks`: answers begin inside a think block, unless a request turns that off.
    """

    def media(kind: str, span: str) -> str:
        return tokens[f"{span}_bos_token"] + tokens[f"{kind}_token"] + tokens[f"{span}_eos_token"]

    opening = ""
    if system is not None:
        opening = (
            "{%- if loop.first and message.role != 'system' -%}"
            "{{- '<|im_start|>system\\n" + system + "<|im_end|>\\n' -}}"
            "{%- endif -%}"
        )
    return (
        "{%- for message in messages -%}" + opening + "{{- '<|im_start|>' + message.role + '\\n' -}}"
        "{%- if message.content is string -%}{{- message.content -}}"
        "{%- else -%}{%- for part in message.content -%}"
        "{%- if part.type in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}"
        "{{- '" + media("image", "vision") + "' -}}"
        "{%- elif part.type in ('audio', 'audio_url', 'input_audio') or 'audio' in part or 'audio_url' in part -%}"
        "{{- '" + media("audio", "audio") + "' -}}"
        "{%- elif part.type in ('video', 'video_url') or 'video' in part -%}"
        "{{- '" + media("video", "vision") + "' -}}"
        "{%- elif 'text' in part -%}{{- part.text -}}"
        "{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{- '<|im_end|>\\n' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
        + (_THINK if thinks else "")
        + "{%- endif -%}"
    )


def write_processor(
    folder: Path,
    name: str,
    ids: Mapping[str, int],
    tokens: Mapping[str, str],
    template: str,
    images: Mapping[str, object],
    *,
    seconds: int,
    visible: Collection[str] = (),
) -> None:
    """Tokenizer, chat template and media settings of `transformers`' processor class `name`.

    `visible`: tokens that are part of an answer's text.
    """
    more = {"extra_special_tokens": dict(tokens), "chat_template": template, **tokens}
    settings = common.tokenizer_settings("Qwen2Tokenizer", 32768, more, processor=name)
    common.write_tokenizer(folder, ids, settings, visible)
    common.write_json(folder / "chat_template.json", {"chat_template": template})
    common.write_json(
        folder / "preprocessor_config.json",
        {
            **images,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": seconds,
            "n_samples": seconds * 16000,
            "nb_max_frames": seconds * 100,
            "padding_side": "right",
            "padding_value": 0.0,
            "dither": 0.0,
            "return_attention_mask": True,
        },
    )
