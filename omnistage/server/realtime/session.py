"""One client's session: what each of its events does, and the response that runs for it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omnistage.core.errors import (
    InternalError,
    InvalidRequestError,
    LimitExceededError,
    OmniError,
    UnsupportedModalityError,
)
from omnistage.core.failures import log_defect
from omnistage.core.types import Modality
from omnistage.media.image import decode_image
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import NotFoundError, PermissionDeniedError
from omnistage.server.realtime import events
from omnistage.server.realtime.audio import base64_seconds, decode, from_base64
from omnistage.server.realtime.config import (
    SessionConfig,
    check_config,
    check_hears,
    default_config,
    for_response,
    hearing_of,
    updated,
)
from omnistage.server.realtime.conversation import Conversation
from omnistage.server.realtime.input_audio import InputAudio, Turn
from omnistage.server.realtime.items import Item, Message, Picture, Sound, new_id, parse_item
from omnistage.server.realtime.response_events import Answer, Event
from omnistage.server.realtime.response_runner import ResponseRun
from omnistage.server.service import ServedModel, Service

Send = Callable[[Event], Awaitable[None]]
_LEAST_COMMIT_MS = 100


class ActiveResponseError(InvalidRequestError):
    """One response at a time."""

    code = "conversation_already_has_active_response"


class NoActiveResponseError(InvalidRequestError):
    """There is nothing to cancel."""

    code = "response_cancel_not_active"


class EmptyBufferError(InvalidRequestError):
    """Too little sound to make a message of."""

    code = "input_audio_buffer_commit_empty"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may hold."""

    buffer_seconds: float = 180.0
    """Sound that is not yet part of a message."""
    conversation_bytes: int = 32 * 2**20
    """Of all messages: eleven minutes of sound, or as much text and pictures."""
    items: int = 500


def chosen_model(service: Service, holder: Holder, name: str, param: str = "model") -> ServedModel:
    """A model that this key may use and that can hold a conversation. Raises what a client should be told."""
    try:
        model = service.model(name)
    except NotFoundError as error:
        error.param = param
        raise
    if holder.models is not None and name not in holder.models:
        raise PermissionDeniedError(f"this key may not use {name!r}", param=param)
    if Modality.TEXT not in model.modalities:
        raise UnsupportedModalityError("this model holds no conversations; use one that gives text", param=param)
    return model


