"""One client's session: what each of its events does, and the response that runs for it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from omnistage.core.cancellation import Cancellation, cancellation_scope
from omnistage.core.errors import (
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModalityError,
)
from omnistage.core.failures import log_defect
from omnistage.core.types import Modality
from omnistage.media.context import decode_for
from omnistage.media.image import decode_image
from omnistage.pipeline.preparation import Lane, prepare
from omnistage.server.access.keys import Holder
from omnistage.server.http.json_body import run_json
from omnistage.server.http.limits import Hold
from omnistage.server.realtime import events
from omnistage.server.realtime.admission import model_for_session
from omnistage.server.realtime.audio import base64_seconds, decode, from_base64
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.config import (
    ResponseOptions,
    SessionConfig,
    audio_input_limits,
    check_config,
    default_config,
    for_response,
    require_audio_input,
)
from omnistage.server.realtime.conversation import Conversation
from omnistage.server.realtime.input_audio import SAMPLE_BYTES, InputAudio, Turn
from omnistage.server.realtime.items import Audio, Image, Item, Message, new_id, parse_item
from omnistage.server.realtime.response_events import ResponseBuilder
from omnistage.server.realtime.response_runner import ResponseRunner
from omnistage.server.realtime.settings_update import apply_update, check_session
from omnistage.server.realtime.transcription import TurnTranscriber
from omnistage.server.service import ServedModel, Service

Send = Callable[[JsonObject], Awaitable[None]]
T = TypeVar("T")
_MIN_COMMIT_MS = 100


class ActiveResponseError(InvalidRequestError, code="conversation_already_has_active_response"):
    """One response at a time."""


class NoActiveResponseError(InvalidRequestError, code="response_cancel_not_active"):
    """There is nothing to cancel."""


class EmptyBufferError(InvalidRequestError, code="input_audio_buffer_commit_empty"):
    """Too little audio for a message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one session."""

    buffer_seconds: float = 180.0
    """Audio that is not yet part of a message."""
    conversation_bytes: int = 32 * 2**20
    """Of all items: eleven minutes of audio, or as much text and images."""
    items: int = 500


class Session:
    """The state of one connection. `handle` runs one event after another; a response runs concurrently."""

    def __init__(
        self,
        service: Service,
        holder: Holder,
        model: ServedModel | None,
        send: Send,
        hold: Hold,
        *,
        limits: Limits | None = None,
        client: str | None = None,
    ) -> None:
        self.id = new_id("sess")
        self._hold = hold
        """Counts the audio buffer and the items."""
        self._item_bytes = 0
        self._service = service
        self._holder = holder
        self._model = model
        self._send_event = send
        self._limits = limits or Limits()
        self._client = client
        self.config = default_config(model) if model is not None else SessionConfig()
        self.conversation = Conversation(self._limits.items, self._limits.conversation_bytes)
        self._audio = self._new_buffer(0)
        self._turn_item_id: str | None = None
        """The id of the current turn's message: it is announced when the turn starts."""
        self._response: ResponseRunner | None = None
        self._transcriber = TurnTranscriber(service, holder, send, client)
        self.finished = asyncio.Event()
        """Set when the session should be closed: the service drains and no response runs."""
        self._draining = False
        self._handlers: dict[str, Callable[[Any], Awaitable[None]]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
            "output_audio_buffer.clear": self._clear_output,
            "conversation.item.create": self._create_item,
            "conversation.item.retrieve": self._retrieve_item,
            "conversation.item.delete": self._delete_item,
            "conversation.item.truncate": self._truncate_item,
            "response.create": self._create_response,
            "response.cancel": self._cancel_response,
        }

    # -------------------------------------------------------------------------------------------- life cycle

    async def begin(self) -> None:
        await self._send("session.created", session=self.config.to_json(self.id))

    async def handle(self, text: str) -> None:
        """Run one client event; its errors go to the client, and the session continues."""
        event: events.ClientEvent | None = None
        event_id = None
        try:
            event = await events.read(text, self._service.owner_of(self._holder))
            event_id = event.event_id
            await self._handlers[event.type](event)
        except events.EventError as error:
            await self.send_error(error.error, error.event_id)
        except OmniError as error:
            await self.send_error(error, event_id)
        except events.ClientGoneError:
            raise
        except Exception as error:
            log_defect("a realtime session", error)
            await self.send_error(InternalError("a defect"), event_id)
        finally:
            if not isinstance(event, events.AudioAppend):  # of which there are many, and few add items
                self._item_bytes = self.conversation.nbytes
            self._hold.set(self._audio.nbytes + self._item_bytes)

    def _reserve(self, size: int) -> None:
        """Raise unless the service can hold this many bytes more for the session."""
        self._hold.resize(self._audio.nbytes + self._item_bytes + size)

    async def _send(self, event_type: str, **fields: object) -> None:
        await self._send_event({"type": event_type, **fields})

    async def send_error(self, error: OmniError, event_id: str | None = None) -> None:
        await self._send_event(events.error_event(error, event_id))

    def drain(self) -> None:
        """Accept no more responses; finish when the current one has ended."""
        self._draining = True
        if not self.busy:
            self.finished.set()

    @property
    def model_name(self) -> str | None:
        return self.config.model

    @property
    def busy(self) -> bool:
        """Whether a response runs."""
        return self._response is not None and not self._response.task.done()

    async def close(self) -> None:
        """End the current response silently, and the transcriptions."""
        await self._transcriber.close()
        if self._response is not None:
            self._response.task.cancel()
            await asyncio.wait({self._response.task})

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise InvalidRequestError(
                "this session has no model yet; connect with ?model=NAME, or send session.update with one",
                param="model",
            )
        return self._model

    # ---------------------------------------------------------------------------------------------- settings

    async def _update(self, event: events.SessionUpdate) -> None:
        model, config = self._model, self.config
        name = event.session.get("model")
        if isinstance(name, str) and model is None:
            model = model_for_session(self._service, self._holder, name, "session.model")
            config = default_config(model)
        work = partial(self._updated, config, model, event.session)
        config, session, errors = await self._run(work, config, event.session)
        first = self._model is None
        old, self.config, self._model = self.config.audio.input, config, model
        if first or old.format != config.audio.input.format:
            self._audio = self._new_buffer(self._audio.ms(self._audio.end))
        elif old.turn_detection != config.audio.input.turn_detection:
            self._audio.set_detection(config.audio.input.turn_detection)
        await self._send("session.updated", session=session)
        for error in errors:
            await self.send_error(error, event.event_id)

    def _updated(
        self, config: SessionConfig, model: ServedModel | None, update: JsonObject
    ) -> tuple[SessionConfig, JsonObject, list[InvalidRequestError]]:
        """The settings with an update, what clients see of them, and what of it is refused."""
        config, errors = apply_update(config, update, partial(check_session, self._service, self._holder, model))
        return config, config.to_json(self.id), errors

    async def _run(self, work: Callable[[], T], config: SessionConfig, update: JsonObject) -> T:
        """Merge and validate settings: in a thread where they have tools, which may be large."""
        small = not (config.tools or update.get("tools"))
        return await run_json(work, small=small, owner=self._service.owner_of(self._holder))

    def _new_buffer(self, start_ms: int) -> InputAudio:
        seconds = self._limits.buffer_seconds
        if self._model is not None:  # all of the buffer may become one clip
            seconds = min(seconds, audio_input_limits(self.config, self._model).max_seconds)
        settings = self.config.audio.input
        return InputAudio(settings.format.type, settings.turn_detection, seconds, start_ms)

    # ------------------------------------------------------------------------------------------- input audio

    async def _append(self, event: events.AudioAppend) -> None:
        require_audio_input(self.model, "audio")
        if base64_seconds(event.audio, self._audio.format) > self._limits.buffer_seconds:
            raise LimitExceededError(
                f"is longer than {self._limits.buffer_seconds:g} s; send it in several events", param="audio"
            )
        self._reserve(int(base64_seconds(event.audio, self._audio.format) * self._audio.rate) * SAMPLE_BYTES)
        slow = self._audio.detection is not None or len(event.audio) > events.LARGE_CHARS
        turns = await asyncio.to_thread(self._append_audio, event.audio) if slow else self._append_audio(event.audio)
        for turn in turns:
            try:
                await self._on_turn(turn)
            except OmniError as error:  # does not concern the next turn
                await self.send_error(error, event.event_id)

    def _append_audio(self, audio: str) -> list[Turn]:
        return self._audio.append(decode(from_base64(audio, "audio"), self._audio.format, "audio"))

    async def _on_turn(self, turn: Turn) -> None:
        detection = self.config.audio.input.turn_detection
        if turn.kind == "started":
            self._turn_item_id = new_id("item")
            start = self._audio.ms(turn.start)
            await self._send("input_audio_buffer.speech_started", audio_start_ms=start, item_id=self._turn_item_id)
            if detection is not None and detection.interrupt_response and self._response is not None:
                self._response.interrupt()
            return
        item_id, end = self._take_turn_id(), self._audio.ms(turn.end)
        await self._send("input_audio_buffer.speech_stopped", audio_end_ms=end, item_id=item_id)
        await self._add_audio(item_id, Audio(self._audio.take(turn.start, turn.end), self._audio.rate))
        if detection is not None and detection.create_response:
            await self._respond({})

    def _take_turn_id(self) -> str:
        item_id, self._turn_item_id = self._turn_item_id or new_id("item"), None
        return item_id

    async def _commit(self, _event: events.ClientEvent) -> None:
        require_audio_input(self.model, "audio")
        if self._audio.seconds * 1000 < _MIN_COMMIT_MS:
            raise EmptyBufferError(
                f"the buffer holds {self._audio.seconds * 1000:.0f} ms of audio; append at least {_MIN_COMMIT_MS}"
            )
        await self._make_room(Message("user", []).size + self._audio.nbytes)  # before the buffer is emptied
        item_id = self._take_turn_id()
        await self._add_audio(item_id, Audio(self._audio.take_all(), self._audio.rate))

    async def _add_audio(self, item_id: str, audio: Audio) -> None:
        item = Message("user", [audio], id=item_id)
        await self._make_room(item.size)
        before = self.conversation.add(item)
        self._item_bytes += item.size
        await self._send("input_audio_buffer.committed", previous_item_id=before, item_id=item.id)
        await self._announce(item, before)
        if (transcription := self.config.audio.input.transcription) is not None:
            self._transcriber.start(item.id, audio, self.model, transcription)

    async def _clear(self, _event: events.ClientEvent) -> None:
        self._audio.clear()
        self._turn_item_id = None
        await self._send("input_audio_buffer.cleared")

    async def _clear_output(self, _event: events.ClientEvent) -> None:
        raise InvalidRequestError(
            "the server has no output buffer: audio is sent as it is generated; send response.cancel, and "
            "conversation.item.truncate with what was heard",
            param="type",
        )

    # ------------------------------------------------------------------------------------------------- items

    async def _create_item(self, event: events.ItemCreate) -> None:
        item = await self._parse_item(event.item, "item")
        await self._make_room(item.size)
        await self._announce(item, self.conversation.add(item, event.previous_item_id))

    async def _make_room(self, size: int) -> None:
        """Drop the oldest items for a new one, unless the client disabled truncation."""
        if self.config.truncation == "disabled" or size > self._limits.conversation_bytes:
            self.conversation.check_room(size)
        while not self.conversation.has_room(size) and (oldest := self.conversation.oldest()) is not None:
            self.conversation.delete(oldest.id)
            await self._send("conversation.item.deleted", item_id=oldest.id)
        self.conversation.check_room(size)
        self._item_bytes = self.conversation.nbytes
        self._reserve(size)

    async def _announce(self, item: Item, before: str | None) -> None:
        data = item.to_json()
        await self._send("conversation.item.added", previous_item_id=before, item=data)
        await self._send("conversation.item.done", previous_item_id=before, item=data)

    async def _parse_item(self, values: JsonObject, path: str) -> Item:
        """An item with media that the model can take: any other would fail every later response."""
        item = await asyncio.to_thread(parse_item, values, audio_input_limits(self.config, self.model), path)
        omni = self.model.omni
        for index, part in enumerate(item.parts if isinstance(item, Message) else ()):
            part_path = f"{path}.content[{index}]"
            if isinstance(part, Audio):
                require_audio_input(self.model, part_path)
            elif isinstance(part, Image):
                if Modality.IMAGE not in omni.processor.input_modalities:
                    raise UnsupportedModalityError("this model has no image input; send text", param=part_path)
                try:
                    await self._check_image(part)
                except InvalidRequestError as error:
                    error.param = f"{part_path}.image_url"
                    raise
        return item

    async def _check_image(self, part: Image) -> None:
        """Decode an image as a response would; a client that leaves ends it."""
        with cancellation_scope(Cancellation()) as cancellation, decode_for(self._service.owner_of(self._holder)):
            await prepare(lambda: decode_image(part.url, self.model.omni.media_limits), cancellation, Lane.MEDIA)

    async def _retrieve_item(self, event: events.ItemEvent) -> None:
        item = self.conversation.get(event.item_id)
        await self._send("conversation.item.retrieved", item=item.to_json(with_audio=True))

    async def _delete_item(self, event: events.ItemEvent) -> None:
        if self.conversation.get(event.item_id).status == "in_progress":
            raise InvalidRequestError("is still being generated; send response.cancel first", param="item_id")
        self.conversation.delete(event.item_id)
        await self._send("conversation.item.deleted", item_id=event.item_id)

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        await self._wait_cancelled(event.item_id)
        self.conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
        await self._send("conversation.item.truncated", **event.model_dump(exclude={"type", "event_id"}))

    # --------------------------------------------------------------------------------------------- responses

    async def _create_response(self, event: events.ResponseCreate) -> None:
        await self._respond(event.response or {})

    async def _respond(self, request: JsonObject) -> None:
        self._service.check_ready()
        model, overrides = self.model, request.get("input")
        if isinstance(overrides, list) and len(overrides) > self._limits.items:
            raise LimitExceededError(
                f"has {len(overrides)} items, and may have {self._limits.items}; leave some out", param="response.input"
            )

        def merge() -> tuple[SessionConfig, ResponseOptions]:
            config, options = for_response(self.config, request)
            check_config(config, model, "response")
            return config, options

        config, options = await self._run(merge, self.config, request)
        await self._wait_cancelled()
        if self.busy and self._response is not None:
            raise ActiveResponseError(
                f"response {self._response.builder.id} is still running; wait for response.done, or cancel it"
            )
        conversation = self.conversation if options.conversation == "auto" else None
        if conversation is not None:
            await self._make_room(0)
        items = self.conversation.context() if options.input is None else await self._input_items(options.input)
        builder = ResponseBuilder(uuid.uuid4().hex, config, conversation, options.metadata)
        for event in builder.created():
            await self._send_event(event)
        runner = ResponseRunner(self._service, self._holder, model, builder, items, self._send_event, self._client)
        self._response = runner
        runner.task.add_done_callback(self._on_response_done)

    async def _input_items(self, values: Sequence[JsonObject]) -> list[Item]:
        """The items that one response gets instead of the conversation; references are to the conversation's."""
        items = []
        for index, value in enumerate(values):
            path = f"response.input[{index}]"
            if value.get("type") == "item_reference":
                items.append(self.conversation.get(str(value.get("id")), f"{path}.id"))
            else:
                items.append(await self._parse_item(value, path))
        return items

    async def _wait_cancelled(self, item_id: str | None = None) -> None:
        """Wait for the last events of a cancelled response (the one of `item_id`); that takes no engine step."""
        runner = self._response
        if runner is not None and runner.cancel_reason and (item_id is None or runner.builder.owns(item_id)):
            await asyncio.wait({runner.task})

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        runner = self._response
        if runner is None or runner.task.done() or event.response_id not in (None, runner.builder.id):
            if event.response_id is not None:
                raise NoActiveResponseError("this response is not running", param="response_id")
            raise NoActiveResponseError("no response is running")
        runner.cancel("client_cancelled")

    def _on_response_done(self, _task: asyncio.Task[None]) -> None:
        if self._draining:
            self.finished.set()
