"""Models whose audio input or output can be used directly: a text read aloud, a clip transcribed."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.core.errors import UnsupportedModalityError
from omnistage.core.family import AnyProcessor, OptionalInputs, SpeechReader
from omnistage.core.types import Modality
from omnistage.pipeline.intake import Prompt


def require_audio_input(
    processor: AnyProcessor, param: str = "model", message: str = "this model has no audio input; use one that has"
) -> None:
    """Raise for a model without audio input: with its own reason where it has one, else with `message`."""
    if Modality.AUDIO in processor.input_modalities:
        return
    if isinstance(processor, OptionalInputs):
        message = processor.unsupported_reason(Modality.AUDIO)
    raise UnsupportedModalityError(message, param=param)


def read_text(processor: object, prompt: Prompt) -> str | None:
    """The text, where a prompt asks a model to read it aloud as it is."""
    if not isinstance(processor, SpeechReader) or not isinstance(prompt, list) or not prompt:
        return None
    last = prompt[-1]
    text = last.get("content") if isinstance(last, Mapping) else None
    return text if isinstance(text, str) and [last] == processor.read_aloud(text) else None
