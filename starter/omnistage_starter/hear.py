"""The first stage: audio and images of a conversation become text, and the conversation becomes a prompt."""

from __future__ import annotations

import os
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from omnistage.config import OmniModelConfig, RemoteStageConfig
from omnistage.core.checkpoint import Checkpoint
from omnistage.core.errors import (
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    MediaError,
    OmniError,
    PromptTooLongError,
    UnclearSpeechError,
)
from omnistage.core.family import LoadContext
from omnistage.core.messages import PLAIN_TEMPLATE, AudioPart, ChatMessage, ImagePart, TemplateOptions, TextPart
from omnistage.core.params import CodecParams
from omnistage.core.types import ARInput, ChatInput, Modality, ModuleOutput, RequestInfo
from omnistage.engines.byte_cache import ByteCache
from omnistage.engines.codec.module import UNFINISHED, Job, ModuleComponent, ModulePayload, Unfinished
from omnistage.media.hashing import content_key
from omnistage.models.causal_lm.processor import CausalLMProcessor, load_tokenizer
from omnistage.models.loading import positive, read_auto_config
from omnistage_starter.bridges import SUBJECT, VERBATIM
from omnistage_starter.image_description import ImageDescriber
from omnistage_starter.speech_to_text import SAMPLE_RATE, SpeechToText, check_clip, join, split

READ_ALOUD = "read_aloud"
"""Name of a last assistant message that is spoken verbatim. Such a request gives speech only."""
MAX_READ_ALOUD_CHARACTERS = 4096
"""The limit of OpenAI's speech endpoint."""
MAX_AUDIO_SECONDS, MAX_IMAGES = 600.0, 8
"""Per request, including the media of earlier turns."""
_MAX_THREADS = 4
_INAUDIBLE = "(inaudible)"
_CACHE_BYTES = 4 * 2**20
"""For the text of audio and images: a conversation sends its earlier media again with every turn."""
_LARGE_PIXELS = 2**22
"""From this size on, hashing or resizing an image counts as a step of its own."""
_USER = "<|im_start|>user"

TextSteps = Generator[None, None, str]
"""Returns the text of an audio clip or an image; yields before each slow step."""


class MediaToText:
    """Text in place of audio and images, cached by content. For one thread."""

    def __init__(self, speech_to_text: SpeechToText | None, describer: ImageDescriber | None) -> None:
        self._speech_to_text = speech_to_text
        self._describer = describer
        self._cache: ByteCache[str] = ByteCache(_CACHE_BYTES, lambda text: len(text.encode()) + 64)

    def transcribe(self, part: AudioPart) -> TextSteps:
        """The words in a clip; empty where there are none."""
        if self._speech_to_text is None:
            raise InternalError("this pipeline has no audio input")
        samples = part.clip.samples
        key = content_key("audio", samples)
        text = self._cache.get(key)
        if text is None:
            pieces = []
            for piece in split(samples):
                yield
                pieces.append(self._speech_to_text.transcribe_piece(piece))
            text = join(pieces)
            self._cache.put(key, text)
        return text

    def describe(self, part: ImagePart) -> TextSteps:
        """What was recognised in an image."""
        if self._describer is None:
            raise InternalError("this pipeline has no image input")
        large = part.image.width * part.image.height > _LARGE_PIXELS
        if large:
            yield
        key = content_key("image", _pixels(part))
        text = self._cache.get(key)
        if text is None:
            if large:
                yield
            text = yield from self._describer.describe_steps(_pixels(part))
            self._cache.put(key, text)
        return text


