"""The models behind the service and the requests that run on them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from omnistage.core.errors import DeadlineExceededError, InvalidRequestError, OmniError, ShutdownError, StageError
from omnistage.core.params import StageParams
from omnistage.core.types import FinishReason, Modality
from omnistage.core.validation import short_repr
from omnistage.omni import AsyncOmni, OutputStream
from omnistage.pipeline.intake import ParamsLike, Prompt, RequestOptions
from omnistage.pipeline.outputs import OmniRequestOutput, OutputChunk, Trace
from omnistage.server.access.keys import Holder, Keyring
from omnistage.server.http.errors import CancelledRequestError, ContentFilterError, LoadingError, NotFoundError
from omnistage.server.http.executor import Workers
from omnistage.server.moderation.filtering import start_filtered
from omnistage.server.moderation.filters import ContentFilter, FilterContext, RequestFilter
from omnistage.server.observe.audit import CURRENT_RECORD, DISCONNECTED, FILTERED, AuditRecord, ended_by
from omnistage.server.observe.metrics import RequestMetrics
from omnistage.server.openai.chat.spoken import SpokenAnswers
from omnistage.server.openai.files import FileStore
from omnistage.server.openai.videos.jobs import JobStore, VideoJobs

if TYPE_CHECKING:
    from omnistage.server.observe.tracing import Tracing

_OWNERS = 10_000
"""Requests whose keys are remembered: more than the engines remember traces of."""
SESSION_CLOSE_TIMEOUT = 5.0
TRANSCRIBE_THREADS, MAX_QUEUED_CLIPS = 2, 8
"""Sounds that ears alone write down at a time, and those with the ones that wait for it."""
K = TypeVar("K")
_TAG = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    omni: AsyncOmni
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def modalities(self) -> tuple[Modality, ...]:
        return self.omni.modalities

    def params_type(self, stage: str) -> type[StageParams]:
        return self.omni.orchestrator.stages[stage].params_type

    def stage_for_params(self, kind: type[StageParams]) -> str | None:
        """The first stage that takes parameters of this kind."""
        stages = self.omni.orchestrator.stages
        return next((name for name in self.omni.orchestrator.graph.order if stages[name].params_type is kind), None)

    def with_seed(self, seed: int | None, chosen: Mapping[str, StageParams]) -> dict[str, StageParams]:
        """These parameters, and the seed on every other stage that draws lots: how it is spoken, what is drawn."""
        made = dict(chosen)
        if seed is None:
            return made
        seed %= 2**63  # OpenAI's may be negative
        stages = self.omni.orchestrator.stages
        for name in self.omni.orchestrator.graph.order:
            kind = stages[name].params_type
            # What draws takes one set of parameters for all of its stages, under the name of the first.
            if "seed" not in kind.model_fields or (kind.shared and name != self.stage_for_params(kind)):
                continue
            if name not in made:
                made[name] = kind.parse({"seed": seed})
            elif kind.shared and getattr(made[name], "seed", None) is None:
                made[name] = made[name].model_copy(update={"seed": seed})
        return made


class Drainable(Protocol):
    def drain(self) -> None:
        """Begin nothing more, and end once what runs has ended."""


class Service:
    """Models by name. `ready` is false while they load and once the service drains.

    Files and jobs are kept in the folder `state`; without one they go when the service does.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel] | None = None,
        keyring: Keyring | None = None,
        state: Path | None = None,
        content_filter: ContentFilter | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._content_filter = content_filter
        self.tracing = tracing
        self.models: dict[str, ServedModel] = dict(models or {})
        self.keyring = keyring or Keyring()
        self.loading = not self.models
        self.draining = False
        self.metrics = RequestMetrics()
        self.spoken = SpokenAnswers()
        self.transcribe_workers = Workers(TRANSCRIBE_THREADS, MAX_QUEUED_CLIPS, "transcribe")
        self.sessions: dict[Drainable, asyncio.Task[None]] = {}
        """Connections that outlive a request, and the tasks that serve them."""
        self._owners: dict[str, str] = {}
        self._tagged: dict[tuple[str, str], str] = {}
        """Requests by their holder and the name that it gave them."""
        if state is None:
            state = Path(tempfile.mkdtemp(prefix="omnistage-"))
            weakref.finalize(self, shutil.rmtree, state, ignore_errors=True)
        self.jobs = VideoJobs(JobStore(state / "videos"))  # first: it refuses a folder that another service has open
        self.files = FileStore(state / "files")

    @property
    def ready(self) -> bool:
        return not self.loading and not self.draining

    def add(self, name: str, omni: AsyncOmni) -> None:
        self.models[name] = ServedModel(name, omni)

    def check_ready(self) -> None:
        """Raise what a client should be told while no requests are taken."""
        if self.loading:
            raise LoadingError("the models are loading; try again soon")
        if self.draining:
            raise ShutdownError("the service is stopping and takes no more requests")

    def model(self, name: str) -> ServedModel:
        """A model by its name. Raises what a client should be told."""
        self.check_ready()
        found = self.models.get(name)
        if found is None:
            # Which there are is not for everybody: a key may be for some of them.
            known = "/v1/models lists those there are" if self.keyring.required else f"models: {', '.join(self.models)}"
            raise NotFoundError(f"there is no model {short_repr(name)}; {known}", param="model")
        return found

    def tagged(self, holder: Holder, tag: str) -> str | None:
        """The id of the latest request that a holder gave this name."""
        return self._tagged.get((holder.name, tag))

    def trace(self, request_id: str, holder: Holder | None = None) -> Trace | None:
        """What ran when. With a holder: only of its own requests."""
        if not self._may_see(request_id, holder):
            return None
        return next((t for m in self.models.values() if (t := m.omni.trace(request_id)) is not None), None)

    def abort(self, request_id: str, holder: Holder | None = None) -> bool:
        """End a request; whether it was running. With a holder: only its own requests."""
        if not self._may_see(request_id, holder):
            return False
        return any(model.omni.abort(request_id) for model in self.models.values())

    def _may_see(self, request_id: str, holder: Holder | None) -> bool:
        return holder is None or not self.keyring.required or self._owners.get(request_id) == holder.name

    @contextlib.asynccontextmanager
    async def run_request(
        self,
        holder: Holder,
        model: ServedModel,
        prompt: Prompt,
        params: ParamsLike,
        options: RequestOptions,
        request_id: str | None = None,
    ) -> AsyncIterator[OutputStream]:
        """A request of a key's holder; it is aborted if the block is left before its end.

        What fails before the first item raises; later the final item carries it. An abort by someone else is a
        failure whatever was made by then, a passed deadline where nothing was.
        """
        with self._recorded(holder, model.name) as record, self.keyring.admit(holder, model.name):
            tag = _checked_tag(record.tag)
            stream = await self._started(record, holder, model, prompt, params, options, request_id)
            record.requests.append(stream.request_id)
            _remember(self._owners, stream.request_id, holder.name)
            if tag is not None:
                _remember(self._tagged, (holder.name, tag), stream.request_id)
            watched = WatchedStream(stream, record, self, model.name)
            try:
                yield watched
            finally:
                watched.close()
                self._traced(model, stream.request_id)

    async def _started(
        self,
        record: AuditRecord,
        holder: Holder,
        model: ServedModel,
        prompt: Prompt,
        params: ParamsLike,
        options: RequestOptions,
        request_id: str | None,
    ) -> OutputStream:
        """A request that is admitted, behind the content filter where there is one."""
        if self._content_filter is None:
            return await model.omni.start(prompt, params, options, request_id)
        own = self._content_filter.open(FilterContext(holder.name, model.name))
        try:
            return await start_filtered(own, model.omni, prompt, params, options, request_id)
        except ContentFilterError as error:
            record.ended = FILTERED
            self.metrics.filtered.labels(model.name, error.where).inc()
            raise

    @contextlib.contextmanager
    def run_without_stages(self, holder: Holder, model: ServedModel) -> Iterator[RequestFilter | None]:
        """Work for a key's holder that needs no stage and counts as a request; its filter, where there is one."""
        with self._recorded(holder, model.name) as record, self.keyring.admit(holder, model.name):
            own = self._content_filter
            try:
                yield None if own is None else own.open(FilterContext(holder.name, model.name))
            except ContentFilterError as error:
                record.ended = FILTERED
                self.metrics.filtered.labels(model.name, error.where).inc()
                raise

    def _traced(self, model: ServedModel, request_id: str) -> None:
        """Measure, and where it is asked for show, what the stages did for a request that is over."""
        trace = model.omni.trace(request_id)
        if trace is None:
            return
        self.metrics.observe_trace(model.name, trace)
        if self.tracing is not None:
            self.tracing.stages(model.name, trace)

    @contextlib.contextmanager
    def _recorded(self, holder: Holder, model: str) -> Iterator[AuditRecord]:
        """The record of the HTTP request that this runs for; work that outlives one, or never had one, has its own."""
        record = CURRENT_RECORD.get()
        if record is not None and not record.closed:
            record.who, record.model = holder.name, model
            yield record
            return
        record = AuditRecord("background", who=holder.name, model=model)
        try:
            yield record
        except BaseException as error:
            failed = "error" if isinstance(error, Exception) else DISCONNECTED
            record.ended = FILTERED if isinstance(error, ContentFilterError) else failed
            raise
        finally:
            record.close()

    async def drain(self, timeout: float) -> None:
        """Take no more requests, let those that run finish for `timeout` seconds, abort the rest."""
        self.draining = True
        for session in tuple(self.sessions):
            session.drain()
        models = (model.omni.shutdown(drain=True, timeout=timeout) for model in self.models.values())
        await asyncio.gather(self.transcribe_workers.close(timeout), *models)
        await self.jobs.close()
        if self.sessions:  # they have only to say goodbye
            await asyncio.wait(tuple(self.sessions.values()), timeout=SESSION_CLOSE_TIMEOUT)


