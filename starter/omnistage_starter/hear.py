"""The first stage: sounds and pictures of a conversation become words, and all of it the language model's prompt."""

from __future__ import annotations

import os
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from omnistage.core.errors import (
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OmniError,
    PromptTooLongError,
)
from omnistage.core.family import LoadContext
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, TextPart
from omnistage.core.params import CodecParams
from omnistage.core.types import ARInput, ChatInput, Modality, ModuleInput, ModuleOutput, RequestInfo
from omnistage.engines.byte_cache import ByteCache
from omnistage.engines.codec.module import UNFINISHED, Job, ModuleComponent, Unfinished
from omnistage.media.hashing import content_key
from omnistage.models.causal_lm.processor import CausalLMProcessor, load_tokenizer
from omnistage.models.loading import positive, read_auto_config
from omnistage_starter.bridges import SPOKEN, SUBJECT
from omnistage_starter.hearing import RATE, Transcriber, check_clip, join, split
from omnistage_starter.seeing import Observer

READ_ALOUD = "read_aloud"
"""Name of an assistant's last message that is to be spoken as it is. Speech is then all that can be asked for."""
MOST_READ = 4096
"""Characters that are read aloud at once, as many as OpenAI's speech endpoint takes."""
MOST_SECONDS, MOST_PICTURES = 600.0, 8
"""Of a whole conversation: what was sent in its earlier turns counts again."""
_MOST_THREADS = 4
_INAUDIBLE = "(inaudible)"
_CACHE_BYTES = 4 * 2**20
"""For words of sounds and pictures: a conversation sends its earlier ones again with every turn."""
_LARGE = 2**22
"""Pixels of a picture from which it takes long even to know it again, or to make it smaller."""
_USER = "<|im_start|>user"

Worded = Generator[None, None, str]
"""Gives the words of a sound or a picture, and stops before each piece of work that takes long."""


class Words:
    """The texts that stand for sounds and pictures. For one thread."""

    def __init__(self, ears: Transcriber | None, eyes: Observer | None) -> None:
        self._ears = ears
        self._eyes = eyes
        self._known: ByteCache[str] = ByteCache(_CACHE_BYTES, lambda text: len(text.encode()) + 64)

    def heard(self, part: AudioPart) -> Worded:
        """What is said in a sound; empty where nothing is."""
        if self._ears is None:
            raise InternalError("a sound came to a stage without ears")
        samples = part.clip.samples
        key = content_key("audio", samples)
        known = self._known.get(key)
        if known is None:
            pieces = []
            for piece in split(samples):
                yield
                pieces.append(self._ears.words(piece))
            known = join(pieces)
            self._known.put(key, known)
        return known

    def seen(self, part: ImagePart) -> Worded:
        """What is found in a picture."""
        if self._eyes is None:
            raise InternalError("a picture came to a stage without eyes")
        large = part.image.width * part.image.height > _LARGE
        if large:
            yield
        key = content_key("image", _pixels(part))
        known = self._known.get(key)
        if known is None:
            if large:
                yield
            known = yield from self._eyes.look(_pixels(part))
            self._known.put(key, known)
        return known


