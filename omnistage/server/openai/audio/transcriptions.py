"""`/v1/audio/transcriptions` and `/translations`: by speech recognition, or a chat model with audio input."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NotRequired

from fastapi import Form, Request, Response, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import Field, field_validator
from typing_extensions import TypedDict

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import (
    InvalidRequestError,
    StageError,
    UnsupportedModalityError,
)
from omnistage.core.family import SpeechRecognizer, Transcriber
from omnistage.core.params import SamplingParams
from omnistage.core.transcripts import Transcript, TranscriptionOptions
from omnistage.core.types import SpeechPrompt
from omnistage.media.audio import decode_audio
from omnistage.media.context import decode_for
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.preparation import Lane, prepare
from omnistage.server.access.keys import Holder
from omnistage.server.http.context import caller, service_of
from omnistage.server.http.errors import ContentFilterError
from omnistage.server.http.openapi import response_docs
from omnistage.server.http.routing import api_router
from omnistage.server.http.sse import DONE_EVENT, event, stream_response
from omnistage.server.observe.audit import note_ignored
from omnistage.server.openai.audio.capabilities import require_audio_input
from omnistage.server.openai.audio.subtitles import as_srt, as_vtt
from omnistage.server.openai.audio.transcriber import DirectTranscript, transcribe
from omnistage.server.openai.audio.transcript_events import (
    TokensUsed,
    TranscriptChunks,
    TranscriptionEvent,
    failure_of,
    streamed,
    tokens_used,
)
from omnistage.server.openai.base import WireModel, only
from omnistage.server.openai.request_models import Finite, Seed
from omnistage.server.openai.running import final_of, final_output
from omnistage.server.service import ServedModel, Service

router = api_router()
_INSTRUCTION = "Transcribe the audio. Write down exactly the words that are said, and nothing else."
_MAX_TEXT = 4000
MAX_TRANSCRIPT_TOKENS = 1_000_000
"""The largest value: a transcription is as long as the speech, so that the model's context is its limit."""
_TIMED = ("srt", "vtt")
_ENGLISH = ("en", "english")
_NO_SAMPLING = "is not supported: of how words are chosen only temperature and seed can be set; leave it out"
_NO_SPEAKERS = "speakers are not distinguished; leave it out"
Language = Annotated[str, Field(max_length=40, pattern="^[A-Za-z][A-Za-z -]*$")]