class PromptBuilder:
    """Builds the language model's prompt from a conversation of text. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        config, tokenizer = read_auto_config(folder).get_text_config(), load_tokenizer(folder)
        self._max_tokens = positive(config, "max_position_embeddings")
        vocab_size, embed_size = positive(config, "vocab_size"), positive(config, "hidden_size")
        self._processor = CausalLMProcessor(tokenizer, vocab_size, embed_size, self._max_tokens)
        self._user = tuple(tokenizer.encode(_USER, add_special_tokens=False))
        # A byte-level vocabulary: no token stands for more characters than its own spelling has.
        self._max_characters = self._max_tokens * max(len(spelling) for spelling in tokenizer.get_vocab())

    def prompt(self, payload: ChatInput) -> ARInput:
        """The prompt, with the rows of its subject: the last user message, else all of it.

        Raises `PromptTooLongError` for a prompt beyond the context length; one that is far too long is not tokenized.
        """
        if payload.tokens is not None:
            prompt = self._processor.tokens(payload.tokens)
        elif payload.messages:
            self._check_characters(sum(len(part.text) for part in _texts(payload.messages)))
            template = payload.template or PLAIN_TEMPLATE
            prompt = self._processor.chat(payload.messages, payload.tools, template=template)
        elif payload.prompt is not None:
            self._check_characters(len(payload.prompt))
            prompt = self._processor.text(payload.prompt)
        else:
            raise InternalError("a conversation without messages, prompt or tokens")
        if (length := len(prompt.token_ids)) >= self._max_tokens:
            raise PromptTooLongError(
                f"has {length} tokens, and the language model holds {self._max_tokens} with at least one for the "
                "answer: shorten it",
                param="prompt",
            )
        start = self._last_message(prompt.token_ids) if payload.messages else 0
        return replace(prompt, context={SUBJECT: torch.tensor([start, length])})

    def read_aloud(self, text: str) -> ARInput:
        """The shortest prompt, with a text beside it that is spoken verbatim."""
        return ARInput(self._user, context={VERBATIM: _encoded(text)}, num_tokens=1)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._processor.decode(token_ids)

    def text_tokens(self, text: str) -> Sequence[int]:
        self._check_characters(len(text))
        return self._processor.text_tokens(text)

    def spellings(self, token_ids: Sequence[int]) -> list[str]:
        return self._processor.spellings(token_ids)

    def check_template(self, template: TemplateOptions) -> None:
        """Each problem is the template's own, found when it is applied."""

    def has_variable(self, name: str) -> bool:
        return self._processor.has_variable(name)

    def _check_characters(self, count: int) -> None:
        if count > self._max_characters:
            raise PromptTooLongError(
                f"has {count} characters, and the {self._max_tokens} tokens that the language model holds never make "
                f"more than {self._max_characters}: shorten it",
                param="prompt",
            )

    def _last_message(self, ids: Sequence[int]) -> int:
        """Where the last user message's content begins: after its header and the token of the line break."""
        size = len(self._user)
        headers = (i for i in range(len(ids) - size, -1, -1) if tuple(ids[i : i + size]) == self._user)
        header = next(headers, None)
        return 0 if header is None else min(header + size + 1, len(ids) - 1)


class Conversations:
    """What a language model on a server is sent: a conversation of text, for its own template and tokenizer."""

    def prompt(self, payload: ChatInput) -> ChatInput:
        return replace(payload, drawing_prompt=None)

    def check_template(self, template: TemplateOptions) -> None:
        """Raise for options, which the server's own template would not see."""
        if template is not PLAIN_TEMPLATE:
            raise InvalidRequestError(
                "the language model's server has its template; leave it out", param=template.param
            )

    def has_variable(self, name: str) -> bool:
        return False

    def read_aloud(self, text: str) -> ARInput:
        """Nothing to generate, with a text beside it that is spoken verbatim."""
        return ARInput((0,), context={VERBATIM: _encoded(text)}, num_tokens=0)


def prompts_of(model: Checkpoint) -> PromptBuilder | Conversations:
    """How the language model of a pipeline gets its prompts."""
    stages = model.config.pipeline.stages if isinstance(model, OmniModelConfig) else {}
    if isinstance(stages.get("think"), RemoteStageConfig):
        return Conversations()
    return PromptBuilder(model.folder / "think")