class Prompter:
    """Conversations that are words only, as the language model's prompts. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        config, tokenizer = read_auto_config(folder).get_text_config(), load_tokenizer(folder)
        self._plain = CausalLMProcessor(tokenizer, positive(config, "vocab_size"), positive(config, "hidden_size"))
        self._user = tuple(tokenizer.encode(_USER, add_special_tokens=False))
        self._window = positive(config, "max_position_embeddings")
        # Its tokens spell every byte of a text: none stands for more characters than its own spelling has.
        self._most_characters = self._window * max(len(spelling) for spelling in tokenizer.get_vocab())

    def prompt(self, payload: ChatInput) -> ARInput:
        """The prompt, with the rows of its subject: the last message of the user's, else all of it.

        Raises `PromptTooLongError` for one that the language model cannot hold; one that is longer by far is not even
        made.
        """
        if payload.tokens is not None:
            made = self._plain.tokens(payload.tokens)
        elif payload.messages:
            self._check_characters(sum(len(part.text) for part in _texts(payload.messages)))
            made = self._plain.chat(payload.messages, payload.tools)
        elif payload.prompt is not None:
            self._check_characters(len(payload.prompt))
            made = self._plain.text(payload.prompt)
        else:
            raise InternalError("a conversation without messages, prompt or tokens")
        if (length := len(made.token_ids)) >= self._window:
            raise PromptTooLongError(
                f"has {length} tokens, and the language model holds {self._window} with at least one for the answer: "
                "shorten it",
                param="prompt",
            )
        start = self._last_message(made.token_ids) if payload.messages else 0
        return replace(made, context={SUBJECT: torch.tensor([start, length])})

    def spoken(self, text: str) -> ARInput:
        """As short a prompt as can be, beside a text that is to be spoken as it is."""
        said = torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())
        return ARInput(self._user, context={SPOKEN: said}, num_tokens=1)

    def _check_characters(self, count: int) -> None:
        if count > self._most_characters:
            raise PromptTooLongError(
                f"has {count} characters, and the {self._window} tokens that the language model holds never make "
                f"more than {self._most_characters}: shorten it",
                param="prompt",
            )

    def _last_message(self, ids: Sequence[int]) -> int:
        """Where the last user message's content begins: behind its head and the token that holds its line's end."""
        size = len(self._user)
        heads = (i for i in range(len(ids) - size, -1, -1) if tuple(ids[i : i + size]) == self._user)
        head = next(heads, None)
        return 0 if head is None else min(head + size + 1, len(ids) - 1)


class Hearer(ModuleComponent):
    """Takes a conversation, gives the prompt. A run does one piece of hearing a sound or looking at a picture."""

    input_type = ChatInput
    max_batch = 16

    def __init__(self, prompter: Prompter, words: Words) -> None:
        self._prompter = prompter
        self._words = words
        self._underway: dict[str, Generator[None, None, ModuleOutput]] = {}

    def check(self, info: RequestInfo, params: CodecParams, payload: ModuleInput | ChatInput) -> None:
        messages = _chat(payload).messages
        if (said := read_aloud_text(messages)) is not None:
            _check_reading(info, said)
            return
        seconds, pictures = 0.0, 0
        for index, message in enumerate(messages):
            for part in message.parts:
                if isinstance(part, AudioPart):
                    _check_sound(part, f"messages[{index}]")
                    seconds += part.clip.seconds
                elif isinstance(part, ImagePart):
                    pictures += 1
        if seconds > MOST_SECONDS:
            raise LimitExceededError(
                f"the sounds last {seconds:.1f} s in all and at most {MOST_SECONDS:.0f} s are heard for one request: "
                "leave earlier ones out, or send what was said in them as text",
                param="messages",
            )
        if pictures > MOST_PICTURES:
            raise LimitExceededError(
                f"there are {pictures} pictures and at most {MOST_PICTURES} are looked at for one request: "
                "leave earlier ones out",
                param="messages",
            )

    def group(self, job: Job) -> Hashable:
        # What takes long goes alone, so that those who only wrote do not wait for it in one batch.
        return job.info.request_id if has_media(_chat(job.payload).messages) else None

    def run(self, jobs: Sequence[Job]) -> list[ModuleOutput | Unfinished]:
        return [self._run(job.info, _chat(job.payload)) for job in jobs]

    def forget(self, request_id: str) -> None:
        self._underway.pop(request_id, None)

    def _run(self, info: RequestInfo, payload: ChatInput) -> ModuleOutput | Unfinished:
        if (said := read_aloud_text(payload.messages)) is not None:
            return ModuleOutput(prompt=self._prompter.spoken(said))
        work = self._underway.pop(info.request_id, None)  # back only where it goes on: what failed starts anew
        try:
            if work is None:
                work = self._work(info, payload)
                next(work)  # up to the first piece
            next(work)  # through one piece, up to the next
        except StopIteration as end:
            result: ModuleOutput = end.value
            return result
        self._underway[info.request_id] = work
        return UNFINISHED

    def _work(self, info: RequestInfo, payload: ChatInput) -> Generator[None, None, ModuleOutput]:
        """All of a request; stops before each piece of work that takes long."""
        only_drawn = info.modalities == {Modality.IMAGE}
        if only_drawn and payload.prompt is not None:
            # Nobody reads on from it, and what is drawn is a message.
            payload = ChatInput((as_message(payload.prompt),), tokens=payload.drawn)
        words: list[str] = []
        for message in payload.messages:
            for part in message.parts:
                if isinstance(part, AudioPart):
                    words.append((yield from self._words.heard(part)) or _INAUDIBLE)
                elif isinstance(part, ImagePart):
                    words.append((yield from self._words.seen(part)))
                elif not isinstance(part, TextPart):
                    raise InternalError(f"a {type(part).__name__} came to be heard")
        worded = with_words(payload.messages, iter(words))
        _check_audible(payload.messages, worded)
        prompt = self._prompter.prompt(replace(payload, messages=worded))
        if only_drawn:
            prompt = replace(prompt, num_tokens=1)  # its rows are all that is wanted of the language model
        return ModuleOutput(prompt=prompt)


def as_message(prompt: str) -> ChatMessage:
    """A bare prompt as what a user says."""
    return ChatMessage("user", (TextPart(prompt),))


def has_media(messages: Sequence[ChatMessage]) -> bool:
    return any(not isinstance(part, TextPart) for message in messages for part in message.parts)


def with_words(messages: Sequence[ChatMessage], words: Iterator[str]) -> tuple[ChatMessage, ...]:
    """Messages with words in place of their media, in order, on lines of their own."""
    worded = []
    for message in messages:
        if has_media([message]):
            lines = [part.text if isinstance(part, TextPart) else next(words) for part in message.parts]
            message = replace(message, parts=(TextPart("\n".join(lines)),))
        worded.append(message)
    return tuple(worded)


def read_aloud_text(messages: Sequence[ChatMessage]) -> str | None:
    """The words to be spoken as they are, where that is what is asked for."""
    if not messages or messages[-1].role != "assistant" or messages[-1].name != READ_ALOUD:
        return None
    return "".join(part.text for part in _texts(messages[-1:]))


def senses(folder: Path) -> frozenset[Modality]:
    """What a starter's folder has the parts to take in."""
    found = {Modality.TEXT}
    if Transcriber.present(folder / "hear"):
        found.add(Modality.AUDIO)
    if Observer.present(folder / "see"):
        found.add(Modality.IMAGE)
    return frozenset(found)


