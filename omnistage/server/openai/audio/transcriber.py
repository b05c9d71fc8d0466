"""A sound written down by a model's ears alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnistage.core.errors import DeadlineExceededError, InvalidRequestError, UnsupportedModalityError
from omnistage.core.family import AudioLimits, OptionalInputs, Transcriber
from omnistage.core.types import Modality
from omnistage.media.audio import decode_audio
from omnistage.media.context import inspect_media, notify_inspector
from omnistage.media.limits import MediaLimits
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import AnswerFilteredError, ContentFilterError
from omnistage.server.moderation.filters import AnswerText, PromptText, Redact, Refuse, RequestFilter
from omnistage.server.service import ServedModel, Service

if TYPE_CHECKING:
    from omnistage.media.context import Decoded


@dataclass(frozen=True, slots=True)
class Dictation:
    text: str
    seconds: float
    """Of the sound."""


def check_hears(
    model: ServedModel, param: str = "model", what: str = "this model does not hear; use one that takes audio"
) -> None:
    """Raise for a model that takes no sound: with what helps where it says so, else with `what`."""
    processor = model.omni.processor
    if Modality.AUDIO in processor.input_modalities:
        return
    if isinstance(processor, OptionalInputs):
        what = processor.unsupported_reason(Modality.AUDIO)
    raise UnsupportedModalityError(what, param=param)


async def dictated(
    service: Service, holder: Holder, model: ServedModel, ears: Transcriber, data: bytes, timeout: float | None
) -> Dictation:
    """What is said in a sound file. It counts as a request of the holder's for as long as anything works on it.

    The content filter sees the sound, and its words twice: as what somebody tells the service, and as its answer.
    """
    if timeout is not None and timeout <= 0:
        raise InvalidRequestError("must be a number of seconds above 0", param="timeout")
    limits = _limits(model)
    with contextlib.ExitStack() as held:
        own = held.enter_context(service.run_without_stages(holder, model))

        def inspect(media: Decoded) -> None:
            if own is not None and isinstance(own.check_media(media), Refuse | Redact):
                raise ContentFilterError("the content filter refuses this; send another", param="file")

        def work(over: threading.Event) -> Dictation:
            with inspect_media(inspect):
                clip = decode_audio(data, limits, ears.audio_sample_rate)
                notify_inspector(clip)
            return Dictation(ears.transcribe(clip, over.is_set), clip.seconds)

        try:
            async with asyncio.timeout(timeout):
                made = await service.transcribe_workers.run(work, held)
        except TimeoutError as error:
            raise DeadlineExceededError(
                "the time was over before all was written down; allow more", param="timeout"
            ) from error
        except InvalidRequestError as error:
            error.param = "file"
            raise
        return made if own is None else await _filtered(own, made)


def _limits(model: ServedModel) -> MediaLimits:
    """The model's, with sounds no longer than its ears take: a longer one is refused before it is decoded."""
    limits, processor = model.omni.media_limits, model.omni.processor
    if not isinstance(processor, AudioLimits):
        return limits
    longest = min(limits.max_audio_seconds, processor.clip_seconds()[1])
    return limits.model_copy(update={"max_audio_seconds": longest})


async def _filtered(own: RequestFilter, made: Dictation) -> Dictation:
    said = await own.check_prompt((PromptText(made.text, "user"),))
    if isinstance(said, Refuse | Redact):
        raise ContentFilterError("the content filter refuses what is said there; send another", param="file")
    verdict = await own.check_output(AnswerText(held=made.text, ended=True))
    if isinstance(verdict, Refuse):
        raise AnswerFilteredError("the content filter ended this transcription")
    return Dictation(verdict.text, made.seconds) if isinstance(verdict, Redact) else made