class ChatToPrompt(ModuleComponent):
    """Takes a conversation, gives the prompt. One run does one step of transcribing a clip or describing an image."""

    input_type = ChatInput
    max_batch = 16

    def __init__(self, prompts: PromptBuilder | Conversations, media: MediaToText) -> None:
        self._prompts = prompts
        self._media = media
        self._running: dict[str, Generator[None, None, ModuleOutput]] = {}

    def check(self, info: RequestInfo, params: CodecParams, payload: ModulePayload) -> None:
        messages = _chat(payload).messages
        if (text := read_aloud_text(messages)) is not None:
            _check_read_aloud(info, text)
            return
        seconds, images = 0.0, 0
        for index, message in enumerate(messages):
            for part in message.parts:
                if isinstance(part, AudioPart):
                    _check_audio(part, f"messages[{index}]")
                    seconds += part.clip.seconds
                elif isinstance(part, ImagePart):
                    images += 1
        if seconds > MAX_AUDIO_SECONDS:
            raise LimitExceededError(
                f"the request has {seconds:.1f} s of audio and at most {MAX_AUDIO_SECONDS:.0f} s are allowed: "
                "leave earlier clips out, or send their words as text",
                param="messages",
            )
        if images > MAX_IMAGES:
            raise LimitExceededError(
                f"the request has {images} images and at most {MAX_IMAGES} are allowed: leave earlier ones out",
                param="messages",
            )

    def group(self, job: Job) -> Hashable:
        # Slow requests run alone, so that text requests do not wait for them in one batch.
        return job.info.request_id if has_media(_chat(job.payload).messages) else None

    def run(self, jobs: Sequence[Job]) -> list[ModuleOutput | Unfinished]:
        return [self._run(job.info, _chat(job.payload)) for job in jobs]

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def _run(self, info: RequestInfo, payload: ChatInput) -> ModuleOutput | Unfinished:
        if (text := read_aloud_text(payload.messages)) is not None:
            return ModuleOutput(prompt=self._prompts.read_aloud(text))
        steps = self._running.pop(
            info.request_id, None
        )  # put back only where it continues: after a failure it restarts
        try:
            if steps is None:
                steps = self._steps(info, payload)
                next(steps)  # up to the first step
            next(steps)  # through one step, up to the next
        except StopIteration as end:
            result: ModuleOutput = end.value
            return result
        self._running[info.request_id] = steps
        return UNFINISHED

    def _steps(self, info: RequestInfo, payload: ChatInput) -> Generator[None, None, ModuleOutput]:
        """A whole request; yields before each slow step."""
        image_only = info.modalities == {Modality.IMAGE}
        if image_only and payload.prompt is not None:
            # A bare prompt is not continued here: the picture is drawn from a message.
            payload = ChatInput((as_message(payload.prompt),), tokens=payload.drawing_prompt)
        texts: list[str] = []
        for message in payload.messages:
            for part in message.parts:
                if isinstance(part, AudioPart):
                    try:
                        texts.append((yield from self._media.transcribe(part)) or _INAUDIBLE)
                    except UnclearSpeechError as error:
                        if message is payload.messages[-1]:
                            error.param = "messages"
                            raise
                        texts.append(_INAUDIBLE)
                elif isinstance(part, ImagePart):
                    texts.append((yield from self._media.describe(part)))
                elif not isinstance(part, TextPart):
                    raise InternalError(f"the starter does not take a {type(part).__name__}")
        messages = replace_media(payload.messages, iter(texts))
        _check_speech(payload.messages, messages)
        prompt = self._prompts.prompt(replace(payload, messages=messages))
        if image_only and isinstance(prompt, ARInput):
            prompt = replace(prompt, num_tokens=1)  # only the prompt's hidden states are needed
        return ModuleOutput(prompt=prompt)


def _encoded(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).copy())


def as_message(prompt: str) -> ChatMessage:
    """A bare prompt as a user's message."""
    return ChatMessage("user", (TextPart(prompt),))


