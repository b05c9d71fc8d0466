"""Transcription by a model's audio input alone, without its language model."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import DeadlineExceededError, InvalidRequestError
from omnistage.core.family import AudioLimits, Transcriber
from omnistage.media.audio import decode_audio
from omnistage.media.budget import MediaHold, media_hold
from omnistage.media.context import decode_for, inspect_media, notify_inspector
from omnistage.media.limits import MediaLimits
from omnistage.pipeline.preparation import Lane, prepare
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import AnswerFilteredError, ContentFilterError
from omnistage.server.moderation.filters import AnswerText, PromptText, Redact, Refuse, RequestFilter
from omnistage.server.service import ServedModel, Service

if TYPE_CHECKING:
    from omnistage.core.clips import AudioClip
    from omnistage.media.context import Decoded

TIMED_OUT = "the timeout passed before the transcription was complete; allow more time"


@dataclass(frozen=True, slots=True)
class DirectTranscript:
    text: str
    seconds: float
    """Of the audio."""


async def transcribe(
    service: Service, holder: Holder, model: ServedModel, transcriber: Transcriber, data: bytes, timeout: float | None
) -> DirectTranscript:
    """The text of an audio file. It counts as a request of the holder's while anything works on it.

    The content filter sees the audio, and its text twice: as input of the client's, and as output of the service's.
    """
    if timeout is not None and timeout <= 0:
        raise InvalidRequestError("must be a number of seconds above 0", param="timeout")
    limits = _limits(model)
    preparation = Cancellation(None if timeout is None else time.monotonic() + timeout)
    with contextlib.ExitStack() as resources:
        request_filter = resources.enter_context(service.run_without_stages(holder, model, preparation))
        place = service.transcribe_workers.reserve(resources)

        def inspect(media: Decoded) -> None:
            if request_filter is not None and isinstance(request_filter.check_media(media), Refuse | Redact):
                raise ContentFilterError("the content filter refuses this; send another", param="file")

        def decode() -> tuple[AudioClip, MediaHold]:
            with inspect_media(inspect), media_hold() as media:
                clip = decode_audio(data, limits, transcriber.audio_sample_rate)
                notify_inspector(clip)
            media.settle()
            return clip, media

        try:
            with cancellation_scope(preparation), decode_for(service.owner_of(holder)):
                clip, media = await prepare(decode, preparation, Lane.MEDIA)
            resources.callback(media.close)
            async with asyncio.timeout(preparation.remaining()):
                text = await service.transcribe_workers.run(
                    lambda over: transcriber.transcribe(clip, over.is_set), place, resources
                )
        except (TimeoutError, DeadlineExceededError) as error:
            raise DeadlineExceededError(TIMED_OUT, param="timeout") from error
        except InvalidRequestError as error:
            error.param = "file"
            raise
        transcript = DirectTranscript(text, clip.seconds)
        return transcript if request_filter is None else await _filtered(request_filter, transcript)


def _limits(model: ServedModel) -> MediaLimits:
    """The model's limits, with clips no longer than it can transcribe: a longer one is refused before decoding."""
    limits, processor = model.omni.media_limits, model.omni.processor
    if not isinstance(processor, AudioLimits):
        return limits
    longest = min(limits.max_audio_seconds, processor.clip_seconds()[1])
    return limits.model_copy(update={"max_audio_seconds": longest})


async def _filtered(request_filter: RequestFilter, transcript: DirectTranscript) -> DirectTranscript:
    verdict = await request_filter.check_prompt((PromptText(transcript.text, "user"),))
    if isinstance(verdict, Refuse | Redact):
        raise ContentFilterError("the content filter refuses what is said in it; send another", param="file")
    verdict = await request_filter.check_output(AnswerText(held=transcript.text, ended=True))
    if isinstance(verdict, Refuse):
        raise AnswerFilteredError("the content filter ended this transcription")
    return DirectTranscript(verdict.text, transcript.seconds) if isinstance(verdict, Redact) else transcript
