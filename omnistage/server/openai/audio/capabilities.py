"""Models whose ears and voice can be used without what lies between: a text read aloud, a sound written down."""

from __future__ import annotations

from collections.abc import Mapping

from omnistage.core.family import SpeechReader
from omnistage.pipeline.intake import Prompt


def read_text(processor: object, prompt: Prompt) -> str | None:
    """The text, where a prompt asks a model to speak it as it is."""
    if not isinstance(processor, SpeechReader) or not isinstance(prompt, list) or not prompt:
        return None
    last = prompt[-1]
    text = last.get("content") if isinstance(last, Mapping) else None
    return text if isinstance(text, str) and [last] == processor.read_aloud(text) else None
