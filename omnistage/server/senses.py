"""Models whose ears and voice can be used without what lies between: a text read aloud, a sound written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from omnistage.media.audio import AudioClip
from omnistage.pipeline.intake import Prompt


@runtime_checkable
class ReadingProcessor(Protocol):
    """An input processor of a model that can speak a text as it is."""

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has just this text spoken."""
        ...


@runtime_checkable
class WritingProcessor(Protocol):
    """An input processor of a model that can write down what is said without a thought about it. Thread-safe."""

    def transcribe(self, clip: AudioClip) -> str:
        """The words in a sound at `ears_rate`; empty where there are none. It takes as long as it takes."""
        ...

    @property
    def ears_rate(self) -> int:
        """Samples a second that it hears."""
        ...


def read_text(processor: object, prompt: Prompt) -> str | None:
    """The text, where a prompt asks a model to speak it as it is."""
    if not isinstance(processor, ReadingProcessor) or not isinstance(prompt, list) or not prompt:
        return None
    last = prompt[-1]
    text = last.get("content") if isinstance(last, Mapping) else None
    return text if isinstance(text, str) and [last] == processor.read_aloud(text) else None
