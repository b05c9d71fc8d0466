"""Texts for models whose prompt a processor writes: a template around the text, and the voice where there is one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnistage.core.types import TOKEN_IDS
from omnistage.models.text_to_speech import voices
from omnistage.models.text_to_speech.processor import TextReader, special_spellings

_SYSTEM = "Generate audio following instruction."
"""Of Higgs Audio, whose template writes no such words itself."""


class PromptedProcessor(TextReader):
    """Has the checkpoint's own processor write the prompt."""

    clip_rate = 24_000
    """Of clips in messages, which none of these models takes."""

    def __init__(self, processor: Any, recordings: Mapping[str, np.ndarray], max_tokens: int) -> None:
        super().__init__(tuple(recordings), max_tokens)
        self.processor = processor
        self._recordings = recordings
        self._voice = next(iter(recordings), None)
        self._special = special_spellings(processor.tokenizer) - _SPEAKERS

    def with_voice(self, voice: str | None) -> PromptedProcessor:
        if voice is None or voice == self._voice:
            return self
        other = copy.copy(self)
        other._voice = voice
        return other

    def prompt(self, text: str, voice: np.ndarray | None) -> Mapping[str, Any]:
        """What the processor makes of it, each with a first dimension of 1."""
        audio_parts = [] if voice is None else [{"type": "audio"}]
        conversation = [{"role": "user", "content": [*audio_parts, {"type": "text", "text": text}]}]
        rendered = self.processor.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        voice_inputs = {} if voice is None else {"audio_prompt_latents": [torch.from_numpy(voice)]}
        inputs: Mapping[str, Any] = self.processor(
            text=rendered, return_tensors="pt", add_special_tokens=False, **voice_inputs
        )
        return inputs

    def encode(self, text: str) -> Mapping[str, np.ndarray]:
        self.reject_spellings(text, self._special)
        inputs = self.prompt(text, None if self._voice is None else self._recordings[self._voice])
        arrays = {name: value[0].numpy() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        self.check_length(len(arrays["input_ids"]))
        return {TOKEN_IDS if name == "input_ids" else name: array for name, array in arrays.items()}


_SPEAKERS = frozenset(("[S1]", "[S2]"))
"""Dia's marks of who speaks, which are part of a text."""


class DiaProcessor(PromptedProcessor):
    def prompt(self, text: str, voice: np.ndarray | None) -> Mapping[str, Any]:
        del voice
        inputs: Mapping[str, Any] = self.processor(text=[text], padding=True, return_tensors="pt")
        return inputs


class HiggsProcessor(PromptedProcessor):
    def prompt(self, text: str, voice: np.ndarray | None) -> Mapping[str, Any]:
        del voice
        messages = (("system", _SYSTEM), ("user", text))
        conversation = [{"role": role, "content": [{"type": "text", "text": words}]} for role, words in messages]
        inputs: Mapping[str, Any] = self.processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return inputs


class VibeVoiceProcessor(PromptedProcessor):
    def prompt(self, text: str, voice: np.ndarray | None) -> Mapping[str, Any]:
        audio_parts = [] if voice is None else [{"type": "audio", "audio": voice}]
        conversation = [{"role": "0", "content": [{"type": "text", "text": text}, *audio_parts]}]
        inputs: Mapping[str, Any] = self.processor.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        return inputs


class SeamlessProcessor(TextReader):
    """A voice is the code of a language, which is that of the text."""

    def __init__(self, tokenizer: Any, codes: Sequence[str], max_tokens: int, language: str | None = None) -> None:
        super().__init__(codes, max_tokens)
        self._tokenizer = tokenizer
        self._special = special_spellings(tokenizer)
        self._language = language or ("eng" if "eng" in codes else codes[0])

    clip_rate = 16_000

    def with_voice(self, voice: str | None) -> SeamlessProcessor:
        if voice is None or voice == self._language:
            return self
        other = copy.copy(self)
        other._language = voice
        return other

    def encode(self, text: str) -> Mapping[str, np.ndarray]:
        self.reject_spellings(text, self._special)
        encoded = self._tokenizer(text, src_lang=self._language, return_tensors="np")
        ids = encoded["input_ids"][0].astype(np.int64)
        self.check_length(len(ids))
        return {TOKEN_IDS: ids, "attention_mask": encoded["attention_mask"][0].astype(np.int64)}


def load_prompted(folder: Path, config: Any) -> PromptedProcessor:
    from omnistage.models.text_to_speech.load import load_processor

    processor = load_processor(folder)
    kind = config.model_type
    if kind == "dia":
        return DiaProcessor(processor, {}, config.encoder_config.max_position_embeddings)
    if kind == "higgs_audio_v2":
        return HiggsProcessor(processor, {}, config.max_position_embeddings)
    if kind == "vibevoice":
        recordings = voices.recordings(folder, processor.feature_extractor.sampling_rate)
        return VibeVoiceProcessor(processor, recordings, config.text_config.max_position_embeddings)
    width = config.latent_dim if kind == "pocket_tts" else config.audio_prompt_dim
    return PromptedProcessor(processor, voices.latents(folder, width), config.max_position_embeddings)
