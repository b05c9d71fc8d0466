"""What the random checkpoints of the Qwen-Omni families share: the chat template and the processor's files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from omnistage.models import _tiny_common as common

_THINK = (
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- else -%}{{- '<think>\\n' -}}{%- endif -%}"
)


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
