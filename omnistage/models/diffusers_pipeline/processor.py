"""Requests to any pipeline of diffusers, as its one stage takes them."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.models._diffusers.processor import DrawingProcessor
from omnistage.models.diffusers_pipeline.inspection import is_sound_pipeline


class SoundProcessor(DrawingProcessor):
    """Texts that describe a sound; `/v1/audio/speech` hands its input on as it is."""

    def __init__(self) -> None:
        super().__init__(takes_images=False)

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        return [{"role": "user", "content": text}]


def processor_of(index: Mapping[str, object]) -> DrawingProcessor:
    """By model_index.json. The component refuses pictures where its pipeline takes none."""
    return SoundProcessor() if is_sound_pipeline(index.get("_class_name")) else DrawingProcessor(takes_images=True)
