"""What callers give, checked and made a request: prompts, parameters, options."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from omnistage.core.errors import (
    InvalidRequestError,
    LimitExceededError,
    PromptTooLongError,
    UnsupportedModalityError,
)
from omnistage.core.family import (
    AnyProcessor,
    AudioLimits,
    ClipRate,
    DrawingProcessor,
    InputProcessor,
    OptionalInputs,
    SpeechRecognizer,
    TextEncoder,
    Thinking,
    VoicePrompts,
)
from omnistage.core.graph import PipelineGraph
from omnistage.core.messages import PLAIN_TEMPLATE, ChatMessage, TemplateOptions
from omnistage.core.params import DiffusionParams, SamplingParams, StageParams
from omnistage.core.types import (
    ARInput,
    ChatInput,
    Modality,
    OmniTokensPrompt,
    RequestInfo,
    SpeechPrompt,
    StagePayloadIn,
    TextBatch,
)
from omnistage.core.validation import SHOWN_CHARS, is_utf8, short_repr
from omnistage.core.voices import VoiceNames
from omnistage.media.budget import media_hold
from omnistage.media.context import current_owner
from omnistage.pipeline.request import OmniRequest, count_tokens, media_bytes

if TYPE_CHECKING:
    import torch

    from omnistage.config import LimitsConfig

Prompt = str | OmniTokensPrompt | TextBatch | SpeechPrompt | Mapping[str, object] | Sequence[Mapping[str, object]]
"""Text, tokens, texts to encode, audio to transcribe, a mapping with one of `prompt`, `prompt_token_ids`,
`prompt_embeds`, or a list of chat messages."""
ParamsLike = StageParams | Mapping[str, StageParams | Mapping[str, object]] | None
"""Parameters of the lead stage (the one that gives text, else the entry), or by stage name."""
MAX_PRIORITY = 1000
"""Either way from 0: further out, waiting could never make up for it."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a caller may say about a request besides its prompt and sampling parameters."""

    modalities: Sequence[str] | None = None
    voice: str | None = None
    priority: int = 0
    timeout: float | None = None
    use_audio_in_video: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model may call, as chat templates take them; for chats."""
    thinking: bool | None = None
    """Whether the chat template has the model think first; None: as it does by itself. For models that can."""
    template: TemplateOptions = PLAIN_TEMPLATE


class RequestFactory:
    """Turns what a caller gives into an `OmniRequest`, or raises what is wrong with it. Thread-safe.

    It decodes media and tokenises, so it belongs in a worker thread, never in an event loop.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        params_types: Mapping[str, type[StageParams]],
        processor: AnyProcessor,
        limits: LimitsConfig,
        defaults: Mapping[str, StageParams] | None = None,
        clock: Callable[[], float] = time.monotonic,
        voices: VoiceNames | None = None,
    ) -> None:
        self._graph = graph
        self._params_types = params_types
        self._processor = processor
        # Asked once: such an `isinstance` looks up every method of the protocol.
        self._payload: Callable[[Prompt, RequestOptions, Mapping[str, StageParams]], StagePayloadIn] = (
            partial(self._drawing, processor)
            if isinstance(processor, DrawingProcessor)
            else partial(self._input, processor)
        )
        self._audio_limits = processor if isinstance(processor, AudioLimits) else None
        self._voiced = processor if isinstance(processor, VoicePrompts) else None
        self._thinking = processor if isinstance(processor, Thinking) else None
        self._limits = limits
        self._defaults = defaults or {}
        self._clock = clock
        self._voices = voices or VoiceNames(processor.voices(), speaks=Modality.AUDIO in graph.outputs)

    def build(
        self,
        prompt: Prompt,
        params: ParamsLike,
        options: RequestOptions,
        request_id: str | None = None,
        arrival: float | None = None,
    ) -> OmniRequest:
        """`arrival` is given where the request has waited since; its deadline counts from there."""
        arrival = self._clock() if arrival is None else arrival
        info = RequestInfo(
            checked_request_id(request_id),
            modalities=self._modalities(options.modalities),
            priority=_priority(options.priority),
            deadline=self.deadline(arrival, options.timeout),
            voice=(voice := self._voices.resolve(options.voice)),
            arrival=arrival,
            owner=current_owner(),
        )
        if voice != options.voice:
            options = replace(options, voice=voice)
        stage_params = self.stage_params(params)  # before the prompt: all that is cheap to check comes first
        max_tokens = self._limits.max_prompt_tokens
        with media_hold() as media:
            payload = self._payload(prompt, options, stage_params)
        media.settle(media_bytes(payload))
        tokens = count_tokens(payload)
        if tokens == 0 and _must_have_tokens(payload):
            raise InvalidRequestError("is empty; give at least one token", param="prompt")
        if max_tokens is not None and tokens > max_tokens:
            raise PromptTooLongError(f"has {tokens} tokens, over the limit of {max_tokens}; shorten it", param="prompt")
        return OmniRequest(info, payload, stage_params, max_tokens, media)

    def tokens(self, prompt: Prompt, options: RequestOptions) -> tuple[int, ...] | int:
        """The tokens of a prompt; their number alone where some stand for media or embeddings."""
        with media_hold() as media:
            payload = self._payload(prompt, options, {})
        media.close()
        if isinstance(payload, ARInput) and payload.embeds is None and not payload.media:
            return tuple(payload.token_ids)
        if isinstance(payload, ChatInput):
            if payload.tokens is None:
                raise InvalidRequestError("has media, whose tokens are known only when it runs", param="messages")
            return tuple(payload.tokens.prompt_token_ids)
        return count_tokens(payload)

    def _modalities(self, names: Sequence[str] | None) -> frozenset[Modality]:
        outputs = self._graph.outputs
        if names is None:
            return frozenset({Modality.TEXT}) if Modality.TEXT in outputs else frozenset(outputs)
        if not isinstance(names, str | list | tuple | set | frozenset):
            raise InvalidRequestError(
                f"must be a list of {', '.join(outputs)}, got {type(names).__name__}", param="modalities"
            )
        requested = (names,) if isinstance(names, str) else tuple(names)
        if not requested:
            raise InvalidRequestError("is empty; name at least one modality", param="modalities")
        for name in requested:
            if not isinstance(name, str) or name not in outputs:
                readable = str(name) if isinstance(name, Modality) else name
                raise UnsupportedModalityError(
                    f"this model has no output {short_repr(readable)}; its outputs: {', '.join(outputs)}",
                    param="modalities",
                )
        return frozenset(map(Modality, requested))

    def deadline(self, arrival: float, timeout: float | None) -> float | None:
        """When a request that arrived then has to end. Raises what is wrong with `timeout`."""
        if timeout is None:
            return None
        if not _is_number(timeout) or timeout <= 0:
            raise InvalidRequestError(
                f"must be a number of seconds above 0, got {short_repr(timeout)}", param="timeout"
            )
        if timeout > self._limits.max_deadline_seconds:
            raise LimitExceededError(
                f"{short_repr(timeout)} s is over the limit of {self._limits.max_deadline_seconds} s; ask for less",
                param="timeout",
            )
        return arrival + timeout

    def stage_params(self, params: ParamsLike) -> dict[str, StageParams]:
        """By stage. Raises what is wrong with them."""
        if params is None:
            return {}
        if isinstance(params, StageParams):
            takers = [name for name, kind in self._params_types.items() if isinstance(params, kind)]
            # Those that a whole request shares need no stage's name: any stage that takes them will do.
            shared = params.shared and takers
            return {takers[0] if shared else self._graph.lead: params}
        if not isinstance(params, Mapping):
            raise InvalidRequestError(
                f"must be SamplingParams or a mapping from stage to parameters, got {type(params).__name__}",
                param="sampling_params",
            )
        return {name: self._stage_params(name, value) for name, value in params.items()}

    def _stage_params(self, name: str, value: object) -> StageParams:
        path = f"sampling_params.{name[:SHOWN_CHARS] if isinstance(name, str) else short_repr(name)}"
        if name not in self._params_types:
            raise InvalidRequestError(f"unknown stage; stages: {', '.join(self._graph.order)}", param=path)
        if isinstance(value, StageParams):
            return value
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"must be parameters or a mapping, got {type(value).__name__}", param=path)
        try:
            return self._params_types[name].parse(value)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param=f"{path}.{error.param}" if error.param else path) from error

    def _input(
        self, processor: InputProcessor, prompt: Prompt, options: RequestOptions, _params: Mapping[str, StageParams]
    ) -> StagePayloadIn:
        if self._voiced is not None:
            processor = self._voiced.with_voice(options.voice)
        if isinstance(prompt, str):
            return self._text(processor, prompt)
        if isinstance(prompt, OmniTokensPrompt):
            return processor.tokens(prompt)
        if isinstance(prompt, SpeechPrompt):
            return self._speech(processor, prompt)
        if isinstance(prompt, TextBatch):
            return self._batch(processor, prompt)
        if isinstance(prompt, Mapping):
            return self._mapping(processor, prompt)
        if isinstance(prompt, list | tuple):
            from omnistage.pipeline.messages.chat import parse_messages

            messages = parse_messages(
                prompt,
                self._limits.media,
                use_audio_in_video=options.use_audio_in_video,
                max_clip_seconds=None if self._audio_limits is None else self._audio_limits.clip_seconds()[1],
                check_kinds=self._check_media,
                **({"audio_rate": processor.clip_rate} if isinstance(processor, ClipRate) else {}),
            )
            if options.template is not PLAIN_TEMPLATE:
                return self._templated(messages, options)
            if options.thinking is not None and self._thinking is not None:
                return self._thinking.chat(messages, options.tools, thinking=options.thinking)
            # Said only where there are some: a family may take none.
            return processor.chat(messages, options.tools) if options.tools else processor.chat(messages)
        raise InvalidRequestError(
            "must be text, an OmniTokensPrompt, a mapping with prompt, prompt_token_ids or prompt_embeds, or a list "
            f"of chat messages; got {type(prompt).__name__}",
            param="prompt",
        )

    def _templated(self, messages: Sequence[ChatMessage], options: RequestOptions) -> StagePayloadIn:
        if self._thinking is None:
            why = "is not supported by this model's chat template; leave it out"
            raise InvalidRequestError(why, param=options.template.param)
        return self._thinking.chat(messages, options.tools, thinking=options.thinking, template=options.template)

    def _drawing(
        self, processor: DrawingProcessor, prompt: Prompt, _options: RequestOptions, params: Mapping[str, StageParams]
    ) -> StagePayloadIn:
        from omnistage.pipeline.messages.drawing import parse_drawing

        takes_images = Modality.IMAGE in processor.input_modalities
        parsed = parse_drawing(prompt, self._limits.media, takes_images=takes_images)
        merged = DiffusionParams()
        for stage_params in (*self._defaults.values(), *params.values()):
            merged = merged.merged(stage_params) if isinstance(stage_params, DiffusionParams) else merged
        return processor.draw(parsed.prompt, parsed.images, parsed.mask, merged)

    def _text(self, processor: InputProcessor, prompt: str) -> StagePayloadIn:
        limit = self._limits.media.max_text_chars
        if len(prompt) > limit:
            raise LimitExceededError(
                f"{len(prompt)} characters exceed the limit of {limit}; shorten it", param="prompt"
            )
        return processor.text(prompt)

    def _speech(self, processor: InputProcessor, prompt: SpeechPrompt) -> StagePayloadIn:
        from omnistage.media.audio import decode_audio
        from omnistage.media.context import notify_inspector

        if not isinstance(processor, SpeechRecognizer):
            raise UnsupportedModalityError("this model transcribes no speech; use one that does", param="model")
        limits = self._limits.media
        if self._audio_limits is not None:
            longest = min(limits.max_audio_seconds, self._audio_limits.clip_seconds()[1])
            limits = limits.model_copy(update={"max_audio_seconds": longest})
        try:
            clip = decode_audio(prompt.audio, limits, processor.audio_sample_rate)
        except InvalidRequestError as error:
            error.param = "audio"
            raise
        notify_inspector(clip)
        return processor.recognize(clip, prompt.options)

    def _batch(self, processor: InputProcessor, batch: TextBatch) -> StagePayloadIn:
        if not isinstance(processor, TextEncoder):
            raise UnsupportedModalityError("this model gives no embeddings or scores; use one that does", param="model")
        limit = self._limits.media.max_text_chars
        chars = sum(len(text) for text in (*batch.texts, *batch.seconds) if isinstance(text, str))
        if chars > limit:
            raise LimitExceededError(f"{chars} characters exceed the limit of {limit}; send fewer texts", param="input")
        return processor.encode(batch)

    def _mapping(self, processor: InputProcessor, prompt: Mapping[str, object]) -> StagePayloadIn:
        fields = ("prompt", "prompt_token_ids", "prompt_embeds")
        if unknown := [short_repr(key) for key in prompt if key not in fields]:
            raise InvalidRequestError(
                f"has unknown keys {', '.join(unknown[:3])}; known: {', '.join(fields)}. Media go into chat messages",
                param="prompt",
            )
        values = {key: value for key, value in prompt.items() if value is not None}
        text = values.get("prompt")
        if isinstance(text, str) and len(values) == 1:
            return self._text(processor, text)
        if text is not None or not values:
            raise InvalidRequestError(
                "give either prompt, a string, or prompt_token_ids and prompt_embeds", param="prompt"
            )
        return processor.tokens(
            OmniTokensPrompt(_token_ids(values.get("prompt_token_ids", ())), _embeds(values.get("prompt_embeds")))
        )

    def _check_media(self, present: frozenset[Modality]) -> None:
        supported = self._processor.input_modalities
        if unsupported := sorted(present - supported):
            if isinstance(self._processor, OptionalInputs):
                raise UnsupportedModalityError(self._processor.unsupported_reason(unsupported[0]), param="messages")
            raise UnsupportedModalityError(
                f"this model does not take {', '.join(unsupported)}; it takes {', '.join(sorted(supported))}",
                param="messages",
            )


