"""`WS /v1/audio/speech/stream`: a text that is still being written, spoken a sentence at a time.

The messages are vLLM-Omni's. Each sentence is a request of `/v1/audio/speech` by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Literal

import numpy as np
from pydantic import Field

from omnistage.core.clips import AudioClip
from omnistage.core.errors import InternalError, InvalidRequestError, LimitExceededError, OmniError
from omnistage.core.failures import log_defect
from omnistage.core.family import VoiceCloner
from omnistage.core.sentences import Sentences
from omnistage.core.types import AudioChunk
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import CLIENT_CLOSED, body_of
from omnistage.server.http.limits import Hold
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, AuditRecord
from omnistage.server.openai.audio.speech import SpeechRequest, reads_aloud, run_speech, speech_pieces
from omnistage.server.openai.base import WireModel
from omnistage.server.realtime.admission import check_model
from omnistage.server.realtime.base import JsonObject, validate
from omnistage.server.realtime.events import ClientGoneError, read_object
from omnistage.server.service import Service

ENDPOINT = "WS /v1/audio/speech/stream sentence"
MAX_CHARS = 100_000
"""Of text that waits to be spoken, as of one request."""
_CHAR_BYTES = 4
_SMALL_CHARS = 256
"""Taken apart in the event loop."""
_VOICE_BYTES = 8 * 2**20
"""Of the first sentence's sound, which is kept where later ones have its voice."""


class SpokenTextConfig(SpeechRequest):
    """`session.config`: as `POST /v1/audio/speech`, without the text."""

    type: Literal["session.config"]
    input: Literal["."] = "."
    stream_format: None = None
    stream_audio: bool = Field(default=False, description="Sound as it is made, not a message for each sentence.")
    split_granularity: Literal["sentence"] = "sentence"


class TextAppend(WireModel):
    type: Literal["input.text"]
    text: str = Field(max_length=MAX_CHARS)


class TextDone(WireModel):
    type: Literal["input.done"]


def _size(sentence: str | None) -> int:
    """Characters that it counts as while it waits; the end of a text takes a place, too."""
    return 1 + len(sentence or "")


