"""Settings of sessions and responses, in OpenAI's form.

A session's settings are one frozen object; an update is merged into its JSON and validated as a whole. The flat form of
the protocol's preview is converted first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationInfo, field_validator, model_validator

from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.family import AudioLimits
from omnistage.core.params import SamplingParams, StageParams
from omnistage.core.types import Modality
from omnistage.media.vad import require_vad, vad_available
from omnistage.server.openai.audio import capabilities
from omnistage.server.openai.base import Metadata, WireModel
from omnistage.server.openai.responses.tools import FlatTool
from omnistage.server.openai.tools import (
    MAX_TOOLS,
    Function,
    FunctionName,
    NamedChoice,
    Tool,
    Toolbox,
    ToolFields,
    check_schemas,
)
from omnistage.server.realtime.audio import RATES, FormatName
from omnistage.server.realtime.base import Ignored, JsonObject, validate
from omnistage.server.realtime.preview import from_preview, merge_settings
from omnistage.server.service import ServedModel

MAX_INSTRUCTIONS = 200_000


class AudioFormat(WireModel):
    type: FormatName = "audio/pcm"
    rate: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _default_rate(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("type", "audio/pcm") == "audio/pcm" and values.get("rate") is None:
            return {**values, "rate": RATES["audio/pcm"]}
        return values

    @field_validator("rate")
    @classmethod
    def _known_rate(cls, rate: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("type")
        if kind is not None and rate not in (None, RATES[kind]):
            raise ValueError(f"must be {RATES[kind]} Hz for {kind}; resample the audio")
        return rate


class ServerVad(WireModel):
    """Turn detection by the server."""

    type: Literal["server_vad"]
    threshold: float = Field(default=0.5, ge=0.0, le=1.0, allow_inf_nan=False)
    prefix_padding_ms: int = Field(default=300, ge=0, le=5_000)
    silence_duration_ms: int = Field(default=500, ge=0, le=30_000)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None


class SemanticVad(WireModel):
    """Turn detection by the same detector, whose silence is chosen by how eager it is to respond."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] = "auto"
    create_response: bool = True
    interrupt_response: bool = True
    threshold: ClassVar[float] = 0.5
    prefix_padding_ms: ClassVar[int] = 300

    @property
    def silence_duration_ms(self) -> int:
        return {"low": 1200, "medium": 700, "auto": 700, "high": 350}[self.eagerness]


TurnDetection = Annotated[ServerVad | SemanticVad, Field(discriminator="type")]


class InputTranscription(WireModel):
    """The user's turns are also written down for the client."""

    model: str | None = Field(default=None, max_length=200)
    language: Annotated[str, Field(max_length=40, pattern="^[A-Za-z][A-Za-z -]*$")] | None = None
    prompt: str | None = Field(default=None, max_length=4000)


class InputAudioConfig(WireModel):
    format: AudioFormat = AudioFormat()
    turn_detection: TurnDetection | None = None
    noise_reduction: Ignored = None
    transcription: InputTranscription | None = None