def _must_have_tokens(payload: StagePayloadIn) -> bool:
    """Whether a prompt without a token is an empty one; messages have some once they are rendered."""
    return isinstance(payload, ARInput) or (
        isinstance(payload, ChatInput) and not payload.messages and not payload.prompt
    )


def checked_request_id(value: object) -> str:
    """A caller's request id, or a new one for None. Raises `InvalidRequestError`."""
    if value is None:
        return f"req-{uuid.uuid4().hex}"
    if not isinstance(value, str) or not value or not is_utf8(value):
        raise InvalidRequestError(f"must be text, and not empty; got {short_repr(value)}", param="request_id")
    return value


def known_request_id(value: object) -> str:
    """A request id that a caller asks about. Raises `InvalidRequestError`."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"must be text, got {type(value).__name__}", param="request_id")
    return value


def is_constrained(params: Mapping[str, StageParams]) -> bool:
    """Whether a stage's output must follow a schema, an expression or a grammar."""
    return any(isinstance(one, SamplingParams) and one.structured is not None for one in params.values())


def is_conversation(value: object) -> bool:
    """Whether this is one conversation: a non-empty list of messages, each a mapping with a role."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(message, Mapping) and "role" in message for message in value)


def _priority(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -MAX_PRIORITY <= value <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"must be a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}, got {short_repr(value)}", param="priority"
        )
    return value


def _is_number(value: object) -> bool:
    """Whether this is a number other than NaN and infinity; whole ones may be too large for a float."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise InvalidRequestError("must be a list of whole numbers", param="prompt_token_ids")
    return tuple(value)


def _embeds(value: object) -> torch.Tensor | None:
    import torch

    if value is not None and not isinstance(value, torch.Tensor):
        raise InvalidRequestError(f"must be a tensor [n, hidden], got {type(value).__name__}", param="prompt_embeds")
    return value
