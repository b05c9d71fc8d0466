"""OpenAI-style chat messages, parsed into typed parts.

The structure of every message is checked before the first media item is decoded, so that a mistake in the last
message costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from omnistage.core.errors import InvalidRequestError, LimitExceededError
from omnistage.core.messages import AudioPart, ChatMessage, ImagePart, Part, Role, TextPart, ToolCall, VideoPart
from omnistage.core.types import Modality
from omnistage.core.validation import is_utf8
from omnistage.media.audio import decode_audio
from omnistage.media.context import notify_inspector
from omnistage.media.image import decode_image
from omnistage.media.limits import MediaLimits
from omnistage.media.video import MIN_FRAMES, decode_video

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
MAX_NAME_CHARS = 256
MAX_ARGUMENT_DEPTH = 64
"""Of a call's arguments: beyond them they are text, so that nothing has to follow them down."""
MAX_ARGUMENT_VALUES = 2**18
"""Of all calls of a request, together: as many as a body may have, which counts these texts as one value each."""
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "refusal", "audio", "function_call"}
    # What clients send back of an answer as they got it, and of an item of /v1/responses
    | {"reasoning", "annotations", "images", "id", "type", "status", "phase"}
)
_TEXT_FIELDS = frozenset({"type", "text", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"})
_PART_FIELDS = frozenset(
    {"type", "detail", "fps", "min_frames", "max_frames", "uuid", "cache_control", "prompt_cache_breakpoint"}
)
_DETAILS = ("auto", "low", "high", "original")
_LOW_DETAIL = (512, 512)
"""Pixels: as OpenAI has it."""
_AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg", "opus", "m4a", "aac", "webm", "mp4", "pcm16")


@dataclass(frozen=True, slots=True)
class _Pending:
    """A media item whose place is valid, not decoded yet. `path` names it in errors."""

    path: str
    kind: Modality
    decode: Callable[[], ImagePart | AudioPart | VideoPart]


@dataclass(frozen=True, slots=True)
class _Options:
    limits: MediaLimits
    audio_limits: MediaLimits
    audio_rate: int
    video_fps: float
    use_audio_in_video: bool
    max_clip_seconds: float
    """Of audio, also that of a video: what is longer is refused before all of it is decoded."""


@dataclass(slots=True)
class _Decoder:
    """Decodes the media of one request; their limits are for all of them together as well as for each."""

    limits: MediaLimits
    pixels: int = 0
    seconds: float = 0.0

    def part(self, part: _Parsed) -> Part:
        if isinstance(part, TextPart):
            return part
        try:
            decoded = part.decode()
            if isinstance(decoded, ImagePart):
                self.pixels += decoded.image.width * decoded.image.height
            elif isinstance(decoded, VideoPart):
                count, height, width, _ = decoded.clip.frames.shape
                self.pixels += count * height * width
                self.seconds += decoded.clip.audio.seconds if decoded.clip.audio is not None else 0.0
            else:
                self.seconds += decoded.clip.seconds
            if self.pixels > self.limits.max_total_pixels:
                raise LimitExceededError(
                    f"the request's images and video frames have {self.pixels} pixels up to here, over the limit of "
                    f"{self.limits.max_total_pixels} together; send fewer or smaller ones"
                )
            if self.seconds > self.limits.max_total_audio_seconds:
                raise LimitExceededError(
                    f"the request's audio lasts {self.seconds:.2f} seconds up to here, over the limit of "
                    f"{self.limits.max_total_audio_seconds:g} together; send fewer or shorter ones"
                )
            notify_inspector(decoded.image if isinstance(decoded, ImagePart) else decoded.clip)
            return decoded
        except InvalidRequestError as error:
            error.param = part.path
            raise


_Parsed = TextPart | _Pending


def parse_messages(
    messages: Sequence[Mapping[str, Any]],
    limits: MediaLimits,
    *,
    audio_rate: int = 16_000,
    video_fps: float = 2.0,
    use_audio_in_video: bool = False,
    max_clip_seconds: float | None = None,
    check_kinds: Callable[[frozenset[Modality]], None] | None = None,
) -> list[ChatMessage]:
    """Return `messages` with their media decoded.

    Content is a string or a list of parts as OpenAI and vLLM clients send them. Sound is resampled to
    `audio_rate`, video is sampled at `video_fps` unless its part says otherwise. `max_clip_seconds` is the longest
    audio that the model takes; `check_kinds` may refuse the kinds of media that there are, before any is decoded.
    Every mistake is an `InvalidRequestError`, or a subclass for media, whose `param` is the path of the value at fault.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError(f"must be a list of messages, got {type(messages).__name__}", param="messages")
    if not messages:
        raise InvalidRequestError("is empty; send at least one message", param="messages")
    _check_arguments(messages, limits)
    longest = math.inf if max_clip_seconds is None else max_clip_seconds
    audio_limits = limits
    if longest < limits.max_audio_seconds:
        audio_limits = limits.model_copy(update={"max_audio_seconds": longest})
    options = _Options(limits, audio_limits, audio_rate, video_fps, use_audio_in_video, longest)
    parsed = [_parse_message(message, f"messages[{index}]", options) for index, message in enumerate(messages)]
    _check_counts(parsed, limits)
    if check_kinds is not None:
        check_kinds(frozenset(part.kind for _, parts in parsed for part in parts if isinstance(part, _Pending)))
    decoder = _Decoder(limits)
    messages_out = []
    call_names: dict[str, str] = {}
    for head, parts in parsed:
        call_names.update({call.id: call.name for call in head.tool_calls if call.id is not None})
        name = head.name or call_names.get(head.tool_call_id or "")
        messages_out.append(replace(head, parts=tuple(map(decoder.part, parts)), name=name))
    return messages_out


def _check_arguments(messages: Sequence[object], limits: MediaLimits) -> None:
    """Bound the JSON in the arguments of calls before any of it is parsed. What is no call is refused later."""
    chars = values = 0
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        for call in calls if isinstance(calls, list | tuple) else ():
            function = call.get("function") if isinstance(call, Mapping) else None
            arguments = function.get("arguments") if isinstance(function, Mapping) else None
            if isinstance(arguments, str):
                chars += len(arguments)
                values += sum(map(arguments.count, ",[{"))
    if chars > limits.max_text_chars:
        raise _too_much_text(chars, limits)
    if values > MAX_ARGUMENT_VALUES:
        raise LimitExceededError(
            f"calls with {values} JSON values in their arguments are over the limit of {MAX_ARGUMENT_VALUES}",
            param="messages",
        )


def _too_much_text(chars: int, limits: MediaLimits) -> LimitExceededError:
    return LimitExceededError(
        f"{chars} characters of text are over the limit of {limits.max_text_chars}; shorten the messages",
        param="messages",
    )


def _check_counts(parsed: list[tuple[ChatMessage, list[_Parsed]]], limits: MediaLimits) -> None:
    parts = [part for _, message_parts in parsed for part in message_parts]
    items = sum(isinstance(part, _Pending) for part in parts)
    if items > limits.max_items:
        raise LimitExceededError(
            f"{items} media items are over the limit of {limits.max_items}; send fewer", param="messages"
        )
    chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
    chars += sum(len(head.reasoning or "") for head, _ in parsed)
    chars += sum(len(call.name) + len(str(call.arguments)) for head, _ in parsed for call in head.tool_calls)
    if chars > limits.max_text_chars:
        raise _too_much_text(chars, limits)


def _parse_message(message: object, path: str, options: _Options) -> tuple[ChatMessage, list[_Parsed]]:
    """The message without its parts, and those."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f'must be an object with "role" and "content", got {_kind(message)}', param=path)
    role_name = message.get("role")
    if not isinstance(role_name, str) or role_name not in _ROLES:
        value = repr(role_name[:40]) if isinstance(role_name, str) else _kind(role_name)
        raise InvalidRequestError(f"must be one of {', '.join(_ROLES)}, got {value}", param=f"{path}.role")
    role = _ROLES[role_name]
    if not message.keys() <= _MESSAGE_FIELDS:
        raise _unknown_field(message, _MESSAGE_FIELDS, path)
    if message.get("function_call") is not None:
        # Leaving it out would run a different conversation from the one that was sent.
        raise InvalidRequestError("is the older form of a call; write tool_calls", param=f"{path}.function_call")
    if message.get("audio") is not None:
        raise InvalidRequestError("not found or expired; send that answer's text as content", param=f"{path}.audio")
    calls: tuple[ToolCall, ...] = ()
    if message.get("tool_calls") not in (None, []):
        calls = _parse_calls(message["tool_calls"], role, f"{path}.tool_calls")
    names = [key for key in ("name", "tool_call_id") if message.get(key) is not None]
    texts = {key: _short_text(message[key], f"{path}.{key}") for key in names}
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        if role != "assistant" or not isinstance(reasoning, str) or not is_utf8(reasoning):
            raise InvalidRequestError("must be text of an assistant message", param=f"{path}.reasoning_content")
        texts["reasoning"] = reasoning
    content, where = message.get("content"), f"{path}.content"
    if role == "assistant" and content is None and message.get("refusal") is not None:
        content, where = message["refusal"], f"{path}.refusal"
    return ChatMessage(role, (), tool_calls=calls, **texts), _parse_content(content, role, where, options)


def _unknown_field(values: Mapping[Any, object], fields: frozenset[str], path: str) -> InvalidRequestError:
    name = str(next(key for key in values if key not in fields))[:MAX_NAME_CHARS]
    unknown = "unknown field; leave it out"
    why = "no files are kept; send the content as a data: URL" if name == "file_id" else unknown
    return InvalidRequestError(why, param=f"{path}.{name}")


def _parse_calls(calls: object, role: Role, path: str) -> tuple[ToolCall, ...]:
    if role != "assistant":
        raise InvalidRequestError("is for assistant messages only; leave it out", param=path)
    if not isinstance(calls, list | tuple):
        raise InvalidRequestError("must be a list of calls", param=path)
    return tuple(_parse_call(call, f"{path}[{index}]") for index, call in enumerate(calls))


def _parse_call(call: object, path: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequestError('must be a call: {"function": {"name": text, "arguments": text}}', param=path)
    if not is_utf8(name) or not is_utf8(arguments):
        raise InvalidRequestError("has half of a surrogate pair, which is not text; remove it", param=path)
    try:
        value = json.loads(arguments)
        json.dumps(value, ensure_ascii=False).encode()  # escapes may spell half of a surrogate pair
    except (ValueError, RecursionError):
        value = None
    # Else a model wrote it and was cut off, perhaps: it is shown what it wrote.
    usable = isinstance(value, dict) and not _is_deep(value)
    return ToolCall(name, value if usable else arguments, _short_text(call.get("id"), f"{path}.id"))


def _is_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        nested = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        level = [child for children in nested for child in children]
        if not level:
            return False
    return True


def _short_text(value: object, path: str) -> str | None:
    if value is not None and (not isinstance(value, str) or not is_utf8(value) or len(value) > MAX_NAME_CHARS):
        raise InvalidRequestError(f"must be text of at most {MAX_NAME_CHARS} characters", param=path)
    return value or None


def _parse_content(content: object, role: Role, path: str, options: _Options) -> list[_Parsed]:
    if content is None and role == "assistant":
        return [TextPart("")]
    if isinstance(content, str):
        return [_text(content, role, path)]
    if not isinstance(content, list | tuple):
        raise InvalidRequestError(f"must be a string or a list of parts, got {_kind(content)}", param=path)
    if not content:
        raise InvalidRequestError("is empty; send text or at least one part", param=path)
    return [_parse_part(part, role, f"{path}[{index}]", options) for index, part in enumerate(content)]


def _parse_part(part: object, role: Role, path: str, options: _Options) -> _Parsed:
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f'must be an object with a "type", got {_kind(part)}', param=path)
    name = part.get("type")
    if isinstance(name, str) and name in _TEXT_TYPES:
        if not part.keys() <= _TEXT_FIELDS:
            raise _unknown_field(part, _TEXT_FIELDS, path)
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"must be a string, got {_kind(part.get('text'))}", param=f"{path}.text")
        return _text(part["text"], role, f"{path}.text")
    if name == "refusal" and role == "assistant":
        if not isinstance(part.get("refusal"), str):
            raise InvalidRequestError(f"must be a string, got {_kind(part.get('refusal'))}", param=f"{path}.refusal")
        return _text(part["refusal"], role, f"{path}.refusal")
    if name in ("file", "input_file"):
        raise InvalidRequestError(
            "files are not read here; send their text, images or audio as separate parts", param=f"{path}.type"
        )
    if not isinstance(name, str) or name not in _MEDIA_PARTS:
        value = repr(name[:40]) if isinstance(name, str) else _kind(name)
        types = ", ".join((*_TEXT_TYPES, *_MEDIA_PARTS))
        raise InvalidRequestError(f"must be one of {types}, got {value}", param=f"{path}.type")
    parse, key = _MEDIA_PARTS[name]
    if not part.keys() <= (fields := _PART_FIELDS | {key}):
        raise _unknown_field(part, fields, path)
    return parse(cast("Mapping[str, Any]", part), key, path, options)


def _text(text: str, role: Role, path: str) -> TextPart:
    if not text and role not in ("assistant", "tool"):
        raise InvalidRequestError(f"is empty; a {role} message needs text", param=path)
    if not is_utf8(text):
        raise InvalidRequestError("has half of a surrogate pair, which is not text; remove it", param=path)
    return TextPart(text)


def _source(part: Mapping[str, Any], key: str, path: str) -> tuple[Any, str]:
    """A media item and its path: a URL, as `{"url": ...}` or plain, or of whatever type the decoder takes."""
    value, path = part.get(key), f"{path}.{key}"
    if not key.endswith("_url"):
        if value is None or (isinstance(value, str) and not value):
            raise InvalidRequestError("is missing or empty; give bytes, a data: URL, a path or an array", param=path)
        return value, path
    if isinstance(value, Mapping):
        value, path = value.get("url"), f"{path}.url"
    if not isinstance(value, str) or not value:
        description = "an empty string" if isinstance(value, str) else _kind(value)
        raise InvalidRequestError(f"must be a URL such as data:<type>;base64,<data>, got {description}", param=path)
    return value, path


def _image(part: Mapping[str, Any], key: str, path: str, options: _Options) -> _Pending:
    detail = None
    if key == "image_url":
        nested = isinstance(part.get(key), Mapping)  # in a chat; the Responses API has it beside the URL
        detail = (part[key] if nested else part).get("detail")
        if detail is not None and detail not in _DETAILS:
            where = f"{path}.{key}" if nested else path
            raise InvalidRequestError(f"must be one of {', '.join(_DETAILS)}", param=f"{where}.detail")
    source, path = _source(part, key, path)

    def decode() -> ImagePart:
        image = decode_image(source, options.limits)
        if detail == "low":
            image.thumbnail(_LOW_DETAIL)
        return ImagePart(image)

    return _Pending(path, Modality.IMAGE, decode)


def _audio(part: Mapping[str, Any], key: str, path: str, options: _Options) -> _Pending:
    source, path = _source(part, key, path)
    return _Pending(
        path, Modality.AUDIO, lambda: AudioPart(decode_audio(source, options.audio_limits, options.audio_rate))
    )


def _input_audio(part: Mapping[str, Any], key: str, path: str, options: _Options) -> _Pending:
    inner, path = part.get(key), f"{path}.{key}"
    if not isinstance(inner, Mapping):
        raise InvalidRequestError(f'must be an object with "data" and "format", got {_kind(inner)}', param=path)
    data, encoding = inner.get("data"), inner.get("format")
    if data == "":
        raise InvalidRequestError("is empty; send the audio as base64 text", param=f"{path}.data")
    if not isinstance(data, str):
        raise InvalidRequestError(f"must be base64 text, got {_kind(data)}", param=f"{path}.data")
    if encoding is not None and encoding not in _AUDIO_FORMATS:
        raise InvalidRequestError(f"must be one of {', '.join(_AUDIO_FORMATS)}", param=f"{path}.format")

    def decode() -> AudioPart:
        rate = options.audio_rate
        return AudioPart(decode_audio(data, options.audio_limits, rate, format=encoding, bare_base64=True))

    return _Pending(f"{path}.data", Modality.AUDIO, decode)


def _video(part: Mapping[str, Any], key: str, path: str, options: _Options) -> _Pending:
    """With the sampling that Qwen clients put beside it."""
    source, source_path = _source(part, key, path)
    fps = part.get("fps", options.video_fps)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not (math.isfinite(fps) and fps > 0):
        raise InvalidRequestError("must be a number above 0", param=f"{path}.fps")
    min_frames = _frame_count(part, "min_frames", 1, path) or MIN_FRAMES
    max_frames = _frame_count(part, "max_frames", 2, path)

    def decode() -> VideoPart:
        with_audio = options.use_audio_in_video
        longest = min(options.max_clip_seconds, options.limits.max_video_seconds)
        rate = options.audio_rate
        clip = decode_video(source, options.limits, fps, max_frames, min_frames, with_audio, rate, longest)
        return VideoPart(clip, with_audio and clip.audio is not None)

    return _Pending(source_path, Modality.VIDEO, decode)


def _frame_count(part: Mapping[str, Any], key: str, minimum: int, path: str) -> int | None:
    value = part.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise InvalidRequestError(f"must be a whole number of at least {minimum}", param=f"{path}.{key}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_PARTS: dict[str, tuple[Callable[[Mapping[str, Any], str, str, _Options], _Pending], str]] = {
    "image_url": (_image, "image_url"),
    "image": (_image, "image"),
    "input_image": (_image, "image_url"),
    "input_audio": (_input_audio, "input_audio"),
    "audio_url": (_audio, "audio_url"),
    "audio": (_audio, "audio"),
    "video_url": (_video, "video_url"),
    "video": (_video, "video"),
}
"""What parses a part of each type, and the key of its content."""
