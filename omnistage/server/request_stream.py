"""A request's stream as the service sees it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from omnistage.core.errors import CancelledRequestError, DeadlineExceededError, ShutdownError
from omnistage.core.types import FinishReason, Modality
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk
from omnistage.pipeline.stream import OutputStream
from omnistage.server.observe.audit import AuditRecord, ended_by

if TYPE_CHECKING:
    from omnistage.server.service import Service


class ObservedStream(OutputStream):
    """A request's stream that counts what passes, for metrics and audit log."""

    def __init__(self, inner: OutputStream, record: AuditRecord, service: Service, model: str) -> None:
        self.request_id, self.trace = inner.request_id, inner.trace
        self._inner = inner
        self._record = record
        self._service = service
        self._model = model
        self._started = False
        self._timed: set[Modality] = set()

    async def take(self) -> list[OutputChunk]:
        items = await self._inner.take()
        for chunk in items:
            if chunk.text and chunk.final is None:
                self._record.usage.completion_tokens += len(chunk.token_ids)  # most of the time
            else:
                self._record.count(chunk)
            if chunk.modality not in self._timed and (chunk.token_ids or chunk.audio is not None):
                self._note_first(chunk)
            if chunk.final is not None:
                self._finish(chunk.final)
            self._started = True
        return items

    @property
    def prompt_tokens(self) -> int:
        return self._inner.prompt_tokens

    def close(self) -> None:
        self._inner.close()

    def _note_first(self, chunk: OutputChunk) -> None:
        self._timed.add(chunk.modality)
        metrics = self._service.metrics
        histogram = metrics.first_token if chunk.token_ids else metrics.first_audio
        histogram(self._model).observe(time.monotonic() - self._record.started)

    def _finish(self, final: OmniRequestOutput) -> None:
        self._service.metrics.observe_output(self._model, final, time.monotonic() - self._record.started)
        if final.error is None and final.finish_reason is FinishReason.ABORT:
            stopping = ShutdownError("the service is stopping; send the request again")
            final.error = stopping if self._service.draining else CancelledRequestError("the request was cancelled")
        elif final.error is None and final.finish_reason is FinishReason.DEADLINE:
            texts = any(answer.token_ids for answer in final.outputs)
            if not (texts or final.audio or final.images or final.videos):  # else the finish reason is enough
                final.error = DeadlineExceededError(
                    "the deadline passed before there was any output; allow more", param="timeout"
                )
        if final.error is not None:
            self._record.ended = ended_by(final.finish_reason)
            if not self._started:  # nothing has been sent: the response can still have its status
                raise final.error