class Session:
    """The state of one connection. `handle` is called for one event after another; a response runs beside it."""

    def __init__(
        self,
        service: Service,
        holder: Holder,
        model: ServedModel | None,
        send: Send,
        *,
        limits: Limits | None = None,
        client: str | None = None,
    ) -> None:
        self.id = new_id("sess")
        self._service = service
        self._holder = holder
        self._model = model
        self._send = send
        self._limits = limits or Limits()
        self._client = client
        self.config = default_config(model) if model is not None else SessionConfig()
        self.conversation = Conversation(self._limits.items, self._limits.conversation_bytes)
        self._audio = self._new_audio(0)
        self._turn_item: str | None = None
        """The id that the message of the turn being spoken will have: it is told when the turn begins."""
        self._run: ResponseRun | None = None
        self.finished = asyncio.Event()
        """Set when the session should be closed: the service drains and nothing runs any more."""
        self._draining = False
        self._handlers: dict[type[events.ClientEvent], Callable[[Any], Awaitable[None]]] = {
            events.SessionUpdate: self._update,
            events.AudioAppend: self._append,
            events.AudioCommit: self._commit,
            events.AudioClear: self._clear,
            events.OutputClear: self._clear_output,
            events.ItemCreate: self._create_item,
            events.ItemRetrieve: self._retrieve_item,
            events.ItemDelete: self._delete_item,
            events.ItemTruncate: self._truncate_item,
            events.ResponseCreate: self._create_response,
            events.ResponseCancel: self._cancel_response,
        }

    # -------------------------------------------------------------------------------------------------- life

    async def begin(self) -> None:
        await self._send({"type": "session.created", "session": self.config.shown(self.id)})

    async def handle(self, text: str) -> None:
        """Do what a message asks; what is wrong with it is told to the client, and the session goes on."""
        event_id = None
        try:
            large = len(text) > events.LARGE_CHARS
            event = await asyncio.to_thread(events.parse, text) if large else events.parse(text)
            event_id = event.event_id
            await self._handlers[type(event)](event)
        except events.EventError as error:
            await self.tell(error.error, error.event_id)
        except OmniError as error:
            await self.tell(error, event_id)
        except events.GoneError:
            raise
        except Exception as error:
            log_defect("a realtime session", error)
            await self.tell(InternalError("a defect"), event_id)

    async def tell(self, error: OmniError, event_id: str | None = None) -> None:
        await self._send(events.error_event(error, event_id))

    def drain(self) -> None:
        """Take no more responses; be finished when the one that runs has ended."""
        self._draining = True
        if not self.busy:
            self.finished.set()

    @property
    def busy(self) -> bool:
        """Whether a response runs."""
        return self._run is not None and not self._run.task.done()

    async def close(self) -> None:
        """End what runs: nobody reads it any more."""
        if self._run is not None:
            self._run.task.cancel()
            await asyncio.wait({self._run.task})

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise InvalidRequestError(
                "this session has no model yet; connect with ?model=NAME, or name it in session.update", param="model"
            )
        return self._model

    # ----------------------------------------------------------------------------------------------- settings

    async def _update(self, event: events.SessionUpdate) -> None:
        model, config = self._model, self.config
        name = event.session.get("model")
        if isinstance(name, str) and model is None:
            model = chosen_model(self._service, self._holder, name, "session.model")
            config = default_config(model)
        config = updated(config, event.session, "session")
        if model is None:
            raise InvalidRequestError("is missing; name a model first", param="session.model")
        if config.model != model.name:
            raise InvalidRequestError("cannot be changed; connect anew for another model", param="session.model")
        check_config(config, model, "session")
        begins = self._model is None
        old, self.config, self._model = self.config, config, model
        if begins or old.audio.input.format != config.audio.input.format:
            self._audio = self._new_audio(self._audio.ms(self._audio.end))
        elif old.audio.input.turn_detection != config.audio.input.turn_detection:
            self._audio.listen(config.audio.input.turn_detection)
        await self._send({"type": "session.updated", "session": config.shown(self.id)})

    def _new_audio(self, begun_ms: int) -> InputAudio:
        seconds = self._limits.buffer_seconds
        if self._model is not None:
            seconds = min(seconds, hearing_of(self.config, self._model).most)  # all of it may become one sound
        given = self.config.audio.input
        return InputAudio(given.format.type, given.turn_detection, seconds, begun_ms)

    # -------------------------------------------------------------------------------------------------- sound

    async def _append(self, event: events.AudioAppend) -> None:
        check_hears(self.model, "audio")
        if base64_seconds(event.audio, self._audio.format) > self._limits.buffer_seconds:
            raise LimitExceededError(
                f"is longer than {self._limits.buffer_seconds:g} s; send it in pieces", param="audio"
            )
        computes = self._audio.detection is not None or len(event.audio) > events.LARGE_CHARS
        for turn in await asyncio.to_thread(self._take_in, event.audio) if computes else self._take_in(event.audio):
            try:
                await self._turn(turn)
            except OmniError as error:  # the next turn is another matter
                await self.tell(error, event.event_id)

    def _take_in(self, audio: str) -> list[Turn]:
        return self._audio.append(decode(from_base64(audio, "audio"), self._audio.format, "audio"))

    async def _turn(self, turn: Turn) -> None:
        """Somebody began to speak, or has stopped."""
        detection = self.config.audio.input.turn_detection
        if turn.kind == "started":
            self._turn_item = new_id("item")
            start = self._audio.ms(turn.start)
            await self._send(
                {
                    "type": "input_audio_buffer.speech_started",
                    "audio_start_ms": start,
                    "item_id": self._turn_item,
                }
            )
            if detection is not None and detection.interrupt_response and self._run is not None:
                self._run.interrupt()
            return
        item_id, self._turn_item = self._turn_item or new_id("item"), None
        end = self._audio.ms(turn.end)
        await self._send({"type": "input_audio_buffer.speech_stopped", "audio_end_ms": end, "item_id": item_id})
        taken = self._audio.take(turn.start, turn.end)
        await self._add_sound(Message("user", [Sound(taken, self._audio.rate)], id=item_id))
        if detection is not None and detection.create_response:
            await self._respond({})

    async def _commit(self, _event: events.AudioCommit) -> None:
        check_hears(self.model, "audio")
        if self._audio.seconds * 1000 < _LEAST_COMMIT_MS:
            raise EmptyBufferError(
                f"the buffer holds {self._audio.seconds * 1000:.0f} ms of sound; append {_LEAST_COMMIT_MS} at least"
            )
        await self._make_room(Message("user", []).size + self._audio.nbytes)  # before it is taken from where it is
        item_id, self._turn_item = self._turn_item or new_id("item"), None
        await self._add_sound(Message("user", [Sound(self._audio.take_all(), self._audio.rate)], id=item_id))

    async def _add_sound(self, item: Message) -> None:
        await self._make_room(item.size)
        before = self.conversation.add(item)
        await self._send({"type": "input_audio_buffer.committed", "previous_item_id": before, "item_id": item.id})
        await self._show(item, before)

    async def _clear(self, _event: events.AudioClear) -> None:
        self._audio.clear()
        self._turn_item = None
        await self._send({"type": "input_audio_buffer.cleared"})

    async def _clear_output(self, _event: events.OutputClear) -> None:
        raise InvalidRequestError(
            "the server keeps no sound back: it is sent as it is made; send response.cancel, and "
            "conversation.item.truncate with what was heard",
            param="type",
        )

    # -------------------------------------------------------------------------------------------------- items

    async def _create_item(self, event: events.ItemCreate) -> None:
        item = await self._checked_item(event.item, "item")
        await self._make_room(item.size)
        before = self.conversation.add(item, event.previous_item_id)
        await self._show(item, before)

    async def _make_room(self, size: int) -> None:
        """Drop the oldest items for a new one, unless the client wants none dropped: a long talk must not get stuck."""
        if self.config.truncation == "disabled" or size > self._limits.conversation_bytes:
            self.conversation.check_room(size)
        while not self.conversation.has_room(size) and (oldest := self.conversation.oldest()) is not None:
            self.conversation.delete(oldest.id)
            await self._send({"type": "conversation.item.deleted", "item_id": oldest.id})
        self.conversation.check_room(size)

    async def _show(self, item: Item, before: str | None) -> None:
        shown = {"previous_item_id": before, "item": item.shown()}
        await self._send({"type": "conversation.item.added", **shown})
        await self._send({"type": "conversation.item.done", **shown})

    async def _checked_item(self, values: Mapping[str, Any], path: str) -> Item:
        """An item whose media the model can take: one that it cannot would spoil every response after it."""
        item = await asyncio.to_thread(parse_item, values, hearing_of(self.config, self.model), path)
        limits, taken = self.model.omni.media_limits, self.model.omni.processor.input_modalities
        for index, part in enumerate(item.parts if isinstance(item, Message) else ()):
            where = f"{path}.content[{index}]"
            if isinstance(part, Sound):
                check_hears(self.model, where)
            elif isinstance(part, Picture):
                if Modality.IMAGE not in taken:
                    raise UnsupportedModalityError("this model does not see; send text", param=where)
                try:
                    await asyncio.to_thread(decode_image, part.url, limits)
                except InvalidRequestError as error:
                    error.param = f"{where}.image_url"
                    raise
        return item

    async def _retrieve_item(self, event: events.ItemRetrieve) -> None:
        item = self.conversation.get(event.item_id)
        await self._send({"type": "conversation.item.retrieved", "item": item.shown(sounds=True)})

    async def _delete_item(self, event: events.ItemDelete) -> None:
        if self.conversation.get(event.item_id).status == "in_progress":
            raise InvalidRequestError("is still being made; send response.cancel first", param="item_id")
        self.conversation.delete(event.item_id)
        await self._send({"type": "conversation.item.deleted", "item_id": event.item_id})

    async def _truncate_item(self, event: events.ItemTruncate) -> None:
        await self._settled(event.item_id)
        self.conversation.truncate(event.item_id, event.content_index, event.audio_end_ms)
        where = {"item_id": event.item_id, "content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
        await self._send({"type": "conversation.item.truncated", **where})

    # ---------------------------------------------------------------------------------------------- responses

    async def _create_response(self, event: events.ResponseCreate) -> None:
        await self._respond(event.response or {})

    async def _respond(self, asked: Mapping[str, Any]) -> None:
        self._service.check_ready()
        model = self.model
        given = asked.get("input")
        if isinstance(given, list) and len(given) > self._limits.items:
            raise LimitExceededError(
                f"has {len(given)} items, and may have {self._limits.items}; leave some out", param="response.input"
            )
        config, options = for_response(self.config, asked)
        check_config(config, model, "response")
        await self._settled()
        if self.busy and self._run is not None:
            raise ActiveResponseError(
                f"response {self._run.answer.id} is still running; wait for response.done, or cancel it"
            )
        kept = self.conversation if options.conversation == "auto" else None
        if kept is not None:
            await self._make_room(0)
        items = self.conversation.context() if options.input is None else await self._given(options.input)
        own = uuid.uuid4().hex
        answer = Answer(own, config, kept, options.metadata)
        for event in answer.created():
            await self._send(event)
        self._run = ResponseRun(self._service, self._holder, model, answer, items, self._send, self._client)
        self._run.task.add_done_callback(self._over)

    async def _given(self, values: Sequence[Mapping[str, Any]]) -> list[Item]:
        """The items that one response is to see instead of the conversation; some may be of the conversation."""
        made = []
        for index, value in enumerate(values):
            path = f"response.input[{index}]"
            if value.get("type") == "item_reference":
                made.append(self.conversation.get(str(value.get("id")), f"{path}.id"))
            else:
                made.append(await self._checked_item(value, path))
        return made

    async def _settled(self, item_id: str | None = None) -> None:
        """Wait for a response that was cancelled to have said so: that takes no step of the engine."""
        run = self._run
        if run is not None and run.cancelled is not None and (item_id is None or run.answer.made(item_id)):
            await asyncio.wait({run.task})

    async def _cancel_response(self, event: events.ResponseCancel) -> None:
        run = self._run
        known = run is not None and event.response_id in (None, run.answer.id)
        if run is None or not known or run.task.done():
            named = event.response_id is not None
            raise NoActiveResponseError(
                f"{'no such' if named else 'no'} response is running", param="response_id" if named else None
            )
        run.cancel("client_cancelled")

    def _over(self, task: asyncio.Task[None]) -> None:
        if self._draining:
            self.finished.set()
