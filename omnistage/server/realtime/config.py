"""What a client may say about its session and its responses, in OpenAI's form.

A session's settings are one frozen object; an update is merged into its JSON and checked as a whole. The older, flat
form of the protocol's preview is moved into the newer one first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, ValidationInfo, field_validator, model_validator

from omnistage.core.errors import InvalidRequestError, UnsupportedModalityError
from omnistage.core.family import AudioLimits
from omnistage.core.params import SamplingParams, StageParams
from omnistage.core.types import Modality
from omnistage.core.validation import short_repr
from omnistage.server.openai.audio import transcriber as dictation
from omnistage.server.openai.responses.tools import FlatTool
from omnistage.server.openai.tools import MAX_TOOLS, Function, FunctionName, NamedChoice, Tool, Toolbox, ToolFields
from omnistage.server.realtime.audio import RATES, FormatName
from omnistage.server.realtime.base import Fields, Ignored, first_problem
from omnistage.server.realtime.vad import available, check_available
from omnistage.server.service import ServedModel

MAX_INSTRUCTIONS = 200_000
_MOST_METADATA = 16


class AudioFormat(Fields):
    type: FormatName = "audio/pcm"
    rate: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _pcm_says_its_rate(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("type", "audio/pcm") == "audio/pcm" and values.get("rate") is None:
            return {**values, "rate": RATES["audio/pcm"]}
        return values

    @field_validator("rate")
    @classmethod
    def _rate_fits(cls, rate: int | None, info: ValidationInfo) -> int | None:
        kind = info.data.get("type")
        if kind is not None and rate not in (None, RATES[kind]):
            raise ValueError(f"{kind} comes at {RATES[kind]} Hz here; resample the sound")
        return rate


class ServerVad(Fields):
    """Turns are heard by the server."""

    type: Literal["server_vad"]
    threshold: float = Field(default=0.5, ge=0.0, le=1.0, allow_inf_nan=False)
    prefix_padding_ms: int = Field(default=300, ge=0, le=5_000)
    silence_duration_ms: int = Field(default=500, ge=0, le=30_000)
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None

    @field_validator("type", mode="before")
    @classmethod
    def _hears_no_meaning(cls, value: object) -> object:
        if value == "semantic_vad":
            raise ValueError("semantic_vad is not offered; use server_vad, or null and commit the sound yourself")
        return value


class InputAudioConfig(Fields):
    format: AudioFormat = AudioFormat()
    turn_detection: ServerVad | None = None
    noise_reduction: Ignored = None
    transcription: None = None

    @field_validator("transcription", mode="before")
    @classmethod
    def _not_transcribed(cls, value: object) -> None:
        if value is not None:
            raise ValueError(
                "is not offered in a session; leave it out, and send the sound to /v1/audio/transcriptions for what "
                "was said"
            )


class OutputAudioConfig(Fields):
    format: AudioFormat = AudioFormat()
    voice: str | None = None
    speed: float | None = Field(default=None, ge=1.0, le=1.0, description="As the model speaks.")

    @field_validator("voice", mode="before")
    @classmethod
    def _voice_by_id(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        if list(value) != ["id"]:
            raise ValueError('must be a name, or {"id": NAME}')
        return value["id"]


class AudioConfig(Fields):
    input: InputAudioConfig = InputAudioConfig()
    output: OutputAudioConfig = OutputAudioConfig()


_Count = Annotated[int, Field(ge=1, le=1_000_000)]


class FunctionTool(Fields, FlatTool):
    """A function, with its fields beside its type."""


class FunctionChoice(Fields):
    type: Literal["function"] = "function"
    name: str


class ResponseConfig(Fields):
    """What a response may set anew, and a session holds for all."""

    output_modalities: Annotated[tuple[Literal["text", "audio"], ...], FailFast()] = Field(
        default=("text",), min_length=1, max_length=1
    )
    instructions: str = Field(default="", max_length=MAX_INSTRUCTIONS)
    audio: AudioConfig = AudioConfig()
    max_output_tokens: _Count | Literal["inf"] = "inf"
    tools: Annotated[tuple[FunctionTool, ...], FailFast()] = Field(default=(), max_length=MAX_TOOLS)
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice = "auto"
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
        given = {name: value for name, value in values.items() if value is not None}
        stage = model.stage_for_params(SamplingParams)
        return {stage: SamplingParams.parse(given)} if given and stage is not None else {}

    def tool_fields(self) -> ToolFields:
        """The tools in the form that chats have them in."""
        # They have been checked; their schemas may be large, and this is done a few times for each response.
        plain = [{name: getattr(tool, name) for name in Function.model_fields} for tool in self.tools]
        tools = [Tool(function=Function.model_construct(**fields)) for fields in plain]
        choice = self.tool_choice
        named = NamedChoice(function=FunctionName(name=choice.name)) if isinstance(choice, FunctionChoice) else choice
        parallel = self.parallel_tool_calls
        return ToolFields(tools=tuple(tools), tool_choice=named, parallel_tool_calls=parallel)

    def toolbox(self) -> Toolbox | None:
        return self.tool_fields().toolbox() if self.tools else None


class SessionConfig(ResponseConfig):
    """A session's settings; what is left out of an update stays as it was."""

    type: Literal["realtime"] = "realtime"
    model: str | None = None
    truncation: Literal["auto", "disabled"] = "auto"
    # OpenAI's, without effect here; a client may send back what it was shown
    id: Ignored = None
    object: Ignored = None
    expires_at: Ignored = None
    include: Ignored = None
    tracing: Ignored = None

    def shown(self, session_id: str) -> dict[str, Any]:
        """The session as clients see it."""
        given = self.model_dump(mode="json", exclude_none=True)
        given["audio"]["input"].setdefault("turn_detection", None)
        return {**given, "id": session_id, "object": "realtime.session"}


