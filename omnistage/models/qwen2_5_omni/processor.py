"""Qwen2.5-Omni's chats into its thinker's input."""

from __future__ import annotations

from pathlib import Path

from omnistage.models._qwen_omni.processor import QwenOmniProcessor, load_processor
from omnistage.models.qwen2_5_omni.load import read_config, read_speakers


class Qwen25OmniProcessor(QwenOmniProcessor):
    """Clips are padded to the extractor's full length."""

    @classmethod
    def load(cls, folder: Path) -> Qwen25OmniProcessor:
        config = read_config(folder)
        thinker = config.thinker_config
        return cls(
            load_processor("Qwen2_5OmniProcessor", folder),
            thinker,
            tuple(read_speakers(folder, config)) if config.enable_audio_output else (),
            placeholders=(thinker.image_token_index, thinker.audio_token_index, thinker.video_token_index),
        )