class OutputAudioConfig(WireModel):
    format: AudioFormat = AudioFormat()
    voice: str | None = None
    speed: float | None = Field(default=None, ge=0.25, le=1.5, allow_inf_nan=False)

    @field_validator("voice", mode="before")
    @classmethod
    def _voice_by_id(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        if list(value) != ["id"]:
            raise ValueError('must be a name, or {"id": NAME}')
        return value["id"]


class AudioConfig(WireModel):
    input: InputAudioConfig = InputAudioConfig()
    output: OutputAudioConfig = OutputAudioConfig()


_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class FunctionTool(FlatTool):
    """A function, with its fields beside its type."""


class FunctionChoice(WireModel):
    type: Literal["function"]
    name: str


def _check_modalities(value: object) -> object:
    if isinstance(value, list | tuple) and len(value) != 1:
        raise ValueError('must be ["text"] or ["audio"]; speech comes with its transcript')
    return value


def _check_choice(value: object) -> object:
    if isinstance(value, dict) and (value.keys() != {"type", "name"} or value["type"] != "function"):
        raise ValueError('must be "auto", "none", "required", or {"type": "function", "name": NAME}')
    return value


def _check_session_type(value: object) -> object:
    if value == "transcription":
        raise ValueError(
            "must be realtime; to transcribe alone, set audio.input.transcription, and create_response of "
            "audio.input.turn_detection to false"
        )
    return value


class ResponseConfig(WireModel):
    """Settings of a session that a single response may override."""

    output_modalities: Annotated[
        tuple[Literal["text", "audio"], ...], FailFast(), BeforeValidator(_check_modalities)
    ] = ("text",)
    instructions: str = Field(default="", max_length=MAX_INSTRUCTIONS)
    audio: AudioConfig = AudioConfig()
    max_output_tokens: _Count | Literal["inf"] = "inf"
    tools: Annotated[tuple[FunctionTool, ...], FailFast()] = Field(default=(), max_length=MAX_TOOLS)
    tool_choice: Annotated[Literal["auto", "none", "required"] | FunctionChoice, BeforeValidator(_check_choice)] = (
        "auto"
    )
    parallel_tool_calls: bool | None = None
    # OpenAI's, without effect here
    reasoning: Ignored = None
    prompt: None = None
    # Ours, and the preview's
    temperature: float | None = Field(default=None, ge=0.0, le=100.0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    @property
    def speaks(self) -> bool:
        return "audio" in self.output_modalities

    def params(self, model: ServedModel) -> dict[str, StageParams]:
        toolbox = self.toolbox()
        values = {
            "temperature": self.temperature,
            "seed": self.seed,
            "structured": None if toolbox is None else toolbox.structured(),
            "max_tokens": None if self.max_output_tokens == "inf" else self.max_output_tokens,
        }
        settings = {name: value for name, value in values.items() if value is not None}
        stage = model.stage_for_params(SamplingParams)
        return {stage: SamplingParams.parse(settings)} if settings and stage is not None else {}

    def tool_fields(self) -> ToolFields:
        """The tools in the form of chat completions."""
        # Already validated; schemas may be large, and this runs several times per response.
        plain = [{name: getattr(tool, name) for name in Function.model_fields} for tool in self.tools]
        tools = tuple(Tool(function=Function.model_construct(**fields)) for fields in plain)
        choice = self.tool_choice
        tool_choice = (
            NamedChoice(function=FunctionName(name=choice.name)) if isinstance(choice, FunctionChoice) else choice
        )
        return ToolFields(tools=tools, tool_choice=tool_choice, parallel_tool_calls=self.parallel_tool_calls)

    def toolbox(self) -> Toolbox | None:
        return self.tool_fields().toolbox if self.tools else None


class SessionConfig(ResponseConfig):
    """A session's settings; an update keeps what it does not name."""

    type: Annotated[Literal["realtime"], BeforeValidator(_check_session_type)] = "realtime"
    model: str | None = None
    truncation: Literal["auto", "disabled"] = "auto"
    # OpenAI's, without effect here; a client may send back what it received
    id: Ignored = None
    object: Ignored = None
    expires_at: Ignored = None
    include: Ignored = None
    tracing: Ignored = None

    def to_json(self, session_id: str) -> JsonObject:
        """The session as clients see it."""
        data = self.model_dump(mode="json", exclude_none=True)
        data["audio"]["input"].setdefault("turn_detection", None)
        return {**data, "id": session_id, "object": "realtime.session"}


class ResponseOptions(WireModel):
    """Fields of `response.create` that are not settings."""

    conversation: Literal["auto", "none"] = "auto"
    input: tuple[JsonObject, ...] | None = None
    metadata: Metadata | None = None


_NULL_IS_DEFAULT = ("instructions", "max_output_tokens", "tools", "tool_choice", "truncation")


def updated(config: SessionConfig, update: JsonObject, prefix: str) -> SessionConfig:
    """A session's settings with an update. Raises `InvalidRequestError`, its path starting with `prefix`."""
    settings = from_preview(update)  # which leaves the newer form as it is
    for name in _NULL_IS_DEFAULT:
        if settings.get(name, ...) is None:
            settings[name] = SessionConfig.model_fields[name].default
    return validate(SessionConfig, merge_settings(config.model_dump(exclude_unset=True), settings), prefix)


def for_response(config: SessionConfig, request: JsonObject) -> tuple[SessionConfig, ResponseOptions]:
    """A session's settings as one response overrides them, and the response's other fields."""
    fields = from_preview(request)
    settings = {name: fields.pop(name) for name in ResponseConfig.model_fields if name in fields}
    options = validate(ResponseOptions, fields, "response")
    return updated(config, settings, "response"), options


def default_config(model: ServedModel) -> SessionConfig:
    """The settings that a session with this model starts with: audio in and out where the model has them."""
    detects_turns = Modality.AUDIO in model.omni.processor.input_modalities and vad_available()
    detection = ServerVad(type="server_vad") if detects_turns else None
    return SessionConfig(
        model=model.name,
        output_modalities=("audio",) if Modality.AUDIO in model.omni.modalities else ("text",),
        audio=AudioConfig(input=InputAudioConfig(turn_detection=detection)),
    )


def check_config(config: SessionConfig, model: ServedModel, prefix: str) -> None:
    """Raise if this model does not support these settings."""

    if config.speaks and Modality.AUDIO not in model.omni.modalities:
        raise UnsupportedModalityError(
            'this model has no audio output; use ["text"]', param=f"{prefix}.output_modalities"
        )
    if config.speaks or config.audio.output.voice is not None:
        model.omni.voices.resolve(config.audio.output.voice, f"{prefix}.audio.output.voice")
    try:
        toolbox = config.tool_fields().toolbox
        if toolbox is not None:
            check_schemas(toolbox.exact_schemas())
    except InvalidRequestError as error:
        error.param = f"{prefix}.{error.param}"
        raise

    if config.audio.input.turn_detection is not None:
        require_audio_input(model, f"{prefix}.audio.input.turn_detection")
        require_vad()


@dataclass(frozen=True, slots=True)
class AudioInputLimits:
    """The format of a session's input audio, and how long one clip may be."""

    format: FormatName
    min_seconds: float
    max_seconds: float


def audio_input_limits(config: SessionConfig, model: ServedModel) -> AudioInputLimits:
    omni = model.omni
    shortest, longest = 0.0, omni.media_limits.max_audio_seconds
    if isinstance(omni.processor, AudioLimits):
        shortest, model_longest = omni.processor.clip_seconds()
        longest = min(longest, model_longest)
    return AudioInputLimits(config.audio.input.format.type, shortest, longest)


def require_audio_input(model: ServedModel, param: str) -> None:
    capabilities.require_audio_input(
        model.omni.processor, param, "this model has no audio input; send text, or use a model that has"
    )
