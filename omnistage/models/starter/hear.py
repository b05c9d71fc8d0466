"""The first stage: sounds and pictures of a conversation become words, and all of it the language model's prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from omnistage.chat import AudioPart, ChatMessage, ImagePart, TextPart
from omnistage.engines.byte_cache import ByteCache
from omnistage.engines.codec.module import Job, ModuleComponent
from omnistage.errors import InternalError, MediaError, OmniError, UnsupportedModalityError
from omnistage.media.hashing import content_key
from omnistage.models.causal_lm.processor import CausalLMProcessor, load_tokenizer
from omnistage.models.loading import positive, read_auto_config
from omnistage.models.starter.bridges import SPOKEN, SUBJECT
from omnistage.models.starter.hearing import RATE, Transcriber, check_clip
from omnistage.models.starter.processor import READ_ALOUD, check_parts, sense_threads, senses
from omnistage.models.starter.seeing import Observer
from omnistage.pipeline.registry import LoadContext
from omnistage.types import (
    ARInput,
    AudioChunk,
    ChatInput,
    CodecParams,
    Modality,
    ModuleInput,
    ModuleOutput,
    RequestInfo,
)

_INAUDIBLE = "(inaudible)"
_CACHE_BYTES = 4 * 2**20
"""For words of sounds and pictures: a conversation sends its earlier ones again with every turn."""
_USER = "<|im_start|>user"


class Words:
    """The texts that stand for sounds and pictures. For one thread."""

    def __init__(self, ears: Transcriber | None, eyes: Observer | None) -> None:
        self._ears = ears
        self._eyes = eyes
        self._known: ByteCache[str] = ByteCache(_CACHE_BYTES, lambda text: len(text.encode()) + 64)

    def heard(self, part: AudioPart) -> str:
        """What is said in a sound; empty where nothing is."""
        if self._ears is None:
            raise InternalError("a sound came to a stage without ears")
        key = content_key("audio", part.clip.samples)
        known = self._known.get(key)
        if known is None:
            known = self._ears.transcribe(part.clip.samples)
            self._known.put(key, known)
        return known

    def seen(self, part: ImagePart) -> str:
        """What is found in a picture."""
        if self._eyes is None:
            raise InternalError("a picture came to a stage without eyes")
        pixels = np.asarray(part.image, dtype=np.uint8)
        key = content_key("image", pixels)
        known = self._known.get(key)
        if known is None:
            known = self._eyes.describe(pixels)
            self._known.put(key, known)
        return known


class Prompter:
    """Conversations that are words only, as the language model's prompts."""

    def __init__(self, folder: Path) -> None:
        config, tokenizer = read_auto_config(folder).get_text_config(), load_tokenizer(folder)
        self._plain = CausalLMProcessor(tokenizer, positive(config, "vocab_size"), positive(config, "hidden_size"))
        self._user = tuple(tokenizer.encode(_USER, add_special_tokens=False))

    def prompt(self, payload: ChatInput) -> ARInput:
        """The prompt, with the rows of its subject: the last message of the user's, else all of it."""
        if payload.messages:
            made = self._plain.chat(payload.messages, payload.tools)
            return _with_subject(made, self._last_message(made.token_ids))
        if payload.prompt is not None:
            return _with_subject(self._plain.text(payload.prompt), 0)
        if payload.tokens is None:
            raise InternalError("a conversation without messages, prompt or tokens")
        return _with_subject(self._plain.tokens(payload.tokens), 0)

    def spoken(self, text: str) -> ARInput:
        """As short a prompt as can be, beside a text that is to be spoken as it is."""
        said = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
        return replace(_with_subject(ARInput(self._user), 0), context={SPOKEN: said}, num_tokens=1)

    def _last_message(self, ids: Sequence[int]) -> int:
        """Where the last user message's content begins: behind its head and the token that holds its line's end."""
        size = len(self._user)
        heads = (i for i in range(len(ids) - size, -1, -1) if tuple(ids[i : i + size]) == self._user)
        head = next(heads, None)
        return 0 if head is None else min(head + size + 1, len(ids) - 1)


def _with_subject(prompt: ARInput, start: int) -> ARInput:
    length = len(prompt.token_ids)
    return replace(prompt, context={SUBJECT: torch.tensor([start, length])})