class TranscriptionForm(WireModel):
    """`POST /v1/audio/transcriptions`. OpenAI's clients write lists as fields with `[]` behind their names."""

    file: UploadFile = Field(description="An audio file, or a video with audio.")
    model: str | None = Field(default=None, description="May be left out where one model is served.")
    language: Language | None = None
    languages: list[Language] = Field(default=[], alias="languages[]", max_length=32)
    prompt: str | None = Field(default=None, max_length=_MAX_TEXT)
    keywords: list[str] = Field(default=[], alias="keywords[]", max_length=128)
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Finite = Field(default=0.0, ge=0, le=2)
    stream: bool = False
    # vLLM's: with one of them a stream has its events
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Without effect: a transcription is as long as the speech."
    )
    seed: Seed | None = Field(default=None, description="Of chat models; others choose nothing at random.")
    n: Annotated[Literal["1"] | None, only("1", why="must be 1: there is one transcription; leave it out")] = None
    top_p: Annotated[None, only(why=_NO_SAMPLING)] = None
    top_k: Annotated[None, only(why=_NO_SAMPLING)] = None
    min_p: Annotated[None, only(why=_NO_SAMPLING)] = None
    frequency_penalty: Annotated[None, only(why=_NO_SAMPLING)] = None
    presence_penalty: Annotated[None, only(why=_NO_SAMPLING)] = None
    repetition_penalty: Annotated[None, only(why=_NO_SAMPLING)] = None
    to_language: Annotated[None, only(why="nothing is translated here; send it to /v1/audio/translations")] = None
    vllm_xargs: Annotated[None, only(why="is not supported; leave it out")] = None
    # OpenAI's, refused with a reason
    chunking_strategy: Annotated[str | None, only("", why="audio is not split into chunks; leave it out")] = None
    include: Annotated[list[str], only([], why="log probabilities are not supported; leave it out")] = Field(
        default=[], alias="include[]"
    )
    known_speaker_names: Annotated[list[str], only([], why=_NO_SPEAKERS)] = Field(
        default=[], alias="known_speaker_names[]"
    )
    known_speaker_references: Annotated[list[str], only([], why=_NO_SPEAKERS)] = Field(
        default=[], alias="known_speaker_references[]"
    )
    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default=[], alias="timestamp_granularities[]", max_length=2
    )
    # Ours
    timeout: Finite | None = None

    @field_validator("response_format", mode="before")
    @classmethod
    def _without_speakers(cls, value: object) -> object:
        if value == "diarized_json":
            raise ValueError("diarized_json needs timestamps and speakers, which are not told apart; use verbose_json")
        return value

    @field_validator("keywords")
    @classmethod
    def _short_keywords(cls, value: list[str]) -> list[str]:
        if sum(map(len, value)) > _MAX_TEXT:
            raise ValueError(f"has more than {_MAX_TEXT} characters in total; send fewer")
        return value

    def chunks(self, model: str) -> TranscriptChunks | None:
        """The writer of vLLM's events, where the request has a field of vLLM's."""
        if self.stream_include_usage is None and self.stream_continuous_usage_stats is None:
            return None
        return TranscriptChunks(
            model,
            include_usage=bool(self.stream_include_usage),
            continuous_usage=bool(self.stream_continuous_usage_stats),
        )

    def check_vllms(self) -> None:
        """Raise for vLLM's options of streams where there is no stream, and name those without effect."""
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise InvalidRequestError("is for streams; send stream: true, or leave it out", param=name)
        if self.max_completion_tokens is not None:
            note_ignored("max_completion_tokens")

    def sampling(self) -> SamplingParams:
        """For a chat model. OpenAI's seeds may be negative."""
        seed = None if self.seed is None else self.seed % 2**63
        return SamplingParams(temperature=self.temperature, seed=seed, max_tokens=MAX_TRANSCRIPT_TOKENS)

    def reject_timestamps(self) -> None:
        """Raise for options that only speech recognition with timestamps has."""
        if self.response_format in _TIMED:
            raise InvalidRequestError(
                f"{self.response_format} needs timestamps, which this model does not give; use json or text",
                param="response_format",
            )
        if self.timestamp_granularities:
            raise InvalidRequestError(
                "timestamps are not supported by this model; leave it out", param="timestamp_granularities[]"
            )

    def options(self) -> TranscriptionOptions:
        """What speech recognition is asked for. Raises for what only a chat model understands."""
        if self.languages or self.keywords:
            name = "languages" if self.languages else "keywords"
            raise InvalidRequestError(f"`{name}` is not supported by this model; leave it out", param=name)
        if self.temperature:
            raise InvalidRequestError("`temperature` must be 0 with this model; leave it out", param="temperature")
        timed = self.response_format in (*_TIMED, "verbose_json") or bool(self.timestamp_granularities)
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequestError(
                "needs response_format verbose_json; set that, or leave it out", param="timestamp_granularities"
            )
        if self.stream and timed:
            raise InvalidRequestError(
                f"a streamed transcription has no times for {self.response_format}; use json or text, or leave stream "
                "out",
                param="response_format",
            )
        words = "word" in self.timestamp_granularities
        return TranscriptionOptions(self.language, False, self.prompt or "", timed, words, self.stream)

    def reject_unsupported_options(self) -> None:
        """Raise for other languages; hints that only a chat model understands are left out."""
        languages = [language for language in (self.language, *self.languages) if language]
        if any(language.lower() not in _ENGLISH for language in languages):
            raise InvalidRequestError("this model transcribes English only", param="language")
        note_ignored(*(name for name in ("prompt", "keywords", "temperature") if getattr(self, name)))


class TranslationForm(WireModel):
    """`POST /v1/audio/translations`."""

    file: UploadFile = Field(description="An audio file, or a video with audio.")
    model: str | None = Field(default=None, description="May be left out where one model is served.")
    prompt: str | None = Field(default=None, max_length=_MAX_TEXT)
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[Finite, only(0, why="`temperature` must be 0; leave it out")] = 0.0
    # Ours
    timeout: Finite | None = None