def has_media(messages: Sequence[ChatMessage]) -> bool:
    return any(not isinstance(part, TextPart) for message in messages for part in message.parts)


def replace_media(messages: Sequence[ChatMessage], texts: Iterator[str]) -> tuple[ChatMessage, ...]:
    """Messages with texts in place of their media, in order, on lines of their own."""
    result = []
    for message in messages:
        if has_media([message]):
            lines = [part.text if isinstance(part, TextPart) else next(texts) for part in message.parts]
            message = replace(message, parts=(TextPart("\n".join(lines)),))
        result.append(message)
    return tuple(result)


def read_aloud_text(messages: Sequence[ChatMessage]) -> str | None:
    """The text to be spoken verbatim, if the request asks for that."""
    if not messages or messages[-1].role != "assistant" or messages[-1].name != READ_ALOUD:
        return None
    return "".join(part.text for part in _texts(messages[-1:]))


def available_inputs(folder: Path) -> frozenset[Modality]:
    """The modalities that the parts in a starter's folder can take."""
    inputs = {Modality.TEXT}
    if SpeechToText.present(folder / "hear"):
        inputs.add(Modality.AUDIO)
    if ImageDescriber.present(folder / "see"):
        inputs.add(Modality.IMAGE)
    return frozenset(inputs)


def media_threads() -> int:
    """CPU threads for one clip or image."""
    return min(os.cpu_count() or 1, _MAX_THREADS)


def _chat(payload: ModulePayload) -> ChatInput:
    if not isinstance(payload, ChatInput):
        raise InternalError(f"the hear stage takes a ChatInput, not a {type(payload).__name__}")
    return payload


def _pixels(part: ImagePart) -> np.ndarray:
    return np.asarray(part.image, dtype=np.uint8)


def _texts(messages: Sequence[ChatMessage]) -> Iterator[TextPart]:
    return (part for message in messages for part in message.parts if isinstance(part, TextPart))


def _check_read_aloud(info: RequestInfo, text: str) -> None:
    if info.modalities != {Modality.AUDIO}:
        raise InvalidRequestError(
            f"a last assistant message named {READ_ALOUD!r} is spoken verbatim and gives audio only; "
            "request audio alone, or give the message another name",
            param="modalities",
        )
    if len(text) > MAX_READ_ALOUD_CHARACTERS:
        raise LimitExceededError(
            f"the text has {len(text)} characters and at most {MAX_READ_ALOUD_CHARACTERS} are spoken at once: send it "
            "in parts",
            param="messages",
        )


def _check_speech(original: Sequence[ChatMessage], converted: Sequence[ChatMessage]) -> None:
    """Raise where the last message is audio without words; earlier messages may be."""
    if not original or not any(isinstance(part, AudioPart) for part in original[-1].parts):
        return
    if not "".join(part.text for part in _texts(converted[-1:])).replace(_INAUDIBLE, "").strip():
        raise MediaError(
            "no speech was detected in the audio of the last message; send speech or text", param="messages"
        )


def _check_audio(part: AudioPart, path: str) -> None:
    if part.clip.sample_rate != SAMPLE_RATE:
        raise MediaError(f"audio must be resampled to {SAMPLE_RATE} Hz, got {part.clip.sample_rate}", param=path)
    try:
        check_clip(part.clip.samples)
    except OmniError as error:
        error.param = error.param or path
        raise


def load_hear(context: LoadContext) -> ChatToPrompt:
    """Speech recognition and image description as far as the folder has them, and the language model's tokenizer."""
    folder = context.model.folder
    inputs = available_inputs(folder)
    speech_to_text = SpeechToText(folder / "hear", media_threads()) if Modality.AUDIO in inputs else None
    describer = ImageDescriber(folder / "see", media_threads()) if Modality.IMAGE in inputs else None
    return ChatToPrompt(prompts_of(context.model), MediaToText(speech_to_text, describer))
