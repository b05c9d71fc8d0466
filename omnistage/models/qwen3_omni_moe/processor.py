"""Qwen3-Omni's chats into its thinker's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from omnistage.models._qwen_omni.expansion import video_default
from omnistage.models._qwen_omni.processor import AUDIO_RATE, QwenOmniProcessor, load_processor
from omnistage.models.qwen3_omni_moe.load import read_config, voices_of

_CHUNK_ROWS = 13
"""That the encoder makes of each full chunk of mel frames, which is a second of sound."""


class Qwen3OmniProcessor(QwenOmniProcessor):
    """Clips are padded to the longest of a chat, and none is cut."""

    chunk: int
    """Mel frames that the audio encoder convolves at once."""

    @classmethod
    def load(cls, folder: Path) -> Qwen3OmniProcessor:
        config = read_config(folder)
        thinker = config.thinker_config
        processor = load_processor("Qwen3OmniMoeProcessor", folder)
        instance = cls(
            processor,
            thinker,
            tuple(voices_of(config)) if config.enable_audio_output else (),
            placeholders=(thinker.image_token_id, thinker.audio_token_id, thinker.video_token_id),
            position_id_per_seconds=video_default(processor, "position_id_per_seconds"),
            seconds_per_chunk=video_default(processor, "seconds_per_chunk"),
        )
        instance.chunk = 2 * int(thinker.audio_config.n_window)
        return instance

    def audio_rows(self, frames: torch.Tensor) -> torch.Tensor:
        rest = (frames % self.chunk - 1) // 2 + 1
        return ((rest - 1) // 2 + 1 - 1) // 2 + 1 + frames // self.chunk * _CHUNK_ROWS

    @property
    def max_samples(self) -> int:
        return self.max_tokens // _CHUNK_ROWS * AUDIO_RATE

    def padded_frames(self, clips: Sequence[np.ndarray]) -> int:
        hop = int(self._processor.feature_extractor.hop_length)
        return max((-(-len(clip) // hop) for clip in clips), default=0)

    def audio_inputs(self, mel: torch.Tensor, mask: torch.Tensor, longest: int) -> Mapping[str, torch.Tensor]:
        """Beside longer clips, a clip of less than a chunk is convolved as if it were as long, up to a chunk."""
        inputs = super().audio_inputs(mel, mask, longest)
        padded = min(longest, self.chunk)
        return inputs if mel.shape[-1] >= padded else {**inputs, "padded_frames": torch.tensor(padded)}
