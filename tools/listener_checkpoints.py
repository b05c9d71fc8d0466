"""Small random checkpoints of models whose decoder begins with a prompt, for `speech_coverage.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speaker_checkpoints import seamless, tokenizer_of

from omnistage.hf import transformers
from omnistage.models import _tiny_common as common

_LAYERS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_ENCODER = {**_LAYERS, "model_type": "parakeet_encoder", "subsampling_conv_channels": 16, "num_mel_bins": 80}
_RATE = 16_000
_MARKS = ["<|startofcontext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|pnc|>", "<|nopnc|>"]


def _save(model: Any, folder: Path, start: int, ids: dict[str, int], factor: float = 3.0) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(factor)
    special = [token for name, token in ids.items() if name != "</s>"]
    model.generation_config = transformers.GenerationConfig(
        **_ends(ids),
        decoder_start_token_id=start,
        max_new_tokens=20,
        min_new_tokens=6,
        suppress_tokens=special,
        exponential_decay_length_penalty=(8, 2.0),
    )
    model.save_pretrained(folder)


def _ends(ids: dict[str, int]) -> dict[str, int]:
    return {"pad_token_id": ids["<pad>"], "eos_token_id": ids["</s>"], "bos_token_id": ids["<s>"]}


def canary(folder: Path, model_type: str) -> None:
    del model_type
    tokenizer, ids = tokenizer_of(folder, _MARKS)
    size, start = common.BASE_VOCAB + len(ids), ids["<|startofcontext|>"]
    config = transformers.CanaryConfig(
        encoder_config={**_ENCODER, "scale_input": False, "layerdrop": 0.0},
        decoder_config={**_LAYERS, "head_dim": 16, "vocab_size": size, **_ends(ids)},
        vocab_size=size,
        decoder_start_token_id=start,
        **_ends(ids),
    )
    model = transformers.CanaryForConditionalGeneration(config)
    _save(model, folder, start, ids, 4.0)
    template = (
        "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "<|startofcontext|><|startoftranscript|><|{{ part['source_language'] }}|><|{{ part['target_language'] }}|>"
        "{% if part['punctuation'] %}<|pnc|>{% else %}<|nopnc|>{% endif %}{% endif %}{% endfor %}{% endfor %}"
    )
    extractor = transformers.ParakeetFeatureExtractor(feature_size=80)
    transformers.CanaryProcessor(extractor, tokenizer, chat_template=template).save_pretrained(folder)


def cohere(folder: Path, model_type: str) -> None:
    """Clips above one and a half seconds are cut."""
    del model_type
    marks = [*_MARKS, "▁", "<|emo:undefined|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>"]
    tokenizer, ids = tokenizer_of(folder, marks)
    start = ids["<|startofcontext|>"]
    config = transformers.CohereAsrConfig(
        encoder_config=_ENCODER,
        **_LAYERS,
        **_ends(ids),
        vocab_size=common.BASE_VOCAB + len(ids),
        decoder_start_token_id=start,
    )
    _save(transformers.CohereAsrForConditionalGeneration(config), folder, start, ids)
    extractor = transformers.CohereAsrFeatureExtractor(feature_size=80, max_audio_clip_s=2.0, overlap_chunk_second=0.5)
    transformers.CohereAsrProcessor(extractor, tokenizer).save_pretrained(folder)


def moonshine_streaming(folder: Path, model_type: str) -> None:
    del model_type
    tokenizer, ids = tokenizer_of(folder, [])
    start = ids["<s>"]
    config = transformers.MoonshineStreamingConfig(
        encoder_config={**_LAYERS, "sliding_windows": [[16, 4], [16, 0]]},
        **_LAYERS,
        **_ends(ids),
        vocab_size=common.BASE_VOCAB + len(ids),
        decoder_start_token_id=start,
    )
    _save(transformers.MoonshineStreamingForConditionalGeneration(config), folder, start, ids)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    transformers.MoonshineStreamingProcessor(extractor, tokenizer).save_pretrained(folder)


def seamless_listener(folder: Path, model_type: str) -> None:
    seamless(folder, model_type, hears=True)


def transcribe(model: Any, processor: Any, clip: np.ndarray, language: str, target: str) -> str:
    """As transformers' documentation has it for each type."""
    name = type(model).__name__
    if name.startswith("Canary"):
        inputs = processor.apply_transcription_request(audio=clip, source_language=language, target_language=target)
        return _text(processor, model.generate(**inputs))
    if name.startswith("CohereAsr"):
        inputs = processor(audio=clip, language=language, sampling_rate=_RATE, return_tensors="pt")
        parts = inputs.pop("audio_chunk_index")
        rows = model.generate(**inputs)
        decoded = processor.decode(rows, skip_special_tokens=True, audio_chunk_index=parts, language=language)
        return str(decoded[0])
    if name.startswith("SeamlessM4T"):
        inputs = processor(audio=clip, sampling_rate=_RATE, return_tensors="pt")
        return _text(processor, model.generate(**inputs, tgt_lang={"en": "eng", "de": "deu"}[target]))
    return _text(processor, model.generate(**processor(clip, sampling_rate=_RATE)))


def _text(processor: Any, rows: torch.Tensor) -> str:
    return str(processor.batch_decode(rows, skip_special_tokens=True)[0])


LISTENERS: dict[str, Callable[[Path, str], None]] = {
    "canary": canary,
    "cohere_asr": cohere,
    "moonshine_streaming": moonshine_streaming,
    "seamless_m4t": seamless_listener,
    "seamless_m4t_v2": seamless_listener,
}
