"""Runs one response: the engine's chunks become events as they arrive, and every end is announced once."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import numpy as np

from omnistage.core.errors import InternalError, InvalidRequestError, LimitExceededError, OmniError, StageError
from omnistage.core.failures import log_defect
from omnistage.core.family import SpeechReader
from omnistage.core.params import SamplingParams, StageParams, StructuredOutput
from omnistage.core.types import FinishReason
from omnistage.pipeline.intake import Prompt, RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput
from omnistage.pipeline.stream import OutputStream
from omnistage.server.access.keys import Holder
from omnistage.server.http.errors import CLIENT_CLOSED
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, AuditRecord
from omnistage.server.openai.running import text_stage
from omnistage.server.openai.tools import Toolbox, read_whole
from omnistage.server.realtime.base import JsonObject
from omnistage.server.realtime.conversation import later_half, to_messages
from omnistage.server.realtime.events import ClientGoneError
from omnistage.server.realtime.items import Item
from omnistage.server.realtime.response_events import CancelReason, Reason, ResponseBuilder
from omnistage.server.service import ServedModel, Service

ENDPOINT = "WS /v1/realtime response"
_MAX_READ_CHARS = 4096
"""Read aloud at once."""
_INCOMPLETE: dict[FinishReason | None, Reason] = {
    FinishReason.LENGTH: "max_output_tokens",
    FinishReason.DEADLINE: "max_output_tokens",
    FinishReason.CONTENT_FILTER: "content_filter",
}


class ResponseRunner:
    """A response in its own task. Cancelling the task ends the work silently: the client has left."""

    def __init__(
        self,
        service: Service,
        holder: Holder,
        model: ServedModel,
        builder: ResponseBuilder,
        items: Sequence[Item],
        send: Callable[[JsonObject], Awaitable[None]],
        client: str | None,
    ) -> None:
        self.builder = builder
        self.cancel_reason: CancelReason | None = None
        self._service = service
        self._holder = holder
        self._model = model
        self._items = list(items)
        self._send = send
        self._record = AuditRecord(ENDPOINT, client, who=holder.name, model=model.name, status=200)
        self._request_id = f"req-{builder.id.removeprefix('resp_')}"
        self._unsent: deque[JsonObject] = deque()
        self._generation = asyncio.ensure_future(self._generate())
        self.task = asyncio.ensure_future(self._run())

    def interrupt(self) -> None:
        """The user speaks: cancel, unless the response is outside of the conversation."""
        if self.builder.conversation is not None:
            self.cancel("turn_detected")

    def cancel(self, reason: CancelReason) -> None:
        """End the work. The task lives on just long enough to send the last events."""
        if self.cancel_reason is not None or self.task.done():
            return
        self.cancel_reason = reason
        # The aborted request's final chunk has its usage. A request that does not run yet has none: stop our task.
        if not self._model.omni.abort(self._request_id):
            self._generation.cancel()

    async def _run(self) -> None:
        record = self._record
        try:
            await self._emit(self._last_events(await self._result()))
        except OmniError as error:
            record.status = error.status
            record.ended = record.ended or ("error" if error.status >= 500 else None)
            await self._fail(error)
        except (ClientGoneError, asyncio.CancelledError):
            record.status, record.ended = CLIENT_CLOSED, DISCONNECTED
        except Exception as error:
            log_defect("a realtime response", error)
            record.status, record.ended = 500, "error"
            await self._fail(InternalError("a defect"))
        finally:
            self._service.metrics.observe_response(record, record.close())

    async def _result(self) -> OmniRequestOutput | None:
        """The request's output; None where `cancel` stopped it before it ran."""
        try:
            return await self._generation
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.cancel_reason is None or (task is not None and task.cancelling()):
                raise
            return None

    async def _generate(self) -> OmniRequestOutput:
        """Run the request to its end; a context that is too long is retried without its older half."""
        CURRENT_RECORD.set(self._record)
        items = self._items
        while True:
            try:
                return await self._attempt(items)
            except LimitExceededError:
                shorter = later_half(items)
                if self.builder.config.truncation == "disabled" or len(shorter) == len(items):
                    raise
                items = shorter
                if self.builder.conversation is not None:
                    self.builder.conversation.start_context_at(items)

    async def _attempt(self, items: Sequence[Item]) -> OmniRequestOutput:
        config = self.builder.config
        toolbox = config.toolbox()
        options = RequestOptions(
            ["text", "audio"] if config.speaks else ["text"],
            config.audio.output.voice if config.speaks else None,
            tools=() if toolbox is None else toolbox.specs(),
        )
        messages = to_messages(items, config.instructions)
        params = config.params(self._model)
        try:
            if toolbox is not None and config.speaks:
                return await self._call_or_speak(messages, params, options, toolbox)
            async with self._run_request(messages, params, options) as stream:
                return await self._read(stream)
        except InvalidRequestError as error:
            if error.param is not None and error.param.startswith(("messages", "prompt")):
                error.param = "conversation"
            raise

    def _run_request(
        self, messages: Prompt, params: Mapping[str, StageParams], options: RequestOptions
    ) -> AbstractAsyncContextManager[OutputStream]:
        return self._service.run_request(self._holder, self._model, messages, params, options, self._request_id)

    async def _call_or_speak(
        self, messages: list[JsonObject], params: dict[str, StageParams], options: RequestOptions, toolbox: Toolbox
    ) -> OmniRequestOutput:
        """Text with calls first; then what of it is no call is spoken as it stands. A call is never spoken."""
        async with self._run_request(messages, params, replace(options, modalities=["text"], voice=None)) as stream:
            final = await self._read(stream, silent=True)
        content, calls = read_whole(final.text, toolbox)
        if (content := (content or "").strip()) and self.cancel_reason is None:
            processor = self._model.omni.processor
            runs: list[tuple[Prompt, dict[str, StageParams], list[str]]]
            if isinstance(processor, SpeechReader):
                await self._emit(self.builder.text(content))
                pieces = [content[at : at + _MAX_READ_CHARS] for at in range(0, len(content), _MAX_READ_CHARS)]
                runs = [(processor.read_aloud(piece), {}, ["audio"]) for piece in pieces]
            else:
                call_params = SamplingParams(structured=StructuredOutput(grammar=f"root ::= {json.dumps(content)}"))
                runs = [(messages, {**params, text_stage(self._model): call_params}, ["text", "audio"])]
            for prompt, more, modalities in runs:
                async with self._run_request(prompt, more, replace(options, modalities=modalities)) as stream:
                    speech = await self._read(stream)
                final.usage.audio_seconds += speech.usage.audio_seconds
        if calls and self.cancel_reason is None:
            await self._emit(self.builder.calls(calls))
        return final

    async def _read(self, stream: OutputStream, *, silent: bool = False) -> OmniRequestOutput:
        async for chunk in stream:
            if chunk.final is not None:
                aborted = self.cancel_reason is not None or chunk.final.finish_reason is FinishReason.ABORT
                if chunk.final.error is not None and not aborted:
                    raise chunk.final.error
                return chunk.final
            if self.cancel_reason is not None or silent:
                continue
            if chunk.text:
                await self._emit(self.builder.text(chunk.text))
            if chunk.audio is not None:
                samples = np.asarray(chunk.audio.samples, dtype=np.float32)
                await self._emit(self.builder.audio(samples, chunk.audio.sample_rate))
        raise StageError("the request ended without a result")

    def _last_events(self, output: OmniRequestOutput | None) -> list[JsonObject]:
        usage = self._record.usage if output is None else output.usage
        if output is None or self.cancel_reason is not None:
            self._record.status, self._record.ended = CLIENT_CLOSED, str(FinishReason.ABORT)
            return self.builder.finish("cancelled", usage, reason=self.cancel_reason)
        if output.finish_reason is FinishReason.ABORT:
            return self.builder.finish("cancelled", usage)
        if output.finish_reason in _INCOMPLETE:
            return self.builder.finish("incomplete", usage, reason=_INCOMPLETE[output.finish_reason])
        return self.builder.finish("completed", usage)

    async def _fail(self, error: OmniError) -> None:
        if self.cancel_reason is not None:
            events = self.builder.finish("cancelled", self._record.usage, reason=self.cancel_reason)
        else:
            events = self.builder.finish("failed", self._record.usage, error=error)
        try:
            await self._emit(events)
        except ClientGoneError:
            self._record.status, self._record.ended = CLIENT_CLOSED, DISCONNECTED

    async def _emit(self, events: Sequence[JsonObject]) -> None:
        self._unsent += events
        while self._unsent:
            await self._send(self._unsent[0])
            # Removed only now: an event whose sending was cancelled is sent again, before the last ones.
            self._unsent.popleft()