class WatchedStream(OutputStream):
    """A request's stream, measured and recorded on its way to the reader."""

    def __init__(self, inner: OutputStream, record: AuditRecord, service: Service, model: str) -> None:
        self.request_id = inner.request_id
        self._inner = inner
        self._record = record
        self._service = service
        self._model = model
        self._begun = False
        self._first_token = self._first_audio = True

    async def __anext__(self) -> OutputChunk:
        item = await anext(self._inner)
        self._measure(item)
        self._record.count(item)
        if item.final is not None:
            item.final.error = item.final.error or self._broken_off(item.final)
            if item.final.error is not None:
                self._record.ended = ended_by(item.final.finish_reason)
                if not self._begun:  # nothing has been sent, so it can still have its status
                    raise item.final.error
        self._begun = True
        return item

    def close(self) -> None:
        self._inner.close()

    def _measure(self, item: OutputChunk) -> None:
        metrics, seconds = self._service.metrics, time.monotonic() - self._record.started
        if item.token_ids and self._first_token:
            self._first_token = False
            metrics.first_token.labels(self._model).observe(seconds)
        if item.audio is not None and self._first_audio:
            self._first_audio = False
            metrics.first_audio.labels(self._model).observe(seconds)
        if item.final is not None:
            metrics.observe_output(self._model, item.final, seconds)

    def _broken_off(self, final: OmniRequestOutput) -> OmniError | None:
        """Why an answer is not whole, where nothing in it would say so; None for one that ended by itself.

        A passed deadline is an error only where nothing was made: what there was is an answer cut short.
        """
        if final.finish_reason is FinishReason.ABORT:
            if self._service.draining:
                return ShutdownError("the service is stopping; send the request again")
            return CancelledRequestError("the request was cancelled")
        something = any(answer.token_ids for answer in final.outputs) or final.audio or final.images or final.videos
        if final.finish_reason is FinishReason.DEADLINE and not something:
            return DeadlineExceededError("the time was over before anything was made; allow more", param="timeout")
        return None


def _checked_tag(tag: str | None) -> str | None:
    if tag is not None and not _TAG.fullmatch(tag):
        raise InvalidRequestError("the header X-Client-Request-Id takes 1 to 128 letters, digits, dots, - and _")
    return tag


def _remember(names: dict[K, str], key: K, name: str) -> None:
    """Add a name, forgetting the oldest beyond a bound."""
    names.pop(key, None)
    names[key] = name
    if len(names) > _OWNERS:
        del names[next(iter(names))]


async def final_output(stream: AsyncIterator[OutputChunk]) -> OmniRequestOutput:
    """Read a request's stream to its end and return the complete result."""
    async for chunk in stream:
        if chunk.final is not None:
            return chunk.final
    raise StageError("the request ended without a result")
