"""What a user sends to the starter: words as the language model's prompt, sounds and pictures as they are."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from omnistage.core.clips import AudioClip
from omnistage.core.errors import InvalidRequestError, QueueFullError, UnsupportedModalityError
from omnistage.core.messages import ChatMessage
from omnistage.core.types import ChatInput, Modality, OmniTokensPrompt
from omnistage.models.chat_template import ToolSpec
from omnistage_starter.hear import (
    READ_ALOUD,
    Prompter,
    as_message,
    has_media,
    read_aloud_text,
    sense_threads,
    senses,
    with_words,
)
from omnistage_starter.hearing import RATE, Transcriber
from omnistage_starter.speaking import local_voices

_MOST_LISTENING = 8
_MISSING = {
    Modality.AUDIO: "it has no ears; with npm installed, run `omnistage pull starter` again, or send text",
    Modality.IMAGE: "it has no eyes; run `omnistage pull starter` again, or send text",
    Modality.VIDEO: "it has no part for them; send a picture, or text",
}


def missing_part(kind: Modality) -> str:
    """Why a starter does not take this, and what helps."""
    return f"this starter does not take {kind}: {_MISSING[kind]}"


class StarterProcessor:
    """What is words already becomes tokens here; what must be heard or seen goes on as it is. Thread-safe."""

    audio_sample_rate = RATE

    def __init__(self, folder: Path, taken: frozenset[Modality], prompter: Prompter, voices: Sequence[str]) -> None:
        self.input_modalities = taken
        self._folder = folder
        self._ears: Transcriber | None = None
        self._lock = threading.Lock()
        self._listening = threading.BoundedSemaphore(_MOST_LISTENING)
        self._prompter = prompter
        self._voices = tuple(voices)

    @classmethod
    def load(cls, folder: Path) -> StarterProcessor:
        return cls(folder, senses(folder), Prompter(folder / "think"), local_voices())

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatInput:
        payload = ChatInput(tuple(messages), tuple(tools))
        if read_aloud_text(messages) is not None:
            return payload  # nobody thinks about it
        if has_media(messages):
            # What is too long without a word of what will be heard is refused before anybody listens.
            self._prompter.prompt(replace(payload, messages=with_words(messages, itertools.repeat(""))))
            return payload
        return replace(payload, tokens=self._tokens(payload))

    def text(self, prompt: str) -> ChatInput:
        payload = ChatInput(prompt=prompt, tokens=self._tokens(ChatInput(prompt=prompt)))
        with contextlib.suppress(InvalidRequestError):  # for whoever asks for a picture to be told, and nobody else
            payload = replace(payload, drawn=self._tokens(ChatInput((as_message(prompt),))))
        return payload

    def tokens(self, prompt: OmniTokensPrompt) -> ChatInput:
        payload = ChatInput(tokens=prompt)
        self._prompter.prompt(payload)  # for what it raises
        return payload

    def _tokens(self, payload: ChatInput) -> OmniTokensPrompt:
        return OmniTokensPrompt(self._prompter.prompt(payload).token_ids)

    def voices(self) -> Sequence[str]:
        return self._voices

    def unsupported_reason(self, kind: Modality) -> str:
        return missing_part(kind)

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has just this text spoken: the assistant's own words, under a name for it."""
        return [{"role": "assistant", "name": READ_ALOUD, "content": text}]

    def transcribe(self, clip: AudioClip, over: Callable[[], bool] | None = None) -> str:
        """What is said in a sound, without the pipeline. Raises `QueueFullError` while enough others listen."""
        if Modality.AUDIO not in self.input_modalities:
            raise UnsupportedModalityError(missing_part(Modality.AUDIO))
        if not self._listening.acquire(blocking=False):
            raise QueueFullError(f"{_MOST_LISTENING} sounds are being written down, the most there may be; try again")
        try:
            with self._lock:  # ears of its own, read on first use: the stage's belong to its thread
                self._ears = self._ears or Transcriber(self._folder / "hear", sense_threads())
            return self._ears.transcribe(clip.samples, over)
        finally:
            self._listening.release()

    def clip_seconds(self) -> tuple[float, float]:
        return Transcriber.seconds
