"""Qwen3-Omni's chats into its thinker's input."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnistage.models._qwen_omni.processor import AUDIO_RATE, OmniItems, QwenOmniProcessor, load_processor
from omnistage.models.qwen3_omni_moe.load import read_config, voices_of

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from omnistage.models.prompts import PromptTokenizer

_CHUNK_ROWS = 13
"""That the encoder makes of each full chunk of mel frames, which is a second of sound."""


class _Extractor:
    """In the feature extractor's place: pads to the longest clip of the chat, also where others are not in the call."""

    def __init__(self, extractor: Any, items: OmniItems) -> None:
        self._extractor, self._items = extractor, items

    def __call__(self, audio: Any, **options: Any) -> Any:
        return self._extractor(audio, **{**options, "padding": "max_length", "max_length": self._items.longest})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)


class _Items(OmniItems):
    def __init__(self, processor: ProcessorMixin, prompts: PromptTokenizer) -> None:
        super().__init__(processor, prompts)
        self._processor.feature_extractor = _Extractor(processor.feature_extractor, self)

    def padded_samples(self, longest: int) -> int:
        return longest


class Qwen3OmniProcessor(QwenOmniProcessor):
    """Clips are padded to the longest of a chat, and none is cut."""

    item_processor = _Items
    chunk: int
    """Mel frames that the audio encoder convolves at once."""

    @classmethod
    def load(cls, folder: Path) -> Qwen3OmniProcessor:
        config = read_config(folder)
        thinker = config.thinker_config
        instance = cls(
            load_processor("Qwen3OmniMoeProcessor", folder),
            thinker,
            tuple(voices_of(config)) if config.enable_audio_output else (),
            placeholders=(thinker.image_token_id, thinker.audio_token_id, thinker.video_token_id),
        )
        instance.chunk = 2 * int(thinker.audio_config.n_window)
        return instance

    @property
    def max_samples(self) -> int:
        return self.max_tokens // _CHUNK_ROWS * AUDIO_RATE

    def audio_inputs(self, mel: torch.Tensor, mask: torch.Tensor, longest: int) -> Mapping[str, torch.Tensor]:
        """Beside longer clips, a clip of less than a chunk is convolved as if it were as long, up to a chunk."""
        inputs = super().audio_inputs(mel, mask, longest)
        padded = min(longest, self.chunk)
        return inputs if mel.shape[-1] >= padded else {**inputs, "padded_frames": torch.tensor(padded)}
