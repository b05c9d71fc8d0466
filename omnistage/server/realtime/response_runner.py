"""Runs one response: the engine's items become events as they come, and however it ends, it says so once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from omnistage.core.errors import InternalError, InvalidRequestError, LimitExceededError, OmniError, StageError
from omnistage.core.failures import log_defect
from omnistage.core.types import FinishReason
from omnistage.omni import OutputStream
from omnistage.pipeline.intake import RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import CLIENT_CLOSED
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, AuditRecord
from omnistage.server.realtime.conversation import later_half, messages_of
from omnistage.server.realtime.events import GoneError
from omnistage.server.realtime.items import Item
from omnistage.server.realtime.response_events import Answer, CancelReason, Event, Reason
from omnistage.server.service import ServedModel, Service

ENDPOINT = "WS /v1/realtime response"
_CUT_SHORT: dict[FinishReason | None, Reason] = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.DEADLINE: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}


class ResponseRun:
    """A response in a task of its own. Cancelling the task ends the work and says nothing: for who has left."""

    def __init__(
        self,
        service: Service,
        holder: Holder,
        model: ServedModel,
        answer: Answer,
        items: Sequence[Item],
        send: Callable[[Event], Awaitable[None]],
        client: str | None,
    ) -> None:
        self.answer = answer
        self.cancelled: CancelReason | None = None
        self._service = service
        self._holder = holder
        self._model = model
        self._items = list(items)
        self._send = send
        self._record = AuditRecord(ENDPOINT, client, who=holder.name, model=model.name, status=200)
        self._request_id = f"req-{answer.id.removeprefix('resp_')}"
        self._unsent: deque[Event] = deque()
        self._work = asyncio.ensure_future(self._generate())
        self.task = asyncio.ensure_future(self._run())

    def interrupt(self) -> None:
        """Somebody speaks: an answer to the conversation is broken off, one beside it goes on."""
        if self.answer.conversation is not None:
            self.cancel("turn_detected")

    def cancel(self, reason: CancelReason) -> None:
        """End the work. Its last events come from the task, which goes on just long enough to send them."""
        if self.cancelled is not None or self.task.done():
            return
        self.cancelled = reason
        # The engine's last item tells how much there was. Where it has none to give, the work is stopped instead.
        if not self._model.omni.abort(self._request_id):
            self._work.cancel()

    async def _run(self) -> None:
        record = self._record
        try:
            await self._emit(self._last(await self._finished_work()))
        except OmniError as error:
            record.status = error.status
            record.ended = record.ended or ("error" if error.status >= 500 else None)
            await self._failed(error)
        except (GoneError, asyncio.CancelledError):
            record.status, record.ended = CLIENT_CLOSED, DISCONNECTED
        except Exception as error:
            log_defect("a realtime response", error)
            record.status, record.ended = 500, "error"
            await self._failed(InternalError("a defect"))
        finally:
            self._service.metrics.observe_response(record, record.close())

    async def _finished_work(self) -> OmniRequestOutput | None:
        """The engine's last item; None where the work was stopped on our own word."""
        try:
            return await self._work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.cancelled is None or (task is not None and task.cancelling()):
                raise
            return None

    async def _generate(self) -> OmniRequestOutput | None:
        """Run the request to its end; what the model cannot hold of the conversation's beginning is left out."""
        CURRENT_RECORD.set(self._record)
        items = self._items
        while True:
            try:
                return await self._attempt(items)
            except LimitExceededError:
                shorter = later_half(items)
                if self.answer.config.truncation == "disabled" or len(shorter) == len(items):
                    raise
                items = shorter
                if self.answer.conversation is not None:
                    self.answer.conversation.forget_before(items)

    async def _attempt(self, items: Sequence[Item]) -> OmniRequestOutput | None:
        config = self.answer.config
        toolbox = config.toolbox()
        options = RequestOptions(
            ["text", "audio"] if config.speaks else ["text"],
            config.audio.output.voice if config.speaks else None,
            tools=() if toolbox is None else toolbox.specs(),
        )
        messages = messages_of(items, config.instructions)
        params = config.params(self._model)
        running = self._service.run_request(self._holder, self._model, messages, params, options, self._request_id)
        try:
            async with running as stream:
                return await self._read(stream)
        except InvalidRequestError as error:
            if error.param is not None and error.param.startswith(("messages", "prompt")):
                error.param = "conversation"
            raise

    async def _read(self, stream: OutputStream) -> OmniRequestOutput | None:
        async for item in stream:
            if item.final is not None:
                ended = self.cancelled is not None or item.final.finish_reason is FinishReason.ABORT
                if item.final.error is not None and not ended:
                    raise item.final.error
                return item.final
            if self.cancelled is None:
                await self._emit(self._events(item))
        return None

    def _events(self, item: OutputChunk) -> list[Event]:
        made = []
        if item.text:
            made += self.answer.text(item.text)
        if item.audio is not None:
            samples = np.asarray(item.audio.samples, dtype=np.float32)
            made += self.answer.audio(samples, item.audio.sample_rate)
        return made

    def _last(self, final: OmniRequestOutput | None) -> list[Event]:
        usage = final.usage if final is not None else self._record.usage
        if self.cancelled is not None:
            self._record.status, self._record.ended = CLIENT_CLOSED, str(FinishReason.ABORT)
            return self.answer.ended("cancelled", usage, reason=self.cancelled)
        if final is None:
            raise StageError("no answer came")
        if final.finish_reason is FinishReason.ABORT:
            return self.answer.ended("cancelled", usage)
        if final.finish_reason in _CUT_SHORT:
            return self.answer.ended("incomplete", usage, reason=_CUT_SHORT[final.finish_reason])
        return self.answer.ended("completed", usage)

    async def _failed(self, error: OmniError) -> None:
        if self.cancelled is not None:
            await self._quietly(self.answer.ended("cancelled", self._record.usage, reason=self.cancelled))
            return
        await self._quietly(self.answer.ended("failed", self._record.usage, error=error))

    async def _quietly(self, events: list[Event]) -> None:
        try:
            await self._emit(events)
        except GoneError:
            self._record.status, self._record.ended = CLIENT_CLOSED, DISCONNECTED

    async def _emit(self, events: Sequence[Event]) -> None:
        self._unsent += events
        while self._unsent:
            await self._send(self._unsent[0])
            # Only now: an event in whose sending we were stopped is still to be sent, before the last ones.
            self._unsent.popleft()