def _few(value: object) -> object:
    """Before each pair is looked at."""
    if isinstance(value, dict) and len(value) > _MOST_METADATA:
        raise ValueError(f"has {len(value)} pairs, and may have {_MOST_METADATA}; leave some out")
    return value


class ResponseOptions(Fields):
    """What `response.create` says beside settings; `settings` are merged into the session's."""

    conversation: Literal["auto", "none"] = "auto"
    input: tuple[dict[str, Any], ...] | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_few)] = None


_SETTINGS = frozenset(ResponseConfig.model_fields)
_PREVIEW = {
    "modalities": ("output_modalities",),
    "voice": ("audio", "output", "voice"),
    "input_audio_format": ("audio", "input", "format"),
    "output_audio_format": ("audio", "output", "format"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "speed": ("audio", "output", "speed"),
    "max_response_output_tokens": ("max_output_tokens",),
}
"""Where the fields of the preview's flat session have gone."""
_PREVIEW_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}


def from_preview(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the preview's flat fields in their new places."""
    made: dict[str, Any] = {name: value for name, value in values.items() if name not in _PREVIEW}
    for name, place in _PREVIEW.items():
        if name not in values:
            continue
        value = values[name]
        if name == "modalities" and isinstance(value, list):
            value = ["audio"] if "audio" in value else value
        if name.endswith("_audio_format") and isinstance(value, str):
            value = {"type": _PREVIEW_FORMATS.get(value, value)}
        for key in reversed(place):
            value = {key: value}
        made = _merged(made, value)
    return made


def _merged(old: Mapping[str, Any], new: Mapping[str, Any], deep: tuple[str, ...] = ("audio",)) -> dict[str, Any]:
    """`old` with what `new` says; only the groups of fields under `audio` are merged, everything else is replaced."""
    inner = ("input", "output") if deep == ("audio",) else ()
    made = dict(old)
    for name, value in new.items():
        if name in deep and isinstance(value, Mapping) and isinstance(made.get(name), Mapping):
            made[name] = _merged(made[name], value, inner)
        else:
            made[name] = value
    return made


def updated(config: SessionConfig, update: Mapping[str, Any], prefix: str) -> SessionConfig:
    """A session's settings with an update. Raises what is wrong with it, the path beginning with `prefix`."""
    given = from_preview(update)
    for name in ("instructions", "max_output_tokens", "tools", "tool_choice", "truncation"):
        if given.get(name, ...) is None:  # as good as the default
            given[name] = SessionConfig.model_fields[name].default
    values = _merged(config.model_dump(exclude_unset=True), given)
    try:
        return SessionConfig.model_validate(values)
    except ValidationError as error:
        raise first_problem(error, values, prefix) from None


def for_response(config: SessionConfig, asked: Mapping[str, Any]) -> tuple[SessionConfig, ResponseOptions]:
    """A session's settings as one response has them, and what it says besides."""
    given = from_preview(asked)
    settings = {name: value for name, value in given.items() if name in _SETTINGS}
    besides = {name: value for name, value in given.items() if name not in _SETTINGS}
    try:
        options = ResponseOptions.model_validate(besides)
    except ValidationError as error:
        raise first_problem(error, besides, "response") from None
    return updated(config, settings, "response"), options


def default_config(model: ServedModel) -> SessionConfig:
    """What a session with this model begins with: it speaks and listens where it can."""
    hears = Modality.AUDIO in model.omni.processor.input_modalities
    detection = ServerVad(type="server_vad") if hears and available() else None
    return SessionConfig(
        model=model.name,
        output_modalities=("audio",) if Modality.AUDIO in model.modalities else ("text",),
        audio=AudioConfig(input=InputAudioConfig(turn_detection=detection)),
    )


def check_config(config: SessionConfig, model: ServedModel, prefix: str) -> None:
    """Raise if these settings cannot be had of this model."""
    voices = model.omni.processor.voices()
    voice = config.audio.output.voice
    if config.speaks and Modality.AUDIO not in model.modalities:
        raise UnsupportedModalityError(
            'this model does not speak; ask for ["text"]', param=f"{prefix}.output_modalities"
        )
    if voice is not None and voice not in voices:
        known = f"voices: {', '.join(voices)}" if voices else "this model has none; leave it out"
        raise InvalidRequestError(
            f"there is no voice {short_repr(voice)}; {known}", param=f"{prefix}.audio.output.voice"
        )
    try:
        config.tool_fields().check_tools()
    except InvalidRequestError as error:
        error.param = f"{prefix}.{error.param}"
        raise
    if config.speaks and config.toolbox() is not None:
        raise InvalidRequestError(
            'a call would be spoken aloud; ask for output_modalities ["text"]', param=f"{prefix}.tools"
        )
    if config.audio.input.turn_detection is not None:
        check_hears(model, f"{prefix}.audio.input.turn_detection")
        check_available()


@dataclass(frozen=True, slots=True)
class Hearing:
    """In which form a session takes sound, and how many seconds one sound may have."""

    format: FormatName
    least: float
    most: float


def hearing_of(config: SessionConfig, model: ServedModel) -> Hearing:
    omni = model.omni
    least, most = 0.0, omni.media_limits.max_audio_seconds
    if isinstance(omni.processor, AudioLimits):
        least, longest = omni.processor.clip_seconds()
        most = min(most, longest)
    return Hearing(config.audio.input.format.type, least, most)


def check_hears(model: ServedModel, param: str) -> None:
    dictation.check_hears(model, param, "this model does not hear; send text, or use one that does")
