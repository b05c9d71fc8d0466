"""What clients get, as pydantic models of OpenAI's wire format: the OpenAPI document is made from them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

_FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Open(BaseModel):
    """An answer to which fields may be added without saying so here."""


class Closed(BaseModel):
    """An answer that has just these fields."""

    model_config = ConfigDict(extra="forbid")


# --------------------------------------------------------------------------------------------------- errors


class ErrorDetail(Closed):
    message: str
    """What to change."""
    type: str
    param: str | None
    code: str | None


class ErrorBody(Closed):
    """OpenAI's error. `param` is the path of the field at fault."""

    error: ErrorDetail


# ----------------------------------------------------------------------------------------------------- text


class TokenUsage(Open):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class CalledFunction(Open):
    name: str | None = None
    arguments: str


class ToolCall(Open):
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class SpokenAnswer(Open):
    """`data` is base64; in a stream each piece is pcm16."""

    id: str | None = None
    data: str | None = None
    sample_rate: int | None = None
    transcript: str | None = None
    expires_at: int | None = None


class PictureUrl(Open):
    url: str


class PicturePart(Open):
    type: Literal["image_url"]
    image_url: PictureUrl


class ChatMessageAnswer(Open):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    audio: SpokenAnswer | None = None
    images: list[PicturePart] | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Open):
    index: int
    message: ChatMessageAnswer
    logprobs: dict[str, Any] | None
    finish_reason: _FinishReason | None


class ChatCompletion(Open):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    system_fingerprint: str | None = None


class ChatDelta(Open):
    role: Literal["assistant"] | None = None
    content: str | None = None
    audio: SpokenAnswer | None = None
    images: list[PicturePart] | None = None
    tool_calls: list[ToolCall] | None = None
    progress: dict[str, int] | None = None


class ChatChunkChoice(Open):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None = None
    finish_reason: _FinishReason | None = None


class ChatChunk(Open):
    """One event of a streamed chat; the last event is the text `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None


class CompletionLogprobs(Closed):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Closed):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _FinishReason | None


class Completion(Closed):
    """Also each event of a streamed completion; the last event is the text `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None


class ResponsePart(Open):
    type: Literal["output_text", "output_audio", "refusal"]


class ResponseItem(Open):
    """A message with its parts, or a call with its arguments."""

    type: Literal["message", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseObject(Open):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[ResponseItem]
    usage: dict[str, Any] | None = None


class ResponseEvent(Open):
    """One event of a streamed response; `type` says which other fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None


# -------------------------------------------------------------------------------------------- sound, pictures


class Transcription(Closed):
    """`duration`, `language`, `segments` and `task` come with `verbose_json`."""

    text: str
    usage: dict[str, Any]
    task: Literal["transcribe"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[dict[str, Any]] | None = None


class TranscriptionEvent(Closed):
    """One event of a streamed transcription."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: dict[str, Any] | None = None


class SpeechEvent(Closed):
    """One event of streamed speech: `audio` is base64, the next piece of the file."""

    type: Literal["speech.audio.delta", "speech.audio.done"]
    audio: str | None = None
    usage: dict[str, int] | None = None


class Picture(Closed):
    """Base64 or an address, as `response_format` asked."""

    seed: int | None
    b64_json: str | None = None
    url: str | None = None


class Pictures(Closed):
    created: int
    data: list[Picture]
    background: Literal["opaque"]
    output_format: Literal["png", "jpeg", "webp"]
    size: str


class PictureEvent(Closed):
    """One event of streamed pictures: `image_generation.` or `image_edit.`, then `partial_image` or `completed`.

    With `progress: true` there are those of the kind `progress` too, which have `step` and `steps`.
    """

    type: str
    step: int | None = None
    steps: int | None = None
    created_at: int | None = None
    b64_json: str | None = None
    size: str | None = None
    output_format: str | None = None
    background: str | None = None
    quality: str | None = None
    image_index: int | None = None
    partial_image_index: int | None = None
    seed: int | None = None
    usage: dict[str, Any] | None = None


class VideoError(Closed):
    code: str
    message: str


class Video(Closed):
    """A video job."""

    id: str
    object: Literal["video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: str | None
    error: VideoError | None


class VideoList(Closed):
    object: Literal["list"]
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(Closed):
    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


# ---------------------------------------------------------------------------------------------------- status


class ModelCard(Open):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    modalities: dict[str, list[str]]
    voices: list[str]
    stages: list[str]
    defaults: dict[str, dict[str, Any]]


class ModelList(Open):
    object: Literal["list"]
    data: list[ModelCard]


class StatsAnswer(Open):
    """Gauges: by model its counters and those of its stages; memory in bytes, null where the system does not say."""

    object: Literal["stats"]
    models: dict[str, dict[str, Any]]
    memory: dict[str, int | None]
    limits: dict[str, int]


class Readiness(Open):
    status: Literal["ready", "loading", "draining"]


class TraceAnswer(Open):
    """What ran when: seconds since the request came in."""

    request_id: str
    arrival: float
    admitted: float | None
    finished: float | None
    stages: dict[str, dict[str, Any]]


class Cancelled(Open):
    id: str
    object: Literal["request"]
    cancelled: Literal[True]
