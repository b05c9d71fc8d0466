"""Transcription of the user's turns, beside the responses to them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable

import numpy as np

from omnistage.core.errors import InternalError, InvalidRequestError, OmniError, QueueFullError
from omnistage.core.failures import log_defect
from omnistage.core.family import SpeechRecognizer, Transcriber
from omnistage.core.params import SamplingParams
from omnistage.core.transcripts import TranscriptionOptions
from omnistage.core.types import Modality, SpeechPrompt
from omnistage.core.validation import short_repr
from omnistage.media.audio_output import encode_audio
from omnistage.pipeline.intake import Prompt, RequestOptions
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import CLIENT_CLOSED, body_of
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, AuditRecord
from omnistage.server.openai.audio.transcriber import transcribe
from omnistage.server.openai.audio.transcript_events import failure_of, tokens_used
from omnistage.server.openai.audio.transcriptions import MAX_TRANSCRIPT_TOKENS, instruction
from omnistage.server.openai.running import final_output
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.config import InputTranscription
from omnistage.server.realtime.events import ClientGoneError
from omnistage.server.realtime.items import Audio
from omnistage.server.service import ServedModel, Service

ENDPOINT = "WS /v1/realtime transcription"
_EVENT = "conversation.item.input_audio_transcription"
_OPENAI_MODEL = re.compile(r"whisper-1|gpt-([a-z0-9.]+-)*transcribe")
"""How the names of OpenAI's models begin, of today's and of new ones."""
_ENGLISH = ("en", "english")
_MAX_RUNNING = 4
"""Turns of one session that are transcribed at once."""


def transcriber_of(
    service: Service, holder: Holder, session_model: ServedModel, settings: InputTranscription, param: str
) -> ServedModel:
    """The model that transcribes: the one named, or for OpenAI's names and none one that is served here.

    Raises `InvalidRequestError`.
    """
    allowed = [m for m in service.models.values() if holder.models is None or m.name in holder.models]
    able = [m for m in allowed if isinstance(m.omni.processor, SpeechRecognizer | Transcriber) and _accepts_audio(m)]
    match = next((model for model in allowed if model.name == settings.model), None)
    if match is None and settings.model is not None and not _OPENAI_MODEL.match(settings.model):
        names = ", ".join(model.name for model in able) or "none"
        raise InvalidRequestError(
            f"there is no model {short_repr(settings.model)}; models that transcribe: {names}", param=f"{param}.model"
        )
    if match is None:
        match = next((m for m in able if m is session_model), able[0] if able else session_model)
    if not _accepts_audio(match) or Modality.TEXT not in match.omni.modalities:
        raise InvalidRequestError("no model that is served here transcribes speech; leave it out", param=param)
    english = settings.language is None or settings.language.lower() in _ENGLISH
    if isinstance(match.omni.processor, Transcriber) and not english:
        raise InvalidRequestError("this model transcribes English only", param=f"{param}.language")
    return match


def _accepts_audio(model: ServedModel) -> bool:
    return Modality.AUDIO in model.omni.processor.input_modalities


class TurnTranscriber:
    """Transcribes turns of one session, each in a task of its own, and sends what comes of it."""

    def __init__(
        self, service: Service, holder: Holder, send: Callable[[JsonObject], Awaitable[None]], client: str | None
    ) -> None:
        self._service = service
        self._holder = holder
        self._send = send
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, item_id: str, part: Audio, model: ServedModel, settings: InputTranscription) -> None:
        task = asyncio.ensure_future(self._run(item_id, part, model, settings))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, item_id: str, part: Audio, model: ServedModel, settings: InputTranscription) -> None:
        record = AuditRecord(ENDPOINT, self._client, who=self._holder.name, status=200)
        CURRENT_RECORD.set(record)
        place: JsonObject = {"item_id": item_id, "content_index": 0}
        try:
            if len(self._tasks) > _MAX_RUNNING:
                raise QueueFullError(f"{_MAX_RUNNING} turns are being transcribed already; this one is skipped")
            transcriber = transcriber_of(self._service, self._holder, model, settings, "transcription")
            record.model = transcriber.name
            text, usage = await self._transcribe(part, transcriber, settings)
            part.transcript = text
            if text:
                await self._send({"type": f"{_EVENT}.delta", **place, "delta": text})
            await self._send({"type": f"{_EVENT}.completed", **place, "transcript": text, "usage": usage})
        except OmniError as error:
            record.status = error.status
            await self._fail(place, error)
        except (ClientGoneError, asyncio.CancelledError):
            record.status, record.ended = CLIENT_CLOSED, DISCONNECTED
        except Exception as error:
            log_defect("a realtime transcription", error)
            record.status, record.ended = 500, "error"
            await self._fail(place, InternalError("a defect"))
        finally:
            self._service.metrics.observe_response(record, record.close())

    async def _fail(self, place: JsonObject, error: OmniError) -> None:
        with contextlib.suppress(ClientGoneError):
            await self._send({"type": f"{_EVENT}.failed", **place, **body_of(error)})

    async def _transcribe(
        self, part: Audio, model: ServedModel, settings: InputTranscription
    ) -> tuple[str, JsonObject]:
        """The words of a turn, and what they cost."""
        processor = model.omni.processor
        samples = part.samples.astype(np.float32) / 32768.0
        if isinstance(processor, Transcriber):
            data = encode_audio(samples, part.rate, ".wav")
            direct = await transcribe(self._service, self._holder, model, processor, data, None)
            return direct.text, {"type": "duration", "seconds": math.ceil(direct.seconds)}
        prompt: Prompt
        params = {}
        if isinstance(processor, SpeechRecognizer):
            data = encode_audio(samples, part.rate, ".wav")
            prompt = SpeechPrompt(data, TranscriptionOptions(language=settings.language, prompt=settings.prompt or ""))
        else:
            words = instruction(settings.language, prompt=settings.prompt)
            audio: JsonObject = {"type": "audio", "audio": (part.samples, part.rate)}
            prompt = [{"role": "user", "content": [audio, {"type": "text", "text": words}]}]
            stage = model.stage_for_params(SamplingParams)
            params = {} if stage is None else {stage: SamplingParams(temperature=0, max_tokens=MAX_TRANSCRIPT_TOKENS)}
        options = RequestOptions(["text"])
        final = await final_output(self._service.run_request(self._holder, model, prompt, params, options))
        if (failure := failure_of(final)) is not None:
            raise failure
        return final.text.strip(), dict(tokens_used(final.usage))