def sense_threads() -> int:
    """Cores that one sound or picture may use."""
    return min(os.cpu_count() or 1, _MOST_THREADS)


def _chat(payload: ModuleInput | ChatInput) -> ChatInput:
    if not isinstance(payload, ChatInput):
        raise InternalError(f"a {type(payload).__name__} came to be heard")
    return payload


def _pixels(part: ImagePart) -> np.ndarray:
    return np.asarray(part.image, dtype=np.uint8)


def _texts(messages: Sequence[ChatMessage]) -> Iterator[TextPart]:
    return (part for message in messages for part in message.parts if isinstance(part, TextPart))


def _check_reading(info: RequestInfo, text: str) -> None:
    if info.modalities != {Modality.AUDIO}:
        raise InvalidRequestError(
            f"an assistant's last message named {READ_ALOUD!r} is spoken as it is, and nothing else is made of it; "
            "ask for audio alone, or give the message another name",
            param="modalities",
        )
    if len(text) > MOST_READ:
        raise LimitExceededError(
            f"the text has {len(text)} characters and at most {MOST_READ} are read aloud at once: send it in parts",
            param="messages",
        )


def _check_audible(sent: Sequence[ChatMessage], worded: Sequence[ChatMessage]) -> None:
    """Raise where nobody can answer: the last message is sound without a word in it. Earlier ones may be."""
    if not sent or not any(isinstance(part, AudioPart) for part in sent[-1].parts):
        return
    if not "".join(part.text for part in _texts(worded[-1:])).replace(_INAUDIBLE, "").strip():
        raise MediaError("no word can be heard in the last message; speak up, or send text", param="messages")


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
    return Hearer(Prompter(folder / "think"), Words(ears, eyes))