class SecondsUsed(TypedDict):
    type: Literal["duration"]
    seconds: int
    """Whole ones, of which the last has begun: some clients take nothing else."""


class Segment(TypedDict):
    """Times are seconds from the beginning of the audio."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float


class Word(TypedDict):
    word: str
    start: float
    end: float


class Transcription(TypedDict):
    """`duration`, `language`, `segments` and `task` come with `verbose_json`."""

    text: str
    usage: TokensUsed | SecondsUsed
    task: NotRequired[Literal["transcribe", "translate"]]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[Segment]]
    words: NotRequired[list[Word]]


def instruction(
    language: str | None, languages: Sequence[str] = (), keywords: Sequence[str] = (), prompt: str | None = None
) -> str:
    """What a chat model is asked to do with audio."""
    parts = [_INSTRUCTION]
    if language:
        parts.append(f"The language is {language}.")
    if languages:
        parts.append(f"The languages may be: {', '.join(languages)}.")
    if keywords:
        parts.append(f"Words that may be said: {', '.join(keywords)}.")
    if prompt:
        parts.append(f"Context that may help with names and spelling: {prompt}")
    return " ".join(parts)


@router.post(
    "/v1/audio/transcriptions",
    response_model=None,
    responses=response_docs(Transcription, events=TranscriptionEvent, files=("text/plain", "text/vtt")),
)
async def transcriptions(
    form: Annotated[TranscriptionForm, Form(media_type="multipart/form-data")], request: Request
) -> Response:
    """Transcribe audio; with timestamps where the model gives them."""
    service = service_of(request)
    holder = caller(request)
    model = service.model(form.model)
    processor = model.omni.processor
    require_audio_input(processor)
    form.check_vllms()
    data = await form.file.read()
    if not data:
        raise InvalidRequestError("is empty; send an audio file", param="file")
    if isinstance(processor, SpeechRecognizer):
        return await recognized(form, form.options(), service, holder, model, data)
    form.reject_timestamps()
    if isinstance(processor, Transcriber):
        form.reject_unsupported_options()
        transcript = await transcribe(service, holder, model, processor, data, form.timeout)
        return await _transcribed(form, transcript, model.name)
    stage = model.stage_for_params(SamplingParams)
    if stage is None:
        raise UnsupportedModalityError("this model has no text output; use one that has", param="model")
    content = [
        {"type": "audio", "audio": data},
        {"type": "text", "text": instruction(form.language, form.languages, form.keywords, form.prompt)},
    ]
    running = service.run_request(
        holder,
        model,
        [{"role": "user", "content": content}],
        {stage: form.sampling()},
        RequestOptions(["text"], None, 0, form.timeout),
        rename=lambda path: "file" if path == "prompt" or path.startswith("messages") else path,
    )
    if form.stream:
        return await stream_response(streamed(running, form.chunks(model.name)))
    seconds = 0.0
    async with running as stream:
        final = await final_of(stream)
        if (failure := failure_of(final)) is not None:
            raise failure
        if form.response_format == "verbose_json":  # decoded again, as the file's header may not say how long it is
            with cancellation_scope(Cancellation()) as cancellation, decode_for(service.owner_of(holder)):
                clip = await prepare(lambda: decode_audio(data, model.omni.media_limits), cancellation, Lane.MEDIA)
            seconds = clip.seconds
    # The language is what the client said: it is not recognised.
    return _whole(form, final.text.strip(), tokens_used(final.usage), form.language or "", seconds)


@router.post(
    "/v1/audio/translations",
    response_model=None,
    responses=response_docs(Transcription, files=("text/plain", "text/vtt")),
)
async def translations(
    form: Annotated[TranslationForm, Form(media_type="multipart/form-data")], request: Request
) -> Response:
    """Transcribe audio in English, whatever its language."""
    service, holder = service_of(request), caller(request)
    model = service.model(form.model)
    if not isinstance(model.omni.processor, SpeechRecognizer):
        raise UnsupportedModalityError("this model does not translate speech; use one that does", param="model")
    data = await form.file.read()
    if not data:
        raise InvalidRequestError("is empty; send an audio file", param="file")
    timed = form.response_format in (*_TIMED, "verbose_json")
    options = TranscriptionOptions(translate=True, prompt=form.prompt or "", timestamps=timed)
    return await recognized(form, options, service, holder, model, data)


async def recognized(
    form: TranscriptionForm | TranslationForm,
    options: TranscriptionOptions,
    service: Service,
    holder: Holder,
    model: ServedModel,
    data: bytes,
) -> Response:
    """By a model whose stage transcribes."""
    processor = model.omni.processor
    timed = isinstance(processor, SpeechRecognizer) and processor.has_timestamps
    if form.response_format == "verbose_json" and not timed:
        options = replace(options, timestamps=False)  # the text and its duration, without segments
    running = service.run_request(
        holder,
        model,
        SpeechPrompt(data, options),
        None,
        RequestOptions(["text"], None, 0, form.timeout),
        rename={"audio": "file"},
    )
    if options.stream:
        chunks = form.chunks(model.name) if isinstance(form, TranscriptionForm) else None
        return await stream_response(streamed(running, chunks))
    final = await final_output(running)
    if (failure := failure_of(final)) is not None:
        raise failure
    transcript, text = final.transcript, final.text.strip()
    if transcript is None:
        raise StageError("the stage ended without a transcript")
    if text != transcript.whole:  # a content filter has changed it
        if form.response_format in _TIMED:
            raise ContentFilterError("the content filter changed this transcription; use json or text")
        transcript = replace(transcript, whole=text, segments=(), words=())
    return _render(form, transcript, tokens_used(final.usage), translated=options.translate)


def _render(
    form: TranscriptionForm | TranslationForm, transcript: Transcript, usage: TokensUsed, *, translated: bool
) -> Response:
    text = transcript.whole or ""
    if form.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    if form.response_format == "srt":
        return PlainTextResponse(as_srt(transcript.segments))
    if form.response_format == "vtt":
        return PlainTextResponse(as_vtt(transcript.segments), media_type="text/vtt")
    body: Transcription = {"text": text, "usage": usage}
    if form.response_format == "verbose_json":
        segments: list[Segment] = [
            {
                "id": place,
                "start": one.start,
                "end": one.end,
                "text": one.text,
                "tokens": list(one.token_ids),
                "temperature": 0.0,
            }
            for place, one in enumerate(transcript.segments)
        ]
        task: Literal["transcribe", "translate"] = "translate" if translated else "transcribe"
        language = "english" if translated else transcript.language
        body |= {"task": task, "language": language, "duration": transcript.seconds, "segments": segments}
        if transcript.words:
            body["words"] = [{"word": one.word, "start": one.start, "end": one.end} for one in transcript.words]
    return JSONResponse(body)


async def _transcribed(form: TranscriptionForm, transcript: DirectTranscript, model: str) -> Response:
    """The text comes at once, and is counted in seconds, for which OpenAI's events have no field."""
    if not form.stream:
        usage: SecondsUsed = {"type": "duration", "seconds": math.ceil(transcript.seconds)}
        return _whole(form, transcript.text, usage, "english", transcript.seconds)
    note_ignored(*(name for name in ("stream_include_usage", "stream_continuous_usage_stats") if getattr(form, name)))

    async def events() -> AsyncGenerator[bytes]:
        if (chunks := form.chunks(model)) is not None:
            yield b"".join(map(event, chunks.whole(transcript.text))) + DONE_EVENT
            return
        if transcript.text:
            yield event({"type": "transcript.text.delta", "delta": transcript.text})
        yield event({"type": "transcript.text.done", "text": transcript.text})

    return await stream_response(events())


def _whole(
    form: TranscriptionForm, text: str, usage: TokensUsed | SecondsUsed, language: str, seconds: float
) -> Response:
    if form.response_format == "text":
        return PlainTextResponse(f"{text}\n")
    transcription: Transcription = {"text": text, "usage": usage}
    if form.response_format == "verbose_json":
        transcription |= {"task": "transcribe", "language": language, "duration": seconds, "segments": []}
    return JSONResponse(transcription)
