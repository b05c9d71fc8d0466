"""Texts and conversations for CSM: who speaks is a number in brackets before each text, a clip follows its text."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from omnistage.core.errors import CheckpointError, InvalidRequestError, MediaError
from omnistage.core.messages import AudioPart, ChatMessage, TextPart
from omnistage.core.types import ARInput, MediaSpan, Modality, OmniTokensPrompt
from omnistage.media.hashing import content_key
from omnistage.models.causal_lm.processor import load_tokenizer
from omnistage.models.csm.bridges import END_CODE
from omnistage.models.loading import positive
from omnistage.models.prompts import PromptTokenizer, tokens_input

if TYPE_CHECKING:
    from transformers import CsmConfig, PreTrainedTokenizerFast

VOICES = tuple("0123456789")
"""Speakers by number. Without clips of a speaker the model chooses a voice for each number anew."""


class CsmProcessor:
    """Thread-safe. The last message is spoken; those before, each a text with its clip, are what was said so far.

    The last one and those of the assistant are said with the request's voice, users' before it with another.
    """

    input_modalities = frozenset({Modality.TEXT, Modality.AUDIO})

    def __init__(self, tokenizer: PreTrainedTokenizerFast, config: CsmConfig) -> None:
        from omnistage.models.csm.backbone import end_code

        self._max_tokens = positive(config, "max_position_embeddings")
        self._prompts = PromptTokenizer(tokenizer, self._max_tokens)
        self._text_vocab = positive(config, "text_vocab_size")
        codec = config.codec_config
        self._rate = positive(codec, "sampling_rate")
        self._frame_samples = round(self._rate / codec.frame_rate)
        ends = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        for name, token in ends.items():
            if token is None:
                raise CheckpointError(f"the tokenizer has no {name}, which CSM's prompts begin or end with")
        self._begin, self._end = (int(token) for token in ends.values())
        self._audio, self._audio_end = positive(config, "audio_token_id"), positive(config, "audio_eos_token_id")
        self._context = {END_CODE: torch.tensor(end_code(config))}
        self._voice = VOICES[0]

    @classmethod
    def load(cls, folder: Path) -> CsmProcessor:
        from omnistage.models.csm.load import read_config

        return cls(load_tokenizer(folder), read_config(folder))

    @property
    def clip_rate(self) -> int:
        return self._rate

    def with_voice(self, voice: str | None) -> CsmProcessor:
        if voice is None or voice == self._voice:
            return self
        other = copy.copy(self)
        other._voice = voice
        return other

    def voices(self) -> Sequence[str]:
        return VOICES

    def clip_seconds(self) -> tuple[float, float]:
        """What fills the context at most."""
        frame = self._frame_samples / self._rate
        return frame, frame * self._max_tokens

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        return [{"role": "assistant", "content": text}]

    def read_aloud_as(self, text: str, clip: Mapping[str, object], clip_text: str | None) -> list[dict[str, object]]:
        if clip_text is None or not clip_text.strip():
            raise InvalidRequestError(
                "this model needs the words that are said in the clip; send them", param="ref_text"
            )
        content = [{"type": "text", "text": clip_text}, clip]
        message: dict[str, object] = {"role": "assistant", "content": content}
        return [message, *self.read_aloud(text)]

    def text(self, prompt: str) -> ARInput:
        if not prompt:
            raise InvalidRequestError("the prompt is empty; send some text", param="prompt")
        return self.chat([ChatMessage("assistant", (TextPart(prompt),))])

    def tokens(self, prompt: OmniTokensPrompt) -> ARInput:
        if prompt.prompt_embeds is not None:
            raise InvalidRequestError("is not supported by this model; send a text", param="prompt_embeds")
        payload = tokens_input(prompt, self._text_vocab, 1)
        if self._audio in payload.token_ids:
            raise InvalidRequestError(
                "prompt_token_ids hold placeholders of audio without audio; use chat() to send clips",
                param="prompt_token_ids",
            )
        return ARInput(payload.token_ids, context=self._context)

    def chat(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] = ()) -> ARInput:
        if tools:
            raise InvalidRequestError("this model calls no functions; leave `tools` out", param="tools")
        ids, spans = list[int](), list[MediaSpan]()
        for number, message in enumerate(messages, start=1):
            last = number == len(messages)
            text, clip = _parts(message, last=last)
            ids += (self._begin, *self._turn(text, other=message.role == "user" and not last), self._end)
            if clip is not None:
                spans.append(self._span(clip, len(ids)))
                ids += (*[self._audio] * len(spans[-1].positions), self._audio_end)
            if len(ids) > self._max_tokens:
                raise self._prompts.limits.too_long(f"{len(ids)} tokens")
        return ARInput(tuple(ids), media=tuple(spans), context=self._context)

    def _turn(self, text: str, *, other: bool) -> tuple[int, ...]:
        speaker = next(voice for voice in VOICES if voice != self._voice) if other else self._voice
        guarded = self._prompts.guarded()
        return self._prompts.encode(f"[{speaker}]{guarded.guard(text)}", guarded)

    def _span(self, part: AudioPart, start: int) -> MediaSpan:
        samples = part.clip.samples
        if part.clip.sample_rate != self._rate:
            raise MediaError(f"audio must be resampled to {self._rate} Hz, got {part.clip.sample_rate}")
        frames = -(-len(samples) // self._frame_samples)
        positions = torch.arange(start, start + frames)
        key = content_key("audio", samples)
        return MediaSpan(Modality.AUDIO, key, positions, {"input_values": torch.from_numpy(samples)[None]})


def _parts(message: ChatMessage, *, last: bool) -> tuple[str, AudioPart | None]:
    """The text of a message and its clip, which all but the last have."""
    if message.role not in ("user", "assistant"):
        raise InvalidRequestError(
            f"this model has no {message.role} messages; send the text to speak, after what was said so far",
            param="messages",
        )
    text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    clips = [part for part in message.parts if isinstance(part, AudioPart)]
    if not text.strip():
        raise InvalidRequestError(
            "a message has no text; give the text to speak, or the transcript of its clip", param="messages"
        )
    if last and clips:
        raise InvalidRequestError("the last message is spoken and has no clip; leave its audio out", param="messages")
    if not last and len(clips) != 1:
        raise InvalidRequestError(
            f"a message before the last has {len(clips)} clips; send its text with one clip of it", param="messages"
        )
    return text, clips[0] if clips else None