class Hearer(ModuleComponent):
    """Takes a conversation, gives the prompt; `text` of what it gives is what was said in its sounds."""

    input_type = ChatInput
    max_batch = 16

    def __init__(self, prompter: Prompter, words: Words, taken: frozenset[Modality]) -> None:
        self._prompter = prompter
        self._words = words
        self._taken = taken

    def check(self, info: RequestInfo, params: CodecParams, payload: ModuleInput | ChatInput) -> None:
        if not isinstance(payload, ChatInput):
            raise InternalError(f"a {type(payload).__name__} came to be heard")
        check_parts(payload.messages, self._taken)
        for index, message in enumerate(payload.messages):
            for part in message.parts:
                if isinstance(part, AudioPart):
                    _check_sound(part, f"messages[{index}]")

    def group(self, job: Job) -> Hashable:
        # What takes long goes alone, so that those who only wrote do not wait for it in one batch.
        return job.info.request_id if _has_media(job.payload) else None

    def run(self, jobs: Sequence[Job]) -> list[AudioChunk | ModuleOutput]:
        return [self._run(job.info, job.payload) for job in jobs]

    def _run(self, info: RequestInfo, payload: ModuleInput | ChatInput) -> ModuleOutput:
        if not isinstance(payload, ChatInput):
            raise InternalError(f"a {type(payload).__name__} came to be heard")
        if (said := _read_aloud(info, payload)) is not None:
            return ModuleOutput(prompt=self._prompter.spoken(said))
        only_drawn = info.modalities == {Modality.IMAGE}
        if only_drawn and payload.prompt is not None:
            # Nobody reads on from it, and what is drawn is a message.
            payload = ChatInput((ChatMessage("user", (TextPart(payload.prompt),)),))
        heard: list[str] = []
        messages = tuple(self._worded(message, heard) for message in payload.messages)
        _check_audible(payload.messages, messages)
        prompt = self._prompter.prompt(replace(payload, messages=messages))
        if only_drawn:
            prompt = replace(prompt, num_tokens=1)  # its rows are all that is wanted of the language model
        return ModuleOutput(prompt=prompt, text="\n".join(heard))

    def _worded(self, message: ChatMessage, heard: list[str]) -> ChatMessage:
        """A message with words in place of its media, on lines of their own; `heard` gets what was said."""
        if all(isinstance(part, TextPart) for part in message.parts):
            return message
        lines: list[str] = []
        for part in message.parts:
            if isinstance(part, AudioPart):
                words = self._words.heard(part)
                heard.append(words)
                lines.append(words or _INAUDIBLE)
            elif isinstance(part, ImagePart):
                lines.append(self._words.seen(part))
            elif isinstance(part, TextPart):
                lines.append(part.text)
            else:
                raise UnsupportedModalityError(f"the starter does not take {type(part).__name__}", param="messages")
        return replace(message, parts=(TextPart("\n".join(lines)),))


def _read_aloud(info: RequestInfo, payload: ChatInput) -> str | None:
    """The words to be spoken as they are, where that is what is asked for."""
    if Modality.AUDIO not in info.modalities or not payload.messages:
        return None
    last = payload.messages[-1]
    if last.role != "assistant" or last.name != READ_ALOUD:
        return None
    return "".join(part.text for part in last.parts if isinstance(part, TextPart))


def _check_audible(sent: Sequence[ChatMessage], worded: Sequence[ChatMessage]) -> None:
    """Raise where nobody can answer: the last message is sound without a word in it. Earlier ones may be."""
    if not sent or not any(isinstance(part, AudioPart) for part in sent[-1].parts):
        return
    texts = [part.text for part in worded[-1].parts if isinstance(part, TextPart)]
    if not "".join(texts).replace(_INAUDIBLE, "").strip():
        raise MediaError("no word can be heard in the last message; speak up, or send text", param="messages")


def _has_media(payload: ModuleInput | ChatInput) -> bool:
    messages = payload.messages if isinstance(payload, ChatInput) else ()
    return any(not isinstance(part, TextPart) for message in messages for part in message.parts)


def _check_sound(part: AudioPart, path: str) -> None:
    if part.clip.sample_rate != RATE:
        raise MediaError(f"audio must be resampled to {RATE} Hz, got {part.clip.sample_rate}", param=path)
    try:
        check_clip(part.clip.samples)
    except OmniError as error:
        error.param = error.param or path
        raise


def load_hear(context: LoadContext) -> Hearer:
    """Ears and eyes as far as the folder has them, and the language model's tokenizer."""
    folder = context.model.folder
    taken = senses(folder)
    ears = Transcriber(folder / "hear", sense_threads()) if Modality.AUDIO in taken else None
    eyes = Observer(folder / "see", sense_threads()) if Modality.IMAGE in taken else None
    return Hearer(Prompter(folder / "think"), Words(ears, eyes), taken)
