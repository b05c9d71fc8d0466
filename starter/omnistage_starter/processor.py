"""The starter's input processor: text becomes the language model's prompt, audio and images are passed on."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from omnistage.core.checkpoint import Checkpoint
from omnistage.core.clips import AudioClip
from omnistage.core.errors import InvalidRequestError, QueueFullError, UnsupportedModalityError
from omnistage.core.family import ThinkBlock
from omnistage.core.messages import PLAIN_TEMPLATE, ChatMessage, TemplateOptions
from omnistage.core.types import ARInput, ChatInput, Modality, OmniTokensPrompt
from omnistage.models.chat_template import ToolSpec
from omnistage_starter.hear import (
    READ_ALOUD,
    Conversations,
    PromptBuilder,
    as_message,
    available_inputs,
    has_media,
    media_threads,
    prompts_of,
    read_aloud_text,
    replace_media,
)
from omnistage_starter.speech_to_text import SAMPLE_RATE, SpeechToText
from omnistage_starter.text_to_speech import local_voices

_MAX_TRANSCRIPTIONS = 8
_REASONS = {
    Modality.AUDIO: "its speech recognition is missing; with npm installed, run `omnistage pull starter` again, or "
    "send text",
    Modality.IMAGE: "its image recognition is missing; run `omnistage pull starter` again, or send text",
    Modality.VIDEO: "it has no part for them; send an image, or text",
}


def missing_part(kind: Modality) -> str:
    """Why a starter does not take this modality, and what to do."""
    return f"this starter does not take {kind}: {_REASONS[kind]}"


class StarterProcessor:
    """Tokenizes text-only conversations here; those with media are passed on to the hear stage. Thread-safe."""

    audio_sample_rate = SAMPLE_RATE

    def __init__(
        self,
        folder: Path,
        inputs: frozenset[Modality],
        prompts: PromptBuilder | Conversations,
        voices: Sequence[str],
    ) -> None:
        self.input_modalities = inputs
        self._folder = folder
        self._speech_to_text: SpeechToText | None = None
        self._lock = threading.Lock()
        self._transcriptions = threading.BoundedSemaphore(_MAX_TRANSCRIPTIONS)
        self._prompts = prompts
        self._voices = tuple(voices)

    @classmethod
    def load(cls, model: Checkpoint) -> StarterProcessor:
        folder = model.folder
        return cls(folder, available_inputs(folder), prompts_of(model), local_voices())

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        *,
        thinking: bool | None = None,
        template: TemplateOptions = PLAIN_TEMPLATE,
    ) -> ChatInput:
        self._prompts.check_template(template)
        payload = ChatInput(tuple(messages), tuple(tools), template=None if template is PLAIN_TEMPLATE else template)
        if read_aloud_text(messages) is not None:
            return payload  # never tokenized
        if has_media(messages):
            # A prompt that is too long without the text of its media is refused before they are processed.
            self._prompts.prompt(replace(payload, messages=replace_media(messages, itertools.repeat(""))))
            return payload
        return replace(payload, tokens=self._tokens(payload))

    def has_variable(self, name: str) -> bool:
        return self._prompts.has_variable(name)

    def think_block(self, thinking: bool | None) -> ThinkBlock | None:
        """None: its language model does not think."""
        return None

    def text(self, prompt: str) -> ChatInput:
        payload = ChatInput(prompt=prompt)
        payload = replace(payload, tokens=self._tokens(payload))
        # As a message it may be too long: the hear stage raises that, and only where an image is asked for.
        with contextlib.suppress(InvalidRequestError):
            payload = replace(payload, drawing_prompt=self._tokens(ChatInput((as_message(prompt),))))
        return payload

    def tokens(self, prompt: OmniTokensPrompt) -> ChatInput:
        payload = ChatInput(tokens=prompt)
        self._prompts.prompt(payload)  # raises for an invalid prompt
        return payload

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._vocabulary().decode(token_ids)

    def text_tokens(self, text: str) -> Sequence[int]:
        """The ids of a bare prompt, also where the model does not hold so many."""
        return self._vocabulary().text_tokens(text)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return self._vocabulary().spellings(token_ids)

    def _vocabulary(self) -> PromptBuilder:
        if not isinstance(self._prompts, PromptBuilder):
            raise UnsupportedModalityError("the language model's server has its tokenizer; ask that", param="model")
        return self._prompts

    def _tokens(self, payload: ChatInput) -> OmniTokensPrompt | None:
        """None where the language model's server has the tokenizer."""
        prompt = self._prompts.prompt(payload)
        return OmniTokensPrompt(prompt.token_ids) if isinstance(prompt, ARInput) else None

    def voices(self) -> Sequence[str]:
        return self._voices

    def unsupported_reason(self, kind: Modality) -> str:
        return missing_part(kind)

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has this text spoken verbatim."""
        return [{"role": "assistant", "name": READ_ALOUD, "content": text}]

    def transcribe(self, clip: AudioClip, over: Callable[[], bool] | None = None) -> str:
        """The words in a clip, without the pipeline. Raises `QueueFullError` at too many concurrent calls."""
        if Modality.AUDIO not in self.input_modalities:
            raise UnsupportedModalityError(missing_part(Modality.AUDIO))
        if not self._transcriptions.acquire(blocking=False):
            raise QueueFullError(f"{_MAX_TRANSCRIPTIONS} transcriptions are running, which is the limit; try again")
        try:
            with self._lock:  # loaded on first use, and separate from the stage's, which belongs to its thread
                self._speech_to_text = self._speech_to_text or SpeechToText(self._folder / "hear", media_threads())
            return self._speech_to_text.transcribe(clip.samples, over)
        finally:
            self._transcriptions.release()

    def clip_seconds(self) -> tuple[float, float]:
        return SpeechToText.seconds
