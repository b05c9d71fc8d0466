"""What a user sends to the starter: handed on as it is, for its first stage to hear and to see."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from omnistage.chat import AudioPart, ChatMessage, ImagePart, TextPart, VideoPart
from omnistage.errors import InvalidRequestError, QueueFullError, UnsupportedModalityError
from omnistage.media.audio import AudioClip
from omnistage.models.chat_template import ToolSpec
from omnistage.models.loading import positive, read_auto_config
from omnistage.models.prompts import tokens_input
from omnistage.models.starter.hearing import RATE, Transcriber
from omnistage.models.starter.seeing import Observer
from omnistage.models.starter.speaking import local_voices
from omnistage.types import ChatInput, Modality, OmniTokensPrompt, is_utf8

READ_ALOUD = "read_aloud"
"""Name of an assistant's last message that is to be spoken as it is, where speech is asked for."""
_MOST_THREADS = 4
_MOST_LISTENING = 8
_MISSING = {
    Modality.AUDIO: "it has no ears; install npm and run `omnistage pull starter` again, or send text",
    Modality.IMAGE: "it has no eyes; run `omnistage pull starter` again, or send text",
    Modality.VIDEO: "it has no part for them; send a picture, or text",
}
_KINDS: dict[type, Modality] = {
    AudioPart: Modality.AUDIO,
    ImagePart: Modality.IMAGE,
    VideoPart: Modality.VIDEO,
}


def senses(folder: Path) -> frozenset[Modality]:
    """What a starter's folder has the parts to take in."""
    found = {Modality.TEXT}
    if Transcriber.present(folder / "hear"):
        found.add(Modality.AUDIO)
    if Observer.present(folder / "see"):
        found.add(Modality.IMAGE)
    return frozenset(found)


def lacking(kind: Modality) -> str:
    """Why a starter does not take this, and what helps."""
    return f"this starter does not take {kind}: {_MISSING[kind]}"


def check_parts(messages: Sequence[ChatMessage], taken: frozenset[Modality]) -> None:
    """Raise for media that there is no part for."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, TextPart):
                continue
            kind = _KINDS[type(part)]
            if kind not in taken:
                raise UnsupportedModalityError(lacking(kind), param="messages")


def sense_threads() -> int:
    """Cores that one sound or picture may use."""
    return min(os.cpu_count() or 1, _MOST_THREADS)


class StarterProcessor:
    """Conversations go on with their media in them. Thread-safe."""

    ears_rate = RATE

    def __init__(
        self, folder: Path, taken: frozenset[Modality], vocab_size: int, embed_size: int, voices: Sequence[str]
    ) -> None:
        self.input_modalities = taken
        self._folder = folder
        self._ears: Transcriber | None = None
        self._lock = threading.Lock()
        self._listening = threading.BoundedSemaphore(_MOST_LISTENING)
        self._vocab_size = vocab_size
        self._embed_size = embed_size
        self._voices = tuple(voices)

    @classmethod
    def load(cls, folder: Path) -> StarterProcessor:
        config = read_auto_config(folder / "think").get_text_config()
        sizes = positive(config, "vocab_size"), positive(config, "hidden_size")
        return cls(folder, senses(folder), *sizes, local_voices())

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatInput:
        check_parts(messages, self.input_modalities)
        return ChatInput(tuple(messages), tuple(tools))

    def text(self, prompt: str) -> ChatInput:
        if not prompt:
            raise InvalidRequestError("the prompt is empty; send some text", param="prompt")
        if not is_utf8(prompt):
            raise InvalidRequestError("has half of a surrogate pair, which is no text; remove it", param="prompt")
        return ChatInput(prompt=prompt)

    def tokens(self, prompt: OmniTokensPrompt) -> ChatInput:
        tokens_input(prompt, self._vocab_size, self._embed_size)  # for what it raises
        return ChatInput(tokens=prompt)

    def voices(self) -> Sequence[str]:
        return self._voices

    def lacking(self, kind: Modality) -> str:
        return lacking(kind)

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has just this text spoken: the assistant's own words, under a name for it."""
        return [{"role": "assistant", "name": READ_ALOUD, "content": text}]

    def transcribe(self, clip: AudioClip) -> str:
        """What is said in a sound, without the pipeline. Raises `QueueFullError` while enough others listen."""
        if Modality.AUDIO not in self.input_modalities:
            raise UnsupportedModalityError(lacking(Modality.AUDIO))
        if not self._listening.acquire(blocking=False):
            raise QueueFullError(f"{_MOST_LISTENING} sounds are being written down, the most there may be; try again")
        try:
            with self._lock:  # ears of its own, read on first use: the stage's belong to its thread
                self._ears = self._ears or Transcriber(self._folder / "hear", sense_threads())
            return self._ears.transcribe(clip.samples)
        finally:
            self._listening.release()

    def clip_seconds(self) -> tuple[float, float]:
        return Transcriber.seconds