class SpokenText:
    """The state of one connection: `handle` takes messages, one task speaks the sentences in their order."""

    def __init__(
        self,
        service: Service,
        holder: Holder,
        model: str | None,
        send: Callable[[JsonObject], Awaitable[None]],
        send_bytes: Callable[[bytes], Awaitable[None]],
        hold: Hold,
        client: str | None = None,
    ) -> None:
        self._service = service
        self._holder = holder
        self.model_name = model
        self._send = send
        self._send_bytes = send_bytes
        self._hold = hold
        self._client = client
        self._config: SpokenTextConfig | None = None
        self._text = Sentences(first_words=None, drop_code=False)
        self._waiting: deque[str | None] = deque()
        """Sentences; None: the text has ended."""
        self._chars = 0
        """Of those."""
        self._voice: tuple[AudioClip, str] | None = None
        """The first sentence and how it sounded: the next ones are spoken with its voice, where the model can."""
        self._num_spoken = 0
        self._config_bytes = 0
        """Bytes of the settings and of the voice."""
        self._task: asyncio.Task[None] | None = None
        self.finished = asyncio.Event()
        self._draining = False

    async def begin(self) -> None:
        """The client speaks first."""

    @property
    def busy(self) -> bool:
        return self._task is not None and not self._task.done()

    def drain(self) -> None:
        self._draining = True
        if not self.busy:
            self.finished.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def send_error(self, error: OmniError, sentence: int | None = None) -> None:
        event: JsonObject = {"type": "error", "message": error.message, "error": body_of(error)["error"]}
        await self._send(event if sentence is None else {**event, "sentence_index": sentence})

    async def handle(self, text: str) -> None:
        """Run one message; its errors go to the client, and the session continues."""
        try:
            await self._handle(await read_object(text, self._service.owner_of(self._holder)))
        except OmniError as error:
            await self.send_error(error)

    async def _handle(self, values: JsonObject) -> None:
        kind = values.get("type")
        if kind == "session.config":
            self._configure(validate(SpokenTextConfig, values))
        elif kind == "input.text":
            await self._append(validate(TextAppend, values).text)
        elif kind == "input.done":
            validate(TextDone, values)
            self._end()
        else:
            raise InvalidRequestError("must be one of session.config, input.text, input.done", param="type")

    def _configure(self, config: SpokenTextConfig) -> None:
        if self._config is not None:
            raise InvalidRequestError("the session is configured already; open another one", param="type")
        name = self._service.model(config.model or self.model_name).requested_name
        model = check_model(self._service, self._holder, name)
        run_speech(self._service, self._holder, model, config)  # refuses what is wrong; it has not begun
        clones = isinstance(model.omni.processor, VoiceCloner)
        size = _VOICE_BYTES if clones and config.ref_audio is None else len(config.ref_audio or "")
        self._hold.resize(size)
        self._config_bytes, self._config, self.model_name = size, config, name

    async def _append(self, text: str) -> None:
        self._require_config()
        self._service.check_ready()
        self._check_room(len(text))
        self._hold.resize(self._config_bytes + _CHAR_BYTES * (self._chars + len(text) + self._text.max_characters))
        if len(text) <= _SMALL_CHARS:
            self._text, sentences = self._text.push(text)
            await asyncio.sleep(0)  # many messages may be there already
        else:
            self._text, sentences = await asyncio.to_thread(self._text.push, text)
        self._speak(sentences)

    def _check_room(self, chars: int) -> None:
        if (waiting := self._chars + chars) > MAX_CHARS:
            raise LimitExceededError(
                f"{waiting} characters would wait to be spoken, over the limit of {MAX_CHARS}; send them later",
                param="text",
            )

    def _end(self) -> None:
        self._require_config()
        self._check_room(1)
        self._speak((*self._text.finish(), None))
        self._text = Sentences(first_words=None, drop_code=False)

    def _require_config(self) -> None:
        if self._config is None:
            raise InvalidRequestError("comes before the session's settings; send session.config first", param="type")

    def _speak(self, sentences: tuple[str | None, ...]) -> None:
        self._waiting += sentences
        self._chars += sum(map(_size, sentences))
        if self._waiting and not self.busy:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            while self._waiting:
                sentence = self._waiting.popleft()
                self._chars -= _size(sentence)
                if sentence is None:
                    await self._send({"type": "session.done", "total_sentences": self._num_spoken})
                    self._num_spoken = 0
                else:
                    await self._say(sentence, self._num_spoken)
                    self._num_spoken += 1
        except ClientGoneError:
            self._waiting.clear()
            self._chars = 0
        if self._draining:
            self.finished.set()

    async def _say(self, sentence: str, index: int) -> None:
        """Speak a sentence. What goes wrong is said, and the next one has its turn."""
        record = AuditRecord(ENDPOINT, self._client, who=self._holder.name, model=self.model_name, status=200)
        CURRENT_RECORD.set(record)
        try:
            try:
                size = await self._send_sound(sentence, index)
            except OmniError as error:
                record.status = error.status
                record.ended = record.ended or ("error" if error.status >= 500 else None)
                await self._fail(error, index)
            except ClientGoneError:
                raise
            except Exception as error:
                log_defect("a spoken text", error)
                record.status, record.ended = 500, "error"
                await self._fail(InternalError("a defect"), index)
            else:
                await self._send({"type": "audio.done", "sentence_index": index, "total_bytes": size, "error": False})
        except (ClientGoneError, asyncio.CancelledError):
            record.status, record.ended = CLIENT_CLOSED, DISCONNECTED
            raise
        finally:
            self._service.metrics.observe_response(record, record.close())

    async def _fail(self, error: OmniError, index: int) -> None:
        await self.send_error(error, index)
        await self._send({"type": "audio.done", "sentence_index": index, "total_bytes": 0, "error": True})

    async def _send_sound(self, sentence: str, index: int) -> int:
        """Send the sound of a sentence; how many bytes it has."""
        config = self._config
        if config is None:
            raise InternalError("a sentence without settings")
        model = self._service.model(self.model_name)
        more: dict[str, object] = {"input": sentence}
        clip: JsonObject | None = None
        if self._voice is not None:
            clip, more["ref_text"] = {"type": "audio", "audio": self._voice[0]}, self._voice[1]
        running = run_speech(self._service, self._holder, model, config.model_copy(update=more), clip)
        chunks: list[AudioChunk] = []
        speed = 1.0 if config.speed is None else config.speed
        reads = reads_aloud(model)
        size, pending, started = 0, list[bytes](), False
        pieces = speech_pieces(running, config.response_format, reads=reads, speed=speed, sounds=chunks)
        async with aclosing(pieces):
            async for piece in pieces:
                if not isinstance(piece, bytes):
                    continue
                size += len(piece)
                if not started:
                    await self._start(sentence, index, chunks[0].sample_rate)
                    started = True
                if config.stream_audio:
                    await self._send_bytes(piece)
                else:
                    pending.append(piece)
        if pending:
            await self._send_bytes(b"".join(pending))
        if self._voice is None and config.ref_audio is None and isinstance(model.omni.processor, VoiceCloner):
            samples = np.concatenate([chunk.samples for chunk in chunks])
            self._voice = AudioClip(samples, chunks[0].sample_rate), sentence
        return size

    async def _start(self, sentence: str, index: int, rate: int) -> None:
        await self._send(
            {
                "type": "audio.start",
                "sentence_index": index,
                "sentence_text": sentence,
                "format": "wav" if self._config is None else self._config.response_format,
                "sample_rate": rate,
            }
        )
