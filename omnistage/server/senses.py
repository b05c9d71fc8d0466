"""Models whose ears and voice can be used without what lies between: a text read aloud, a sound written down."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from omnistage.errors import DeadlineExceededError, InvalidRequestError
from omnistage.media.audio import AudioClip, decode_audio
from omnistage.media.watch import inspecting, show
from omnistage.server.errors import ContentFilterError
from omnistage.server.filters import AnswerText, Redact, Refuse
from omnistage.server.keys import Holder
from omnistage.server.service import ServedModel, Service

if TYPE_CHECKING:
    from omnistage.media.watch import Decoded


@runtime_checkable
class ReadingProcessor(Protocol):
    """An input processor of a model that can speak a text as it is."""

    def read_aloud(self, text: str) -> list[dict[str, object]]:
        """The conversation that has just this text spoken."""
        ...


@runtime_checkable
class WritingProcessor(Protocol):
    """An input processor of a model that can write down what is said without a thought about it. Thread-safe."""

    def transcribe(self, clip: AudioClip) -> str:
        """The words in a sound at `ears_rate`; empty where there are none. It takes as long as it takes."""
        ...

    @property
    def ears_rate(self) -> int:
        """Samples a second that it hears."""
        ...


@dataclass(frozen=True, slots=True)
class Dictation:
    text: str
    seconds: float
    """Of the sound."""


async def dictated(
    service: Service, holder: Holder, model: ServedModel, ears: WritingProcessor, data: bytes, timeout: float | None
) -> Dictation:
    """What is said in a sound file. It counts as a request of the holder's, and the content filter sees both ends."""
    if timeout is not None and timeout <= 0:
        raise InvalidRequestError("must be a number of seconds above 0", param="timeout")
    with service.working(holder, model) as own:

        def inspect(media: Decoded) -> None:
            if own is not None and isinstance(own.check_media(media), Refuse | Redact):
                raise ContentFilterError("the content filter refuses this; send another", param="file")

        def work() -> Dictation:
            with inspecting(inspect):
                clip = decode_audio(data, model.omni.media_limits, ears.ears_rate)
                show(clip)
            return Dictation(ears.transcribe(clip), clip.seconds)

        try:
            async with asyncio.timeout(timeout):
                made = await asyncio.to_thread(work)
        except TimeoutError as error:
            raise DeadlineExceededError(
                "the time was over before all was written down; allow more", param="timeout"
            ) from error
        except InvalidRequestError as error:
            error.param = "file"
            raise
        if own is None:
            return made
        verdict = await own.check_output(AnswerText(held=made.text, ended=True))
        if isinstance(verdict, Refuse):
            raise ContentFilterError("the content filter ended this transcription")
        return Dictation(verdict.text, made.seconds) if isinstance(verdict, Redact) else made
